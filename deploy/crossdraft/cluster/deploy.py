"""Deploys a configuration on a running Ray cluster: model servers and the gRPC front as detached actors, orchestrators
and the HTTP front by Serve, which restarts, checks, scales and replaces them.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _check_cached_client_alive, _get_global_client
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview

from crossdraft.cluster.capacity import (
    HEAD,
    IMPLICIT_RESOURCE,
    PROGRESS_SECONDS,
    NotServedError,
    Placement,
    Say,
    Waiting,
    amounts_of,
    await_nodes,
    fits,
    node_ids,
    shown,
    taken,
    with_fronts,
)
from crossdraft.cluster.config import (
    APPLICATION,
    DIRECTORY,
    INGRESS,
    NAMESPACE,
    Configuration,
    FrontConfig,
    Http,
    OrchestratorConfig,
    Resources,
    Scale,
    ServedService,
    digest_of,
    orchestrator_name,
    parse,
    slot_of,
    version_of,
)
from crossdraft.cluster.directory import DirectoryActor, Entry, Load, Role
from crossdraft.cluster.fronts import Ingress
from crossdraft.cluster.orchestrators import Orchestrator
from crossdraft.cluster.rollout import (
    ALWAYS,
    MAX_CALLS,
    Means,
    Replica,
    Rollout,
    actors,
    changes,
    free_nodes,
    fronts_of,
    is_front,
    kill,
    named_actors,
    running,
    servers,
    services_of,
    starts,
)
from crossdraft.cluster.serve_grpc import PROXY, Elsewhere
from crossdraft.config.api import ConnectionOptions
from crossdraft.config.fields import part_of
from crossdraft.serving.http.connections import LIMITS
from crossdraft.serving.logs import logged

log = logging.getLogger(__name__)
REPLICA = f"SERVE_REPLICA::{APPLICATION}#"  # beginning of the names of Serve's actors
EXTRA_CALLS = 16  # of a replica at once besides its outputs: `models` and health checks
MAX_STREAMS = 4096  # requests of one ingress at once
HEALTH_INTERVAL = 2.0  # seconds between two health checks
HEALTH_SECONDS = 15.0  # for an answer
SCALE_SECONDS = 15.0  # over which numbers of outputs are averaged; Serve hears of them every 10 s
ALL = 100  # percent of replicas that may exist twice while they are replaced
FINISHER = "finisher"  # an actor
PORT_TAKEN = "Failed to bind"  # in the error of a proxy of Serve's; otherwise it has not started in time
DEPLOYING = "deploying"  # an actor, while a `deploy` is under way
POLL_SECONDS = 1.0
BUILDING = Waiting(600.0, say=log.info)  # for the nodes of a cluster that Kubernetes starts
RUNNING, STOPPING = "RUNNING", "STOPPING"  # states of replicas
DEPLOYMENT = ("name", "state", "replicas", "message")
MISSING = ("what", "serving", "configured")
HasRoom = Callable[[Resources], bool]


def deploy(configuration: Configuration, waiting: Waiting | None = None) -> None:
    """Returns once everything serves. What runs already and is unchanged goes on; what differs is replaced.

    Raises:
        NoCapacityError: nodes lack resources.
        NotServedError: something cannot be run with its options, nodes have another crossdraft, or another deployment
            is under way; what ran before goes on.
    """
    with alone():
        _deploy(configuration, waiting or Waiting())


@contextmanager
def alone() -> Iterator[None]:
    """No other deployment begins meanwhile; raises NotServedError if one is under way."""
    try:  # it ends with this process, however that ends
        mark: Any = ray.remote(_Mark).options(name=DEPLOYING, namespace=NAMESPACE, num_cpus=0).remote()
    except ValueError as error:  # the name is taken
        raise NotServedError("another `crossdraft deploy` is under way on this cluster: wait until it ends") from error
    try:
        yield
    finally:
        ray.kill(mark)


class _Mark:
    """An actor that does nothing."""


def _deploy(configuration: Configuration, waiting: Waiting) -> None:
    plan = await_nodes(configuration, places_now(configuration), waiting)
    configuration = with_fronts(configuration, plan)
    until = time.monotonic() + waiting.seconds
    with _serve_started(configuration.http):
        below, above = _begun(configuration, plan, until, waiting.say)
        try:
            _run(configuration, plan, until, waiting.say)
            above.begin()
            above.make_room()
            below.finish()
            above.finish()
        except NotServedError as error:
            raise _undone(error, below, above) from error


def _undone(error: NotServedError, *begun: Rollout) -> NotServedError:
    """The same error, with what serves no more."""
    missing = ", ".join(slot for one in begun for slot in one.undo())
    lost = f"\nmissing now: {missing}; deploy again what can be served" if missing else ""
    return NotServedError(f"{error}{lost}")


def _begun(configuration: Configuration, plan: Placement, until: float, say: Say) -> tuple[Rollout, Rollout]:
    """As `rollouts`, once what Serve's replicas need runs, and they have room; raises NotServedError."""
    start_directory((configuration.metrics_port or 0) if configuration.metrics else 0)
    below, above = rollouts(configuration, plan, until, say)
    try:
        below.begin()
        if not _room_for_serve(plan):
            below.make_room()
    except NotServedError as error:
        raise _undone(error, below) from error
    return below, above


def rollouts(configuration: Configuration, plan: Placement, until: float, say: Say) -> tuple[Rollout, Rollout]:
    """From what runs now: that of the model servers, and that of the gRPC fronts, which must serve at a moment."""
    there, ids = running(say), node_ids()
    at = {one.name: one.node for one in there.values()}
    places = {what: [ids[node] for node in nodes if node in ids] for what, nodes in plan.places.items()}

    def rollout(wanted: Sequence[Replica], front: bool) -> Rollout:
        changed = changes(wanted, [name for name in there if is_front(name) is front])
        nodes = starts(changed, at, places) | at
        return Rollout(changed, Means(nodes, configuration.grace_seconds, until, say))

    return rollout(services_of(configuration), False), rollout(fronts_of(configuration), True)


def places_now(configuration: Configuration) -> dict[str, list[str]]:
    """Nodes of the replicas that run and go on, by kind; Serve's count among them."""
    names = {id: name for name, id in node_ids().items()}
    wanted = (*services_of(configuration), *fronts_of(configuration))
    whats = {one.name: one.what for one in wanted} | {INGRESS: shown(Role.HTTP, "")}
    whats |= {orchestrator_name(one.name): shown(Role.ORCHESTRATOR, one.name) for one in configuration.models}
    found: dict[str, list[str]] = {}
    for one in actors():
        of_serve = one.name.startswith(REPLICA)
        what = whats.get(one.name.removeprefix(REPLICA).rpartition("#")[0] if of_serve else one.name)
        if what and one.node in names and one.state == "ALIVE":
            found.setdefault(what, []).append(names[one.node])
    return found


def _room_for_serve(plan: Placement) -> bool:
    """Whether each of Serve's deployments can have the replicas that it lacks, and one to replace others with."""
    free = free_nodes()
    serves = [need for need in plan.needs if need.spread]
    lacking = ((need, max(1, len(plan.places[need.what]) - len(need.there))) for need in serves)
    return all(taken(need.amounts, free) for need, count in lacking for _ in range(count))


def undeploy() -> None:
    """Ends everything that `deploy` started; Serve, too, if nothing else uses it."""
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()
    kill(named_actors())


def start_directory(metrics_port: int) -> None:
    """Makes sure that the directory runs, with this crossdraft and this `Configuration.metrics_port`."""
    try:
        there: Any = ray.get_actor(DIRECTORY, NAMESPACE)
        if ray.get(there.installed.remote()) != version_of(metrics_port):
            ray.kill(there)
    except ValueError:  # there is none
        pass
    ray.remote(DirectoryActor).options(
        name=DIRECTORY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={HEAD: 0.001},  # with the head the cluster ends anyway
        max_restarts=ALWAYS,
        max_task_retries=ALWAYS,  # all its calls may be repeated
        max_concurrency=MAX_CALLS,
    ).remote(metrics_port)


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
    proxies = PROXY | {LIMITS: json.dumps(vars(part_of(ConnectionOptions, http)))}
    starting = ray.remote(serve.start).options(num_cpus=0, runtime_env={"env_vars": proxies})  # which proxies inherit
    try:
        ray.get(starting.remote(proxy_location="EveryNode", http_options={"host": http.host, "port": http.port}))
    except (RayError, TimeoutError) as error:
        serve.shutdown()
        why = in_short(str(error)) or type(error).__name__
        advice = "choose another port" if PORT_TAKEN in str(error) else "deploy again"
        raise NotServedError(f"Ray Serve cannot listen for HTTP on {http.host}:{http.port}: {why}; {advice}") from error
    try:
        yield
    except ValueError:
        serve.shutdown()
        raise


def _run(configuration: Configuration, plan: Placement, until: float, say: Say) -> None:
    """Returns once Serve runs the application; raises NotServedError, with Serve's reasons."""
    before, told = _state(), time.monotonic()
    target = serve.RunTarget(application(configuration, has_room(), plan), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    while (state := _state()) is not ApplicationStatus.RUNNING:
        failed = state is ApplicationStatus.DEPLOY_FAILED
        if failed or time.monotonic() > until:
            reasons = "; ".join((*_unhealthy(), "" if failed else "the time for it is over"))
            if before is None:
                serve.delete(APPLICATION)
            raise NotServedError(f"orchestrators or the HTTP front cannot be run: {reasons}")
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            say("; ".join(_unhealthy()) or "Ray Serve starts the application")
        time.sleep(POLL_SECONDS)


def _unhealthy() -> Iterator[str]:
    """What Serve says of deployments that are not complete."""
    found = serve.status().applications.get(APPLICATION)
    for name, one in () if found is None else found.deployments.items():
        if one.status.value != "HEALTHY":
            yield f"{name}: {replicas_of(one)[0]} replicas serve; {in_short(one.message) or one.status.value.lower()}"


def has_room() -> HasRoom:
    """Whether a replica with such resources fits beside all that runs now."""
    free = free_nodes()
    return lambda resources: fits(amounts_of(resources), free)


def application(configuration: Configuration, room: HasRoom, plan: Placement) -> Application:
    """The Serve application: the HTTP front as ingress, behind it a deployment of orchestrators for each model.

    Args:
        configuration: what is served.
        room: whether another replica fits: then it is started before the one that it replaces has ended.
        plan: how many replicas may be on one node.
    """
    front = FrontConfig.of(configuration)
    orchestrators = [_orchestrators(model, configuration, room, plan) for model in configuration.models]
    return _ingress(configuration, room, plan).bind(front, configuration.http, *orchestrators)


def _orchestrators(model: ServedService, configuration: Configuration, room: HasRoom, plan: Placement) -> Application:
    config = OrchestratorConfig.of(model, configuration)
    resources, name = model.orchestrator_resources, orchestrator_name(model.name)
    most = plan.most(shown(Role.ORCHESTRATOR, model.name))
    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=model.max_outputs + EXTRA_CALLS,
        ray_actor_options=_actor_options(resources, name, config.digest, most),
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": Elsewhere}),
        **_number(model.orchestrators),
        **_lifecycle(configuration, resources, room),
    )(Orchestrator)
    return _versioned(deployment, config.digest).bind(config)


def _ingress(configuration: Configuration, room: HasRoom, plan: Placement) -> Deployment:
    http, what = configuration.http, shown(Role.HTTP, "")
    alone = replace(http, replicas=1, resources=Resources())
    version = digest_of(FrontConfig.of(configuration).digest, alone)
    deployment = serve.deployment(
        name=INGRESS,
        num_replicas=http.replicas,
        max_ongoing_requests=MAX_STREAMS,
        ray_actor_options=_actor_options(http.resources, INGRESS, version, plan.most(what)),
        **_lifecycle(configuration, http.resources, room),
    )(serve.ingress()(Ingress))
    return _versioned(deployment, version)


def _number(replicas: Scale) -> dict[str, Any]:
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.max}
    scale = {
        "min_replicas": replicas.min,
        "max_replicas": replicas.max,
        "target_ongoing_requests": replicas.outputs,
        "upscale_delay_s": replicas.up_seconds,
        "downscale_delay_s": replicas.down_seconds,
        "look_back_period_s": SCALE_SECONDS,
    }
    return {"autoscaling_config": scale}


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


def _actor_options(resources: Resources, name: str, version: str, most: float) -> dict[str, object]:
    """Of replicas of which a node takes at most so many.

    Serve's own `max_replicas_per_node` counts old and new replicas together, so that a new one could not start beside
    the one that it replaces.
    """
    share = {f"{IMPLICIT_RESOURCE}{name}-{version}-{most:g}": 1 / most}
    return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "resources": dict(resources.custom) | share}


def in_short(text: str) -> str:
    """The first and the last line of what Ray says, without the traceback between them."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys((*lines[:1], *lines[-1:])))


def build(args: Mapping[str, object]) -> Application:
    """The application, for Serve to build from `import_path` and `args`, as KubeRay makes it do.

    Starts the model servers. What they replace ends once Serve runs the application, for which an actor waits.

    Raises:
        ConfigurationError: the configuration cannot be used.
        NoCapacityError: nodes lack resources.
        NotServedError: a service cannot be run with its options; what ran before goes on.
    """
    configuration = parse(yaml.safe_dump(dict(args)), "args")
    with logged(configuration.log_format):
        plan = await_nodes(configuration, places_now(configuration), BUILDING)
        configuration = with_fronts(configuration, plan)
        _begun(configuration, plan, time.monotonic() + BUILDING.seconds, log.info)
    actor: Any = ray.remote(Finisher)
    finisher = actor.options(name=FINISHER, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0)
    finisher.remote().finish.remote(configuration, replace(plan, places={}))
    return application(configuration, has_room(), plan)


class Finisher:
    """An actor that ends what an application does not need any more, one call at a time."""

    def finish(self, configuration: Configuration, plan: Placement) -> None:
        """Waits until Serve runs the application; if Serve fails, everything stays as it is."""
        with logged(configuration.log_format):
            while (state := _state()) not in (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOY_FAILED):
                time.sleep(POLL_SECONDS)
            if state is ApplicationStatus.DEPLOY_FAILED:
                log.error("Serve cannot run the application; what it does not need goes on")
                return
            below, above = rollouts(configuration, plan, time.monotonic() + BUILDING.seconds, log.info)
            try:
                for one in (above, below):
                    one.begin()
                    one.finish()
            except NotServedError as error:
                log.error("%s", _undone(error, above, below))


def _state() -> ApplicationStatus | None:
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else found.status


@dataclass(frozen=True)
class Deployed:
    """What runs now."""

    processes: tuple[Entry, ...]  # in the directory
    state: str  # Serve's, of the application
    deployments: tuple[tuple[str, str, int, str], ...]  # name, state, running replicas, Serve's message
    loads: Mapping[str, Load]  # of processes, by their ids
    restarts: Mapping[str, int]  # by id; Serve does not restart processes, but starts others
    missing: tuple[tuple[str, int, int], ...] = ()  # kinds of which not all serve: name, serving, configured

    def plain(self) -> dict[str, object]:
        """For JSON."""
        deployments = [dict(zip(DEPLOYMENT, one, strict=True)) for one in self.deployments]
        processes = [
            asdict(one)
            | {"role": one.role.value, "restarts": self.restarts.get(one.id, 0)}
            | asdict(self.loads.get(one.id, Load()))
            for one in self.processes
        ]
        missing = [dict(zip(MISSING, one, strict=True)) for one in self.missing]
        return {"processes": processes, "state": self.state, "deployments": deployments, "missing": missing}


def deployed() -> Deployed:
    """Raises ValueError if nothing is deployed."""
    directory: Any = ray.get_actor(DIRECTORY, NAMESPACE)
    entries: tuple[Entry, ...]
    (_, entries), loads = ray.get([directory.entries.remote(), directory.loads.remote()])
    restarts = {one.id: one.restarts for one in actors()}
    found = serve.status().applications.get(APPLICATION)
    state, has = ("not started", {}) if found is None else (found.status.value, found.deployments)
    missing = tuple(_missing({one.id for one in entries}, has))
    deployments = tuple(
        (name, one.status.value, replicas_of(one)[0], in_short(one.message)) for name, one in has.items()
    )
    return Deployed(tuple(entries), state, deployments, loads, restarts, missing)


def _missing(
    serving: Collection[str], deployments: Mapping[str, DeploymentStatusOverview]
) -> Iterator[tuple[str, int, int]]:
    """As `Deployed.missing`; `serving` has ids of actors in the directory."""
    kinds: dict[str, list[bool]] = {}
    for one in servers():
        kinds.setdefault(slot_of(one.name).rpartition("/")[0].replace("/", " "), []).append(one.id in serving)
    counts = {kind: (sum(serve), len(serve)) for kind, serve in kinds.items()}
    counts |= {name: replicas_of(one) for name, one in deployments.items()}
    yield from ((what, serve, wanted) for what, (serve, wanted) in sorted(counts.items()) if serve < wanted)


def replicas_of(deployment: DeploymentStatusOverview) -> tuple[int, int]:
    """How many serve, and how many are to: those that Serve ends count as neither."""
    states = deployment.replica_states.items()
    serving = sum(count for state, count in states if state == RUNNING)
    return serving, sum(count for state, count in states if state != STOPPING)
