"""`crossdraft bench dataplane`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from crossdraft.bench import dataplane
from crossdraft.bench.dataplane import CONFIGURATIONS, Turn, _body_of, _summed_up
from crossdraft.bench.workload import NO_DRAFTER, request_of
from crossdraft.console.processes import Running, Wanted
from crossdraft.serving.http.requests import CompletionBody
from tests.bench.conftest import PROCESS, Measure, Pair
from tests.cli.conftest import Cli

SMALL = ("--outputs", 2, "--max-tokens", 8, "--turns", 1, "--target-pace", "1,0", "--drafter-pace", "0,0")


def check(measure: Measure, over: str) -> None:
    found = measure("dataplane", "--over", over, *SMALL)
    assert [one["configuration"] for one in found] == list(CONFIGURATIONS)
    assert all(one["speed"] > 0 and one["tokens_per_pass"] >= 1 for one in found)


@pytest.mark.full  # services and a server of its own; their parts are tested below
@pytest.mark.parametrize("over", ["pipeline", "http", "grpc"])
def test_every_configuration_has_its_figures_on_services_of_its_own(measure: Measure, over: str) -> None:
    check(measure, over)


def test_every_configuration_has_its_figures(
    measure: Measure, addresses: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def running(wanted: Sequence[Wanted]) -> AsyncIterator[list[Running]]:
        yield [Running(addresses[one.role], PROCESS) for one in wanted]

    monkeypatch.setattr(dataplane, "running", running)
    check(measure, "pipeline")


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_server_is_asked_for_the_same(configuration: str) -> None:
    request, drafted = request_of(configuration, 3, "seeded", 0.5, 9), configuration != NO_DRAFTER
    (asked,) = CompletionBody(**_body_of(request, drafted)).output_requests("free", "id")
    assert asked.generation == request
    assert asked.drafter == (None if drafted else "")


def test_ratios_are_to_no_drafter_and_to_the_best_fixed_choice() -> None:
    seconds = dict(zip(CONFIGURATIONS, (4.0, 2.0, 1.0, 2.0), strict=True))
    found = _summed_up(3, {name: [Turn(took, 100, 10, (0.1, 0.2, 0.3))] for name, took in seconds.items()})
    assert [one.to_plain for one in found] == [1, 2, 4, 2]
    assert [one.to_best for one in found] == [0.25, 0.5, 1, 0.5]
    assert found[0].processor_ms == pytest.approx(6)
    assert found[0].target_pass_ms == pytest.approx(20)


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--outputs", "0", "between 1 and 1024"),
        ("--target-pace", "x", "got x"),
        ("--method", "nothing", "nothing"),
        ("--over", "tcp", "got tcp"),
    ],
)
def test_what_cannot_be_measured_is_refused(cli: Cli, option: str, value: str, complaint: str) -> None:
    cli("bench", "dataplane", option, value).failed(complaint)
