"""The controller among simulated outputs, beside the arms that it chooses from."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from statistics import fmean
from typing import Any

import pytest

from crossdraft.speculation import choice as choices
from crossdraft.speculation import estimates
from crossdraft.speculation.choice import PLAIN, Choice, DraftSeen, Fixed, Judged, Lifecycle, PassSeen, arms_for
from crossdraft.speculation.controller import MANY, SILENT, Arms, OutputController, TargetController
from crossdraft.speculation.estimates import Times
from crossdraft.speculation.selection import Record
from tests.speculation import simulator
from tests.speculation.simulator import CHAINS, KIND, TOKENS, Simulation, World, arm_speeds, controllers, fixed_speed
from tests.verification.enumerating import few_or_full, full

Cell = tuple[int, float, float, float, float, bool]
OUTPUTS, ACCEPTANCES = (1, 4, 16, 64), (0.5, 0.8, 0.95)
PASSES, STEPS, TRIPS = (6, 12, 25, 60), (0.5, 1, 2, 4), (0, 5, 20)
COLD = [(0.8, 25, 1, 0, True)]
COLD_FULL = [(0.95, 12, 1, 5, False), (0.8, 60, 2, 20, True), (0.95, 25, 2, 0, True)]
SHARED = World(0.4, pass_each=0.0002, step_base=0.003, step_each=0.0001, shared=True)


def world_of(acceptance: float, pass_ms: float, step_ms: float, trip_ms: float, samples: bool) -> World:
    """A node of a pass costs what it does beside an accelerator's pass, and machinery what it does in one process."""
    base, step = pass_ms / 1e3, step_ms / 1e3
    costs = {"pass_base": base, "pass_each": base / 400, "step_base": step, "step_each": step / 60}
    return World(acceptance, **costs, drafter_trip=trip_ms / 1e3, samples=samples, machinery=0.0002, noise=0.08)


@pytest.mark.parametrize(("outputs", "seconds", "slower", "seed"), [(1, 0.3, 2, 1), (1, 1.5, 4, 2), (16, 1.5, 4, 1)])
def test_no_drafter_is_not_judged_by_how_fast_a_machine_was_that_was_busy(outputs, seconds, slower, seed):
    world = world_of(0.02, 8, 1, 0, True)  # a drafter of no use
    busy = replace(world, pass_base=slower * world.pass_base, pass_each=slower * world.pass_each)
    simulation = Simulation(busy, controllers(simulator.arms_of(world)), 96, outputs, seed)
    simulation.speed(seconds)
    simulation.world = world
    simulation.speed(2.0)
    assert simulation.speed(4.0) > 0.9 * fixed_speed(world, PLAIN, 96, outputs, 4.0)


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
    """0.9 of the best arm in nine of ten, 0.8 in all, and 0.97 of no drafter in all."""
    found = [simulator.measured(world_of(*cell[1:]), cell[0]) for cell in FEW]
    of_best, of_plain = (sorted(one) for one in zip(*((one.of_best, one.of_plain) for one in found), strict=True))
    assert of_best[0] >= 0.8, of_best
    assert of_best[1] >= 0.9, of_best
    assert of_plain[0] >= 0.97, of_plain


@pytest.mark.full
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_it_is_so_in_the_whole_grid(outputs: int) -> None:
    """Each cell with one of 20 seeds; BENCHMARKS says where the aims are missed."""
    cells = product(ACCEPTANCES, PASSES, STEPS, TRIPS)
    found = []
    for number, cell in enumerate(cells):
        samples = bool(number % 2) ^ bool(number // len(TRIPS) // len(STEPS) % 2)
        found.append(simulator.measured(world_of(*cell, samples), outputs, seed=1 + number % 20))
    of_best, of_plain = (sorted(one) for one in zip(*((one.of_best, one.of_plain) for one in found), strict=True))
    assert sum(one >= 0.9 for one in of_best) >= 0.75 * len(found), of_best
    assert of_best[0] >= 0.6, of_best
    assert of_best[len(found) // 20] >= 0.75, of_best
    assert of_plain[0] >= 0.92, of_plain


@pytest.mark.parametrize(("outputs", "pass_ms", "tokens"), [(4, 60, 48), (16, 60, 48)])
def test_it_learns_also_from_outputs_that_all_end_before_a_trial_is_over(outputs: int, pass_ms: int, tokens: int):
    """A trial goes on at the next batch; while outputs end, load by load, nothing is begun anew."""
    world = world_of(0.95, pass_ms, 1, 0, True)
    assert fmean(simulator.in_batches(world, outputs, tokens, 4, seed) for seed in range(6)) >= 0.78


@pytest.mark.parametrize("crowded", [estimates.CROWDED, full(2 * estimates.CROWDED)])
def test_it_finds_overlapping_where_that_is_the_best_by_a_fifth(crowded: float, monkeypatch: pytest.MonkeyPatch):
    """Of 24 outputs, which stay in step: less was expected of it than of lock-step rounds, and it was never tried."""
    monkeypatch.setattr(estimates, "CROWDED", crowded)
    costs = {"pass_base": 0.012, "pass_each": 0.00003, "step_base": 0.003, "machinery": 0.00003, "noise": 0.03}
    world = World(0.9, **costs, target_trip=0.001, samples=True)
    speeds = arm_speeds(world, 24)
    best = max(speeds, key=lambda arm: speeds[arm])
    assert best.overlap
    assert all(speeds[best] > 1.2 * speed for arm, speed in speeds.items() if not arm.overlap)
    assert simulator.measured(world, 24, then=200).of_best >= 0.83


@pytest.mark.parametrize("acceptance", [0.9, full(0.6)])
def test_it_finds_rounds_on_one_device_that_overlapped_arms_slow_down(acceptance: float) -> None:
    """As one GPU with a small drafter: beside passes both take longer, which says little of rounds."""
    costs = {"pass_base": 0.0055, "pass_each": 0.00003, "step_base": 0.0003, "reply": 130, "machinery": 0.00015}
    world = World(acceptance, **costs, drafter_trip=0.0008, target_trip=0.0008, noise=0.03, samples=True, shared=True)
    speeds = arm_speeds(world, 1)
    assert not max(speeds, key=lambda arm: speeds[arm]).overlap
    assert fmean(simulator.measured(world, 1, seed, 60, 200).of_best for seed in range(4)) >= 0.9


@pytest.mark.parametrize("world", [world_of(0.5, 12, 2, 0, True), full(world_of(0.8, 12, 2, 20, True))])
def test_outputs_that_change_from_rounds_to_overlapping_are_in_step_within_a_few_passes(world: World) -> None:
    """In two groups, each with every second pass, they would have three fifths of their speed for 50 passes."""
    eight = [arm for arm in simulator.WITH_TREES if arm.max_draft_tokens == 8]
    rounds, overlapped = (next(arm for arm in eight if arm.overlap == own) for own in (False, True))
    found = []
    for seed in range(6):
        simulation, used = Simulation(world, lambda: Fixed(PLAIN), 2000, 0, seed), [Fixed(rounds) for _ in range(4)]
        simulation._make = iter(used).__next__
        simulation.resize(4)
        simulation.speed(0.5)
        for one in used:
            one.choice = overlapped
        simulation.speed(10 * world.pass_base)
        found.append(simulation.speed(20 * world.pass_base))
    assert fmean(found) >= 0.85 * arm_speeds(world, 4)[overlapped]


@pytest.mark.parametrize("cell", [*COLD, *map(full, COLD_FULL)])
@pytest.mark.parametrize("stall", [0.0, 0.3])
def test_the_first_five_outputs_have_most_of_what_there_is(cell: tuple[float, float, float, float, bool], stall: float):
    """A stall in a first use is nobody's: its own seconds apart, nothing changes."""
    found = [simulator.cold(replace(world_of(*cell), stall=stall), seed=seed).of_best for seed in range(6)]
    assert sum(found) / len(found) >= (0.81 if stall else 0.85), found


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
    ("name", "outputs"), few_or_full(product(USELESS, (1, 4, 16)), lambda given: USUAL.get(given[0]) == given[1])
)
def test_a_drafter_that_does_not_pay_costs_what_may_be_lost(name: str, outputs: int) -> None:
    world = USELESS[name]
    plain = fixed_speed(world, PLAIN, TOKENS, outputs, 400 * world.pass_base)
    simulation = Simulation(world, controllers(), TOKENS, outputs, 1)
    due = 0.98 * plain * 400 * world.pass_base - 64 * outputs
    assert simulation.speed(400 * world.pass_base) * 400 * world.pass_base >= due
    assert simulation.speed(400 * world.pass_base) >= 0.94 * plain


@pytest.mark.parametrize("prompt", [0, 400])
@pytest.mark.parametrize("outputs", [full(1), 4, full(16)])
def test_so_it_does_where_services_share_a_processor_and_outputs_are_short(outputs: int, prompt: int) -> None:
    """What trials displace is charged: 2 %, 60 tokens, and what was under way when these were lost; no stall apart."""
    world, number = replace(SHARED, prompt=prompt), 6 * outputs
    for seed in range(2):
        shared = TargetController()
        shared.budget.excuses = -math.inf
        plain = Simulation(world, lambda: Fixed(PLAIN), 128, outputs, seed).until_ended(number)
        auto = Simulation(world, partial(shared.output, KIND, CHAINS), 128, outputs, seed).until_ended(number)
        assert auto <= (1.02 + 70 / (6 * 128)) * plain, (auto / plain, seed)


TURNED = {
    "useless": replace(World(0.02), drafter_trip=0.005),
    "silent": World(0.9, step_base=math.inf),
    "pausing": World(0.9, pause=0.3),
    "slow": World(0.9, step_base=0.05),
    "costly": World(0.9, pass_each=0.01),
}


@pytest.mark.parametrize("outputs", [1, full(4), full(16)])
@pytest.mark.parametrize("name", TURNED)
def test_a_drafter_that_turns_costs_what_may_be_lost(name: str, outputs: int) -> None:
    """From then on 2 %, 60 tokens and the 15 that were won lately, and what the last round lost, of each output."""
    simulation = Simulation(World(0.9), controllers(), 4 * TOKENS, outputs, 1)
    simulation.speed(1.0)
    simulation.world = world = TURNED[name]
    seconds = 400 * world.pass_base
    plain = fixed_speed(world, PLAIN, TOKENS, outputs, seconds)
    assert simulation.speed(seconds) * seconds >= 0.98 * plain * seconds - 80 * outputs


@pytest.mark.parametrize("outputs", [1, full(4), full(16)])
def test_it_follows_a_drafter_that_becomes_useless_and_good_again(outputs: int) -> None:
    """Within 200 and 500 tokens of each output, on average of six seeds."""
    good, useless = world_of(0.9, 12, 1, 0, True), world_of(0.02, 12, 1, 0, True)
    plain, best = arm_speeds(good, outputs)[PLAIN], max(arm_speeds(good, outputs).values())
    found = []
    for seed in range(6):
        simulation = Simulation(good, controllers(simulator.arms_of(good)), 4096, outputs, seed)
        simulation.speed(400 * 0.012)
        simulation.world = useless
        simulation.speed(200 * outputs / plain)
        beside_plain = simulation.speed(400 * outputs / plain) / plain
        simulation.world = good
        simulation.speed(500 * outputs / plain)
        found.append((beside_plain, simulation.speed(400 * 0.012) / best))
    beside_plain, beside_best = map(sum, zip(*found, strict=True))
    assert beside_plain / len(found) >= 0.96, found
    assert beside_best / len(found) >= 0.88, found


@pytest.mark.parametrize("many", [16, full(64)])
def test_it_follows_the_load(many: int) -> None:
    world = world_of(0.8, 12, 1, 0, False)
    simulations = [Simulation(world, controllers(), 96, 1, seed) for seed in range(3)]
    for outputs in (1, many, 1):
        found = []
        for simulation in simulations:
            simulation.resize(outputs)
            simulation.speed(100 * 0.012)
            found.append(simulation.speed(300 * 0.012))
        assert sum(found) / len(found) >= 0.85 * max(arm_speeds(world, outputs).values())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_ends_where_a_step_costs_more_than_it_brings(temperature: float) -> None:
    """The probability that is asked for is a step's cost in tokens; none of draft tokens that are drawn."""
    for step in (0.0005, 0.0025):
        make = controllers(simulator.WITH_TREES, ("seeded", temperature, None))
        found: list[float] = []

        def noted(make: Callable[[], choices.Controller] = make, found: list[float] = found) -> choices.Controller:
            controller = make()
            assert isinstance(controller, OutputController)
            choose = controller.choose

            def choosing(now: float) -> Choice:
                choice = choose(now)
                if choice.tree_nodes:
                    found.append(choice.least_likely)
                return choice

            controller.choose = choosing  # type: ignore[method-assign]
            return controller

        world = World(0.8, pass_base=0.025, step_base=step, step_each=0.0, samples=True)
        simulation = Simulation(world, noted, TOKENS, 1, 1)
        simulation.speed(3.0)
        usual, cost = sorted(found)[len(found) // 2], step * simulation.emitted / simulation.agenda.now
        assert usual == 0 if temperature else cost / 1.5 <= usual <= 1.5 * cost


def begun(number: int = 1, arms: Arms = CHAINS, **how: Any) -> tuple[TargetController, list[OutputController]]:
    """Outputs that have begun, where what passes and draft steps cost is known."""
    shared = TargetController()
    outputs = [shared.output(KIND, arms, **how) for _ in range(number)]
    shared.costs.target.add(0.01)
    for output in outputs:
        output.observe(Lifecycle.STARTED, 0.0)
    return shared, outputs


def rounds_of(depth: int) -> Choice:
    return Choice(depth, depth, False)


def usual(
    arm: Choice, number: int = 1, arms: Arms = CHAINS, **how: Any
) -> tuple[TargetController, list[OutputController]]:
    """... and all use this arm."""
    shared, outputs = begun(number, arms, **how)
    shared.selection.usual = arm
    return shared, outputs


@pytest.mark.parametrize(
    ("arms", "holds"),
    [
        (arms_for(rounds_only=True), lambda arm: not arm.overlap),
        (arms_for(3), lambda arm: arm.max_draft_tokens <= 3),
        (arms_for(least=5), lambda arm: not arm.overlap or arm.min_draft_tokens == 5),
        (arms_for(trees=(32,)), lambda arm: arm.tree_nodes in (0, 32)),
        (arms_for(64, rounds_only=True, copies=True), lambda arm: arm.max_draft_tokens in (8, 16, 32, 64)),
    ],
)
def test_limits_hold(arms: Arms, holds: Callable[[Choice], bool]) -> None:
    assert arms[0] == PLAIN
    assert len(arms) > 2
    assert all(map(holds, arms[1:]))
    assert all((arm.patience > 0) == (arm.min_draft_tokens > 0) for arm in arms if arm.overlap and arm.drafts)


def test_prepared_continuations_that_are_asked_for_are_in_overlapped_epochs() -> None:
    arms = arms_for(branches=(3, 2), targets=2)
    arm = next(one for one in arms if one.drafts and one.overlap and one.min_draft_tokens)
    _, (output,) = usual(arm, arms=arms, targets=2)
    choice = output.choose(0.0)
    assert (choice.branch_depth, choice.branch_width, choice.speculate) == (3, 2, True)
    assert choice.settings == "overlapped (at most 16 ahead, waits for 4, 2 x 3 prepared)"


@pytest.mark.parametrize(("outputs", "replied"), [(1, 1), (MANY, 1), (MANY + 1, 2)])
def test_replies_hold_two_draft_tokens_where_outputs_are_many(outputs: int, replied: int) -> None:
    _, (output, *_) = usual(CHAINS[-1], outputs)
    choice = output.choose(0.0)
    assert choice.overlap
    assert choice.chunk == replied


def test_a_drafter_that_stands_aside_is_asked_again_after_a_while() -> None:
    _, (output,) = usual(rounds_of(8))
    assert output.choose(0.0).drafts
    output.observe(DraftSeen(0, 0.001, 0.001, aside="no room"), 0.1)
    assert not output.choose(0.1).drafts
    assert output.choose(0.1).reason == "the drafter cannot go on with this text: no room"
    output.observe(Judged(0, False, 4 * choices.LONG_RUN, 1), 0.2)
    assert output.choose(0.3).drafts


def test_a_drafter_that_copies_is_asked_again_at_once_if_it_found_something() -> None:
    _, (output,) = usual(rounds_of(8))
    assert output.choose(0.0).drafts
    output.observe(DraftSeen(7, 0.001, 0.001), 0.1)
    output.observe(DraftSeen(0, None, 0.001, aside="nothing to copy"), 0.1)
    assert output.choose(0.2).drafts
    output.observe(DraftSeen(0, 0.001, 0.001, aside="nothing to copy"), 0.3)
    assert not output.choose(0.4).drafts


def test_a_drafter_that_brings_nothing_is_shown() -> None:
    shared, (output,) = usual(rounds_of(8))
    nothing = "drafts nothing: it does not answer, or cannot go on with these texts"
    output.choose(10.0)
    output.observe(DraftSeen(0, 0.001, 0.001, aside="no room"), 10.1)
    assert (shared.idle(10.1), shared.idle(10.1 + SILENT)) == ("", nothing)
    output.observe(DraftSeen(1, 0.001, 0.001), 20.0)
    assert shared.idle(20.0 + SILENT) == ""  # nobody has asked since
    output.choose(20.0)
    assert (shared.idle(20.0), shared.idle(20.1 + SILENT)) == ("", nothing)
    other = shared.output(KIND, CHAINS)
    other.observe(Lifecycle.STARTED, 29.0)
    output.observe(Lifecycle.ENDED, 30.0)
    assert shared.idle(90.0) == ""  # nobody waits
    shared.selection.usual, shared.selection.records = PLAIN, {rounds_of(8): Record(1.0)}
    assert shared.idle(10.0).startswith("paused")


def test_a_drafter_is_wanted_while_one_may_be_used() -> None:
    shared = TargetController()
    output = shared.output(KIND, CHAINS)
    assert output.wants_drafter(0.0)  # it opens while the first tokens come
    shared.costs.target.add(0.01)
    assert not output.wants_drafter(0.0)
    shared.selection.trial = rounds_of(8)
    assert output.wants_drafter(0.0)
    output.choose(0.0)
    output.observe(DraftSeen(0, None, 0.001, aside="no room"), 0.0)
    assert not output.wants_drafter(0.0)  # its run need not end before it is asked again
    output.observe(Judged(0, False, 4 * choices.LONG_RUN, 1), 0.2)
    assert output.wants_drafter(0.0)


def test_a_text_that_fares_clearly_worse_is_decided_for_alone() -> None:
    shared, (hard, *others) = usual(rounds_of(8), 3)
    shared.costs.steps[False].add(0.004)
    for _ in range(20):
        for output in (hard, *others):
            output.choose(0.0)
            accepted = 0 if output is hard else 8
            output.observe(DraftSeen(8, 0.032, 0.032), 0.0)
            output.observe(Judged(accepted, output is hard, accepted + 1, 0), 0.0)
    assert not hard.choose(1.0).drafts
    assert "worse than usual" in hard.choose(1.0).reason
    assert not hard.shares
    assert all(one.choose(1.0).max_draft_tokens == 8 and one.shares for one in others)
    for other in others:
        other.observe(Lifecycle.ENDED, 2.0)
    hard.choose(2.0)
    assert hard.shares  # it is all that there is


def test_an_explanation_has_what_each_arm_was_expected_to_bring_and_has_brought() -> None:
    shared, (output,) = usual(rounds_of(8))
    shared.selection.records[rounds_of(8)] = Record(4.0, 4.0, 4.0)
    lines = output.explain()
    assert lines[0] == "a pass of 1 output takes 10 ms; 75% of draft tokens are accepted"
    rows = {line[:44].strip(): line[44:].split() for line in lines[2:-1]}
    (first, eight), *others = rows.items()
    assert first == "lock-step (rounds of 8)"  # what was tried, and then what seems fastest
    assert float(eight[1]) == pytest.approx(float(eight[0]))
    assert all(row[1:] == ["not", "tried"] for _, row in others)
    assert [float(row[0]) for _, row in others] == sorted((float(row[0]) for _, row in others), reverse=True)
    assert len(rows) == len(CHAINS)
    assert lines[-1] == "in use: lock-step (rounds of 8); trials may cost 30 tokens more"
    assert TargetController().output(KIND, CHAINS).explain() == ["nothing is known yet"]


def test_outputs_of_other_limits_share_what_arms_have_shown() -> None:
    """Whichever limits most outputs have, no arm is looked for that is not theirs; those in common are no news."""
    target, limits = TargetController(), cycle((arms_for(), arms_for(), arms_for(rounds_only=True), arms_for(4)))
    simulation = Simulation(World(0.9), lambda: target.output(KIND, next(limits)), 32, 3)
    simulation.speed(2.0)
    assert simulation.speed(4.0) > 1.3 * fixed_speed(World(0.9), PLAIN, 32, 3, 2.0)
    assert len(target.selections) == 2  # of one output, and of several


@pytest.mark.parametrize(("arm", "seconds"), [(rounds_of(8), 0.03), (CHAINS[-1], 0.01)])
def test_passes_that_drafts_beside_them_slow_down_are_no_cost_of_other_arms(arm: Choice, seconds: float) -> None:
    shared, (output,) = usual(arm)
    for turn in range(12):
        output.choose(0.0)
        output.observe(DraftSeen(4, 0.001, 0.001), 0.1 * turn)
        output.observe(Judged(2, True, 3, 0), 0.1 * turn)
        output.observe(PassSeen(0.03 + 1e-6 * turn), 0.1 * turn)
        shared.selection.trial, shared.selection.usual = None, arm
    assert shared.costs.target.seconds(1) == pytest.approx(seconds, rel=0.01)


def test_an_output_that_has_ended_has_no_targets() -> None:
    target, kind = TargetController(), ("coupled", 0.0, None)
    several, *others = (target.output(kind, CHAINS, number) for number in (2, 1, 1))
    for one in (several, *others):
        one.observe(Lifecycle.STARTED, 0.0)
    several.observe(Lifecycle.ENDED, 0.1)
    assert target.load == len(others)
    for one in others:
        one.observe(Lifecycle.ENDED, 0.2)
        one.observe(PassSeen(0.02), 0.3)


def test_tokens_of_outputs_that_decide_for_themselves_are_not_taken_for_others() -> None:
    shared, outputs = begun(3, (PLAIN,))
    for turn in range(12):
        for output in outputs:
            output.choose(0.0)
            output._alone = turn > 5 and output is outputs[0]
            output.observe(Judged(0, False, 1, 1), 0.01 * turn)
            output.observe(PassSeen(0.01, sessions=3, fed=3), 0.01 * turn)
    assert shared.selection.speeds(shared.guesses(outputs, (PLAIN,)))[PLAIN] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("prompts", [True, False])
def test_rounds_say_the_less_of_no_drafter_the_more_of_them_went_into_prompts(prompts: bool) -> None:
    """Each pass takes ten times as long, all but a tenth of which is a prompt's, by what passes take. Where all do so
    a drafter is tried after as many more."""
    shared, (output,) = begun()
    fed = 100 if prompts else 1
    shared.costs.target = Times()
    for size, seconds in 3 * ((1, 0.01), (100, 0.1)):
        shared.costs.target.add(seconds, size)
    turn = 0
    while shared.selection.trial is None:
        output.choose(0.0)
        output.observe(Judged(0, False, 1, 1), 0.1 * turn)
        output.observe(PassSeen(0.1 + 1e-6 * turn, fed=fed), 0.1 * turn)
        turn += 1
    assert (turn > 20) == prompts


def test_a_pass_is_learned_from_once_whichever_outputs_tell_of_it() -> None:
    """Each says how long it took until its own token was sampled, so that no two of them say the same."""
    shared, outputs = begun(16)
    for turn in range(9):
        for number, output in enumerate(outputs):
            seconds = (0.5 if turn == 8 else 0.01) + 1e-6 * number
            output.observe(PassSeen(seconds, sessions=16, fed=16), 0.01 * turn)
    assert shared.costs.target.seconds(16) == pytest.approx(0.01, rel=0.01)
    shared, (output,) = begun()
    shared.costs.target = Times()
    output.observe(PassSeen(0.06, forwards=3, fed=1), 0.1)  # some tokens of a run
    assert shared.costs.target.seconds(1) == pytest.approx(0.02)
