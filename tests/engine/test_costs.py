"""What steps cost, learned from steps."""

import random

import pytest

from crossdraft.engine.scheduler import REACH, StepCosts


def learned(steps: list[tuple[int, float]]) -> StepCosts:
    costs = StepCosts()
    for tokens, seconds in steps:
        costs.observe(tokens, seconds)
    return costs


def test_a_line_is_found_through_noise() -> None:
    draw = random.Random(3)
    sizes = [draw.choice((6, 12, 30, 60)) for _ in range(200)]
    costs = learned([(size, (0.02 + 0.001 * size) * draw.uniform(0.9, 1.1)) for size in sizes])
    for size in (1, 6, 40, 100):
        assert costs.seconds(size) == pytest.approx(0.02 + 0.001 * size, rel=0.08)
    assert costs.tokens(0.06) == pytest.approx(40, abs=4)


def test_steps_of_one_size_say_what_that_size_takes_and_that_more_takes_longer() -> None:
    costs = learned([(6, 0.03)] * 50)
    assert costs.seconds(6) == pytest.approx(0.03)
    assert 0.03 < costs.seconds(12) < 0.06
    assert 6 < costs.tokens(0.06) <= REACH * 6


def test_what_no_step_came_near_is_not_tried_at_once() -> None:
    flat = learned([(size, 0.01) for size in range(1, 9)])
    assert flat.tokens(1.0) == REACH * 8
    flat.observe(16, 0.01)
    assert flat.tokens(1.0) == REACH * 16


def test_one_stall_changes_little_and_a_machine_that_became_slower_is_noticed() -> None:
    costs = learned([(size, 0.02 + 0.001 * size) for size in (6, 12) * 50])
    costs.observe(6, 1.0)
    assert costs.seconds(6) == pytest.approx(0.026, rel=0.05)
    for size in (6, 12) * 150:
        costs.observe(size, 0.06 + 0.001 * size)
    assert costs.seconds(6) == pytest.approx(0.066, rel=0.1)


def test_nothing_is_known_before_the_first_step_and_a_step_without_time_says_nothing() -> None:
    costs = learned([(5, 0.0)])
    assert costs.seconds(100) == 0.0
    assert costs.tokens(1.0) == REACH


@pytest.mark.parametrize("steps", [[(8, 0.001), (1, 0.1)] * 20, [(0, 0.01)] * 5, [(100, 1e-9), (1, 10.0)] * 30])
def test_no_estimate_is_negative_or_falls_with_tokens(steps: list[tuple[int, float]]) -> None:
    costs = learned(steps)
    times = [costs.seconds(size) for size in range(0, 600, 50)]
    assert times == sorted(times)
    assert times[0] >= -1e-12
    assert costs.tokens(0.05) <= REACH * 100


def test_a_step_that_fed_nothing_says_nothing() -> None:
    """It is over at once: a forward that failed, or works whose tokens are all held."""
    costs = learned([(6, 0.02)] * 50)
    costs.observe(0, 5e-5)
    assert costs.seconds(6) == pytest.approx(0.02)
