"""What a learner makes of observations."""

from dataclasses import asdict, replace
from math import isfinite

import numpy as np
import pytest

from crossdraft.speculation.choice import (
    PLAIN,
    BranchSeen,
    Choice,
    DraftSeen,
    Estimates,
    Fixed,
    Judged,
    Observation,
    PassSeen,
    Workload,
)
from crossdraft.speculation.estimator import LatestTimes, Learner, PassTimes, Plane
from crossdraft.speculation.simulator import simulate

GIVEN = Workload(
    acceptance=(0.5, 0.7, 0.8),
    match=0.4,
    token=0.002,
    pass_base=0.018,
    pass_node=0.0005,
    slope=0.2,
    drafter_trip=0.005,
    target_trip=0.001,
    branch_hit=0.6,
    tokens_per_draft_token=0.8,
    nodes_per_draft_token=1.5,
)


class Watched:
    """Runs every epoch like `Fixed`, and learns."""

    waits_for_drafter = False

    def __init__(self, choices: list[Choice], samples: bool = False) -> None:
        self.learner = Learner(Estimates(), samples)
        self._choices = choices
        self._epochs = 0

    def observe(self, seen: Observation, now: float) -> None:
        self.learner.observe(seen, now)

    def choose(self, now: float) -> Choice:
        self._epochs += 1
        choice = Fixed(self._choices[self._epochs % len(self._choices)]).choose(now)
        self.learner.begin(choice, now)
        return choice


def learnt(given: Workload, *choices: Choice, tokens: int = 3000) -> Estimates:
    watched = Watched(list(choices))
    simulate(given, watched, tokens, np.random.default_rng(3), jitter=0.1)
    return watched.learner.estimates


def test_a_generation_teaches_all_numbers() -> None:
    found = learnt(GIVEN, Choice(8, min_draft_tokens=2, patience=0.1), Choice(8, patience=0.0, branch_depth=3))
    assert found.token == pytest.approx(GIVEN.token, rel=0.15)
    assert found.drafter_trip == pytest.approx(GIVEN.drafter_trip, rel=0.3)
    assert found.pass_base + found.target_trip == pytest.approx(0.019, rel=0.07)
    assert found.target_trip == pytest.approx(GIVEN.target_trip, rel=0.1)
    assert found.pass_node == pytest.approx(0.00075, rel=0.45)  # a draft token is one and a half nodes
    assert found.tokens_per_draft_token == pytest.approx(0.8, rel=0.15)
    assert found.acceptance[0] == pytest.approx(0.5, abs=0.12)
    assert found.acceptance[2] == pytest.approx(0.8, abs=0.12)
    assert found.match == pytest.approx(0.4, abs=0.15)
    assert found.branch_hit == pytest.approx(0.6, abs=0.15)
    assert found.slope == pytest.approx(0.2, abs=0.1)


def test_a_lock_step_generation_teaches_what_it_can() -> None:
    found = learnt(GIVEN, Choice(4, min_draft_tokens=4, overlap=False))
    assert found.token == pytest.approx(GIVEN.token, rel=0.1)
    assert found.drafter_trip == pytest.approx(GIVEN.drafter_trip, rel=0.2)
    assert found.acceptance[0] == pytest.approx(0.5, abs=0.12)


def test_one_stall_changes_nothing() -> None:
    watched = Watched([Choice(8, min_draft_tokens=2, patience=0.1)])
    simulate(GIVEN, watched, 500, np.random.default_rng(3))
    before = watched.learner.estimates
    watched.learner.observe(DraftSeen(1, 3, None, 4.0, 3.0, 0), 1e3)
    watched.learner.observe(DraftSeen(1, 0, 5.0, None, 0.002, 0), 1e3)
    watched.learner.observe(PassSeen(3, 6.0, 6.0, 0.0, 2), 1e3)
    after = watched.learner.estimates
    assert after.token == pytest.approx(before.token, rel=0.05)
    assert after.drafter_trip == pytest.approx(before.drafter_trip, rel=0.05)
    assert after.pass_base == pytest.approx(before.pass_base, rel=0.02)


def test_a_lasting_change_is_learnt() -> None:
    learner = Learner(Estimates())
    for seconds in (0.001,) * 40 + (0.010,) * 9:
        learner.observe(DraftSeen(1, 1, None, seconds, seconds, 0), 1e3)
    assert learner.estimates.token == pytest.approx(0.010)


def test_tokens_of_the_targets_own_are_compared_and_not_judged() -> None:
    learner = Learner(Estimates())
    learner.begin(Choice(4), 0.0)
    before = learner.estimates
    learner.observe(Judged(0, 0, refused=False, tokens=1, settled=1, caught_up=True), 1e3)
    learner.observe(Judged(0, 0, refused=True, tokens=0, settled=0, caught_up=True), 1e3)
    after = learner.estimates
    assert (after.compared, after.judged) == (1, 0)
    assert after.match < before.match
    assert after.acceptance[0] <= before.acceptance[0]  # nothing was judged: all there is to go by


def test_what_was_accepted_before_the_target_went_on_by_itself_is_judged() -> None:
    learner = Learner(Estimates())
    learner.begin(Choice(4), 0.0)
    learner.observe(Judged(0, 3, refused=False, tokens=4, settled=1, caught_up=True), 1e3)
    assert (learner.estimates.judged, learner.estimates.compared) == (pytest.approx(3, abs=0.05), 0)
    learner.observe(Judged(3, 2, refused=False, tokens=1, settled=0), 1e3)
    assert learner.estimates.compared == 1
    assert learner.estimates.judged == pytest.approx(4, abs=0.1)


def test_what_is_told_twice_counts_once() -> None:
    learner = Learner(Estimates())
    learner.begin(Choice(4), 0.0)
    learner.observe(Judged(0, 3, refused=False, tokens=3, settled=0), 1e3)
    before = learner.estimates
    learner.observe(Judged(0, 3, refused=False, tokens=0, settled=0), 1e3)
    assert learner.estimates == before


def test_forgetting_follows_a_text_that_becomes_hard() -> None:
    learner = Learner(Estimates())
    for _ in range(100):
        learner.observe(Judged(0, 4, refused=False, tokens=4, settled=0), 1e3)
    easy = learner.estimates.acceptance[0]
    for _ in range(400):
        learner.observe(Judged(0, 0, refused=True, tokens=1, settled=0), 1e3)
    assert easy > 0.9
    assert learner.estimates.acceptance[0] < 0.2


def test_what_has_not_been_seen_is_the_prior() -> None:
    found = Learner(Estimates()).estimates
    assert found.acceptance == pytest.approx(Estimates().acceptance)
    assert not found.known
    assert found.slope == Estimates().slope


def test_estimates_seed_the_next_learner() -> None:
    found = learnt(GIVEN, Choice(8, min_draft_tokens=2, patience=0.1))
    again = Learner(found).estimates
    assert again.known
    for name, value in asdict(replace(found, judged=0, compared=0, tried=0)).items():
        assert getattr(replace(again, judged=0, compared=0, tried=0), name) == pytest.approx(value, rel=0.15), name


def test_estimates_are_plain_numbers() -> None:
    for value in asdict(learnt(GIVEN, Choice(8, min_draft_tokens=2, patience=0.1), tokens=200)).values():
        assert all(isfinite(one) for one in (value if isinstance(value, tuple) else (value,)))
    hits = Learner(Estimates())
    hits.begin(Choice(4, branch_depth=2, branch_width=2), 0.0)
    for _ in range(20):
        hits.observe(BranchSeen(False), 1e3)
    assert 0 <= hits.estimates.branch_hit < 0.2


def test_pass_times_depend_on_draft_tokens_and_on_what_the_drafter_works() -> None:
    times = PassTimes(Plane(0.0, 0.0, 0.0))
    now = 0.0
    for turn in range(80):
        draft_tokens, beside = (0, 2, 8, 16)[turn % 4], (0.0, 0.01)[turn // 4 % 2]
        end = now + 0.020 + 0.001 * draft_tokens + 0.4 * beside
        times.worked(now, now + beside)
        times.add(draft_tokens, now, end)
        now = end
    times.add(0, now, now + 5.0)
    found = times.plane()
    assert found.base == pytest.approx(0.020, rel=0.03)
    assert found.node == pytest.approx(0.001, rel=0.05)
    assert found.slowed == pytest.approx(0.4, abs=0.05)


def test_what_passes_do_not_tell_apart_is_as_it_was_believed() -> None:
    times = PassTimes(Plane(0.020, 0.001, 0.3))
    for turn in range(20):
        times.worked(turn, turn + 0.026)
        times.add(0, turn, turn + 0.026)
    found = times.plane()
    assert found.slowed == pytest.approx(0.3)
    assert found.base == pytest.approx(0.026 * 0.7, rel=0.01)


def test_plain_passes_and_others_are_told_apart() -> None:
    learner = Learner(Estimates())
    for turn in range(40):
        plain = turn % 2 == 0
        learner.begin(PLAIN if plain else Choice(4), turn)
        seconds = 0.020 if plain else 0.030
        if not plain:
            learner.observe(DraftSeen(1, 0, 0.0, None, seconds, 0), turn + seconds)
        learner.observe(PassSeen(1, seconds, seconds, 0.0, 0), turn + seconds)
    found = learner.estimates
    assert found.plain == pytest.approx(0.020)
    assert found.pass_base == pytest.approx(0.020, rel=0.1)
    assert found.slowed == pytest.approx(1 / 3, abs=0.1)


def test_a_pass_that_says_nothing_of_its_time_is_not_known() -> None:
    """A plain one beside a drafter that is still at work: forecasts cannot start from it."""
    learner = Learner(Estimates())
    learner.begin(Choice(1, min_draft_tokens=1, overlap=False), 0.0)
    learner.observe(DraftSeen(1, 0, 0.2, None, 0.1, 0), 0.2)
    learner.begin(PLAIN, 0.2)
    learner.observe(PassSeen(1, 0.02, 0.02, 0.0, 0), 0.23)
    assert not learner.estimates.known
    learner.observe(PassSeen(1, 0.02, 0.02, 0.0, 0), 1.0)
    assert learner.estimates.known
    assert learner.estimates.workload().plain_seconds == pytest.approx(0.02)


def test_hope_lasts_until_a_drafter_has_been_judged() -> None:
    learner = Learner(Estimates())
    learner.begin(Choice(4), 0.0)
    for _ in range(30):  # far away: all that is compared is what the target has drawn by itself
        learner.observe(Judged(0, 0, refused=False, tokens=1, settled=1, caught_up=True), 0.0)
        learner.observe(Judged(0, 0, refused=True, tokens=0, settled=0, caught_up=True), 0.0)
    assert learner.estimates.acceptance[0] < 0.3
    assert learner.hopeful.acceptance[0] > 0.85
    for _ in range(30):
        learner.observe(Judged(0, 0, refused=True, tokens=1, settled=0), 0.0)
    assert learner.hopeful.acceptance[0] < 0.2


def test_times_without_waits_are_low_ones() -> None:
    times = LatestTimes(0.0)
    for seconds in (1, 9, 1, 9, 9, 1, 9, 9):
        times.add(seconds)
    assert (times.low(), times.median()) == (1, 9)
