"""Arms among each other, in a closed world: each costs and brings what a test says, and nothing else happens."""

from collections.abc import Callable, Mapping
from random import Random

import pytest

from crossdraft.speculation.choice import PLAIN, Choice, arms_for
from crossdraft.speculation.contest import CREDIT, EARNED, EXCUSES, Account, Contest
from crossdraft.speculation.estimates import Round

PASS = 0.01  # seconds
ARMS = arms_for()[1:]
Cost = Callable[[int, Choice], tuple[float, float]]  # seconds and tokens of a round


def contest_of() -> Contest:
    return Contest(Account(), PLAIN)


def guessed(speed: float = 1.5) -> dict[Choice, Round]:
    """Of an arm that is this many times as fast as no drafter."""
    return {PLAIN: Round(1.0, PASS)} | {arm: Round(speed, PASS) for arm in ARMS}


def run(
    cost: Cost,
    tokens: float,
    contest: Contest | None = None,
    guesses: Mapping[Choice, Round] | None = None,
    outputs: int = 1,
) -> float:
    """Seconds until so many tokens are emitted, in which each round is pure."""
    contest, seconds, emitted, number = contest or contest_of(), 0.0, 0.0, 0
    while emitted < tokens:
        took, brought = cost(number, contest.current)
        contest.add(took, brought, True, guesses or guessed(), outputs)
        seconds, emitted, number = seconds + took, emitted + brought, number + 1
    return seconds


def of(speeds: Mapping[Choice, float], noise: float = 0.0, seed: int = 0) -> Cost:
    random = Random(seed)

    def cost(_: int, arm: Choice) -> tuple[float, float]:
        return PASS * random.lognormvariate(0, noise), speeds.get(arm, 1.0)

    return cost


@pytest.mark.parametrize("best", [ARMS[0], ARMS[3], ARMS[-1]])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_fastest_arm_is_found_and_used(best: Choice, noise: float) -> None:
    contest = contest_of()
    speeds = dict.fromkeys(ARMS, 1.3) | {best: 2.0}
    run(of(speeds, noise), 600, contest)
    assert contest.usual == best
    assert run(of(speeds, noise), 1000, contest) < 1.06 * 1000 * PASS / 2


@pytest.mark.parametrize("lent", [1.0, 0.8])
def test_an_overlapped_arm_of_which_too_little_is_expected_is_tried(lent: float) -> None:
    """It is a fourth faster, and a fifth slower was expected, also where rounds disappoint, which says little of it."""
    contest, best = contest_of(), ARMS[-1]
    assert best.overlap
    guesses = guessed() | {arm: Round(1.2, PASS) for arm in ARMS if arm.overlap}
    run(of({arm: 1.5 * lent for arm in ARMS if not arm.overlap} | {best: 1.9 * lent}), 1000, contest, guesses, 16)
    assert contest.usual == best


@pytest.mark.parametrize("speed", [0.02, 0.3, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("hoped", [1.05, 1.5, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_bounded_whatever_arms_cost_and_however_much_they_promise(
    speed: float, hoped: float, seed: int
) -> None:
    """At most 2 % and 60 tokens, and the round that empties the account."""
    for tokens in (50, 500, 5000):
        seconds = run(of(dict.fromkeys(ARMS, speed), 0.08, seed), tokens, guesses=guessed(hoped))
        assert seconds <= PASS * (1.02 * (1 + EARNED) * tokens + CREDIT + 10)


LONG = 0.3  # seconds of a stall
ADVERSARIES: dict[str, Cost] = {
    "useless from then on": lambda number, arm: (PASS, 2.0 if number < 300 else 0.1),
    "useless now and then": lambda number, arm: (PASS, 2.0 if number // 100 % 2 == 0 else 0.1),
    "good for as long as a trial lasts": lambda number, arm: (PASS, 2.0 if number % 12 < 6 else 0.2),
    "each fourth round stalls": lambda number, arm: (PASS + LONG * (number % 4 == 0), 2.0),
    "each second round stalls": lambda number, arm: (PASS + LONG * (number % 2 == 0), 3.0),
    "stalls while it is tried": lambda number, arm: (PASS + LONG * (number % 20 < 10), 2.0),
}


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("outputs", [1, 16])
def test_the_loss_is_bounded_whatever_is_done_to_deceive(name: str, outputs: int) -> None:
    """Stalls that are excused apart, at any time: EXCUSES of them, and EARNED / 2 of the rounds."""
    contest, lost, emitted = contest_of(), 0.0, 0.0
    for number in range(4000):
        excused, arm = contest.account.excuses, contest.current
        seconds, tokens = ADVERSARIES[name](number, arm) if arm.drafts else (PASS, 1.0)
        contest.add(seconds, tokens, True, guessed(), outputs)
        stall = contest.account.excuses < excused
        lost += (PASS if stall else seconds) / PASS - tokens
        emitted += tokens
        assert lost <= EARNED * emitted + CREDIT + (LONG + PASS) / PASS


def test_as_many_stalls_are_excused_as_first_uses_and_then_one_in_many_rounds() -> None:
    account = Account()
    assert sum(account.excused(True) for _ in range(1000)) == pytest.approx(EXCUSES + 1000 * EARNED / 2, abs=1)
    assert not any(account.excused(False) for _ in range(int(2 / EARNED) + 2))
    assert account.excused(True)


def test_an_arm_that_ceases_to_pay_is_left_and_one_that_pays_again_is_found() -> None:
    contest, speeds = contest_of(), {ARMS[2]: 2.0}
    run(of(speeds), 500, contest)
    assert contest.usual == ARMS[2]
    slow = lambda _, arm: (PASS * (3.0 if arm.drafts else 1.0), 2.0 if arm.drafts else 1.0)  # noqa: E731
    assert run(slow, 200, contest) < 1.25 * 200 * PASS
    assert not contest.usual.drafts
    run(of(speeds), 3000, contest)
    assert contest.usual == ARMS[2]


def test_a_stall_is_nobodys_and_what_always_takes_long_is_a_cost() -> None:
    slow = ARMS[2]
    for often, used in ((97, True), (1, False)):
        contest = contest_of()

        def cost(number: int, arm: Choice, often: int = often) -> tuple[float, float]:
            stalled = arm == slow and number % often == 0
            return PASS + 0.3 * stalled, 2.0 if arm == slow else 0.9 if arm.drafts else 1.0

        run(cost, 2000, contest)
        assert (contest.usual == slow) is used


def test_an_outage_keeps_no_drafter_away_for_long() -> None:
    contest, speeds = contest_of(), {ARMS[2]: 2.0}
    run(of(speeds), 500, contest)
    for _ in range(int(EXCUSES) + 3):
        contest.add(60.0, 2.0, True, guessed(), 1)
    assert not contest.usual.drafts
    run(of(speeds), 3 * CREDIT / EARNED, contest)
    assert contest.usual == ARMS[2]


def test_rounds_in_which_not_all_use_the_arm_cost_and_say_nothing() -> None:
    contest = contest_of()
    for _ in range(3):
        contest.add(PASS, 1.0, True, guessed(), 1)
    tried = contest.current
    assert tried.drafts
    for _ in range(4):
        contest.add(PASS, 1.4, False, guessed(), 1)
    assert not contest.seen(tried)
    contest.add(PASS, 0.0, False, guessed(), 1)
    assert contest.account.credit < CREDIT


def test_what_drafts_displace_after_a_trial_is_charged_and_a_slow_round_without_any_is_not() -> None:
    contest = contest_of()
    for _ in range(3):
        contest.add(PASS, 1.0, True, guessed(), 1)
    assert contest.current.drafts
    contest.end_trial()
    for _ in range(5):  # no draft was made yet
        contest.add(2 * PASS, 1.0, False, guessed(), 1)
        assert contest.account.credit == CREDIT
    contest.trial = ARMS[0]
    contest.add(PASS, 1.0, True, guessed(), 1)
    contest.end_trial()
    for _ in range(5):  # what was asked for still takes time
        credit = contest.account.credit
        contest.add(2 * PASS, 1.0, True, guessed(), 1)
        assert credit - contest.account.credit == pytest.approx(1, abs=EARNED + 1e-9)
    assert contest.seen(PLAIN) == pytest.approx(0.5, abs=0.01)  # ... and is not taken for what no drafter brings
    contest.add(PASS, 1.0, True, guessed(), 1)
    contest.add(2 * PASS, 1.0, True, guessed(), 1)
    assert contest.account.credit > credit - 1


def test_passes_that_share_a_processor_with_drafts_do_not_make_no_drafter_slower() -> None:
    """Drafting brings two tokens a round of four passes' time; what a pass is thought to take rises with it."""
    contest, seconds, emitted, shown = contest_of(), 0.0, 0.0, PASS
    while emitted < 1000:
        drafts = contest.current.drafts
        took, brought = (4 * PASS, 2.0) if drafts else (PASS, 1.0)
        guesses = {PLAIN: Round(1.0, shown)} | {arm: Round(2.0, 1.3 * shown) for arm in ARMS}
        contest.add(took, brought, True, guesses, 16)
        shown += 0.3 * ((3 * PASS if drafts else PASS) - shown)
        seconds, emitted = seconds + took, emitted + brought
    assert contest.usual == PLAIN
    assert seconds * (1 - EARNED) < (1000 + CREDIT + 10) * PASS


def test_whatever_requests_ask_for_what_was_used_long_ago_is_forgotten() -> None:
    contest = contest_of()
    run(of({ARMS[2]: 2.0}), 500, contest)
    arms = [Choice(most, least) for most in range(1, 65) for least in range(min(most, 16))]
    for arm in arms:
        contest.end_trial()
        contest.usual = arm
        contest.add(PASS, 1.0, True, guessed() | {arm: Round(1.5, PASS)}, 1)
    assert len(contest.records) < 0.9 * len(arms)
    assert contest.seen(ARMS[2]) > contest.seen(ARMS[0])
