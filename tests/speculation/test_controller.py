"""The controller of a target among simulated outputs, beside fixed choices and plain decoding."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from typing import Any

import pytest

from crossdraft.speculation.choice import (
    PLAIN,
    Choice,
    Controller,
    DrafterSeen,
    DraftSeen,
    Ended,
    Fixed,
    Judged,
    Observation,
    PassSeen,
    Started,
)
from crossdraft.speculation.controller import (
    EMPTY,
    EXPLORED,
    KINDS,
    POLICIES,
    OutputController,
    PlainController,
    TargetController,
)
from crossdraft.speculation.estimates import PLACES, RECENT, Estimates, Kind, StepCost
from crossdraft.speculation.policy import TREES, Limits, Mode
from tests.speculation.simulator import (
    KIND,
    TOKENS,
    Simulation,
    World,
    controllers,
    fixed_choices,
    fixed_speed,
    measured,
)
from tests.verification.enumerating import full

FEW = [(1, 0.5, 8.0, 0.0), (1, 0.95, 60.0, 20.0), (1, 0.8, 8.0, 5.0), (4, 0.95, 8.0, 5.0)]
GRID = [
    (1, 0.8, 25.0, 5.0), (1, 0.95, 8.0, 20.0),
    (4, 0.8, 60.0, 0.0), (4, 0.5, 60.0, 20.0),
    (16, 0.8, 8.0, 20.0), (16, 0.95, 25.0, 0.0),
]  # fmt: skip
MANY = [(16, 0.5, 60.0, 5.0), (64, 0.5, 8.0, 0.0), (64, 0.95, 8.0, 20.0), (64, 0.8, 25.0, 0.0)]


@cache
def best(world: World, tokens: int, slots: int, seconds: float) -> float:
    return max(fixed_speed(world, choice, tokens, slots, seconds) for choice in fixed_choices())


@pytest.mark.parametrize("cells", [FEW, full(FEW + GRID)], ids=["few", "grid"])
def test_it_is_near_the_best_fixed_choice_and_never_below_plain_decoding(
    cells: list[tuple[int, float, float, float]],
) -> None:
    found = [measured(*cell, passes=200 if cell[0] < 16 else 100) for cell in cells]
    shares = sorted(cell.of_best for cell in found)
    assert shares[0] >= 0.8, shares
    assert shares[len(shares) // 10 + 1] >= 0.9, shares
    assert min(cell.of_plain for cell in found) >= 0.96


@pytest.mark.full
def test_many_outputs_at_once_make_most_of_what_the_best_fixed_choice_makes() -> None:
    """Less than few do: it takes the controller a part of these outputs to learn what passes of so many cost."""
    found = [measured(*cell, passes=300) for cell in MANY]
    shares = sorted(cell.of_best for cell in found)
    assert shares[0] >= 0.8, shares
    assert shares[1] >= 0.85, shares
    assert min(cell.of_plain for cell in found) >= 0.96


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
def test_a_drafter_that_does_not_pay_costs_next_to_nothing(name: str, outputs: int) -> None:
    world = USELESS[name]
    seconds = 400 * world.pass_base
    plain = fixed_speed(world, PLAIN, 256, outputs, seconds)
    simulation = Simulation(world, controllers(), 256, outputs, 1)
    assert simulation.speed(seconds) >= 0.94 * plain  # what it has to learn included
    assert simulation.speed(seconds) >= 0.97 * plain


@pytest.mark.parametrize(
    "world",
    [full(World(0.95)), World(0.8, drafter_trip=0.005), full(World(0.95, pass_base=0.025, drafter_trip=0.02))],
    ids=str,
)
def test_short_outputs_know_what_those_before_them_have_learned(world: World) -> None:
    makes: list[Callable[[], Controller]] = [controllers(), *(partial(Fixed, choice) for choice in fixed_choices())]
    auto, *fixed = (ends(world, make) for make in makes)
    assert min(one[-1] - one[1] for one in fixed) / (auto[-1] - auto[1]) >= 0.85


def ends(world: World, make: Callable[[], Controller]) -> list[float]:
    """When 24 outputs of 48 tokens, one after another, are over."""
    simulation = Simulation(world, make, 48, 1, 1)
    simulation.until_ended(24)
    return simulation.ended[:24]


@pytest.mark.parametrize(
    ("outputs", "before", "after"), [(4, 0.95, 0.02), (1, 0.02, 0.95), full(16, 0.95, 0.02), full(16, 0.02, 0.95)]
)
def test_it_follows_a_drafter_that_changes(outputs: int, before: float, after: float) -> None:
    simulation = Simulation(World(before), controllers(), 256, outputs, 1)
    simulation.speed(1.5)
    simulation.world = World(after)
    simulation.speed(4.0)
    assert simulation.speed(2.0) >= 0.8 * best(World(after), 256, outputs, 1.0)


@pytest.mark.parametrize("many", [8, full(24)])
def test_it_follows_the_load(many: int) -> None:
    world = World(0.8)
    simulation = Simulation(world, controllers(), 64, 1, 1)
    for outputs in (1, many, 1):
        simulation.resize(outputs)
        simulation.speed(0.8)
        assert simulation.speed(1.0) >= 0.75 * best(world, 64, outputs, 1.0)


@pytest.mark.parametrize("spread", [0.2, 0.35])
def test_texts_that_are_hard_to_draft_are_no_reason_to_give_up_a_mode(spread: float) -> None:
    uneven = World(0.55, pass_base=0.04, step_base=0.003, spread=spread, samples=True)
    best = max(fixed_speed(uneven, choice, TOKENS, 1, 120.0) for choice in fixed_choices(samples=True))
    found = [Simulation(uneven, controllers(Limits(samples=True)), TOKENS, 1, seed).speed(120.0) for seed in range(3)]
    assert sum(found) > 0.92 * 3 * best


@cache
def learned() -> Estimates:
    shared = TargetController()
    Simulation(World(0.9), lambda: shared.output(KIND, Limits()), 256, 4, 1).speed(0.5)
    return shared.estimates


def test_the_next_controller_begins_with_what_one_has_learned() -> None:
    begun = TargetController(learned())
    assert begun.estimates == learned()
    choice = begun.output(KIND, Limits()).choose(0.0)
    assert choice.drafts
    assert "measuring" not in choice.reason


@pytest.mark.parametrize(
    "changed",
    [
        {"target_trip": float("nan")},
        {"drafter": StepCost(0.001, session=float("inf"))},
        {"widest": -1.0},
        {"acceptance": ((KIND, ((1.0, 2.0),)),)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_no_controller_can_have_learned_is_refused(changed: dict[str, Any]) -> None:
    assert learned().known
    with pytest.raises(ValueError, match="estimates must be finite numbers"):
        replace(learned(), **changed)


def test_as_many_outputs_as_were_seen_in_a_pass_draft_at_once_with_what_was_learned() -> None:
    shared = TargetController(replace(learned(), widest=16.0))
    outputs = [shared.output(KIND, Limits()) for _ in range(16)]
    for output in outputs:
        output.observe(Started(), 0.0)
    assert all(output.choose(0.0).drafts for output in outputs)


def test_outputs_that_never_draft_are_counted_and_teach_what_a_pass_costs() -> None:
    shared = TargetController()
    outputs = [shared.output(KIND, Limits()), *(PlainController(shared) for _ in range(3))]
    for output in outputs:
        output.observe(Started(), 0.0)
    assert shared.outputs == 4
    assert not shared.target.known
    for output in outputs[1:]:
        output.observe(PassSeen(0.009, 0.008, sessions=4, fed=4), 0.1)
        output.observe(Judged(0, 0, False, 1, 1), 0.1)
        assert not output.choose(0.1).drafts
    assert shared.target.cost.seconds(4) == pytest.approx(0.008)
    assert shared.outputs == 4  # none of them is another orchestrator's
    assert outputs[0].choose(0.1).drafts
    for output in outputs[1:]:
        output.observe(Ended(), 0.2)
    assert shared.outputs == 1


def test_the_first_output_drafts_at_once_and_others_wait_for_what_it_finds() -> None:
    shared = TargetController()
    first, second = (shared.output(KIND, Limits()) for _ in range(2))
    assert first.choose(0.0).drafts
    assert not second.choose(0.0).drafts
    first.observe(Ended(), 0.1)
    assert second.choose(0.2).drafts


@pytest.mark.parametrize(
    "seen", [DrafterSeen(False), DraftSeen(0, 0.001, 0.001, aside="no room")], ids=["gone", "stands aside"]
)
def test_an_output_whose_drafter_is_of_no_use_keeps_no_others_from_theirs(seen: Observation) -> None:
    shared = TargetController()
    first, second = (shared.output(KIND, Limits()) for _ in range(2))
    assert first.choose(0.0).drafts
    first.observe(seen, 0.1)
    assert second.choose(0.2).drafts


def test_an_output_with_whose_text_its_drafter_cannot_go_on_decodes_plainly() -> None:
    output = TargetController(learned()).output(KIND, Limits())
    assert output.choose(0.0).drafts
    output.observe(DraftSeen(0, 0.001, 0.001, aside="no room"), 0.1)
    assert not output.choose(0.1).drafts
    assert output.choose(0.1).reason == "the drafter cannot go on with this text: no room"


def test_a_drafter_that_is_there_and_brings_nothing_is_shown() -> None:
    shared, output = taught(4)
    assert shared.idle(10.0) == ""
    for _ in range(EMPTY):
        assert not shared.idle(10.0)
        output.observe(DraftSeen(0, 0.001, 0.001, aside="no room"), 10.0)
    assert shared.idle(10.0) == "drafts nothing: it cannot go on with these texts"  # which are nobody else's business
    output.observe(DraftSeen(1, 0.001, 0.001), 10.0)
    assert shared.idle(10.0) == ""
    copier = shared.output(KIND, Limits(copies=True))
    for _ in range(EMPTY):
        copier.observe(DraftSeen(0, 0.001, 0.001, aside="nothing to copy"), 10.0)
    assert shared.idle(10.0) == ""
    assert TargetController().idle(0.0) == ""
    useless, _ = taught(0)
    assert useless.idle(10.0).startswith("paused: no draft token raises the speed")
    output.choose(20.0)
    assert shared.idle(1000.0) == "does not answer"


def test_a_drafter_that_copies_is_asked_again_as_soon_as_that_costs_little() -> None:
    output = TargetController(learned()).output(KIND, Limits(copies=True))
    assert output.choose(0.0).drafts
    output.observe(DraftSeen(7, 0.001, 0.001), 0.1)
    output.observe(DraftSeen(0, None, 0.001, aside="no room"), 0.1)  # it found something, which ends here
    assert output.choose(0.2).drafts
    for _ in range(RECENT):
        output.target.drafter_trip.add(10.0)
    output.observe(DraftSeen(0, 10.0, 0.001, aside="no room"), 0.3)
    assert not output.choose(0.4).drafts
    output.observe(Judged(0, 0, False, EXPLORED, EXPLORED), 0.5)
    assert output.choose(0.6).drafts


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        (Limits(rounds_only=True), lambda choice: not choice.overlap),
        (Limits(max_draft_tokens=3), lambda choice: choice.max_draft_tokens <= 3),
        (Limits(min_draft_tokens=5), lambda choice: not choice.overlap or choice.min_draft_tokens == 5),
        (Limits(samples=True, tree_nodes=(32,)), lambda choice: choice.tree_nodes in (0, 32)),
        (Limits(branch_depth=2), lambda choice: not choice.overlap or choice.branch_depth == 2),
    ],
)
def test_limits_hold(limits: Limits, holds) -> None:  # type: ignore[no-untyped-def]
    shared = TargetController(learned())
    choice = shared.output(KIND, limits).choose(0.0)
    assert choice.drafts
    assert holds(choice)


@pytest.mark.parametrize(("token", "trees"), [(0.00002, True), (0.02, False)])
def test_trees_are_drafted_where_further_tokens_of_a_pass_are_cheap(token: float, trees: bool) -> None:
    """Half of the draft tokens are accepted, and the drafter is as far away as a pass takes."""
    shares = ((50.0, 100.0), (100.0, 100.0), *[(50.0, 100.0)] * len(PLACES))
    costs = {"target": StepCost(0.02, 0.0, token), "drafter": StepCost(0.001), "rounds": StepCost(0.001, 0.0, 0.00005)}
    before = replace(learned(), **costs, drafter_trip=0.02, acceptance=((KIND, shares),))
    choice = TargetController(before).output(KIND, Limits(samples=True, tree_nodes=TREES)).choose(0.0)
    assert bool(choice.tree_nodes) is trees


def test_a_step_of_a_tree_is_known_to_cost_more_than_one_of_a_chain() -> None:
    shared = TargetController(learned())
    output = shared.output(KIND, Limits(samples=True))
    for number in range(400):
        output._running = Choice(4, 4, overlap=False, tree_nodes=32 * (number % 2))
        seconds = 4 * (0.001 + 0.0002 * (output._running.width - 1))
        output.observe(DraftSeen(4, seconds + 0.001, seconds), 0.01 * number)
    given = output.conditions
    assert given.round_seconds(8) == pytest.approx(0.0024, rel=0.1)
    assert given.round_seconds() == pytest.approx(0.001, rel=0.1)


def taught(accepted: int) -> tuple[TargetController, OutputController]:
    shared = TargetController(learned())
    output = shared.output(KIND, Limits())
    for number in range(60):
        output.choose(0.02 * number)
        output.observe(PassSeen(0.009, 0.008), 0.02 * number)
        output.observe(DraftSeen(4, 0.005, 0.004), 0.02 * number)
        output.observe(Judged(0, accepted, True, accepted + 1, 0), 0.02 * number)
    return shared, output


def test_a_drafter_that_does_not_pay_is_tried_once_in_a_while() -> None:
    shared, output = taught(0)
    chosen = []
    for number in range(4 * EXPLORED):
        choice = output.choose(10 + 0.1 * number)
        chosen.append(choice)
        output.observe(PassSeen(0.009, 0.008), 10 + 0.1 * number)
        output.observe(Judged(0, 0, choice.drafts, 1, int(not choice.drafts)), 10 + 0.1 * number)
    trials = [choice for choice in chosen if "trying" in choice.reason]
    assert 2 <= len(trials) <= 5
    assert all(choice.patience == 0 for choice in trials)
    assert shared.estimates.target.base > 0


def test_an_explanation_has_the_marginal_table() -> None:
    _, output = taught(4)
    lines = output.explain()
    assert lines[0].startswith("target: ")
    table = [line for line in lines if line[:12].strip().isdigit()]
    assert len(table) >= 4
    assert table[0].split()[1] == "1.000"
    assert any(line.startswith(Mode.PLAIN.value) for line in lines)
    assert lines[-1].startswith("decided: ")
    assert "too little" in TargetController().output(KIND, Limits()).explain()[-1]
    assert any(re.match(r"lock-step \(rounds of \d+\): \d\S* tokens/s forecast, \S+ corrected", line) for line in lines)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice(0), "no drafter"),
        (Choice(4, 4, overlap=False), "lock-step (rounds of 4)"),
        (Choice(4, 4, overlap=False, tree_nodes=16), "lock-step (rounds of 4, trees of 16)"),
        (Choice(16, 4), "overlapped (at most 16 ahead, waits for 4)"),
        (
            Choice(8, patience=0.0, branch_depth=3, branch_width=2),
            "overlapped (at most 8 ahead, never waits, 2 x 3 prepared)",
        ),
    ],
)
def test_settings_in_words(choice: Choice, words: str) -> None:
    assert choice.settings == words


@pytest.mark.parametrize(("least", "most"), [(7, 7), (40, 40), (33, 47), (0, 8), (4, 16)])
def test_a_number_of_draft_tokens_to_wait_for_that_is_asked_for_is_kept(least: int, most: int) -> None:
    shared = TargetController(learned())
    output = shared.output(KIND, Limits(max_draft_tokens=most, min_draft_tokens=least))
    for number in range(30):
        choice = output.choose(0.1 * number)
        if choice.overlap and choice.drafts and choice.patience:
            assert (choice.min_draft_tokens, choice.max_draft_tokens <= most) == (least, True)
        output.observe(PassSeen(0.009, 0.008), 0.1 * number)
        output.observe(DraftSeen(4, 0.005, 0.004), 0.1 * number)
        output.observe(Judged(0, 4 if number < 20 else 0, True, 1, 0), 0.1 * number)


def test_kinds_of_requests_try_a_new_drafter_each_for_themselves() -> None:
    shared = TargetController()
    greedy, sampled = (shared.output((None, temperature, None), Limits()) for temperature in (0.0, 1.0))
    assert greedy.choose(0.0).drafts
    assert sampled.choose(0.0).drafts


def test_a_drafter_is_not_silent_because_an_output_ended_before_its_answer() -> None:
    shared = TargetController(learned())
    first = shared.output(KIND, Limits())
    assert first.choose(0.0).drafts
    first.observe(Ended(), 0.1)
    assert not shared.silent(100.0)


def test_a_drafter_that_is_asked_when_a_run_is_over_is_not_silent_before() -> None:
    shared, output, others = crowded_out()
    run = output.choose(1.02).run
    for other in others:
        other.observe(Ended(), 1.1)
    for _ in range(16):
        output.observe(PassSeen(0.008, 0.008, asked=False), 1.2)
    assert output.choose(1.2).drafts
    assert not shared.silent(1.2 + 0.008 * run)
    assert shared.silent(10.0)


def test_what_is_emitted_without_a_drafter_says_nothing_of_drafting() -> None:
    shared, output = taught(4)
    assert output.choose(10.0).drafts
    output.observe(DrafterSeen(False), 10.1)
    before = rating(shared, 31)
    for number in range(800):
        output.observe(Judged(0, 0, False, 1, 1), 11 + 0.1 * number)
    output.observe(Ended(), 100.0)
    assert rating(shared, 30) == before


def rating(shared: TargetController, most: int) -> str:
    """What rounds are expected to bring, decided anew for an output with other limits than any before."""
    output = shared.output(KIND, Limits(max_draft_tokens=most))
    output.choose(10.1)
    (found,) = (line for line in output.explain() if line.startswith(Mode.LOCK_STEP.value))
    output.observe(Ended(), 10.1)
    return found


def test_a_pass_counts_once_however_many_outputs_tell_of_it() -> None:
    shared = TargetController()
    outputs = [shared.output(KIND, Limits()) for _ in range(64)]
    for seconds in (0.01,) * 60 + (0.02,) * 3:
        for number, output in enumerate(outputs):
            output.observe(PassSeen(seconds, seconds + 1e-6 * number, sessions=64, fed=64), 0.0)
    assert shared.target.cost.seconds(64) < 0.012  # three passes of 63 are slow


def test_with_many_more_outputs_than_ever_the_first_pass_is_seen_before_all_draft() -> None:
    shared = TargetController(learned())
    outputs = [shared.output(KIND, Limits()) for _ in range(16)]
    for output in outputs:
        output.observe(Started(), 0.0)
    assert [output.choose(0.0).drafts for output in outputs] == [True] + [False] * 15
    outputs[0].observe(PassSeen(0.009, 0.009, sessions=16, fed=16), 0.0)
    assert all(output.choose(0.01).drafts for output in outputs)


@pytest.mark.parametrize("width", [4, 16])
def test_outputs_that_are_never_in_one_pass_draft_too(width: int) -> None:
    """On several targets a pass has some of them."""
    shared = TargetController(learned())
    outputs = [shared.output(KIND, Limits()) for _ in range(16)]
    for output in outputs:
        output.observe(Started(), 0.0)
    for _ in range(6):
        for output in outputs:
            output.observe(PassSeen(0.009, 0.009, sessions=width, fed=width), 0.0)
    assert all(output.choose(0.01).drafts for output in outputs)


@pytest.mark.parametrize("before", [None, "learned"], ids=["nothing known", "a wider pass than ever"])
def test_of_many_outputs_that_begin_at_once_one_opens_its_drafter_until_drafting_is_decided(before: str | None) -> None:
    shared = TargetController(learned() if before else None)
    outputs = [shared.output(KIND, Limits()) for _ in range(16)]
    for output in outputs:
        output.observe(Started(), 0.0)
    assert [output.wants_drafter(0.0) for output in outputs] == [True] + [False] * 15
    outputs[0].choose(0.0)
    outputs[0].observe(DraftSeen(8, 0.003, 0.002), 0.01)
    outputs[0].observe(Judged(0, 8, False, 9, 1), 0.02)
    outputs[0].observe(PassSeen(0.009, 0.009, sessions=16, fed=16), 0.02)
    assert outputs[0].choose(0.02).drafts
    assert all(output.wants_drafter(0.03) for output in outputs)


def test_no_drafter_is_wanted_where_drafting_does_not_pay_but_to_try_it() -> None:
    before = TargetController()
    Simulation(World(0.02), lambda: before.output(KIND, Limits()), 256, 4, 1).speed(2.0)
    shared = TargetController(before.estimates)
    first, second = (shared.output(KIND, Limits()) for _ in range(2))
    for output in (first, second):
        output.observe(Started(), 10.0)
        assert not output.wants_drafter(10.0)
    for number in range(3 * EXPLORED):
        for output in (first, second):
            output.observe(Judged(0, 0, False, 1, 1), 10 + 0.01 * number)
    assert [output.wants_drafter(20.0) for output in (first, second)].count(True) == 1


def test_what_drafting_brought_among_many_outputs_is_not_held_against_it_with_one() -> None:
    world = World(0.7)
    shared = TargetController(learned())
    many = [shared.output(KIND, Limits()) for _ in range(64)]
    for mode in (Mode.LOCK_STEP, Mode.OVERLAPPED, Mode.HURRIED):
        for output in many:
            shared.begun(output, mode)
        for _ in range(800):
            shared.brought(mode, 5, 10)
    for output in many:
        output.observe(Ended(), 0.0)
    simulation = Simulation(world, lambda: shared.output(KIND, Limits()), 256, 1, 1)
    simulation.speed(1.0)
    assert simulation.speed(2.0) >= 0.85 * best(world, 256, 1, 1.0)


def test_a_round_trip_behind_many_outputs_is_not_expected_of_one() -> None:
    shared = TargetController(learned())
    alone = shared.output(KIND, Limits())
    alone.observe(Started(), 0.0)
    for _ in range(16):
        alone.observe(DraftSeen(1, 0.012, 0.002), 0.0)
    others = crowd(shared, 63)
    for _ in range(16):
        alone.observe(DraftSeen(1, 0.062, 0.002), 0.0)
    assert alone.conditions.drafter_trip == pytest.approx(0.06)
    for output in others[1:]:
        output.observe(Ended(), 0.0)
    assert alone.conditions.drafter_trip == pytest.approx(0.01)  # of the two loads that were seen the nearer one
    others[0].observe(Ended(), 0.0)
    assert alone.conditions.drafter_trip == pytest.approx(0.01)


def test_a_pass_waits_for_as_many_draft_tokens_as_an_output_gets_of_its_own() -> None:
    shared = TargetController(learned())
    good, usual = (shared.output(KIND, Limits(rounds_only=True)) for _ in range(2))
    chosen: dict[OutputController, list[int]] = {good: [], usual: []}
    for number in range(120):
        now = 0.02 * number
        for output, accepted in ((good, 6), (usual, number % 4)):
            choice = output.choose(now)
            output.observe(PassSeen(0.009, 0.008, sessions=2, fed=10), now)
            output.observe(DraftSeen(4, 0.005, 0.004), now)
            output.observe(Judged(0, accepted, output is usual, accepted + 1, 0), now)
            if choice.drafts:
                chosen[output].append(choice.min_draft_tokens)
                assert choice.patience > 2 * output.conditions.draft_arrives(choice.min_draft_tokens)
    assert chosen[good][-1] > 2 * chosen[usual][-1], chosen
    assert max(chosen[good]) >= 10


def crowd(shared: TargetController, outputs: int) -> list[OutputController]:
    """So many more outputs, and what a pass of theirs costs: drafting does not pay."""
    more = [shared.output(KIND, Limits()) for _ in range(outputs)]
    for output in more:
        output.observe(Started(), 1.0)
    for _ in range(16):
        more[0].observe(PassSeen(0.01, 0.0095, sessions=outputs + 1, fed=outputs + 1), 1.0)
    return more


def crowded_out() -> tuple[TargetController, OutputController, list[OutputController]]:
    """An output that had asked for draft tokens, then decoded plainly among many others, which end."""
    steps = StepCost(0.001, 0.001)
    shared = TargetController(replace(learned(), drafter=steps, rounds=steps))
    output = shared.output(KIND, Limits())
    output.observe(PassSeen(0.0085, 0.008), 1.0)
    assert output.choose(1.0).drafts
    return shared, output, crowd(shared, 63)


def test_an_output_that_stopped_its_drafter_waits_for_no_answer() -> None:
    shared, output, others = crowded_out()
    assert not output.choose(1.02).drafts
    for other in others:
        other.observe(Ended(), 1.1)
    for _ in range(16):
        output.observe(PassSeen(0.0085, 0.008), 1.2)
    assert not shared.silent(10.0)
    assert output.choose(10.0).drafts


def test_a_drafter_whose_answer_was_overdue_is_silent_however_its_outputs_go_on() -> None:
    shared, output, others = crowded_out()
    assert not output.choose(5.0).drafts
    assert shared.silent(5.0)
    shared.asked(others[0], 5.0)
    output.observe(Ended(), 5.0)
    assert not shared.silent(5.0)  # the other one has waited for a moment
    assert shared.silent(10.0)


@pytest.mark.parametrize(("own", "others", "targets"), [(16, 112, 1), (32, 0, 4)])
def test_a_draft_step_is_forecast_for_the_outputs_that_its_cost_is_fitted_over(
    own: int, others: int, targets: int
) -> None:
    """Those of other orchestrators are in the cost; and several targets do not share the drafter out."""
    shared = TargetController()
    outputs = [shared.output(KIND, Limits(targets=targets)) for _ in range(own)]
    for drafting in [*range(1, own + 1)] * 8:
        for place, output in enumerate(outputs):
            shared.begun(output, Mode.HURRIED if place < drafting else Mode.PLAIN)
        total = drafting * (own + others) // own
        seconds = 0.001 + 0.00005 * total
        outputs[0].observe(PassSeen(0.009, 0.008, sessions=(own + others) // targets, fed=400), 0.0)
        outputs[0].observe(DraftSeen(4, 0.001 + 4 * seconds, 4 * seconds), 0.0)
    assert outputs[0].conditions.draft_seconds == pytest.approx(0.001 + 0.00005 * (own + others), rel=0.05)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """The limits that policies are made for."""
    seen: list[Limits] = []
    decide = TargetController._decide

    def counted(self: TargetController, output: OutputController, *rest: Any) -> Any:
        seen.append(output.limits)
        return decide(self, output, *rest)

    monkeypatch.setattr(TargetController, "_decide", counted)
    return seen


def chosen_by(kinds: Sequence[tuple[Kind, Limits]], seconds: float) -> None:
    """Outputs of these kinds, all of which choose every 10 ms for so long."""
    shared = TargetController(learned())
    outputs = [shared.output(*one) for one in kinds]
    for output in outputs:
        output.observe(Started(), 0.0)
    for number in range(round(100 * seconds)):
        for output in outputs:
            output.observe(PassSeen(0.009, 0.008, sessions=len(outputs), fed=2 * len(outputs)), 0.01 * number)
            output.observe(Judged(0, 3, True, 4, 0), 0.01 * number)
            output.choose(0.01 * number)


def test_requests_of_nearly_one_temperature_share_their_policy(made: list[Limits]) -> None:
    chosen_by([(("coupled", 0.96 + number / 1000, None), Limits()) for number in range(64)], 0.5)
    assert 1 <= len(made) <= POLICIES


def test_more_kinds_than_are_kept_cost_no_more_policies_than_fit_into_the_event_loop(made: list[Limits]) -> None:
    kinds = [(KIND, Limits(max_draft_tokens=1 + number)) for number in range(KINDS + 16)]
    chosen_by(kinds, 3.0)
    assert len(made) <= 4 * POLICIES
    assert {*made} == {limits for _, limits in kinds}  # each gets one, as none is forgotten while it is used


def beside_others(accepted: float) -> TargetController:
    """Knows a drafter from beside plain decoding, where a step takes it as long as a pass takes the target."""
    kind = (KIND, ((60 * accepted, 60.0), (60.0, 60.0), *((0.0, 0.0),) * len(PLACES)))
    cost = StepCost(0.008, 1e-5, 1e-5)
    return TargetController(Estimates(cost, replace(cost, token=0.0), StepCost(), 0.0005, 0.0005, (kind,)))


def decoded(
    shared: TargetController, output: OutputController, tokens: int, step_seconds: float, held: bool = True
) -> list[Choice]:
    """What an output chose while it emitted so many tokens, in rounds where a step takes so long, and all draft tokens
    were accepted or none."""
    chosen: list[Choice] = []
    now, left = 0.0, tokens
    while left > 0:
        choice = output.choose(now)
        accepted = choice.max_draft_tokens if held else 0
        made = accepted + 1 if choice.drafts else choice.run
        if choice.drafts:
            now += step_seconds * choice.max_draft_tokens
            output.observe(DraftSeen(choice.max_draft_tokens, 0.0005, step_seconds * choice.max_draft_tokens), now)
        now += 0.009 * (1 if choice.drafts else made)
        output.observe(PassSeen(0.0085, 0.008), now)
        refused = choice.drafts and not held
        output.observe(Judged(0, accepted, refused, made, int(not choice.drafts)), now)
        chosen.append(choice)
        left -= made
    return chosen


@pytest.mark.parametrize(("step_seconds", "pays"), [(0.001, True), (0.02, False)])
def test_rounds_are_tried_by_all_since_what_they_cost_is_not_seen_beside_others(
    step_seconds: float, pays: bool
) -> None:
    shared = beside_others(0.9)
    output = shared.output(KIND, Limits())
    chosen = decoded(shared, output, 2000, step_seconds)
    assert not chosen[0].drafts
    tried = [choice for choice in chosen if choice.reason.startswith("trying lock-step")]
    assert tried
    assert not any(choice.overlap for choice in tried)
    assert chosen[-1].drafts is pays
    rounds = sum(choice.max_draft_tokens + 1 for choice in chosen if choice.drafts)
    assert rounds > 1500 if pays else rounds < 200


def test_a_trial_ends_when_many_more_outputs_come_than_it_was_begun_for() -> None:
    trying, shared = "trying lock-step", beside_others(0.9)
    before = takewhile(
        lambda choice: not choice.reason.startswith(trying), decoded(shared, shared.output(KIND, Limits()), 2000, 0.02)
    )
    shared = beside_others(0.9)
    output = shared.output(KIND, Limits())
    decoded(shared, output, sum(choice.run for choice in before), 0.02)
    assert output.choose(100.0).reason.startswith(trying)
    others = [shared.output(KIND, Limits()) for _ in range(15)]
    for other in others:
        other.observe(Started(), 100.0)
    output.observe(PassSeen(0.009, 0.0085, sessions=16, fed=16), 100.0)
    assert not any(one.choose(100.0).reason.startswith(trying) for one in (output, *others))


def test_a_reply_says_nothing_of_the_cost_where_more_draft_than_when_it_was_asked() -> None:
    shared = TargetController(learned())
    outputs = [shared.output(KIND, Limits()) for _ in range(16)]
    outputs[0].choose(0.0)
    before = outputs[0].conditions.draft_seconds
    for output in outputs[1:]:
        output.choose(0.0)
    assert shared.drafting > 8
    outputs[0].observe(DraftSeen(4, 0.1, 0.1), 0.1)
    assert shared.drafter.cost.seconds(1) == pytest.approx(before)
    outputs[0].observe(DraftSeen(4, None, 0.1), 0.2)
    assert shared.drafter.cost.seconds(1) > before


def test_rounds_that_no_drafter_could_make_pay_are_not_tried() -> None:
    shared = beside_others(0.02)
    chosen = decoded(shared, shared.output(KIND, Limits()), 1000, 0.001, held=False)
    assert not [choice for choice in chosen if choice.reason.startswith("trying lock-step")]


def test_an_output_whose_text_is_hard_to_draft_stops_and_the_others_go_on() -> None:
    shared, output = taught(accepted=4)
    other = shared.output(KIND, Limits())
    for _ in range(400):  # observations, an eighth of which is many
        output.observe(PassSeen(0.009, 0.008), 10.0)
    for one in (output, other, output, other):
        assert one.choose(10.0).drafts
    for number in range(40):
        output.observe(Judged(0, 0, True, 1, 0), 10.0 + 0.01 * number)
        output.choose(10.0 + 0.01 * number)
    assert not output.choose(11.0).drafts
    assert other.conditions.chances[0] > 2 * output.conditions.chances[0]


def test_a_hard_text_tries_the_drafter_again_while_the_output_that_measured_it_drafts() -> None:
    shared, easy = taught(accepted=4)
    hard = shared.output(KIND, Limits())
    assert shared.measures(easy)
    assert easy.choose(10.0).drafts
    hard.choose(10.0)
    assert shared.measures(hard)
