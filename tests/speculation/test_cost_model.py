"""The simulator against closed forms and the first version's table, and the forecast against the simulator."""

import os
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from crossdraft.speculation.choice import PLAIN, Choice, Workload, lock_step
from crossdraft.speculation.controller import Limits, rank
from crossdraft.speculation.cost_model import forecast
from crossdraft.speculation.simulator import simulate
from tests.verification.scheduling import InTurn

PASS = 1.0
FULL = "CROSSDRAFT_FULL_TESTS" in os.environ


def workload(acceptance: float, trip: float, token: float = 1 / 20, node: float = 0.03, **more: float) -> Workload:
    """Agreement after the target's own tokens as everywhere, as the first version of the simulation had it."""
    return Workload((acceptance,), acceptance, token, PASS, node, drafter_trip=trip, **more)


def speed(given: Workload, choice: Choice, tokens: int = 4000, jitter: float = 0.0) -> float:
    return simulate(given, choice, tokens, np.random.default_rng(1), jitter).speed


def test_plain_decoding_is_one_token_a_pass() -> None:
    run = simulate(workload(0.8, 0.5), PLAIN, 100, np.random.default_rng(0))
    assert (run.passes, run.seconds) == (100, pytest.approx(100 * PASS))
    assert run.idle == pytest.approx(0)
    assert run.drafter_seconds == 0


@pytest.mark.parametrize(
    ("acceptance", "trip", "expected"), [(0.5, 0, 1.51), (0.7, 0.5, 1.55), (0.8, 2, 1.20), (0.9, 0, 3.82)]
)
def test_lock_step_at_its_best_k_is_as_in_the_first_simulation(acceptance: float, trip: float, expected: float) -> None:
    given = workload(acceptance, trip)
    assert max(speed(given, lock_step(k).choice) for k in (2, 3, 4, 6, 8, 12)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("acceptance", "trip", "expected"), [(0.5, 0.5, 1.23), (0.7, 0.5, 1.73), (0.9, 2, 2.51), (0.95, 2, 4.00)]
)
def test_overlapped_is_as_in_the_first_simulation(acceptance: float, trip: float, expected: float) -> None:
    given = workload(acceptance, trip)
    ways = [Choice(window, min_draft_tokens=wait, patience=trip + 1) for window in (8, 64) for wait in (0, 2)]
    ways.append(Choice(64, patience=0.0))
    assert max(speed(given, way, 3000) for way in ways) == pytest.approx(expected, rel=0.08)


def test_lock_step_is_its_closed_form() -> None:
    given = workload(0.7, 0.5)
    round_ = 0.5 + 4 / 20 + PASS + 4 * 0.03
    tokens = 1 + 0.7 + 0.7**2 + 0.7**3 + 0.7**4
    assert forecast(given, lock_step(4).choice).speed == pytest.approx(tokens / round_)
    assert speed(given, lock_step(4).choice, 20_000) == pytest.approx(tokens / round_, rel=0.02)


CHOICES = (
    Choice(4),
    Choice(16, patience=0.0),
    Choice(8, min_draft_tokens=2),
    Choice(8, min_draft_tokens=3, patience=0.4),
    Choice(8, min_draft_tokens=1, branch_depth=3),
    Choice(4, branch_depth=2, branch_width=2),
    lock_step(4).choice,
)
GRID = list(product((0.0, 0.3, 0.6, 0.95), (1 / 20, 1 / 5), (0, 0.5, 2), (0.01, 0.2), (False, True)))


def test_forecasts_agree_with_simulations() -> None:
    errors = []
    for i, (acceptance, token, trip, node, samples) in list(enumerate(GRID))[:: 1 if FULL else 5]:
        given = replace(
            workload(acceptance, trip, token, node, branch_hit=0.5, slope=0.05),
            match=acceptance if samples else 0.6 * acceptance,
            samples=samples,
        )
        choice = CHOICES[i % len(CHOICES)]
        errors.append(abs(speed(given, choice, 1500, jitter=0.1) / forecast(given, choice).speed - 1))
    assert np.median(errors) < 0.025  # of which a simulation of 1,500 tokens has about 0.02
    assert np.quantile(errors, 0.9) < 0.09
    assert max(errors) < 0.2


def test_idle_share_and_passes_agree_as_well() -> None:
    given = workload(0.8, 0.5)
    for choice in (lock_step(4).choice, Choice(8, min_draft_tokens=3), Choice(16, patience=0.0)):
        run = simulate(given, choice, 10_000, np.random.default_rng(2), 0.1)
        expected = forecast(given, choice)
        assert run.idle == pytest.approx(expected.idle, abs=0.03)
        assert run.passes_per_token == pytest.approx(expected.passes_per_token, rel=0.06)


def test_a_drafter_that_never_answers_costs_one_wait() -> None:
    given = workload(0.8, 0.5, token=inf)
    run = simulate(given, Choice(8, min_draft_tokens=4, patience=2.0), 100, np.random.default_rng(0))
    assert run.seconds == pytest.approx(100 * PASS + 2.0)


def test_branches_pay_at_a_distance_and_what_they_cost_is_charged() -> None:
    near = workload(0.6, 0.5, branch_hit=0.5, samples=True)
    dear = replace(near, slope=1.0)
    without, with_branches = Choice(8, min_draft_tokens=2), Choice(8, min_draft_tokens=2, branch_depth=4)
    run = simulate(near, with_branches, 10_000, np.random.default_rng(0))
    assert run.hits / run.tried == pytest.approx(0.5, abs=0.03)
    assert run.speed > 1.1 * speed(near, without)
    assert speed(dear, with_branches) < speed(dear, without)


def test_rows_of_adopted_draft_tokens_take_a_round_trip() -> None:
    given = workload(0.6, 2, branch_hit=0.8)
    choice = Choice(8, min_draft_tokens=2, branch_depth=4)
    assert speed(replace(given, samples=True), choice) > 1.1 * speed(given, choice)


def test_matching_less_after_plain_passes_makes_a_far_drafter_worth_less() -> None:
    given = workload(0.6, 2)
    choice = Choice(8, patience=0.0)
    assert speed(replace(given, match=0.2), choice) < 0.95 * speed(given, choice)


def test_draft_tokens_are_worth_tokens() -> None:
    given = workload(0.8, 0.5)
    longer = replace(given, tokens_per_draft_token=1.5)
    choice = lock_step(4).choice
    accepted = 0.8 + 0.8**2 + 0.8**3 + 0.8**4
    assert forecast(longer, choice).speed / forecast(given, choice).speed == pytest.approx(
        (1 + 1.5 * accepted) / (1 + accepted)
    )
    assert speed(longer, choice, 10_000) == pytest.approx(forecast(longer, choice).speed, rel=0.03)


def test_a_second_target_hides_passes() -> None:
    given = workload(0.95, 0, targets=2, token=0.2)
    alone, both = Choice(16, min_draft_tokens=3), Choice(16, min_draft_tokens=3, speculate=True)
    assert speed(given, both) > 1.03 * speed(given, alone)


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        workload(1.2, 0)
    with pytest.raises(ValueError, match="0 or more"):
        workload(0.5, -1)


@pytest.mark.parametrize(
    "choice", [Choice(4), Choice(16, patience=0.0), Choice(8, min_draft_tokens=3, patience=0.4)], ids=str
)
def test_a_drafter_on_the_same_machine_slows_the_target(choice: Choice) -> None:
    alone = workload(0.6, 0.1, token=0.1)
    shared = replace(alone, contention=1.6)
    assert speed(shared, choice) < 0.93 * speed(alone, choice)
    assert speed(shared, choice) == pytest.approx(forecast(shared, choice).speed, rel=0.08)
    for undisturbed in (PLAIN, lock_step(4).choice):
        assert speed(shared, undisturbed) == pytest.approx(speed(alone, undisturbed), rel=1e-3)


def test_a_plain_pass_below_a_round_trip_does_not_hold_the_simulation_up() -> None:
    given = replace(workload(0.6, 0.1), target_trip=0.5, plain=0.3, contention=1.3)
    run = simulate(given, PLAIN, 10, np.random.default_rng(0))
    assert run.seconds == pytest.approx(10 * 0.3)


def test_plain_passes_may_cost_less() -> None:
    given = replace(workload(0.6, 0.1), plain=0.8 * PASS)
    assert speed(given, PLAIN) == pytest.approx(forecast(given, PLAIN).speed) == pytest.approx(1 / (0.8 * PASS))
    assert speed(given, Choice(4)) == speed(workload(0.6, 0.1), Choice(4))


@pytest.mark.parametrize(("acceptance", "trip", "token"), [(0.8, 0, 1 / 20), (0.95, 0.1, 1 / 20), (0.8, 0, 1 / 40)])
def test_replies_grow_where_that_costs_next_to_nothing(acceptance: float, trip: float, token: float) -> None:
    given = workload(acceptance, trip, token, 0.01)
    best = rank(given, Limits(branch_depth=0)).best.choice
    assert best.chunk >= 3
    assert speed(given, best, 10_000, 0.1) > 0.97 * speed(given, replace(best, chunk=1), 10_000, 0.1)


@pytest.mark.parametrize(("acceptance", "trip", "token"), [(0.95, 0.5, 1 / 20), (0.9, 0.2, 1 / 4)])
def test_replies_stay_small_where_a_pass_would_return_to_fewer_draft_tokens(
    acceptance: float, trip: float, token: float
) -> None:
    assert rank(workload(acceptance, trip, token, 0.01), Limits(branch_depth=0)).best.choice.chunk == 1


def test_a_plain_pass_that_is_shorter_than_the_round_trip_ends() -> None:
    """Both are estimates; the drafter's work beside such a pass must not hold it up for ever."""
    given = Workload((0.8,), 0.5, 0.001, 0.01, target_trip=0.01, plain=0.004, contention=2.0)
    assert simulate(given, PLAIN, 100, np.random.default_rng(0)).seconds == pytest.approx(0.4)
    for choice in (Choice(4, 1), Choice(4, 0, patience=0.0)):
        controller = InTurn((PLAIN, choice)).fresh()
        assert simulate(given, controller, 100, np.random.default_rng(0)).tokens >= 100


@pytest.mark.parametrize("trip", [0.0, 0.5])
@pytest.mark.parametrize("worth", [0.5, 1.0, 1.5])
def test_a_drafter_that_writes_no_faster_than_the_target_is_of_no_use(trip: float, worth: float) -> None:
    """So the ways of using it need not be compared."""
    given = workload(0.9, trip, token=worth * PASS, node=0.0, tokens_per_draft_token=worth, branch_hit=0.5, slope=0.1)
    assert rank(given, Limits()).best.choice == PLAIN
    assert rank(given, Limits(rounds_only=True)).best.choice == PLAIN
    for choice in (lock_step(1).choice, lock_step(6).choice, Choice(8, patience=0.0), Choice(12, 2, branch_depth=2)):
        assert speed(given, choice) <= 1.02 / PASS
