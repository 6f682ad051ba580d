"""A target that sessions share: what passes cost there, and how much is drafted for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from crossdraft.speculation.choice import LONG_RUN, PLAIN, Choice, DrafterSeen, DraftSeen, Estimates, Judged, PassSeen
from crossdraft.speculation.controller import FIRST_RUN, Adaptive, Limits, choose
from crossdraft.speculation.estimator import Learner, Load

FIXED, EACH = 0.020, 0.002  # seconds of a forward, and of each token in it
CHAINS = Limits(branch_depth=0)


def forward(tokens: int) -> float:
    return FIXED + EACH * tokens


def passed(draft_tokens: int, sessions: int, others: int, queued: float = 0.0, trip: float = 0.001) -> PassSeen:
    """A pass over so many draft tokens beside other sessions' tokens."""
    seconds = forward(1 + draft_tokens + others)
    waited = seconds + queued + trip
    return PassSeen(1 + draft_tokens, waited, seconds, 0.0, draft_tokens, queued, sessions=sessions, others=others)


def drawn(sessions: int, others: int) -> PassSeen:
    """A token of a run."""
    seconds = forward(1 + others)
    return PassSeen(1, seconds, seconds, 0.0, 0, asked=False, sessions=sessions, others=others)


@contextmanager
def epoch(learner: Learner, choice: Choice, now: float) -> Iterator[None]:
    learner.begin(choice, now)
    yield


def taught(learner: Learner, sessions: int, each: int = 4, now: float = 0.0) -> float:
    """Epochs with a drafter and without, on a target of which the others want as many draft tokens; returns the
    time.
    """
    for turn in range(20):
        accepted = (0, 2, 5, 1, 3)[turn % 5]
        with epoch(learner, Choice(4), now):
            for draft_tokens in (each, 1):
                now += 0.1
                learner.observe(
                    DraftSeen(draft_tokens, 0, 0.002 + 0.001 * draft_tokens, None, 0.001 * draft_tokens, 0), now
                )
                learner.observe(
                    DraftSeen(draft_tokens, draft_tokens, None, 0.001 * draft_tokens, 0.001 * draft_tokens, 0), now
                )
                now += 0.1
                learner.observe(passed(draft_tokens, sessions, (sessions - 1) * (1 + each)), now)
                learner.observe(Judged(0, accepted, refused=True, tokens=1 + accepted, settled=0), now)
        with epoch(learner, PLAIN, now):
            now += 10
            for _ in range(2):
                learner.observe(drawn(sessions, (sessions - 1) * (1 + each)), now)
    return now


@pytest.mark.parametrize("sessions", [1, 4, 16])
def test_passes_are_compared_as_if_all_that_share_the_target_did_the_same(sessions: int) -> None:
    learner = Learner(Estimates())
    taught(learner, sessions, now=taught(learner, 1))
    found = learner.estimates
    assert found.sessions == pytest.approx(sessions)
    assert found.pass_node == pytest.approx(EACH * sessions, rel=0.1)
    assert found.pass_base == pytest.approx(forward(sessions), rel=0.2)  # seen only beside what the others ask for
    assert found.plain == pytest.approx(forward(sessions), rel=0.2)
    assert found.target_trip == pytest.approx(0.001)


def test_the_next_generation_begins_with_what_it_costs_there() -> None:
    learner = Learner(Estimates())
    taught(learner, 8)
    before = learner.estimates
    after = Learner(before).estimates
    assert (after.pass_base, after.pass_node, after.plain) == pytest.approx(
        (before.pass_base, before.pass_node, before.plain), rel=1e-6
    )
    assert after.sessions == pytest.approx(before.sessions)


def test_less_is_drafted_for_a_busy_target_and_more_again_when_it_is_not() -> None:
    learner, now, windows = Learner(Estimates()), 0.0, []
    for sessions in (1, 4, 32, 4, 1):
        now = taught(learner, sessions, each=4, now=now)
        found = choose(learner.estimates, CHAINS)
        windows.append(found.choice.max_draft_tokens)
    assert windows[0] > windows[1] > windows[2] == 0
    assert windows[3] > 0
    assert windows[4] >= windows[0] - 1


def test_who_waits_for_the_forwards_of_others_shares_the_target_with_them() -> None:
    load = Load()
    for _ in range(40):
        load.saw(passed(0, 1, 0, queued=3 * forward(1)))
    assert load.sessions == pytest.approx(4)
    assert load.queue == pytest.approx(3 * forward(1))


def test_the_queue_is_part_of_a_pass_and_none_of_a_run() -> None:
    learner = Learner(Estimates())
    learner.begin(Choice(2), 0.0)
    for turn in range(20):
        learner.observe(passed(0, 1, 0, queued=0.003), float(turn))
    assert learner.estimates.pass_base == pytest.approx(forward(1) + 0.003, rel=0.05)
    assert learner.estimates.target_trip == pytest.approx(0.001)
    learner.begin(PLAIN, 30.0)
    for turn in range(20):
        learner.observe(drawn(1, 0), 40.0 + turn)
    assert learner.estimates.plain == pytest.approx(forward(1), rel=0.05)


def test_the_first_tokens_of_a_run_that_came_together_count_without_their_round_trip() -> None:
    learner = Learner(Estimates())
    learner.begin(PLAIN, 0.0)
    learner.observe(PassSeen(1, 0.050, 0.030, 0.0, 0, forwards=3), 1.0)
    assert learner.plain_seen == 3
    assert learner.estimates.target_trip == pytest.approx(0.020)
    assert learner.estimates.plain == pytest.approx(0.010)


def test_runs_grow_while_plain_decoding_goes_on() -> None:
    controller = Adaptive(limits=CHAINS)
    controller.observe(DrafterSeen(False), 0.0)
    runs = [controller.choose(float(now)).run for now in range(6)]
    assert runs == [FIRST_RUN, 8, 16, LONG_RUN, LONG_RUN, LONG_RUN]
    controller.observe(DrafterSeen(True), 6.0)
    assert controller.choose(6.0).drafts
    controller.observe(DrafterSeen(False), 7.0)
    assert controller.choose(7.0).run == FIRST_RUN
