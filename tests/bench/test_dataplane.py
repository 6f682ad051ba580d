"""`crossdraft bench dataplane`."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from crossdraft.bench import dataplane
from crossdraft.bench.commands import DataplanePlan
from crossdraft.bench.dataplane import AGAINST, CONFIGURATIONS, ROUND, ROUNDS, DataplaneResult, Turn, _summed_up
from crossdraft.bench.services import Distant, Served
from tests.bench.conftest import PROCESS, Measure, Pair
from tests.cli.conftest import Cli

SMALL = ("--outputs", 2, "--max-tokens", 8, "--turns", 1, "--target-pace", "1,0", "--drafter-pace", "0,0")


def check(measure: Measure) -> None:
    found = measure("dataplane", *SMALL)
    assert [one["configuration"] for one in found] == list(CONFIGURATIONS)
    assert all(one["speed"] > 0 and one["tokens_per_pass"] >= 1 for one in found)
    assert [one["configuration"] for one in found if one["round_ms"]] == list(ROUNDS)


@pytest.mark.full  # services of its own; their parts are tested below
def test_every_configuration_has_its_figures_on_services_of_its_own(measure: Measure) -> None:
    check(measure)


def test_every_configuration_has_its_figures(measure: Measure, started: list[Served]) -> None:
    check(measure)
    assert [(one.pace, one.logit_noise) for one in started] == [("1,0", 0), ("0,0", 0.02)]


def test_the_drafter_is_at_its_distance(measure: Measure, addresses: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = list[float]()

    class Link:
        async def delay(self, milliseconds: float) -> None:
            delays.append(milliseconds)

    @asynccontextmanager
    async def service(role: str, served: Served, core: int | None, distant: bool) -> AsyncIterator[Distant]:
        yield Distant(addresses[role], PROCESS, Link() if distant else None)

    monkeypatch.setattr(dataplane, "service", service)
    measure("dataplane", *SMALL, "--trip-ms", 3)
    assert delays == [1.5]


OTHER = [
    DataplaneResult(outputs, name, speed, 2.0, 0.1, 0.2, 0.3, 0.4, 1.0, 1.0)
    for outputs in (2, 4)
    for name, speed in zip(CONFIGURATIONS, range(100, 700, 100), strict=True)
]


def other_run(file: Path, results: Sequence[DataplaneResult] = OTHER, **options: object) -> Path:
    """As --json has it; of a version without --trip-ms and --against."""
    options = {"max_tokens": 8, "turns": 9, "target_pace": "1,0", "drafter_pace": "0,0"} | options
    plan = {name: value for name, value in asdict(DataplanePlan(**options)).items() if name in options}
    results_ = [{name: value for name, value in asdict(one).items() if "other" not in name} for one in results]
    file.write_text(json.dumps({"plan": plan, "results": results_}))
    return file


def test_another_run_stands_beside_this_one(measure: Measure, started: list[Served], tmp_path: Path) -> None:
    for one in measure("dataplane", *SMALL, "--against", other_run(tmp_path / "other.json")):
        assert one["other_speed"] == 100 * (1 + CONFIGURATIONS.index(one["configuration"]))
        assert one["other_processor_ms"] == pytest.approx(0.6)
    table = (tmp_path / "out.md").read_text()
    assert all(f"| {heading} |" in table for heading in AGAINST)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"max_tokens": 9}, "of other conditions: it has max_tokens 9 and not 8; measure either again"),
        ({"trip_ms": 5.0}, "trip_ms 5.0 and not 0.0"),
        ({"results": OTHER[:3]}, "has not all that was measured of --outputs 2"),
    ],
)
def test_a_run_of_other_conditions_is_refused(cli: Cli, tmp_path: Path, changed: Any, complaint: str) -> None:
    cli("bench", "dataplane", *SMALL, "--against", other_run(tmp_path / "other.json", **changed)).failed(complaint)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"plan": {}, "results": [{"outputs": 1}]}'])
def test_what_is_no_run_is_refused(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    complaint = "--against takes the --json of another `bench dataplane`"
    cli("bench", "dataplane", *SMALL, "--against", tmp_path / "other.json").failed(complaint)


def test_ratios_are_to_no_drafter_and_to_the_best_fixed_choice() -> None:
    seconds = dict(zip(CONFIGURATIONS, (4.0, 2.0, 1.0, 2.0, 2.0, 4.0), strict=True))
    found = _summed_up(3, {name: [Turn(took, 100, 10, (0.1, 0.2, 0.3))] for name, took in seconds.items()})
    assert [one.to_plain for one in found] == [1, 2, 4, 2, 2, 1]
    assert [one.to_best for one in found] == [0.25, 0.5, 1, 0.5, 0.5, 0.25]
    assert found[0].processor_ms == pytest.approx(6)
    assert found[0].target_pass_ms == pytest.approx(20)


def test_what_is_neither_pass_nor_draft_of_a_round_is_machinery() -> None:
    turns = [Turn(1.0, 100, 30, (0.1, 0.2, 0.3), 60, 0.9, 0.6), Turn(1.0, 100, 30, (0.1, 0.2, 0.3), 40, 0.5, 0.4)]
    found = _summed_up(3, dict.fromkeys(CONFIGURATIONS, turns))
    assert [one.configuration for one in found if one.round_ms] == list(ROUNDS)
    shown = [of(found[2]) for of in ROUND.values()]
    assert shown == [3, ROUNDS[0], "60.0", "14.0", "10.0", "36.0", "12.00"]


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--outputs", "0", "between 1 and 1024"),
        ("--target-pace", "x", "got x"),
        ("--method", "nothing", "nothing"),
        ("--trip-ms", "-1", "--trip-ms"),
        ("--against", "nowhere.json", "No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(cli: Cli, option: str, value: str, complaint: str) -> None:
    cli("bench", "dataplane", option, value).failed(complaint)
