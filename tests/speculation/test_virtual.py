"""What the pipeline is for, on a clock that nobody waits for: the session itself among services that take time."""

import pytest

from crossdraft.speculation.choice import PLAIN, Choice, Fixed, lock_step
from tests.clock import Outcome, Run, World

TOKENS = 200


def outcome(world: World, choice: Choice) -> Outcome:
    return Run(world, Fixed(choice)).run()


def best_lock_step(world: World) -> float:
    return max(Run(world, lock_step(k)).run().speed for k in (3, 6, 12))


def world(acceptance: float, round_trip: float, **changes: float) -> World:
    return World(acceptance, token=0.05, round_trip=round_trip, tokens=TOKENS, **changes)  # type: ignore[arg-type]


def test_drafting_on_beats_the_best_round_where_most_is_accepted() -> None:
    near = world(0.95, 0.5)
    overlapped = outcome(near, Choice(24, min_draft_tokens=1, patience=0.5))
    assert overlapped.speed > 1.2 * best_lock_step(near)
    assert overlapped.idle < 0.2


def test_prepared_continuations_bridge_a_distance() -> None:
    far = world(0.7, 0.5)
    without = outcome(far, Choice(20, patience=0))
    prepared = outcome(far, Choice(20, patience=0, branch_depth=2))
    assert prepared.counts.branches_hit > 0.3 * prepared.counts.branches_tried
    assert prepared.speed > 1.05 * without.speed
    assert prepared.speed > 1.15 * best_lock_step(far)


@pytest.mark.parametrize("round_trip", [0.0, 0.5, 2.0])
def test_a_drafter_that_is_never_right_costs_its_nodes_only(round_trip: float) -> None:
    useless = world(0.0, round_trip, node=0.001)
    plain = outcome(useless, PLAIN).speed
    assert outcome(useless, Choice(2, min_draft_tokens=0, patience=0)).speed > 0.95 * plain


def test_a_second_target_works_on_what_comes_later() -> None:
    both = world(0.95, 0.1, targets=2)
    one = outcome(both, Choice(24, min_draft_tokens=1, patience=0.5))
    two = outcome(both, Choice(24, min_draft_tokens=1, patience=0.5, speculate=True))
    assert two.counts.speculated > 0
    assert two.speed > 1.03 * one.speed


@pytest.mark.parametrize("acceptance", [0.8, 0.95])
def test_a_pass_that_waits_loses_nothing_to_replies_of_several_draft_tokens(acceptance: float) -> None:
    near = world(acceptance, 0.1, node=0.01)
    single, several = (Run(near, Fixed(Choice(24, min_draft_tokens=6, patience=2.0, chunk=chunk))) for chunk in (1, 3))
    assert several.run().speed > 0.96 * single.run().speed
    assert several.replies < 0.45 * single.replies


def test_fewer_replies_and_no_starving_drafter() -> None:
    """With a window that is always used up, what matters is that it moves on in time."""
    narrow = world(1.0, 0.0, node=0.0)
    single = Run(narrow, Fixed(Choice(8, min_draft_tokens=4, patience=2.0)))
    several = Run(narrow, Fixed(Choice(8, min_draft_tokens=4, patience=2.0, chunk=3)))
    assert several.run().speed > 0.98 * single.run().speed
    assert several.replies < 0.5 * single.replies
    assert several.advances <= single.advances
