"""`crossdraft bench dataplane`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from crossdraft.lab import dataplane
from crossdraft.lab.dataplane import CONFIGURATIONS, ROUND, ROUNDS, _summed_up
from crossdraft.lab.harness import Timed
from crossdraft.lab.services import Distant, Served
from tests.cli.conftest import Cli
from tests.lab.conftest import PROCESS, Measure, Pair, figures

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


def test_ratios_are_to_no_drafter_and_to_the_best_fixed_choice() -> None:
    seconds = dict(zip(CONFIGURATIONS, (4.0, 2.0, 1.0, 2.0, 2.0, 4.0), strict=True))
    found = _summed_up(
        3, {name: [Timed(100, took, figures(tokens=100, passes=10), (0.1, 0.2, 0.3))] for name, took in seconds.items()}
    )
    assert [one.to_plain for one in found] == [1, 2, 4, 2, 2, 1]
    assert [one.to_best for one in found] == [0.25, 0.5, 1, 0.5, 0.5, 0.25]
    assert found[0].processor_ms == pytest.approx(6)
    assert found[0].target_pass_ms == pytest.approx(20)


def test_what_is_neither_pass_nor_draft_of_a_round_is_machinery() -> None:
    counted = ((60, 0.9, 0.6), (40, 0.5, 0.4))
    turns = [
        Timed(
            100,
            1.0,
            figures(tokens=100, passes=30, epochs=epochs, target_seconds=passed, drafter_seconds=drafted),
            (0.1, 0.2, 0.3),
        )
        for epochs, passed, drafted in counted
    ]
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
    ],
)
def test_what_cannot_be_measured_is_refused(cli: Cli, option: str, value: str, complaint: str) -> None:
    cli("bench", "dataplane", option, value).failed(complaint)
