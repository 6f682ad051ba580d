"""The dashboard and the alerts ask for metrics that there are, and docs/metrics.md names them."""

import json
import re
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import yaml

from crossdraft.client import GenerationRequest
from crossdraft.cluster.failover import LossMetrics
from crossdraft.cluster.orchestrators import OrchestratorMetrics
from crossdraft.config.service import SessionOptions
from crossdraft.rpc.handlers import CLOSED, Activity
from crossdraft.rpc.metrics import PREFIX, Registry, ServiceMetrics, exposition
from crossdraft.serving.backend import OutputRequest
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.types.statistics import ModelStatistics
from tests.serving.exposed import faults, names, value
from tests.serving.fakes import FakeBackend

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "crossdraft.json"
ALERTS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "alerts.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAME = re.compile(rf"{PREFIX}[a-zA-Z0-9_]+")


USED = ModelStatistics(5, 0.5, {1: 3, 2: 1, 300: 1}, 40, 4, 1, 7, 0.25, 1)


@pytest.fixture
async def front() -> str:
    """What a front says after an output."""
    metrics = Metrics()
    async with aclosing(
        MeasuredBackend(FakeBackend(), metrics).stream(OutputRequest("a", "toy", GenerationRequest("a")))
    ) as stream:
        async for _ in stream:
            pass
    return metrics.text()[0].decode()


@pytest.fixture
def service() -> str:
    """What a service says after a session."""
    registry, activity = Registry(), Activity("target", SessionOptions())
    registry.register(ServiceMetrics("target", "toy", activity, lambda: USED))
    activity.end(activity.begin("", "", ""), CLOSED)
    return exposition(registry)[0].decode()


def queries() -> Iterator[str]:
    board = json.loads(FILE.read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def cluster() -> list[str]:
    """What a cluster's processes say besides."""
    losses, orchestrator = Registry(), OrchestratorMetrics("toy")
    LossMetrics(losses, ["toy"])
    return [exposition(one)[0].decode() for one in (losses, orchestrator.registry)]


def test_every_metric_that_the_dashboard_and_alerts_ask_for_is_there(front: str, service: str) -> None:
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert len(asked) > 30
    assert asked <= {name for text in (front, service, *cluster()) for name in names(text)}
    assert {f"{PREFIX}{name}" for name in ("orchestrators_lost_total", "output_resume_seconds_bucket")} <= asked


def test_a_first_loss_is_an_increase() -> None:
    text, _ = cluster()
    assert value(text, "orchestrators_lost_total", {"model_name": "toy"}) == 0
    assert value(text, "output_resume_seconds_count", {"model_name": "toy"}) == 0


def test_the_text_keeps_to_the_rules_of_prometheus(front: str, service: str) -> None:
    assert faults(front) == []
    assert faults(service) == []


def test_openmetrics_is_spoken_where_it_is_asked_for(front: str) -> None:
    text, kind = Metrics().text("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert "# EOF" not in front
    assert "_created" not in front


def test_buckets_of_batches_hold_all_that_is_below_them(service: str) -> None:
    found = dict(re.findall(r'service_batch_size_bucket{le="([^"]+)"[^}]*} (\S+)', service))
    assert (found["1.0"], found["2.0"], found["128.0"], found["+Inf"]) == ("3.0", "4.0", "4.0", "5.0")
    assert "crossdraft_service_batch_size_sum" in service


def test_every_metric_is_on_the_page_and_nothing_else(front: str, service: str) -> None:
    there = {name for text in (front, service, *cluster()) for name in names(text)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name).removeprefix(PREFIX) for name in there}
    table = "\n".join(line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    told = {name.split("{")[0] for name in re.findall(r"`([^`]+)`", table)}
    assert {name.replace("…", "spec_decode_num_accepted_tokens") for name in told} == families
