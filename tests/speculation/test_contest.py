"""Arms among each other, in a closed world: each costs and brings what a test says, and nothing else happens."""

from collections.abc import Callable, Mapping
from random import Random

import pytest

from crossdraft.speculation.arms import NO_DRAFTER, Arm, Limits, Round
from crossdraft.speculation.contest import CREDIT, EARNED, Account, Contest

PASS = 0.01  # seconds
PLAIN = Round(1.0, PASS)
ARMS = [arm for arm in Limits().arms if arm.depth]
Cost = Callable[[int, Arm], tuple[float, float]]  # seconds and tokens of a round


def guessed(speed: float = 1.5) -> dict[Arm, Round]:
    """Of an arm that is this many times as fast as no drafter."""
    return {NO_DRAFTER: PLAIN} | {arm: Round(speed, PASS) for arm in ARMS}


def run(cost: Cost, tokens: float, contest: Contest | None = None, guesses: Mapping[Arm, Round] | None = None) -> float:
    """Seconds until so many tokens are emitted, in which each round is pure."""
    contest, seconds, emitted, number = contest or Contest(Account()), 0.0, 0.0, 0
    while emitted < tokens:
        took, brought = cost(number, contest.current)
        contest.add(took, brought, True, guesses or guessed(), 1)
        seconds, emitted, number = seconds + took, emitted + brought, number + 1
    return seconds


def of(speeds: Mapping[Arm, float], noise: float = 0.0, seed: int = 0) -> Cost:
    random = Random(seed)

    def cost(_: int, arm: Arm) -> tuple[float, float]:
        return PASS * random.lognormvariate(0, noise), speeds.get(arm, 1.0)

    return cost


@pytest.mark.parametrize("best", [ARMS[0], ARMS[3], ARMS[-1]])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_fastest_arm_is_found_and_used(best: Arm, noise: float) -> None:
    contest = Contest(Account())
    speeds = dict.fromkeys(ARMS, 1.3) | {best: 2.0}
    run(of(speeds, noise), 600, contest)
    assert contest.usual == best
    assert run(of(speeds, noise), 1000, contest) < 1.06 * 1000 * PASS / 2


@pytest.mark.parametrize("speed", [0.02, 0.3, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("hoped", [1.05, 1.5, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_bounded_whatever_arms_cost_and_however_much_they_promise(
    speed: float, hoped: float, seed: int
) -> None:
    """At most 2 % and 60 tokens, and a round of those of which a stall's part is counted."""
    for tokens in (50, 500, 5000):
        seconds = run(of(dict.fromkeys(ARMS, speed), 0.08, seed), tokens, guesses=guessed(hoped))
        assert seconds <= PASS * (1.02 * (1 + EARNED) * tokens + CREDIT + 10)


def test_an_arm_that_ceases_to_pay_is_left_and_one_that_pays_again_is_found() -> None:
    contest, speeds = Contest(Account()), {ARMS[2]: 2.0}
    run(of(speeds), 500, contest)
    assert contest.usual == ARMS[2]
    slow = lambda _, arm: (PASS * (3.0 if arm.depth else 1.0), 2.0 if arm.depth else 1.0)  # noqa: E731
    assert run(slow, 200, contest) < 1.25 * 200 * PASS
    assert not contest.usual.depth
    run(of(speeds), 3000, contest)
    assert contest.usual == ARMS[2]


def test_a_stall_is_nobodys_and_what_always_takes_long_is_a_cost() -> None:
    slow = ARMS[2]
    for often, used in ((97, True), (1, False)):
        contest = Contest(Account())

        def cost(number: int, arm: Arm, often: int = often) -> tuple[float, float]:
            stalled = arm == slow and number % often == 0
            return PASS + 0.3 * stalled, 2.0 if arm == slow else 0.9 if arm.depth else 1.0

        run(cost, 2000, contest)
        assert (contest.usual == slow) is used


def test_an_outage_keeps_no_drafter_away_for_long() -> None:
    contest, speeds = Contest(Account()), {ARMS[2]: 2.0}
    run(of(speeds), 500, contest)
    for _ in range(2):
        contest.add(60.0, 2.0, True, guessed(), 1)
    assert not contest.usual.depth
    run(of(speeds), 3 * CREDIT / EARNED, contest)
    assert contest.usual == ARMS[2]


def test_what_another_load_has_shown_is_a_guess() -> None:
    contest = Contest(Account())
    run(of({ARMS[2]: 2.0}), 800, contest)
    other = contest.at_another_load()
    assert not other.usual.depth
    assert other.speed(ARMS[2], guessed()) > other.speed(ARMS[0], guessed())
    for _ in range(3):
        other.add(PASS, 1.0, True, guessed(), 1)
    assert other.usual == ARMS[2]


def test_rounds_in_which_not_all_use_the_arm_cost_and_say_nothing() -> None:
    contest = Contest(Account())
    for _ in range(3):
        contest.add(PASS, 1.0, True, guessed(), 1)
    tried = contest.current
    assert tried.depth
    for _ in range(4):
        contest.add(PASS, 1.4, False, guessed(), 1)
    assert contest.windows(tried) == 0
    contest.add(PASS, 0.0, False, guessed(), 1)
    assert contest.account.credit < CREDIT
