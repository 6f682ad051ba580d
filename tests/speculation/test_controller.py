"""The controller among simulated outputs, beside the arms that it chooses from."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from crossdraft.speculation.arms import NO_DRAFTER, Limits
from crossdraft.speculation.choice import PLAIN, DraftSeen, Ended, Judged, PassSeen, Started
from crossdraft.speculation.controller import OutputController, TargetController
from tests.speculation.simulator import (
    TOKENS,
    Shares,
    Simulation,
    World,
    arm_speeds,
    cold,
    controllers,
    fixed_speed,
    limits_of,
    measured,
)
from tests.verification.enumerating import full

Cell = tuple[int, float, float, float, float, bool]
OUTPUTS, ACCEPTANCES, PASSES, STEPS, TRIPS = (
    (1, 4, 16, 64),
    (0.5, 0.8, 0.95),
    (6, 12, 25, 60),
    (0.5, 1, 2, 4),
    (0, 5, 20),
)


def world_of(acceptance: float, pass_ms: float, step_ms: float, trip_ms: float, samples: bool) -> World:
    """A node of a pass costs what it does beside an accelerator's pass, and machinery what it does in one process."""
    base, step = pass_ms / 1e3, step_ms / 1e3
    costs = {"pass_base": base, "pass_each": base / 400, "step_base": step, "step_each": step / 60}
    return World(acceptance, **costs, drafter_trip=trip_ms / 1e3, samples=samples, machinery=0.0002, noise=0.08)


def near_the_best(found: Sequence[Shares]) -> None:
    """0.9 of the best arm in nine of ten, 0.8 in all, and 0.97 of no drafter in all."""
    of_best = sorted(one.of_best for one in found)
    assert of_best[0] >= 0.8, of_best[:5]
    assert of_best[max(1, len(of_best) // 10)] >= 0.9, of_best[: len(of_best) // 5]
    of_plain = sorted(one.of_plain for one in found)
    assert of_plain[0] >= 0.97, of_plain[:5]


FEW: list[Cell] = [
    (1, 0.8, 12, 1, 5, True),
    (1, 0.95, 25, 0.5, 0, True),
    (1, 0.5, 6, 4, 0, False),
    (4, 0.8, 60, 2, 0, False),
    (16, 0.8, 60, 0.5, 0, True),
    (16, 0.95, 12, 1, 0, False),
    (64, 0.5, 6, 4, 20, False),
]


def test_it_is_near_the_best_arm_and_never_slower_than_no_drafter() -> None:
    near_the_best([measured(world_of(*cell), outputs) for outputs, *cell in FEW])


@pytest.mark.full
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("samples", [False, True])
def test_it_is_so_in_the_whole_grid(outputs: int, samples: bool) -> None:
    """Each cell with one of 20 seeds, of which each has all values of each dimension."""
    cells = product(ACCEPTANCES, PASSES, STEPS, TRIPS)
    near_the_best(
        [measured(world_of(*cell, samples), outputs, seed=1 + number % 20) for number, cell in enumerate(cells)]
    )


COLD = [(0.8, 25, 1, 0, True)]
COLD_FULL = [(0.95, 12, 1, 5, False), (0.8, 60, 2, 20, True), (0.95, 25, 2, 0, True)]


@pytest.mark.parametrize("cell", [*COLD, *map(full, COLD_FULL)])
@pytest.mark.parametrize("stall", [0.0, 0.3])
def test_the_first_five_outputs_have_most_of_what_there_is(
    cell: tuple[float, float, float, float, bool], stall: float
) -> None:
    """A stall in a first use is nobody's: its own seconds apart, nothing changes."""
    found = [cold(replace(world_of(*cell), stall=stall), seed=seed).of_best for seed in range(4)]
    assert sum(found) / len(found) >= (0.75 if stall else 0.85), found


USELESS = {
    "random": World(0.02),
    "random, drawing": World(0.02, samples=True),
    "random and far": World(0.02, drafter_trip=0.02),
    "slow": World(0.8, step_base=0.03),
    "silent": World(step_base=math.inf),
    "costly": World(0.3, pass_each=0.002),
}
USUAL = {"random": 1, "random, drawing": 4, "slow": 1, "silent": 1, "costly": 4}  # outputs


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        (name, outputs) if USUAL.get(name) == outputs else full(name, outputs)
        for name in USELESS
        for outputs in (1, 4, 16)
    ],
)
def test_a_drafter_that_does_not_pay_costs_what_may_be_lost(name: str, outputs: int) -> None:
    world = USELESS[name]
    plain = fixed_speed(world, PLAIN, TOKENS, outputs, 400 * world.pass_base)
    simulation = Simulation(world, controllers(), TOKENS, outputs, 1)
    due = 0.98 * plain * 400 * world.pass_base - 64 * outputs
    assert simulation.speed(400 * world.pass_base) * 400 * world.pass_base >= due
    assert simulation.speed(400 * world.pass_base) >= 0.94 * plain


@pytest.mark.parametrize(("outputs", "arm"), [(1, None), full(4, None), full(16, None)])
def test_it_follows_a_drafter_that_becomes_useless_and_good_again(outputs: int, arm: None) -> None:
    good, useless = world_of(0.9, 12, 1, 0, True), world_of(0.02, 12, 1, 0, True)
    plain, best = arm_speeds(good, outputs)[NO_DRAFTER], max(arm_speeds(good, outputs).values())
    simulation = Simulation(good, controllers(limits_of(good)), 4096, outputs, 1)
    simulation.speed(400 * 0.012)
    simulation.world = useless
    simulation.speed(200 * outputs / plain)
    assert simulation.speed(400 * outputs / plain) >= 0.96 * plain
    simulation.world = good
    simulation.speed(500 * outputs / plain)
    assert simulation.speed(400 * 0.012) >= 0.75 * best


@pytest.mark.parametrize("many", [16, full(64)])
def test_it_follows_the_load(many: int) -> None:
    world = world_of(0.8, 12, 1, 0, False)
    simulation = Simulation(world, controllers(), 96, 1, 1)
    for outputs in (1, many, 1):
        simulation.resize(outputs)
        simulation.speed(100 * 0.012)
        assert simulation.speed(300 * 0.012) >= 0.85 * max(arm_speeds(world, outputs).values())


def test_outputs_of_other_limits_may_have_a_round_while_a_contest_is_not_theirs() -> None:
    """The arm of most outputs may be none that the only one of the round has."""
    target, now = TargetController(), 0.0
    kind, most, few = ("coupled", 0.0, None), Limits(), Limits(rounds_only=True)

    def passed(one: OutputController) -> None:
        nonlocal now
        arm = target.contest.current
        if arm.depth:
            one.observe(DraftSeen(8, 0.001, 0.001), now)
        now, tokens = now + 0.02, 9 if arm.overlap else 2 if arm.depth else 1
        one.observe(Judged(0, tokens - 1, False, tokens, 1), now)
        one.observe(PassSeen(0.02, 0.02, sessions=len(target.outputs)), now)

    outputs = [target.output(kind, most) for _ in range(4)]
    for one in outputs:
        one.observe(Started(), now)
    for one in 50 * outputs:
        one.choose(now)
        passed(one)
    for one in outputs:
        one.observe(Ended(), now)
    single = target.output(kind, few)
    single.observe(Started(), now)
    for _ in range(5):
        single.choose(now)
        passed(single)
    for _ in range(3):
        target.output(kind, most).observe(Started(), now)
    assert target.contest.usual not in few.arms
    passed(single)  # it was under way
    assert single.explain()


def test_an_output_that_has_ended_has_no_targets() -> None:
    target, kind = TargetController(), ("coupled", 0.0, None)
    several, *others = (target.output(kind, Limits(targets=number)) for number in (2, 1, 1))
    for one in (several, *others):
        one.observe(Started(), 0.0)
    several.observe(Ended(), 0.1)
    assert target.load == len(others)
    for one in others:
        one.observe(Ended(), 0.2)
        one.observe(PassSeen(0.02, 0.02), 0.3)
