"""How much is proposed, waited for, and whether drafting pays; in numbers, without a clock."""

import pytest

from crossdraft.integrations.vllm.pacing import EXPLORED, MISSES, DrafterPace, Offer, Pacing
from crossdraft.integrations.vllm.streams import Guess, Outcome
from crossdraft.speculation.choice import DraftSeen
from crossdraft.speculation.estimates import Share

MOST = 4
STEP = 0.05  # seconds of the target
WAIT = 0.02  # seconds at most


def pace_of(accepted: float, trip: float = 0.0, step: float = 0.001) -> DrafterPace:
    """A drafter of which so large a part of 400 draft tokens was accepted."""
    pace = DrafterPace()
    for number in range(400):
        hit = number * accepted % 1.0 < accepted
        pace.judged(Outcome(int(hit), not hit, edge=hit))
    for _ in range(20):
        pace.answered(DraftSeen(1, trip + step, step), 4)
    return pace


def pacing_of(token: float = 0.0002, base: float = STEP) -> Pacing:
    """With a target whose step takes `base`, and so many seconds more for each draft token."""
    pacing = Pacing(MOST, WAIT)
    for number in range(200):
        pacing.stepped(base + token * (number % 5), 1, number % 5)
        pacing.emitted(1, 4)
    return pacing


def offer(pace: DrafterPace, count: int, awaited: bool = False) -> Offer:
    return Offer(pace, Guess((0,) * count, count), Share(), awaited)


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


def test_a_short_wait_is_worth_it_and_a_long_one_is_not() -> None:
    pacing = pacing_of()
    near, far = pace_of(0.8, trip=0.001), pace_of(0.8, trip=0.5)
    assert 0 < pacing.wait([offer(near, 0, awaited=True)]) <= WAIT
    assert pacing.wait([offer(far, 0, awaited=True)]) == 0.0


@pytest.mark.parametrize(
    ("accepted", "at_hand", "awaited"),
    [(0.8, 2, True), (0.8, 0, False), (0.02, 0, True)],
)
def test_nobody_waits_for_what_is_there_or_does_not_come_or_is_worth_nothing(
    accepted: float, at_hand: int, awaited: bool
) -> None:
    assert pacing_of().wait([offer(pace_of(accepted, trip=0.001), at_hand, awaited)]) == 0.0


def test_one_of_many_is_not_waited_for() -> None:
    pace = pace_of(0.6, trip=0.012)
    others = [offer(pace, MOST)] * 31
    assert pacing_of().wait([*others, offer(pace, 0, awaited=True)]) == 0.0


def test_a_silent_drafter_is_waited_for_twice_until_it_answers() -> None:
    pacing, lacking = pacing_of(), [offer(pace_of(0.8, trip=0.001), 0, awaited=True)]
    for _ in range(MISSES):
        assert pacing.wait(lacking) > 0
        pacing.waited(answered=False)
    assert pacing.wait(lacking) == 0.0
    pacing.answered()
    assert pacing.wait(lacking) > 0


def test_nothing_is_waited_for_where_that_is_forbidden() -> None:
    pacing = Pacing(MOST, 0.0)
    for _ in range(100):
        pacing.stepped(STEP, 1, 0)
    assert pacing.wait([offer(pace_of(0.8, trip=0.001), 0, awaited=True)]) == 0.0


def test_a_useless_drafter_is_left_and_tried_again() -> None:
    pacing, useless, good = pacing_of(), pace_of(0.0), pace_of(0.8)
    assert pacing.pays(good, 1)
    assert not pacing.pays(useless, 1)
    assert pacing.pays(DrafterPace(), 1)  # of which nothing is known
    assert pacing.trial_due()  # some tokens were emitted since the last one
    for _ in range(20):
        pacing.judged(Outcome(0, True))
    assert not pacing.trial_due()
    pacing.emitted(int(EXPLORED), 400)
    assert pacing.trial_due()


def test_a_drafter_that_becomes_good_pays_again() -> None:
    pacing, pace = pacing_of(), pace_of(0.0)
    for _ in range(60):
        pace.judged(Outcome(3, False))
    assert pacing.pays(pace, 1)


def test_more_is_asked_of_a_drafter_with_shorter_tokens() -> None:
    pacing, words, letters = pacing_of(), DrafterPace(), DrafterPace()
    for _ in range(100):
        words.answered(DraftSeen(4, None, 0.004), 16)
        letters.answered(DraftSeen(4, None, 0.004), 4)
    few, many = pacing.pull(words), pacing.pull(letters)
    assert few.window < many.window <= 64
    assert few.chunk < many.chunk
