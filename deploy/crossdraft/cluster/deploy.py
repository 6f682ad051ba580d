"""Deploys a configuration on a running Ray cluster: model servers and the gRPC front as detached actors, orchestrators
and the HTTP front by Serve, which restarts, checks, scales and replaces them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, Deployment
from ray.serve.context import _check_cached_client_alive, _get_global_client
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview

from crossdraft.cluster.capacity import NotServedError, Say, Waiting, amounts_of, await_nodes, fits, needs_of
from crossdraft.cluster.config import (
    APPLICATION,
    DIRECTORY,
    FRONT_ENVIRONMENT,
    INGRESS,
    NAMESPACE,
    Configuration,
    FrontConfig,
    Http,
    OrchestratorConfig,
    Resources,
    ServedService,
    digest_of,
    orchestrator_name,
    parse,
)
from crossdraft.cluster.directory import DirectoryActor, Entry
from crossdraft.cluster.fronts import Ingress
from crossdraft.cluster.installed import installed
from crossdraft.cluster.orchestrators import Orchestrator
from crossdraft.cluster.rollout import (
    ALWAYS,
    MAX_CALLS,
    Rollout,
    changes,
    free_nodes,
    fronts_of,
    is_front,
    running,
    services_of,
)
from crossdraft.serving.logs import logged

log = logging.getLogger(__name__)
HEAD = {"node:__internal_head__": 0.001}  # Ray's resource of the head node, with which the cluster ends anyway
EXTRA_CALLS = 16  # of a replica at once besides its outputs: `models` and health checks
MAX_STREAMS = 4096  # requests of one ingress at once
HEALTH_INTERVAL = 2.0  # seconds between two health checks
HEALTH_SECONDS = 15.0  # for an answer
ALL = 100  # percent of replicas that may exist twice while they are replaced
FINISHER = "finisher"  # an actor
POLL_SECONDS = 1.0
RUNNING = "RUNNING"
DEPLOYMENT = ("name", "state", "replicas", "message")
HasRoom = Callable[[Resources], bool]


def deploy(configuration: Configuration, waiting: Waiting | None = None) -> None:
    """Returns once everything serves. What runs already and is unchanged goes on; what differs is replaced.

    Raises:
        NoRoomError: nodes lack resources.
        NotServedError: something cannot be run with its options, or nodes have another crossdraft; what ran before
            goes on.
    """
    waiting = waiting or Waiting()
    await_nodes(needs_of(configuration), waiting)
    with _serve_started(configuration.http):
        start_directory()
        below, above = rollouts(configuration, waiting.say)
        try:
            below.begin()
            _run(configuration)
            above.begin()
        except NotServedError:
            below.undo()
            above.undo()
            raise
        above.finish()
        below.finish()


def rollouts(configuration: Configuration, say: Say) -> tuple[Rollout, Rollout]:
    """From what runs now: that of the model servers, and that of the gRPC fronts."""
    there, grace = running(), configuration.grace_seconds
    services = [name for name in there if not is_front(name)]
    fronts = [name for name in there if is_front(name)]
    below = Rollout(changes(services_of(configuration), services), grace, say)
    above = Rollout(changes(fronts_of(configuration), fronts), grace, say)
    return below, above


def undeploy() -> None:
    """Ends everything that `deploy` started; Serve, too, if nothing else uses it."""
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE:
            ray.kill(ray.get_actor(named["name"], NAMESPACE))


def start_directory() -> None:
    """Makes sure that the directory runs, with this crossdraft."""
    try:
        there: Any = ray.get_actor(DIRECTORY, NAMESPACE)
        if ray.get(there.installed.remote()) != installed():
            ray.kill(there)
    except ValueError:  # there is none
        pass
    ray.remote(DirectoryActor).options(
        name=DIRECTORY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=HEAD,
        max_restarts=ALWAYS,
        max_task_retries=ALWAYS,  # all its calls may be repeated
        max_concurrency=MAX_CALLS,
    ).remote()


@contextmanager
def _serve_started(http: Http) -> Iterator[None]:
    """Runs Serve with its proxies at this address; an error in the block ends it, unless it ran before."""
    _check_cached_client_alive()  # forgets a Serve instance that another process has ended
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        has = client.http_config
        if (has.host, has.port) != (http.host, http.port):
            raise NotServedError(
                f"Serve listens at {has.host}:{has.port} and cannot be moved to {http.host}:{http.port} "
                "while it runs: use that address, or undeploy first"
            )
        yield
        return
    try:
        serve.start(proxy_location="EveryNode", http_options={"host": http.host, "port": http.port})
    except (RayError, TimeoutError) as error:
        serve.shutdown()
        raise NotServedError(
            f"cannot listen for HTTP on {http.host}:{http.port}: {_last_line(error)}; choose another port"
        ) from error
    try:
        yield
    except ValueError:
        serve.shutdown()
        raise


def _run(configuration: Configuration) -> None:
    try:
        serve.run(application(configuration, has_room()), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise NotServedError(f"orchestrators or the HTTP front cannot be run: {error}") from error


def has_room() -> HasRoom:
    """Whether a replica with such resources fits beside all that runs now."""
    free = free_nodes()
    return lambda resources: fits(amounts_of(resources), free)


def application(configuration: Configuration, room: HasRoom) -> Application:
    """The Serve application: the HTTP front as ingress, behind it a deployment of orchestrators for each model.

    Args:
        configuration: what is served.
        room: whether another replica fits: then it is started before the one that it replaces has ended.
    """
    front = FrontConfig.of(configuration)
    orchestrators = [_orchestrators(model, configuration, room) for model in configuration.models]
    return _ingress(configuration, room).bind(front, configuration.http, *orchestrators)


def _orchestrators(model: ServedService, configuration: Configuration, room: HasRoom) -> Application:
    config = OrchestratorConfig.of(model, configuration)
    resources = model.orchestrator_resources
    deployment = serve.deployment(
        name=orchestrator_name(model.name),
        num_replicas=model.orchestrators,
        max_ongoing_requests=model.outputs + EXTRA_CALLS,
        ray_actor_options=_actor_options(resources),
        **_lifecycle(configuration, resources, room),
    )(Orchestrator)
    return _versioned(deployment, config.digest).bind(config)


def _ingress(configuration: Configuration, room: HasRoom) -> Deployment:
    http = configuration.http
    deployment = serve.deployment(
        name=INGRESS,
        num_replicas=http.replicas,
        max_ongoing_requests=MAX_STREAMS,
        ray_actor_options=_actor_options(http.resources) | {"runtime_env": FRONT_ENVIRONMENT},
        **_lifecycle(configuration, http.resources, room),
    )(serve.ingress()(Ingress))
    alone = http.model_copy(update={"replicas": 1, "resources": Resources()})
    return _versioned(deployment, digest_of(FrontConfig.of(configuration).digest, alone))


def _lifecycle(configuration: Configuration, resources: Resources, room: HasRoom) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_INTERVAL,
        "health_check_timeout_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": configuration.grace_seconds,
        "max_surge_percent": ALL if room(resources) else 0,
    }


def _versioned(deployment: Deployment, version: str) -> Deployment:
    """Serve replaces replicas when the version changes, and without one at each deployment."""
    return deployment.options(version=version, _internal=True)


def _actor_options(resources: Resources) -> dict[str, object]:
    return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "resources": dict(resources.custom)}


def _last_line(error: Exception) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def build(args: Mapping[str, object]) -> Application:
    """The application, for Serve to build from `import_path` and `args`, as KubeRay makes it do.

    Starts the model servers. What they replace ends once Serve runs the application, for which an actor waits.

    Raises:
        ConfigurationError: the configuration cannot be used.
        NotServedError: a service cannot be run with its options; what ran before goes on.
    """
    configuration = parse(yaml.safe_dump(dict(args)), "args")
    with logged(configuration.log_format):
        start_directory()
        below, _ = rollouts(configuration, log.info)
        try:
            below.begin()
        except ValueError:
            below.undo()
            raise
    actor: Any = ray.remote(Finisher)
    finisher = actor.options(name=FINISHER, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0)
    finisher.remote().finish.remote(configuration)
    return application(configuration, has_room())


class Finisher:
    """An actor that ends what an application does not need any more, one call at a time."""

    def finish(self, configuration: Configuration) -> None:
        """Waits until Serve runs the application; if Serve fails, everything stays as it is."""
        with logged(configuration.log_format):
            while (state := _state()) not in (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOY_FAILED):
                time.sleep(POLL_SECONDS)
            if state is ApplicationStatus.DEPLOY_FAILED:
                log.error("Serve cannot run the application; what it does not need goes on")
                return
            below, above = rollouts(configuration, log.info)
            for one in (above, below):
                one.begin()
                one.finish()


def _state() -> ApplicationStatus | None:
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else found.status


@dataclass(frozen=True)
class Deployed:
    """What runs now."""

    processes: tuple[Entry, ...]  # in the directory
    state: str  # Serve's, of the application
    deployments: tuple[tuple[str, str, int, str], ...]  # name, state, running replicas, Serve's message

    def plain(self) -> dict[str, object]:
        """For JSON."""
        deployments = [dict(zip(DEPLOYMENT, one, strict=True)) for one in self.deployments]
        processes = [asdict(entry) | {"role": entry.role.value} for entry in self.processes]
        return {"processes": processes, "state": self.state, "deployments": deployments}


def deployed() -> Deployed:
    """Raises ValueError if nothing is deployed."""
    directory: Any = ray.get_actor(DIRECTORY, NAMESPACE)
    entries: tuple[Entry, ...]
    _, entries = ray.get(directory.entries.remote())
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        return Deployed(tuple(entries), "not started", ())
    deployments = ((name, one.status.value, _running(one), one.message) for name, one in found.deployments.items())
    return Deployed(tuple(entries), found.status.value, tuple(deployments))


def _running(deployment: DeploymentStatusOverview) -> int:
    return sum(count for state, count in deployment.replica_states.items() if state == RUNNING)
