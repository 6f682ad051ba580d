"""What a controller estimates: what steps take, and how draft tokens fare."""

import pytest

from crossdraft.speculation.choice import PLAIN, Choice, arms_for
from crossdraft.speculation.estimates import HOPED, LATEST, MEMORY, Costs, Round, Share, Times


def test_a_step_of_any_size_is_on_the_line_between_those_that_were_seen() -> None:
    times = Times()
    assert (times.known, times.seconds(4)) == (False, 0.0)
    for size in (1, 8, 64):
        for _ in range(LATEST):
            times.add(0.010 + 0.001 * size, size)
    for size in (2, 8, 40, 100):
        assert times.seconds(size) == pytest.approx(0.010 + 0.001 * size)


FIRST_USES = [(0.02, 1)] * 3 + [(0.3, 6), (0.3, 8)]  # two sizes in one octave


@pytest.mark.parametrize(
    ("seen", "size", "least", "most"),
    [
        # Pauses of the machine are no cost, and a real change is.
        ([(0.3 if number % 3 == 1 else 0.01, 1) for number in range(LATEST)], 1, 0.01, 0.01),
        ([(0.3 if number % 3 == 1 else 0.01, 1) for number in range(LATEST)] + [(0.02, 1)] * LATEST, 1, 0.02, 0.02),
        # First uses say nothing.
        (FIRST_USES, 7, 0.0, 0.021 - 1e-12),
        ([*FIRST_USES, (0.03, 7)], 7, 0.03, 0.03),
        # Rounding makes no time negative.
        (3 * [(0.48592769656281265, 1.0), (0.0, 7.0)], 7.0, 0.0, 0.0),
        # What many cost is still known after a time with few.
        ([(0.05, 64)] * 100 + [(0.01, 1)] * 100, 64, 0.05 * (1 - 1e-6), 0.05 * (1 + 1e-6)),
    ],
)
def test_what_a_step_takes_by_those_that_were_seen(seen, size: float, least: float, most: float) -> None:
    times = Times()
    for seconds, tokens in seen:
        times.add(seconds, tokens)
    assert least <= times.seconds(size) <= most


def test_rounds_cost_what_their_steps_do() -> None:
    costs = Costs()
    for seconds, tokens in 3 * [(0.02, 1), (0.03, 11)]:
        costs.target.add(seconds, tokens)
    costs.steps[False].add(0.002)
    costs.trips[False].add(0.005)

    def round_of(arm: Choice, chance: float = 1.0) -> Round:
        return costs.round(arm, 1, 1, chance)

    assert round_of(Choice(4, 4, False)) == (pytest.approx(5), pytest.approx(0.024 + 0.005 + 4 * 0.002))
    assert round_of(PLAIN) == (1, 0.02)
    good, bad = (round_of(Choice(16, 0, True), chance) for chance in (0.9, 0.1))
    assert good.tokens / good.seconds > 2 * bad.tokens / bad.seconds
    assert bad.tokens / bad.seconds == pytest.approx(50, rel=0.25)
    far = Costs()
    far.target.add(0.02)
    far.steps[False].add(0.0001)
    far.trips[False].add(0.16)
    speeds = [one.tokens / one.seconds for one in (far.round(Choice(ahead, 4, True), 1, 1, 0.99) for ahead in (8, 16))]
    assert speeds[0] < 0.7 * speeds[1] < 0.7 * 16 / 0.16  # no more than may be ahead are on their way


def test_it_begins_hopeful_and_hopes_again_after_a_time_without_a_drafter() -> None:
    acceptance = Share()
    assert acceptance.mean() == HOPED
    acceptance.add(0, 40)
    assert acceptance.mean() < 0.15
    acceptance.fade(MEMORY)
    assert acceptance.mean() == HOPED


def test_a_text_is_taken_for_a_usual_one_until_it_clearly_differs() -> None:
    fared = Share(memory=60.0)
    fared.add(0, 3)
    assert fared.factor(0.5) == 1
    fared.add(0, 40)
    assert fared.factor(0.5) < 0.2
    fared.fade(60.0)
    assert fared.factor(0.5) == 1
    fared.add(60, 60)
    assert 1.5 < fared.factor(0.5) < 2


def test_what_a_step_takes_beside_passes_is_its_own() -> None:
    """Until rounds or overlapped arms are seen the other ones say what it is."""
    costs = Costs()
    rounds, overlapped = (next(arm for arm in arms_for() if arm.drafts and arm.overlap == own) for own in (False, True))
    costs.steps[True].add(0.004)
    costs.trips[True].add(0.05)
    assert (costs.arrival(rounds, 1, 0), costs.arrival(overlapped, 1, 0)) == (0.05, 0.05)
    costs.trips[False].add(0.001)
    assert (costs.arrival(rounds, 1, 0), costs.arrival(overlapped, 1, 0)) == (0.001, 0.05)
    assert (costs.step(rounds, 1), costs.step(overlapped, 1)) == (0.004, 0.004)
    costs.steps[False].add(0.001)
    assert (costs.step(rounds, 1), costs.step(overlapped, 1)) == (0.001, 0.004)
    known = Costs()
    known.steps[False].add(0.001)
    assert known.step(overlapped, 1) == 0.001
