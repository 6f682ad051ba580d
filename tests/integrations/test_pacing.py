"""How much is proposed and waited for, and whether requests draft at all; in numbers, without a clock."""

from collections.abc import Callable
from random import Random

import pytest

from crossdraft.integrations.vllm.pacing import DrafterPace, Offer, Pacing, worth_of_first
from crossdraft.integrations.vllm.streams import Guess, Outcome
from crossdraft.speculation.choice import DraftSeen
from crossdraft.speculation.estimates import Share
from crossdraft.speculation.selection import CREDIT, EARNED

MOST = 4
STEP = 0.05  # seconds of the target
WAIT = 0.004  # seconds at most: 0.08 of a step
NOW = 100.0  # seconds


def pace_of(accepted: float, *delays: float) -> DrafterPace:
    """A drafter of which so large a part of 400 draft tokens was accepted, and whose replies took so long."""
    pace = DrafterPace()
    for number in range(400):
        hit = number * accepted % 1.0 < accepted
        pace.judged(Outcome(int(hit), not hit, edge=hit))
    for delay in delays:
        pace.answered(DraftSeen(1, delay, 0.001), 4)
    return pace


def pacing_of(longest: float = 1.0, accepted: float = 0.9, always: bool = True) -> Pacing:
    """With a target whose step takes so long, and of whose draft tokens so large a part is accepted."""
    pacing = Pacing(MOST, longest, always)
    for number in range(200):
        pacing.judged(Outcome(int(number * accepted % 1.0 < accepted), number * accepted % 1.0 >= accepted, None))
        pacing.verified(STEP, 1, number % 5)
        pacing.emitted(1, 4)
        pacing.drafts(1)
        pacing.stepped(STEP, 1, 3)
    return pacing


def offer(pace: DrafterPace, count: int, asked: float | None = None) -> Offer:
    return Offer(pace, Guess((0,) * count, count), Share(), asked)


def test_a_usual_request_proposes_as_much_as_its_arm_says() -> None:
    pacing, pace = pacing_of(), pace_of(0.9)
    (count,) = pacing.lengths([offer(pace, MOST)])
    assert 2 <= count <= MOST
    assert pacing.lengths([offer(pace, 0), offer(pace, 1)]) == [0, 1]


def test_a_request_whose_guesses_hold_proposes_more_than_one_whose_do_not() -> None:
    pacing, pace = pacing_of(accepted=0.6), pace_of(0.6)
    good, bad = Share(held=48.0, seen=50.0), Share(held=2.0, seen=50.0)
    counts = pacing.lengths([Offer(pace, Guess((0,) * MOST, MOST), share) for share in (good, bad)])
    assert counts[0] > counts[1] == 0


def test_more_is_asked_of_a_drafter_with_shorter_tokens() -> None:
    pacing, words, letters = pacing_of(), DrafterPace(), DrafterPace()
    for _ in range(100):
        words.answered(DraftSeen(4, None, 0.004), 16)
        letters.answered(DraftSeen(4, None, 0.004), 4)
    few, many = pacing.pull(words), pacing.pull(letters)
    assert few.window < many.window <= 64
    assert few.first < many.first
    assert few.first < few.chunk < many.chunk


def test_a_slow_drafter_replies_several_times_in_a_step_and_a_fast_one_with_all_that_a_step_may_propose() -> None:
    pacing, slow, fast = pacing_of(), DrafterPace(), DrafterPace()
    for _ in range(20):
        slow.answered(DraftSeen(4, None, 4 * STEP / 8), 16)
        fast.answered(DraftSeen(4, None, 4 * STEP / 1000), 16)
    assert (pacing.pull(slow).chunk, pacing.pull(fast).chunk) == (2, MOST + 1)


@pytest.mark.parametrize(("part", "requests", "prepared"), [(100, 1, 2), (100, 3, 0), (4, 1, 0)])
def test_a_drafter_with_time_left_prepares_continuations_for_few_requests(part: int, requests: int, prepared: int):
    """A draft token of one letter in four takes so large a part of a step."""
    pacing, pace = pacing_of(), DrafterPace()
    for _ in range(20):
        pace.answered(DraftSeen(4, None, 4 * STEP / part), 16)
    pacing.drafts(requests)
    assert pacing.pull(pace).branch == prepared


# Waits.


def test_what_usually_comes_soon_is_waited_for() -> None:
    until = pacing_of().wait([offer(pace_of(0.8, 0.001, 0.002, 0.001), 0, asked=NOW)], NOW)
    assert NOW + 0.002 <= until <= NOW + WAIT


def test_a_wait_lasts_as_long_as_most_replies_take_and_not_as_the_slowest() -> None:
    until = pacing_of().wait([offer(pace_of(0.12, *[0.0002] * 9, 0.003), 0, asked=NOW)], NOW)
    assert NOW + 0.0002 <= until < NOW + 0.003


@pytest.mark.parametrize(
    ("pace", "at_hand", "asked"),
    [
        pytest.param(pace_of(0.8, 0.001), 2, NOW, id="it is there"),
        pytest.param(pace_of(0.8, 0.001), 0, None, id="it was not asked for"),
        pytest.param(pace_of(0.8, 0.001), 0, NOW - 1.0, id="it should have come long ago"),
        pytest.param(pace_of(0.8), 0, NOW, id="no delay is known"),
        pytest.param(pace_of(0.8, WAIT), 0, NOW, id="it takes longer than any step may wait"),
        pytest.param(pace_of(0.8, *[0.5] * 9, 0.001), 0, NOW, id="it seldom comes soon"),
        pytest.param(pace_of(0.02, 0.001), 0, NOW, id="it is worth nothing"),
    ],
)
def test_nobody_waits(pace: DrafterPace, at_hand: int, asked: float | None) -> None:
    assert pacing_of().wait([offer(pace, at_hand, asked)], NOW) == NOW


def test_nothing_is_waited_for_where_that_is_forbidden_or_many_would_wait() -> None:
    lacking = offer(pace_of(0.8, 0.001), 0, asked=NOW)
    assert (pacing_of(longest=0.0).wait([lacking], NOW), pacing_of().wait([lacking] * 3, NOW)) == (NOW, NOW)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_worth_of_a_first_token_is_what_a_simulation_shows(chance: float, most: int) -> None:
    """Steps with and without a draft at hand, as the docstring has them; the first one in only one of two runs."""

    def tokens(helped: bool, random: Random, steps: int = 12) -> int:
        """In so many steps after a refusal, the first of them helped by its first draft token or not."""
        total, length = 0, 1 if helped else 0
        for step in range(steps):
            proposed = length if step == 0 or length == 0 else most
            right = next((n for n in range(proposed + 1) if random.random() >= chance), proposed + 1)
            total += 1 + min(right, proposed)
            length = most if right > proposed else 0
        return total

    runs = 6000
    gained = [tokens(True, Random(seed)) - tokens(False, Random(seed + runs)) for seed in range(runs)]
    mean = sum(gained) / runs
    error = (sum((one - mean) ** 2 for one in gained) / runs**2) ** 0.5
    assert abs(mean - worth_of_first([chance] * most)) < 4.5 * error


# Whether it pays.

Cost = Callable[[int], tuple[float, float]]  # step to its seconds and the tokens of each request, with drafting


def run(cost: Cost, steps: int, pacing: Pacing | None = None, requests: int = 1) -> tuple[float, list[bool]]:
    """Steps without drafting that so many steps lost beside decoding without, and which of them drafted."""
    pacing, drafted, lost = pacing or Pacing(MOST, WAIT), [], 0.0
    for step in range(steps):
        drafted.append(pacing.drafts(requests))
        seconds, tokens = cost(step) if drafted[-1] else (STEP, 1.0)
        if drafted[-1]:
            pacing.judged(Outcome(int(tokens > 1), tokens <= 1, None))
        pacing.verified(seconds, requests, 2 * requests if drafted[-1] else 0)
        pacing.stepped(seconds, requests, round(tokens * requests))
        lost += seconds / STEP - tokens
    return lost, drafted


@pytest.mark.parametrize("share", [1.03, 1.2, 2.0, 3.0])
def test_a_bad_one_costs_what_is_allowed(share: float) -> None:
    """Whatever it costs, and however long."""
    for steps in (100, 1000, 5000):
        lost, drafted = run(lambda _: (share * STEP, 1.0), steps)
        assert any(drafted)
        assert lost <= CREDIT + EARNED * steps + 10
        assert sum(drafted) < 0.5 * steps or share < 1.1


def test_one_that_becomes_bad_is_left_and_one_that_becomes_good_drafts_again() -> None:
    pacing = Pacing(MOST, WAIT)
    run(lambda _: (STEP, 2.0), 1000, pacing)
    lost, drafted = run(lambda _: (1.5 * STEP, 1.0), 1000, pacing)
    assert lost <= CREDIT + EARNED * 1000 + 10
    assert sum(drafted[500:]) < 100
    lost, drafted = run(lambda _: (STEP, 2.0), 2000, pacing)
    assert sum(drafted[1200:]) > 0.9 * 800


def test_batches_of_different_sizes_are_measured_apart() -> None:
    pacing, drafted = Pacing(MOST, WAIT), {1: 0, 16: 0}
    for _ in range(500):
        for requests in drafted:
            cost = (STEP, 2.0) if requests == 1 else (1.5 * STEP, 1.0)
            drafted[requests] += sum(run(lambda _, cost=cost: cost, 1, pacing, requests)[1])
    assert drafted[1] > 0.8 * 500
    assert drafted[16] < 0.3 * 500


def test_requests_may_be_told_to_draft_always() -> None:
    assert not Pacing(MOST, WAIT).drafts(1)
    assert Pacing(MOST, WAIT, always=True).drafts(1)
    assert all(run(lambda _: (2 * STEP, 1.0), 500, Pacing(MOST, WAIT, always=True))[1])


@pytest.mark.parametrize("always", [False, True])
def test_a_pause_of_drafting_is_logged(always: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once, though it is tried again and again; not where requests draft all the same."""
    run(lambda _: (1.5 * STEP, 1.0), 2000, Pacing(MOST, WAIT, always), requests=3)
    lines = [one for one in caplog.messages if "with up to 4 requests at once: paused" in one]
    assert len(lines) == (0 if always else 1)
    assert always or "drafting loses" in lines[0]
