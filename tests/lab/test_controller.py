"""`crossdraft bench controller`: which cells it runs, how they are summed up, and short runs of every scenario."""

import os
import signal
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli.processes import Wanted
from crossdraft.config.request import AUTO
from crossdraft.lab import controller
from crossdraft.lab.commands import ControllerPlan
from crossdraft.lab.controller import ALL, ControllerBenchmark, ControllerConditions, Curve, compared, covering, summary
from crossdraft.lab.harness import Timed
from crossdraft.lab.services import Served
from crossdraft.lab.workload import WITHOUT_DRAFTER
from tests.cli.conftest import Cli
from tests.lab.conftest import PROCESS, Measure, figures

GIVEN = ControllerConditions("grid", "slem", 0.0, 1, 0.8, 8.0, 5.0)
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
    cells = covering(dimensions)
    assert meeting(cells, dimensions, 3)
    assert meeting(cells[:20], dimensions, 2)
    assert len(cells) == len(set(cells)) < 60
    assert covering(dimensions) == cells
    assert covering([(1,), ("a", "b")]) == [(1, "a"), (1, "b")]


def test_all_cells_begin_with_those_of_the_grid_and_scenarios_take_the_middle_values() -> None:
    few, all_ = (ControllerBenchmark(ControllerPlan(all_cells=all_)).comparisons for all_ in (False, True))
    assert all_[: len(few)] == few
    assert len(set(all_)) == len(all_) == 4 * 3**4
    plan = ControllerPlan(scenario=("short", "bad"), outputs="1,4,9", methods="slem")
    found = ControllerBenchmark(plan).comparisons
    assert [(one.scenario, one.outputs, one.trip_ms) for one in found[:1]] == [("short", 1, 5.0)]
    assert [(one.drafter, one.outputs) for one in found[1:]] == list(product(("useless", "slow", "dead"), (1, 4, 9)))
    assert {(one.acceptance, one.pass_ms, one.temperature) for one in found} == {(0.8, 25.0, 0.0)}


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


def samples(*speeds: float) -> list[Timed]:
    return [Timed(100, 100 / speed, figures(tokens=100, passes=50)) for speed in speeds]


def test_auto_is_compared_with_the_fastest_other_choice() -> None:
    (first,), given = (
        samples(5),
        {WITHOUT_DRAFTER: samples(10, 10), AUTO: samples(18, 18), "overlapped, 8": samples(20, 20)},
    )
    found = compared(GIVEN, "", given, first)
    assert found.best == "overlapped, 8"
    assert (found.at_first, found.speeds[AUTO]) == pytest.approx((5, 18))
    assert [ratio.value for ratio in (found.to_best, found.to_none) if ratio] == pytest.approx([0.9, 1.8])
    assert found.tokens_per_pass == 2
    slow = compared(GIVEN, "", {WITHOUT_DRAFTER: samples(10), AUTO: samples(9), "overlapped, 8": samples(8)})
    assert slow.best == WITHOUT_DRAFTER
    none = compared(GIVEN, "", {WITHOUT_DRAFTER: [Timed(0, 1.0)], AUTO: [Timed(5, 1.0)]})
    assert (none.to_best, none.to_none, none.accepted, none.tokens_per_pass) == (None, None, None, None)


def test_the_summary_counts_cells() -> None:
    cells = [
        compared(GIVEN, "", {WITHOUT_DRAFTER: samples(10), AUTO: samples(auto), "overlapped, 8": samples(20)})
        for auto in (20, 19, 9, 17)
    ]
    assert summary(cells) == (
        "grid: auto is at least 0.9 of the best fixed choice in 2 of 4 (50%), least 0.45; "
        "at least 0.97 of no drafter in 3 of 4 (75%), least 0.90, lower end of the interval above 0.94 in 3 of 4"
    )


def check_cell(cell: dict[str, Any]) -> None:
    assert set(cell["speeds"]) == set(ALL)
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


@pytest.fixture
def quick(started: list[Wanted | Served], monkeypatch: pytest.MonkeyPatch) -> list[Wanted | Served]:
    """What was to be started, in order; a pair that is there already stands for all of it."""

    async def calibrated(folder: str, methods: list[str]) -> dict[str, Curve]:
        return dict.fromkeys(methods, Curve((0.1, 1.0), (0.9, 0.1)))

    changes = {"calibrated": calibrated, "LEAST_TOKENS": 4, "SHORT": {"request 1": (0, 1), "requests 2 to 3": (1, 3)}}
    for name, value in changes.items():
        monkeypatch.setattr(controller, name, value)
    return started


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Those that processes were sent; they get none."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: found.append((process, number)))
    return found


def test_cells_and_bad_drafters_which_are_noisy_slow_or_stopped(
    measure: Measure, quick: list[Served], signals: list[tuple[int, int]]
) -> None:
    options = ("--scenario", "grid", "--scenario", "bad", "--outputs", 1, "--method", "slem")
    cell, *found = measure("controller", *TINY, *options)
    check_cell(cell)
    assert [one["conditions"]["drafter"] for one in found] == ["useless", "slow", "dead"]
    assert all(set(one["speeds"]) == {WITHOUT_DRAFTER, AUTO} and one["best"] == WITHOUT_DRAFTER for one in found)
    _, *drafters = [served for served in quick if served.pace != "1,0.0025"]  # which is the target's
    assert [served.pace for served in drafters] == ["1,0.01", "100,0", "1,0.01"]
    assert [served.logit_noise > 10 for served in drafters] == [True, False, False]
    assert signals == [(PROCESS, signal.SIGSTOP), (PROCESS, signal.SIGCONT)]


def test_short_requests(measure: Measure, quick: list[Wanted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "ALL", (WITHOUT_DRAFTER, AUTO))
    found = measure("controller", *TINY, "--scenario", "short", "--method", "slem")
    assert [one["part"] for one in found] == list(controller.SHORT)


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--scenario", "grit", "must be one of grid"),
        ("--outputs", "0", "between 1 and 1024"),
        ("--pass-ms", "8,x", "numbers with commas"),
        ("--method", "nothing", "nothing"),
        ("--drafter-pace", "x", "got x"),
    ],
)
def test_what_cannot_be_compared_is_refused(cli: Cli, option: str, value: str, complaint: str) -> None:
    cli("bench", "controller", option, value).failed(complaint)
