"""The Serve application: the HTTP front as ingress, an orchestrator deployment for each model behind it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, Deployment
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from crossdraft.cluster.actors import entry_of, node_address
from crossdraft.cluster.config import (
    APPLICATION,
    ASKING,
    INGRESS,
    Configuration,
    Front,
    Fronted,
    Http,
    Resources,
    ServedService,
    digest_of,
    fronted,
    orchestrated,
    orchestrator_name,
)
from crossdraft.cluster.directory import Entry, FarDirectory, Role, announced
from crossdraft.cluster.failover import ClusterBackend, Lost, Together
from crossdraft.cluster.metrics import LossMetrics, add_scraping
from crossdraft.cluster.orchestrators import Orchestrator
from crossdraft.rpc.metrics import Exporter
from crossdraft.serving.http import HttpOptions, RateLimit, make_app
from crossdraft.serving.logs import logged
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.serving.backend import OutputRequest, OverloadedError, ServedModel

BESIDE_OUTPUTS = 16  # calls of a replica at once besides its outputs: questions for models and health
MOST_STREAMS = 4096  # requests of one ingress at once
HEALTH_SECONDS = 2.0  # between two questions
HEALTH_PATIENCE = 15.0  # seconds for an answer
ALL = 100  # percent of replicas that may be there twice while they are replaced
Room = Callable[[Resources], bool]


class Ingress:
    """A replica of the HTTP front; the orchestrators are named so that Serve has them first."""

    def __init__(self, told: Fronted, http: Http, *orchestrators: object) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(told.log_format))
        self._told, self._http = told, http

    def __serve_build_asgi_app__(self) -> FastAPI:  # Serve calls it in the replica
        measuring, node = Measuring(self._told), node_address()
        metrics = measuring.exporter.start(node, 0) if self._told.metrics else ""
        entry = entry_of(Role.HTTP, "", "", "", metrics, node)
        self._announcing = asyncio.get_running_loop().create_task(_announce(entry))
        app = http_app(self._told, self._http, measuring)
        add_scraping(app, FarDirectory(), self._told.keys)
        return app


async def _announce(entry: Entry) -> None:
    async with announced(entry):
        await asyncio.Event().wait()  # until the process ends


def application(configuration: Configuration, room: Room) -> Application:
    """What `serve.run` is given.

    Args:
        configuration: what is served.
        room: whether another replica fits beside those that are there: then it is started before the one that it
            replaces has ended.
    """
    behind = [_orchestrators(model, configuration, room) for model in configuration.models]
    return _ingress(configuration, room).bind(fronted(configuration), configuration.http, *behind)


def _orchestrators(model: ServedService, configuration: Configuration, room: Room) -> Application:
    told = orchestrated(model, configuration)
    deployment = serve.deployment(
        name=orchestrator_name(model.name),
        num_replicas=model.orchestrators,
        max_ongoing_requests=model.outputs + BESIDE_OUTPUTS,
        ray_actor_options=_actor_options(model.orchestrator_resources),
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_PATIENCE,
        graceful_shutdown_timeout_s=configuration.grace_seconds,
        max_surge_percent=ALL if room(model.orchestrator_resources) else 0,
    )(Orchestrator)
    return _versioned(deployment, told.digest).bind(told)


def _ingress(configuration: Configuration, room: Room) -> Deployment:
    http, told = configuration.http, fronted(configuration)
    deployment = serve.deployment(
        name=INGRESS,
        num_replicas=http.replicas,
        max_ongoing_requests=MOST_STREAMS,
        ray_actor_options=_actor_options(http.resources) | {"runtime_env": ASKING},
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_PATIENCE,
        graceful_shutdown_timeout_s=configuration.grace_seconds,
        max_surge_percent=ALL if room(http.resources) else 0,
    )(serve.ingress()(Ingress))
    alone = http.model_copy(update={"replicas": 1, "resources": Resources()})
    return _versioned(deployment, digest_of(told.digest, alone))


def _versioned(deployment: Deployment, version: str) -> Deployment:
    """Serve replaces replicas when the version differs, and draws a new one for each deployment unless it is given."""
    return deployment.options(version=version, _internal=True)


def _actor_options(resources: Resources) -> dict[str, object]:
    return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "resources": dict(resources.custom)}


# What clients speak with, in a cluster: outputs of orchestrators, measured, with keys and limits.

MIB = 2**20


class Measuring:
    """The outputs of a front's process, and their metrics. Made in a process of the cluster."""

    def __init__(self, told: Fronted) -> None:
        self.metrics = Metrics()
        handles = {model: _measuring_orchestrators(model) for model in told.models}
        outputs = ClusterBackend(handles, LossMetrics(self.metrics.registry))
        self.outputs = MeasuredBackend(outputs, self.metrics)
        self.exporter = Exporter(self.metrics.registry)


def http_app(told: Fronted, http: Http, measuring: Measuring) -> FastAPI:
    """The ingress's application."""
    options = HttpOptions(
        keys=told.keys,
        rate=rate_of(http),
        max_bytes=http.max_request_mib * MIB,
        max_choices=http.max_choices,
        stalled_seconds=http.stalled_seconds,
        metrics=measuring.metrics.text,
    )
    return make_app(measuring.outputs, options)


# Orchestrators behind a handle of Ray Serve.


class ServeOrchestrators:
    """The replicas of one deployment; each call goes to the one with the fewest under way."""

    def __init__(self, handle: DeploymentHandle[Orchestrator]) -> None:
        self._handle = handle

    async def models(self) -> tuple[ServedModel, ...]:
        """As `Orchestrators.models`."""
        with _foreign_errors():
            models: tuple[ServedModel, ...] = await self._handle.models.remote()
        return models

    async def stream(self, order: OutputRequest) -> AsyncGenerator[Together, None]:
        """As `Orchestrators.stream`; closing it early cancels the replica's work."""
        with _foreign_errors():
            response: Any = self._handle.options(stream=True).stream.remote(order)
            try:
                async for together in response:
                    yield together
            finally:
                response.cancel()


def _measuring_orchestrators(model: str) -> ServeOrchestrators:
    return ServeOrchestrators(serve.get_deployment_handle(orchestrator_name(model), APPLICATION))


def rate_of(front: Front) -> RateLimit | None:
    """Of clients; None: as many as they like."""
    return None if front.requests_per_minute is None else RateLimit(front.requests_per_minute, front.burst)


CROWDED_SECONDS = 1.0  # before a client may ask again where all replicas are taken


@contextmanager
def _foreign_errors() -> Iterator[None]:
    """What Ray raises, as what it means."""
    try:
        yield
    except BackPressureError as error:
        raise OverloadedError("all orchestrators are taken", CROWDED_SECONDS) from error
    except (RayError, RayServeException) as error:
        raise Lost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Lost("it was stopped") from error
