"""How much is proposed and waited for, and whether requests draft at all; in numbers, without a clock."""

from collections.abc import Callable
from random import Random

import pytest

from crossdraft.integrations.vllm.pacing import (
    ALLOWED,
    ALLOWED_STEPS,
    MOST_GAINED,
    TRIAL,
    DrafterPace,
    DraftingAccount,
    Offer,
    Pacing,
    worth_of_first,
)
from crossdraft.integrations.vllm.streams import Guess, Outcome
from crossdraft.speculation.choice import DraftSeen
from crossdraft.speculation.estimates import Share

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


def pacing_of(token: float = 0.0002, longest: float = 1.0) -> Pacing:
    """With a target whose step takes so many seconds more for each draft token."""
    pacing = Pacing(MOST, longest)
    for number in range(200):
        pacing.verified(STEP + token * (number % 5), 1, number % 5)
        pacing.stepped(STEP, 1, 3)
        pacing.emitted(1, 4)
    return pacing


def offer(pace: DrafterPace, count: int, asked: float | None = None) -> Offer:
    return Offer(pace, Guess((0,) * count, count), Share(), asked)


def test_all_of_a_good_draft_is_proposed() -> None:
    assert pacing_of().lengths([offer(pace_of(0.9), MOST)]) == [MOST]


def test_nothing_of_a_random_one() -> None:
    assert pacing_of().lengths([offer(pace_of(0.0), MOST)]) == [0]


def test_where_tokens_are_dear_only_the_likeliest_are_proposed() -> None:
    pacing = pacing_of(token=0.02)
    (count,) = pacing.lengths([offer(pace_of(0.7), MOST)])
    assert 0 < count < MOST
    assert pacing.lengths([offer(pace_of(0.2), MOST)]) == [0]


def test_a_request_whose_guesses_hold_proposes_more_than_one_whose_do_not() -> None:
    pacing, pace = pacing_of(token=0.02), pace_of(0.6)
    good, bad = Share(held=48.0, seen=50.0), Share(held=2.0, seen=50.0)
    counts = pacing.lengths([Offer(pace, Guess((0,) * MOST, MOST), share) for share in (good, bad)])
    assert counts[0] > counts[1] == 0


def test_requests_without_a_draft_propose_nothing() -> None:
    assert pacing_of().lengths([offer(pace_of(0.9), 0), offer(pace_of(0.9), 2)]) == [0, 2]


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
    assert pacing.pull(slow).chunk == 2
    assert pacing.pull(fast).chunk == MOST + 1


@pytest.mark.parametrize(("part", "requests", "prepared"), [(100, 1, 2), (100, 3, 0), (4, 1, 0)])
def test_a_drafter_with_time_left_prepares_continuations_for_few_requests(
    part: int, requests: int, prepared: int
) -> None:
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
    until = pacing_of().wait([offer(pace_of(0.15, *[0.0002] * 9, 0.003), 0, asked=NOW)], NOW)
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
    assert pacing_of(longest=0.0).wait([lacking], NOW) == NOW
    assert pacing_of().wait([lacking] * 3, NOW) == NOW


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

Cost = Callable[[int], tuple[float, float]]  # step to its seconds and the tokens that it emits, with drafting


def run(cost: Cost, steps: int, account: DraftingAccount | None = None) -> tuple[float, list[bool]]:
    """Seconds of so many steps beyond what as many tokens take without drafting, and which of them drafted."""
    account, drafted, beyond = account or DraftingAccount(), [], 0.0
    for step in range(steps):
        drafted.append(account.decide())
        seconds, tokens = cost(step) if drafted[-1] else (STEP, 1.0)
        account.stepped(seconds, tokens)
        beyond += seconds - STEP * tokens
    return beyond, drafted


def test_a_good_drafter_drafts_nearly_always() -> None:
    beyond, drafted = run(lambda _: (1.2 * STEP, 1.8), 2000)
    assert sum(drafted) > 0.97 * len(drafted)
    assert beyond < -0.5 * STEP * len(drafted)


@pytest.mark.parametrize("share", [1.03, 1.2, 2.0, 3.0])
def test_a_bad_one_costs_what_is_allowed(share: float) -> None:
    """Whatever it costs, and however long."""
    for steps in (100, 1000, 20_000):
        beyond, drafted = run(lambda _: (share * STEP, 1.0), steps)
        assert any(drafted)
        assert beyond <= STEP * (ALLOWED_STEPS + ALLOWED * steps + share) + ALLOWED * beyond


def test_one_that_neither_gains_nor_loses_drafts_now_and_then() -> None:
    """A step costs a few percent more than can be measured."""
    beyond, drafted = run(lambda _: (STEP, 1.0), 4000)
    assert beyond == pytest.approx(0.0, abs=1e-6)
    assert 0 < sum(drafted) < 0.3 * 4000
    assert any(drafted[-500:])


def test_one_that_becomes_bad_is_left_when_its_gain_is_used_up() -> None:
    account = DraftingAccount()
    run(lambda _: (STEP, 2.0), 1000, account)
    beyond, drafted = run(lambda _: (1.5 * STEP, 1.0), 1000, account)
    assert beyond <= STEP * (MOST_GAINED + ALLOWED * 1000 + 1)
    assert sum(drafted[500:]) <= 2 * TRIAL


def test_one_that_becomes_good_drafts_again() -> None:
    account = DraftingAccount()
    run(lambda _: (1.5 * STEP, 1.0), 1000, account)
    beyond, drafted = run(lambda _: (STEP, 2.0), 2000, account)
    assert sum(drafted[1200:]) > 0.95 * 800
    assert beyond < -0.5 * STEP * 800


def test_the_target_may_become_slower_or_faster() -> None:
    """As contexts grow: some steps without drafting tell what they cost by now, and the comparison is with these."""
    account, lost = DraftingAccount(), 0
    for step in range(4000):
        usual = STEP * (1 + step / 4000)
        drafts = account.decide()
        account.stepped(1.05 * usual if drafts else usual, 1.2 if drafts else 1.0)
        lost += not drafts
    assert lost < 0.05 * 4000


def test_a_noisy_machine_makes_no_good_drafter_bad() -> None:
    random = Random(0)

    def noisy(seconds: float) -> float:
        return seconds * random.choice((0.9, 1.0, 1.1)) * (8.0 if random.random() < 0.02 else 1.0)

    account, drafted = DraftingAccount(), 0
    for _ in range(4000):
        drafts = account.decide()
        account.stepped(noisy(1.1 * STEP if drafts else STEP), 1.5 if drafts else 1.0)
        drafted += drafts
    assert drafted > 0.9 * 4000


def test_batches_of_different_sizes_have_accounts_of_their_own() -> None:
    pacing, drafted = pacing_of(), {1: 0, 16: 0}
    for _ in range(500):
        for requests in drafted:
            drafts = pacing.drafts(requests)
            drafted[requests] += drafts
            good = drafts and requests == 1
            pacing.stepped(STEP * (1.5 if drafts else 1.0), requests, requests * (2 if good else 1))
    assert drafted[1] > 0.9 * 500
    assert drafted[16] < 0.2 * 500


def test_requests_may_be_told_to_draft_always() -> None:
    assert not Pacing(MOST, WAIT).drafts(1)
    assert Pacing(MOST, WAIT, always=True).drafts(1)


@pytest.mark.parametrize("always", [False, True])
def test_a_pause_of_drafting_is_logged(always: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once, though it is tried again and again; not where requests draft all the same."""
    pacing = Pacing(MOST, WAIT, always)
    for _ in range(2000):
        drafts = pacing.drafts(3)
        pacing.stepped(STEP * (1.5 if drafts else 1.0), 3, 3)
    lines = [one for one in caplog.messages if "with up to 4 requests at once: paused" in one]
    assert len(lines) == (0 if always else 1)
    assert always or "drafting loses 50 % of a step here" in lines[0]
