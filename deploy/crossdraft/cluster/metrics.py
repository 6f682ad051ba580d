"""Metrics that only a cluster has: of its orchestrators, and of outputs that went on with another one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Header, Response
from prometheus_client import Counter, Gauge, Histogram
from pydantic import BaseModel

from crossdraft.cluster.directory import DirectoryGoneError, Entry, FarDirectory, Role
from crossdraft.rpc.metrics import PREFIX, Registry
from crossdraft.serving.limits import KeyRefusedError, Keys

ABANDONED = "abandoned"  # nobody wanted the rest
FINISHED = "finished"
AGAIN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32)  # bounds, seconds
SERVICES = (Role.TARGET, Role.DRAFTER)


@dataclass
class Course:
    """How an output ends."""

    outcome: str = ABANDONED

    def finished(self) -> None:
        """It has its end."""
        self.outcome = FINISHED

    def refused(self, error: Exception) -> None:
        """It ended in an error that can be expected."""
        self.outcome = type(error).__name__


class OrchestratorMetrics:
    """Of one orchestrator; what clients see is measured by the fronts."""

    def __init__(self, model: str) -> None:
        self.registry = Registry()
        self._model = model
        name, made = f"{PREFIX}orchestrator_", self.registry
        labels = ("model_name",)
        self._running = Gauge(f"{name}running_outputs", "Outputs that are being made.", labels, registry=made)
        self._resumed = Counter(
            f"{name}resumed_outputs", "Outputs that another orchestrator had begun.", labels, registry=made
        )
        self._ended = Counter(f"{name}outputs", "Outputs, by how they ended.", ("model_name", "outcome"), registry=made)
        self._services = Gauge(
            f"{name}services", "Services that the directory names.", ("model_name", "role"), registry=made
        )

    @contextmanager
    def output(self, resumed: bool) -> Iterator[Course]:
        """The block makes one."""
        course = Course()
        self._resumed.labels(self._model).inc(resumed)
        self._running.labels(self._model).inc()
        try:
            yield course
        finally:
            self._running.labels(self._model).dec()
            self._ended.labels(self._model, course.outcome).inc()

    def services(self, entries: Sequence[Entry]) -> None:
        """These are there now."""
        for role in SERVICES:
            count = sum(entry.role is role for entry in entries)
            self._services.labels(self._model, role.value).set(count)


class LossMetrics:
    """Of a front: orchestrators that were lost in the middle of an output, and how long its client waited."""

    def __init__(self, registry: Registry) -> None:
        labels = ("model_name",)
        self._lost = Counter(
            f"{PREFIX}orchestrators_lost",
            "Times that an orchestrator was lost with an output.",
            labels,
            registry=registry,
        )
        self._waited = Histogram(
            f"{PREFIX}output_resume_seconds",
            "Seconds from the last sign of an orchestrator that was lost to the next token, of another one.",
            labels,
            buckets=AGAIN,
            registry=registry,
        )

    def lost(self, model: str) -> None:
        """An orchestrator of a model, with an output."""
        self._lost.labels(model).inc()

    def resumed(self, model: str, seconds: float) -> None:
        """Another one has made the next token."""
        self._waited.labels(model).observe(seconds)


# Where Prometheus finds the processes of a cluster: what its `http_sd_configs` reads.

PATH = "/metrics/targets"


class Scraped(BaseModel):
    """One process, as Prometheus wants it."""

    targets: list[str]  # host:port
    labels: dict[str, str]


def scraped(entries: Sequence[Entry]) -> list[Scraped]:
    """Those that answer Prometheus, with what they are and where."""
    return [
        Scraped(targets=[entry.metrics], labels={"crossdraft_role": entry.role.value, "crossdraft_node": entry.node})
        for entry in entries
        if entry.metrics
    ]


def add_scraping(app: FastAPI, directory: FarDirectory, keys: Keys) -> None:
    """Adds the route. It needs a key where there are keys: it tells where services are."""

    @app.get(PATH, response_model=list[Scraped], include_in_schema=False)
    async def targets(response: Response, authorization: Annotated[str | None, Header()] = None) -> list[Scraped]:
        try:
            keys.holder(authorization)
            _, entries = await directory.entries()
        except KeyRefusedError:
            response.status_code = 401
            return []
        except DirectoryGoneError:
            response.status_code = 503
            return []
        return scraped(entries)
