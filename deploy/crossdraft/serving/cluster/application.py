"""The Serve application: the HTTP front as ingress, an orchestrator deployment for each model behind it."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment

from crossdraft.serving.cluster.directing import FarDirectory, announced
from crossdraft.serving.cluster.directory import Entry, Role
from crossdraft.serving.cluster.hosting import entry_of, node_address
from crossdraft.serving.cluster.measuring import Measuring, http_app
from crossdraft.serving.cluster.naming import ASKING, INGRESS, digest_of, orchestrator_name
from crossdraft.serving.cluster.orchestrating import Orchestrator
from crossdraft.serving.cluster.scraping import add_scraping
from crossdraft.serving.cluster.told import Fronted, fronted, orchestrated
from crossdraft.serving.configuration import Configuration, Http, Resources, ServedService
from crossdraft.serving.logs import logged

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
