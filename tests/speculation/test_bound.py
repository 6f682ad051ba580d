"""The bound by which a drafter is seen to be hopeless without a forecast."""

import numpy as np
import pytest

from crossdraft.speculation import controller
from crossdraft.speculation.choice import Workload
from crossdraft.speculation.controller import Limits, bound, rank


def workload(rng: np.random.Generator) -> Workload:
    return Workload(
        tuple(rng.uniform(0, 1, 8)),
        match=rng.uniform(),
        token=rng.uniform(0.0005, 0.01),
        pass_base=rng.uniform(0.01, 0.05),
        pass_node=rng.uniform(0, 0.01),
        drafter_trip=rng.uniform(0, 0.01),
        target_trip=rng.uniform(0, 0.01),
        branch_hit=rng.uniform(0, 0.8),
        tokens_per_draft_token=rng.uniform(0.5, 1.3),
        samples=bool(rng.integers(2)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_way_with_a_drafter_is_forecast_to_be_faster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = workload(np.random.default_rng(seed))
    most = bound(drawn)
    monkeypatch.setattr(controller, "bound", lambda _: float("inf"))  # all forecasts are made
    ranking = rank(drawn, Limits(samples=drawn.samples))
    ways = [ranking.rounds, ranking.hurried, *([ranking.best] if ranking.best.choice.drafts else [])]
    assert max(way.speed for way in ways) <= most


def test_a_target_that_is_busy_with_others_has_no_room_for_draft_tokens() -> None:
    busy = Workload((0.6,), match=0.6, token=0.002, pass_base=0.02, pass_node=0.02)
    assert bound(busy) < rank(busy, Limits()).plain.speed
    assert not rank(busy, Limits()).best.choice.drafts
