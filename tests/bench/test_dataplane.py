"""`crossdraft bench dataplane`."""

import pytest

from crossdraft.bench.dataplane import CONFIGURATIONS, Turn, _summed_up
from tests.bench.conftest import Measure
from tests.cli.conftest import Cli


@pytest.mark.parametrize(
    "over", [pytest.param("pipeline", marks=pytest.mark.full), "http", pytest.param("grpc", marks=pytest.mark.full)]
)
def test_every_configuration_has_its_figures(measure: Measure, over: str) -> None:
    found = measure(
        "dataplane",
        "--over",
        over,
        "--outputs",
        2,
        "--max-tokens",
        8,
        "--turns",
        1,
        "--target-pace",
        "1,0",
        "--drafter-pace",
        "0,0",
    )
    assert [one["configuration"] for one in found] == list(CONFIGURATIONS)
    assert all(one["speed"] > 0 and one["tokens_per_pass"] >= 1 for one in found)


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
