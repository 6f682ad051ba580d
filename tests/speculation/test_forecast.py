"""Forecasts beside the simulator, which draws at random what they expect."""

import pytest

from crossdraft.speculation.choice import PLAIN, Choice
from crossdraft.speculation.estimates import StepCost
from crossdraft.speculation.forecast import Conditions, forecast
from tests.speculation.simulator import TURN, World, fixed_speed
from tests.verification.enumerating import full

CHOICES = (
    PLAIN,
    Choice(2, 2, overlap=False),
    Choice(8, 8, overlap=False),
    Choice(16, 4, chunk=2),
    Choice(32, 8, chunk=2),
    Choice(12, patience=0.0),
    Choice(24, patience=0.0),
)


def conditions(world: World, outputs: int) -> Conditions:
    return Conditions(
        [world.acceptance] * 64,
        outputs,
        StepCost(world.pass_base, world.pass_each, world.pass_each),
        StepCost(world.step_base, world.step_each),
        outputs,
        world.target_trip + 2 * TURN,
        world.drafter_trip + 2 * TURN,
        samples=world.samples,
    )


WORLDS = ((0.95, 0.0), (0.8, 0.005), (0.95, 0.02))


@pytest.mark.parametrize(
    ("place", "acceptance", "trip"),
    [
        (place, *one) if place % len(WORLDS) == at else full(place, *one)
        for place in range(len(CHOICES))
        for at, one in enumerate(WORLDS)
    ],
)
def test_one_output_is_as_fast_as_forecast(place: int, acceptance: float, trip: float) -> None:
    choice = CHOICES[place]
    world = World(acceptance, drafter_trip=trip)
    simulated = fixed_speed(world, choice, 1 << 30, 1, 8.0)
    assert simulated == pytest.approx(forecast(conditions(world, 1), choice).speed, rel=0.2)


@pytest.mark.parametrize("choice", [PLAIN, Choice(8, 8, overlap=False), Choice(24, patience=0.0)])
def test_of_outputs_that_share_a_target_too(choice: Choice) -> None:
    """Simulated services take no processor time for an output's part of a pass, which forecasts count."""
    world = World(0.8)
    simulated = fixed_speed(world, choice, 1 << 30, 16, 1.0)
    assert simulated == pytest.approx(16 * forecast(conditions(world, 16), choice).speed, rel=0.3)


def test_what_a_draft_token_costs_grows_with_the_outputs_in_a_pass() -> None:
    dear = World(0.6, pass_each=0.001)
    alone, many = (
        max(range(1, 9), key=lambda k: forecast(conditions(dear, n), Choice(k, k, overlap=False)).speed)
        for n in (1, 16)
    )
    assert many < alone
