"""`crossdraft bench controller`: which cells it runs, how they are summed up, and short runs of every scenario."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import combinations, product

import pytest

from crossdraft.bench import controller
from crossdraft.bench.commands import ControllerPlan
from crossdraft.bench.controller import (
    ALL,
    SHORT,
    Conditions,
    ControllerBenchmark,
    Curve,
    compared,
    covering,
    summary,
)
from crossdraft.bench.harness import Timed
from crossdraft.bench.services import Distant, Killable, Served
from crossdraft.bench.workload import AUTO, NO_DRAFTER
from crossdraft.console.processes import Running, Wanted
from tests.bench.conftest import PROCESS, Measure, Pair, figures
from tests.cli.conftest import Cli

GIVEN = Conditions("grid", "slem", 0.0, 1, 0.8, 8.0, 5.0)
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


def test_all_cells_begin_with_those_of_the_grid() -> None:
    few, all_ = (ControllerBenchmark(ControllerPlan(all_cells=all_)).comparisons for all_ in (False, True))
    assert all_[: len(few)] == few
    assert len(set(all_)) == len(all_) == 4 * 3**4
    assert ControllerBenchmark(ControllerPlan(cells=7)).comparisons == few[:7]


def test_scenarios_take_the_middle_values() -> None:
    plan = ControllerPlan(scenario=("short", "load", "turning", "bad"), outputs="1,4,9", methods="slem")
    found = ControllerBenchmark(plan).comparisons
    assert [(one.scenario, one.outputs, one.trip_ms) for one in found[:3]] == [
        ("short", 1, 5.0),
        ("load", 9, 5.0),
        ("turning", 4, 0.0),
    ]
    assert [(one.drafter, one.outputs) for one in found[3:]] == list(product(("useless", "slow", "dead"), (1, 4, 9)))
    assert {(one.acceptance, one.pass_ms, one.temperature) for one in found} == {(0.8, 25.0, 0.0)}


def test_noise_is_found_between_those_that_were_measured() -> None:
    curve = Curve((0.1, 1.0, 10.0), (0.9, 0.5, 0.1))
    assert [curve.noise(share) for share in (0.9, 0.7, 0.5, 0.3)] == pytest.approx([0.1, 0.1**0.5, 1, 10**0.5])
    assert [curve.noise(share) for share in (0.95, 0.0)] == pytest.approx([0.1, 10])


def test_more_noise_is_never_said_to_accept_more() -> None:
    assert Curve((0.1, 1.0, 10.0), (0.9, 0.5, 0.6)).noise(0.7) == pytest.approx(0.1**0.5)


def samples(*speeds: float) -> list[Timed]:
    return [Timed(100, 100 / speed, figures(tokens=100, passes=50)) for speed in speeds]


def test_auto_is_compared_with_the_fastest_other_choice() -> None:
    found = compared(GIVEN, "", {NO_DRAFTER: samples(10, 10), AUTO: samples(18, 18), "overlapped, 8": samples(20, 20)})
    assert found.best == "overlapped, 8"
    assert [ratio.value for ratio in (found.to_best, found.to_none) if ratio] == pytest.approx([0.9, 1.8])
    assert found.tokens_per_pass == 2
    assert (
        compared(GIVEN, "", {NO_DRAFTER: samples(10), AUTO: samples(9), "overlapped, 8": samples(8)}).best == NO_DRAFTER
    )


def test_without_a_token_of_the_others_there_is_no_ratio() -> None:
    found = compared(GIVEN, "", {NO_DRAFTER: [Timed(0, 1.0)], AUTO: [Timed(5, 1.0)]})
    assert (found.to_best, found.to_none, found.accepted, found.tokens_per_pass) == (None, None, None, None)


def test_the_summary_counts_cells() -> None:
    cells = [
        compared(GIVEN, "", {NO_DRAFTER: samples(10), AUTO: samples(auto), "overlapped, 8": samples(20)})
        for auto in (20, 19, 9, 17)
    ]
    assert summary(cells) == (
        "grid: auto is at least 0.9 of the best fixed choice in 2 of 4 (50%), least 0.45; "
        "at least 0.97 of no drafter in 3 of 4 (75%), least 0.90"
    )


def test_a_cell_is_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "NOISES", (0.1, 1.0))
    monkeypatch.setattr(controller, "CALIBRATED_TOKENS", 16)
    (cell,) = measure("controller", *TINY, "--outputs", 2, "--method", "coupled", "--drafter-pace", "0,0")
    assert set(cell["speeds"]) == set(ALL)
    assert min(cell["speeds"].values()) > 0
    assert 0 < cell["accepted"] <= 1
    assert cell["tokens_per_pass"] >= 1
    assert cell["to_none"]["value"] == pytest.approx(cell["speeds"][AUTO] / cell["speeds"][NO_DRAFTER])


@pytest.fixture
def in_this_process(addresses: Pair, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Served | Wanted]]:
    """What was to be started, in order; a pair that is there already stands for all of it."""
    asked: list[tuple[str, Served | Wanted]] = []

    @asynccontextmanager
    async def service(role: str, served: Served, core: int, distant: bool) -> AsyncIterator[Distant]:
        asked.append((role, served))
        yield Distant(addresses[role], PROCESS, None)

    async def started(wanted: Wanted, stack: AsyncExitStack) -> Killable:
        asked.append((wanted.role, wanted))
        return Killable(wanted, addresses[wanted.role], stack, Running(addresses[wanted.role], PROCESS))

    async def restarted(killed: Killable) -> Killable:
        asked.append((killed.wanted.role, killed.wanted))
        return killed

    async def calibrated(folder: str, methods: list[str]) -> dict[str, Curve]:
        return dict.fromkeys(methods, Curve((0.1, 1.0), (0.9, 0.1)))

    monkeypatch.setattr(controller, "service", service)
    monkeypatch.setattr(controller, "calibrated", calibrated)
    monkeypatch.setattr(controller, "WINDOW", 0.3)
    monkeypatch.setattr(controller, "LEAST_TOKENS", 8)
    monkeypatch.setattr(Killable, "started", started)
    monkeypatch.setattr(Killable, "restarted", restarted)
    return asked


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Those that processes were sent; they get none."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: found.append((process, number)))
    return found


def test_bad_drafters_are_noisy_slow_or_stopped(
    measure: Measure, in_this_process: list[tuple[str, Served]], signals: list[tuple[int, int]]
) -> None:
    found = measure("controller", *TINY, "--scenario", "bad", "--outputs", 1, "--method", "slem")
    assert [one["conditions"]["drafter"] for one in found] == ["useless", "slow", "dead"]
    assert all(set(one["speeds"]) == {NO_DRAFTER, AUTO} and one["best"] == NO_DRAFTER for one in found)
    drafters = [served for role, served in in_this_process if role == "drafter"]
    assert [served.pace for served in drafters] == ["1,0.01", "100,0", "1,0.01"]
    assert [served.logit_noise > 10 for served in drafters] == [True, False, False]
    assert signals == [(PROCESS, signal.SIGSTOP), (PROCESS, signal.SIGCONT)]


@pytest.mark.usefixtures("in_this_process")
def test_short_requests_are_grouped_by_their_place(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "ALL", (NO_DRAFTER, AUTO))
    found = measure("controller", *TINY, "--scenario", "short", "--method", "slem")
    assert [one["part"] for one in found] == list(SHORT)
    assert all(one["to_none"]["value"] > 0 for one in found)


def test_speeds_are_measured_while_drafters_and_load_change(
    measure: Measure, in_this_process: list[tuple[str, Wanted]], signals: list[tuple[int, int]]
) -> None:
    options = ("--scenario", "turning", "--scenario", "load", "--outputs", "1,2", "--method", "slem")
    found = measure("controller", *TINY, *options)
    parts = {
        kind: [one["part"] for one in found if one["conditions"]["scenario"] == kind] for kind in ("turning", "load")
    }
    assert [part for part in parts["turning"] if part.startswith("until")] == ["until useless", "until good again"]
    assert (len(parts["turning"]), len(parts["load"])) == (3 * controller.WINDOWS + 2, 3 * controller.WINDOWS)
    assert signals == [(PROCESS, signal.SIGKILL)] * 2 * 4
    wanted = [one for _, one in in_this_process if isinstance(one, Wanted)]
    noises = [float(one.more[one.more.index("--logit-noise") + 1]) for one in wanted]
    assert [noise > 10 for noise in noises] == [False, *4 * (True, False)]


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
