"""`crossdraft bench controller`: which cells it runs, how they are compared and summed up, and a short run."""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from crossdraft.cli.processes import Wanted
from crossdraft.config.request import AUTO
from crossdraft.lab import controller
from crossdraft.lab.commands import ControllerPlan
from crossdraft.lab.controller import (
    CHOICES,
    WITHOUT_DRAFTER,
    ControllerConditions,
    Curve,
    Ratio,
    compared,
    speed_ratio,
)
from crossdraft.lab.outputs import Output, RunResult
from tests.cli.conftest import Cli
from tests.lab.conftest import Measure, figures

GIVEN = ControllerConditions("slem", 0.0, 1, 0.8, 8.0, 5.0)
TINY = ("--acceptance", 0.8, "--pass-ms", 1, "--trip-ms", 0, "--turns", 1, "--seconds", 0)


def meeting(cells: list[tuple[int, ...]], dimensions: list[range], size: int) -> bool:
    """Whether any values of so many different dimensions meet in a cell."""
    return all(
        any(all(cell[place] == value for place, value in zip(places, values, strict=True)) for cell in cells)
        for places in combinations(range(len(dimensions)), size)
        for values in product(*(dimensions[place] for place in places))
    )


def test_any_three_values_meet_in_the_grid_and_any_two_in_its_beginning() -> None:
    dimensions = [range(4), range(3), range(3), range(3), range(3)]
    cells = controller.covering(dimensions)
    assert meeting(cells, dimensions, 3)
    assert meeting(cells[:20], dimensions, 2)
    assert len(cells) == len(set(cells)) < 60
    assert controller.covering(dimensions) == cells
    assert controller.covering([(1,), ("a", "b")]) == [(1, "a"), (1, "b")]


def test_all_cells_begin_with_those_of_the_grid() -> None:
    few, all_ = (controller.ControllerBenchmark(ControllerPlan(all_cells=all_)).comparisons for all_ in (False, True))
    assert all_[: len(few)] == few
    assert len(set(all_)) == len(all_) == 4 * 3**4


def test_noise_is_found_between_those_that_were_measured_and_more_never_accepts_more() -> None:
    curve = Curve((0.1, 1.0, 10.0), (0.9, 0.5, 0.1))
    assert [curve.noise(share) for share in (0.9, 0.7, 0.5, 0.3)] == pytest.approx([0.1, 0.1**0.5, 1, 10**0.5])
    assert [curve.noise(share) for share in (0.95, 0.0)] == pytest.approx([0.1, 10])
    assert Curve((0.1, 1.0, 10.0), (0.9, 0.5, 0.6)).noise(0.7) == pytest.approx(0.1**0.5)


async def test_a_curve_is_measured(drafter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NOISES", (0.001, 100.0)), ("CALIBRATED_ON", 2), ("CALIBRATED_TOKENS", 8)):
        monkeypatch.setattr(controller, name, value)
    curve = (await controller.calibrated(str(drafter_folder), ["slem"]))["slem"]
    assert curve.acceptances[0] > 0.5 > curve.acceptances[1]


def timed(tokens: int, seconds: float, **counted: float) -> RunResult:
    return RunResult((Output(0.0, (), seconds, figures=figures(tokens=tokens, **counted)),), seconds)


def samples(*speeds: float) -> list[RunResult]:
    return [timed(100, 100 / speed, passes=50) for speed in speeds]


def test_auto_is_compared_with_the_fastest_other_choice() -> None:
    (first,) = samples(5)
    given = {WITHOUT_DRAFTER: samples(10, 10), AUTO: samples(18, 18), "overlapped, 8": samples(20, 20)}
    found = compared(GIVEN, first, given)
    assert found.best == "overlapped, 8"
    assert (found.at_first, found.speeds[AUTO]) == pytest.approx((5, 18))
    assert [ratio.value for ratio in (found.to_best, found.to_none) if ratio] == pytest.approx([0.9, 1.8])
    assert found.tokens_per_pass == 2
    slow = compared(GIVEN, first, {WITHOUT_DRAFTER: samples(10), AUTO: samples(9), "overlapped, 8": samples(8)})
    assert slow.best == WITHOUT_DRAFTER
    none = compared(GIVEN, first, {WITHOUT_DRAFTER: [timed(0, 1.0)], AUTO: [timed(5, 1.0)]})
    assert (none.to_best, none.to_none, none.accepted) == (None, None, None)
    lost = [timed(5, 1.0, judged_at=(4, 3), accepted_at=(3, 2), drafters_lost=1)]  # type: ignore[arg-type]
    counted = compared(GIVEN, first, {WITHOUT_DRAFTER: samples(10), AUTO: lost})
    assert (counted.accepted, counted.lost) == (5 / 7, 1)


def test_a_ratio_is_of_all_tokens_over_all_time() -> None:
    ours = [timed(100, 1.0), timed(10, 1.0)]
    others = [timed(50, 1.0), timed(10, 2.0)]
    assert controller.speed_of(ours) == 55
    assert speed_ratio(ours, others).value == pytest.approx(55 / 20)


def test_pairs_that_agree_leave_no_doubt_however_they_differ_from_each_other() -> None:
    others = [timed(100, 1.0), timed(10, 1.0), timed(300, 7.0)]
    twice = [replace(run, seconds=run.seconds / 2) for run in others]
    assert speed_ratio(twice, others) == Ratio(pytest.approx(2), pytest.approx(2), pytest.approx(2))


def test_an_interval_is_that_of_prompts_drawn_again() -> None:
    random = np.random.default_rng(1)
    ours = [timed(int(tokens), 1.0) for tokens in random.integers(50, 150, 40)]
    found = speed_ratio(ours, [timed(100, 1.0)] * 40)
    wanted = stats.bootstrap([[one.figures.tokens / 100 for one in ours]], np.mean, method="percentile", rng=2)
    assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval), abs=0.02)
    assert found.low < found.value < found.high
    (alone, *_) = ours
    assert speed_ratio([alone], [alone]) == Ratio(1.0, 1.0, 1.0)


def test_only_pairs_are_compared() -> None:
    for ours, others in (([], []), ([timed(1, 1.0)], [])):
        with pytest.raises(ValueError, match=r"in pairs|zip"):
            speed_ratio(ours, others)


def test_the_summary_counts_cells() -> None:
    cells = [
        compared(GIVEN, *samples(5), {WITHOUT_DRAFTER: samples(10), AUTO: samples(auto), "overlapped, 8": samples(20)})
        for auto in (20, 19, 9, 17)
    ]
    assert controller.summary(cells) == (
        "auto is at least 0.9 of the best fixed choice in 2 of 4 (50%), least 0.45; "
        "at least 0.97 of no drafter in 3 of 4 (75%), least 0.90, lower end of the interval above 0.94 in 3 of 4"
    )


def check_cell(cell: dict[str, Any]) -> None:
    assert set(cell["speeds"]) == set(CHOICES)
    assert min(cell["at_first"], *cell["speeds"].values()) > 0
    assert 0 <= cell["accepted"] <= 1
    assert cell["tokens_per_pass"] >= 1
    assert cell["to_none"]["value"] == pytest.approx(cell["speeds"][AUTO] / cell["speeds"][WITHOUT_DRAFTER])


@pytest.mark.full  # services of its own; all else is tested with a pair that is there already
def test_a_cell_is_measured_on_services_of_its_own(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "NOISES", (0.1, 1.0))
    monkeypatch.setattr(controller, "CALIBRATED_TOKENS", 16)
    (cell,) = measure("controller", *TINY, "--outputs", 2, "--method", "coupled", "--drafter-pace", "0,0")
    check_cell(cell)


def test_cells_on_a_pair_that_is_there(
    measure: Measure, started: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def calibrated(folder: str, methods: list[str]) -> dict[str, Curve]:
        return dict.fromkeys(methods, Curve((0.1, 1.0), (0.9, 0.1)))

    monkeypatch.setattr(controller, "calibrated", calibrated)
    monkeypatch.setattr(controller, "LEAST_TOKENS", 4)
    cells = measure("controller", *TINY, "--outputs", "1,2", "--method", "slem")
    for cell in cells:
        check_cell(cell)
    target, drafter = started  # once for all cells
    assert target.more[-2:] == ("--pace", "1,0.0025")
    *_, pace, _, noise = drafter.more
    assert pace == "1,0.01"
    assert 0.1 < float(noise) < 1


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--outputs", "0", "between 1 and 1024"),
        ("--pass-ms", "8,x", "must be a number, got x"),
        ("--method", "nothing", "nothing"),
        ("--drafter-pace", "x", "got x"),
    ],
)
def test_what_cannot_be_compared_is_refused(cli: Cli, option: str, value: str, complaint: str) -> None:
    cli("bench", "controller", option, value).failed(complaint)
