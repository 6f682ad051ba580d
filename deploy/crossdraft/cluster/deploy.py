"""Deploys a configuration on a running Ray cluster, as one application of Ray Serve's: a deployment for each kind of
process, which are targets, drafters, orchestrators, fronts, and the directory.

Serve starts, checks, scales, replaces and ends all of them, whether `crossdraft deploy` or `serve deploy` brings them.
It replaces deployments in no order, keeps what ran where a new version does not start, and leaves the other ones as
they are then. What `crossdraft deploy` adds: it seeks room, files and ports on the nodes first and says what is
missing; where other models are to be served, it starts these before it ends the ones before; and if something does not
start, it brings back what was deployed.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import inf
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
    CPUS,
    GPUS,
    HEAD,
    PROGRESS_SECONDS,
    NotServedError,
    Placement,
    Say,
    Waiting,
    all_nodes,
    amounts_of,
    asked,
    await_nodes,
    needs_of,
    placed,
    shown,
    taken,
    with_fronts,
)
from crossdraft.cluster.config import (
    APPLICATION,
    DIRECTORY,
    NAMESPACE,
    WHOLE,
    Configuration,
    ConfigurationError,
    FrontConfig,
    Http,
    OrchestratorConfig,
    Resources,
    Scale,
    ServedService,
    deployment_name,
    digest_of,
    parse,
    version_of,
)
from crossdraft.cluster.directory import DirectoryOwner, Entry, Load, Role
from crossdraft.cluster.fronts import GrpcFrontConfig, Ingress
from crossdraft.cluster.orchestrators import Orchestrator
from crossdraft.cluster.serve_grpc import PROXY, Elsewhere
from crossdraft.cluster.servers import ModelServerConfig, ServerConfig, ServerReplica, by_outputs
from crossdraft.config.api import ConnectionOptions
from crossdraft.config.fields import part_of
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.server import Listening
from crossdraft.serving.http.connections import LIMITS
from crossdraft.serving.logs import logged

log = logging.getLogger(__name__)
IMPLICIT_RESOURCE = "node:__internal_implicit_resource_"  # of resources beginning so every node has 1
EXTRA_CALLS = 16  # of a replica at once besides its outputs: `models` and health checks
MAX_STREAMS = 4096  # requests of one ingress at once
HEALTH_INTERVAL = 2.0  # seconds between two health checks
HEALTH_SECONDS = 15.0  # for an answer
DRAINED_INTERVAL = 0.1  # seconds between two looks whether a replica that ends has requests of Serve's
BEYOND_GRACE = 15.0  # seconds after the grace period until a replica that has not ended is killed
SCALE_SECONDS = 15.0  # over which numbers of outputs are averaged; Serve hears of them every 10 s
ALL = 100  # percent of replicas that may exist twice while they are replaced
ONLY = 0.6  # of a resource of which a node has 1
FAILING = "failed to start"  # in Serve's message
PORT_TAKEN = "Failed to bind"  # in the error of a proxy of Serve's; otherwise it has not started in time
DEPLOYING = "deploying"  # an actor, while a `deploy` is under way
POLL_SECONDS = 0.5
UNDO_SECONDS = 600.0  # for what is started again after a deployment has failed
BUILDING = Waiting(600.0, say=log.info)  # for the nodes of a cluster that Kubernetes starts
RUNNING, STOPPING = "RUNNING", "STOPPING"  # states of replicas
DEPLOYMENT = ("name", "state", "replicas", "message")
MISSING = ("what", "serving", "configured")
Versions = Mapping[str, str]  # of deployments, by name


@dataclass(frozen=True)
class Hosted:
    """One deployment of Serve's, of replicas that are all alike."""

    name: str
    version: str  # another one, and its replicas are replaced
    kind: Any  # class of its replicas
    given: tuple[object, ...]  # to them
    replicas: Scale
    resources: Resources  # of each process of a replica
    ranks: int = 1  # processes of a replica
    most: float = inf  # replicas on one node
    options: Mapping[str, Any] = field(default_factory=dict)  # more of Serve's
    what: str = ""  # as in a placement


Hostings = tuple[Hosted, ...]  # of an application: the directory first, the HTTP front last
DIRECTORIES, FRONTS = deployment_name(DIRECTORY), (deployment_name(Role.HTTP), deployment_name(Role.GRPC))


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
    plan = await_nodes(configuration, waiting)
    configuration = with_fronts(configuration, plan)
    wanted, before, until = hosted(configuration, plan), deployed_before(), time.monotonic() + waiting.seconds
    _check(wanted, versions_of(before), plan)
    with _serve_started(configuration.http):
        nothing = _state() is None
        try:
            for step in steps(wanted, before, _free()):
                _run(step, before, until, waiting.say)
        except NotServedError as error:
            if nothing:
                serve.delete(APPLICATION)
            raise (_undone(error, wanted, before, waiting.say) if before else error) from error


def _undone(error: NotServedError, wanted: Hostings, before: Hostings, say: Say) -> NotServedError:
    """The same error, once what was deployed before serves again; or with what does not."""
    say(f"{error}\nwhat was deployed before is brought back")
    try:
        _run(before, wanted, time.monotonic() + UNDO_SECONDS, say)
    except NotServedError as missing:
        return NotServedError(f"{error}\nmissing now: {missing}; deploy again what can be served")
    return error


def _check(wanted: Hostings, before: Versions, plan: Placement) -> None:
    """Asks the nodes for models, files and ports of what is new; raises NotServedError."""
    checks: dict[str, list[tuple[str, ServerConfig]]] = {}
    for one in wanted:
        for config in one.given if before.get(one.name) != one.version else ():
            if isinstance(config, ServerConfig):
                for node in {*plan.places[one.what]}:
                    checks.setdefault(node, []).append((one.what, config))
    faults = asked(_faults, {node: (node, of) for node, of in checks.items()})
    if any(faults.values()):
        raise NotServedError("\n".join(filter(None, faults.values())))


def _faults(node: str, checks: Sequence[tuple[str, ServerConfig]]) -> str:
    """Runs on a node, in a task."""
    said = []
    for what, config in checks:
        try:
            config.check()
        except (ValueError, CannotListen) as error:
            said.append(f"{what} cannot be served on node {node}: {error}")
    return "\n".join(said)


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
        Listening(http.host, http.port).check_free()
    except CannotListen as error:
        raise NotServedError(f"Ray Serve cannot listen for HTTP: {error}; choose another port") from error
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


def _run(wanted: Hostings, before: Hostings, until: float, say: Say) -> None:
    """Returns once Serve runs these; raises NotServedError, with Serve's reasons."""
    target = serve.RunTarget(application(wanted, before, _free()), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    said, told = "", time.monotonic()
    while (state := _state()) is not ApplicationStatus.RUNNING:
        failed, reasons = state is ApplicationStatus.DEPLOY_FAILED, "; ".join(_unhealthy())
        if failed or time.monotonic() > until:
            raise NotServedError(f"Ray Serve cannot run all: {reasons}{'' if failed else '; the time for it is over'}")
        if time.monotonic() - told > PROGRESS_SECONDS or (FAILING in reasons and reasons != said):
            said, told = reasons, time.monotonic()
            say(reasons or "Ray Serve starts the application")
        time.sleep(POLL_SECONDS)


def _unhealthy() -> Iterator[str]:
    """What Serve says of deployments that are not complete."""
    found = serve.status().applications.get(APPLICATION)
    for name, one in () if found is None else found.deployments.items():
        if one.status.value != "HEALTHY":
            serving, wanted = replicas_of(one)
            yield f"{name}: {serving} of {wanted} serve; {in_short(one.message) or one.status.value.lower()}"


def _state() -> ApplicationStatus | None:
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else found.status


def undeploy() -> None:
    """Ends everything that `deploy` started; Serve, too, if nothing else uses it."""
    if _state() is not None:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()


def hosted(configuration: Configuration, plan: Placement) -> Hostings:
    """All deployments of a configuration that names the number of its fronts.

    Args:
        configuration: what is served.
        plan: how many replicas may be on one node.
    """
    found = tuple(_hosted(configuration, plan))
    port = (configuration.metrics_port or 0) if configuration.metrics else 0
    state = {"configuration": WHOLE.dump_json(configuration).decode(), "versions": versions_of(found)}
    head = Resources(cpus=0, custom={HEAD: ONLY})  # with the head the cluster ends anyway
    options = {"user_config": state}
    return (Hosted(DIRECTORIES, version_of(port), DirectoryOwner, (port,), Scale(max=1), head, options=options), *found)


def _hosted(configuration: Configuration, plan: Placement) -> Iterator[Hosted]:
    for model in configuration.models:
        for service in (model.target, *model.drafters):
            yield _server(ModelServerConfig.of(model.name, service, configuration))
        yield _orchestrators(model, configuration, plan)
    if configuration.grpc is not None:
        yield _server(GrpcFrontConfig.of(configuration.grpc, configuration))
    front, http, what = FrontConfig.of(configuration), configuration.http, shown(Role.HTTP, "")
    alone, number = replace(http, replicas=1, resources=Resources()), http.replicas or 1
    yield Hosted(
        deployment_name(Role.HTTP),
        digest_of(front.digest, alone),
        serve.ingress()(Ingress),
        (front, http),
        Scale(min=number, max=number),
        http.resources,
        most=plan.most(what),
        options={"max_ongoing_requests": MAX_STREAMS, "graceful_shutdown_timeout_s": configuration.grace_seconds},
        what=what,
    )


def _server(config: ServerConfig) -> Hosted:
    fixed = (
        config.replicas.min == config.replicas.max
    )  # replicas that have begun so never say how many outputs they have
    return Hosted(
        deployment_name(config.role, config.model, config.name),
        config.digest if fixed else digest_of(config.digest, fixed),
        ServerReplica,
        (config,),
        config.replicas,
        config.resources,
        config.ranks,
        1 if config.port else inf,
        {"graceful_shutdown_timeout_s": config.grace_seconds + BEYOND_GRACE},
        shown(config.role, config.model, config.name),
    )


def _orchestrators(model: ServedService, configuration: Configuration, plan: Placement) -> Hosted:
    config, what = OrchestratorConfig.of(model, configuration), shown(Role.ORCHESTRATOR, model.name)
    return Hosted(
        deployment_name(Role.ORCHESTRATOR, model.name),
        config.digest,
        Orchestrator,
        (config,),
        model.orchestrators,
        model.orchestrator_resources,
        most=plan.most(what),
        options={
            "max_ongoing_requests": model.max_outputs + EXTRA_CALLS,
            "request_router_config": RequestRouterConfig.model_validate({"request_router_class": Elsewhere}),
            "graceful_shutdown_timeout_s": configuration.grace_seconds,
        },
        what=what,
    )


def versions_of(found: Hostings) -> dict[str, str]:
    """By name."""
    return {one.name: one.version for one in found}


def deployed_before() -> Hostings:
    """What Serve has been told to run; nothing where it has not, or what an earlier crossdraft told it is not valid."""
    client = _get_global_client(raise_if_no_controller_running=False)
    applications = {} if client is None else client.get_serve_details()["applications"]
    deployments = applications.get(APPLICATION, {}).get("deployments", {})
    if DIRECTORIES not in deployments:
        return ()
    state = deployments[DIRECTORIES]["deployment_config"]["user_config"]
    try:
        configuration = parse(state["configuration"])
    except ConfigurationError:
        return ()
    found = hosted(configuration, placed(needs_of(configuration), all_nodes()))
    return tuple(replace(one, version=state["versions"].get(one.name, one.version)) for one in found)


def steps(wanted: Hostings, before: Hostings, free: Mapping[str, dict[str, float]]) -> tuple[Hostings, ...]:
    """What Serve is to run, one after the other.

    What serves new models begins beside all that ran before, if it has room in `free` (changed); then fronts change,
    and then what they do not ask for any more ends.
    """
    names = versions_of(before)
    new = [one for one in wanted if one.name not in names and one.name not in FRONTS]
    room = all(taken(amounts_of(one.resources), free, one.ranks * one.replicas.max) for one in new)
    if not (before and new and room):
        return (wanted,)
    both = {one.name: one for one in (*before[:-1], *wanted)}
    first = both | {one.name: one for one in before if one.name in FRONTS}
    return tuple(first.values()), tuple(both.values()), wanted


def _free() -> dict[str, dict[str, float]]:
    """Free resources of each node."""
    has = ray._private.state.available_resources_per_node()  # no public API has it; Serve uses this one, too
    return {node: dict(amounts) for node, amounts in has.items()}


def application(wanted: Hostings, before: Hostings, free: Mapping[str, dict[str, float]]) -> Application:
    """For Serve, with the HTTP front as ingress.

    Where replicas have room in `free` (changed) beside those that they replace, they start before these end. Serve ends
    none while there are fewer than wanted: if there are to be more of them, all these must have room, too.
    """
    there, versions = {one.name: one.replicas.max for one in before}, versions_of(before)
    more = {one.name: 1 + max(0, one.replicas.max - there.get(one.name, 0)) for one in wanted}
    new_first = sorted(wanted, key=lambda one: versions.get(one.name) == one.version)
    beside = {one.name: taken(amounts_of(one.resources), free, one.ranks * more[one.name]) for one in new_first}
    *others, front = ((_deployment(one, beside[one.name], more[one.name]), one.given) for one in wanted)
    bound = [deployment.bind(*given) for deployment, given in others]
    return front[0].bind(*front[1], *bound)


def _deployment(one: Hosted, beside: bool, more: int) -> Deployment:
    """`beside`: new replicas start before old ones end; else so many may be missing meanwhile."""
    amounts = amounts_of(one.resources)
    custom = {name: amount for name, amount in amounts.items() if name not in (CPUS, GPUS)}
    if one.most < inf:
        # Serve's own `max_replicas_per_node` counts old and new replicas together, so that a new one could not start
        # beside the one that it replaces.
        custom[f"{IMPLICIT_RESOURCE}{one.name}-{one.version}-{one.most:g}"] = 1 / one.most
    takes = {"num_cpus": one.resources.cpus, "num_gpus": one.resources.gpus, "resources": custom}
    group: dict[str, Any] = {"placement_group_bundles": [amounts] * one.ranks, "placement_group_strategy": "PACK"}
    deployment = serve.deployment(
        name=one.name,
        ray_actor_options=takes,
        health_check_period_s=HEALTH_INTERVAL,
        health_check_timeout_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=DRAINED_INTERVAL,
        max_surge_percent=ALL if beside else 0,
        rolling_update_percentage=min(1.0, more / one.replicas.max),
        **(group if one.ranks > 1 else {}),
        **_number(one.replicas, isinstance(one.given[0], ServerConfig)),
        **one.options,
    )(one.kind)
    # Serve replaces replicas when the version changes, and without one at each deployment.
    return deployment.options(version=one.version, _internal=True)


def _number(replicas: Scale, sessions: bool) -> dict[str, Any]:
    """`sessions`: Serve does not see them; replicas say how many outputs they have."""
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
    return {"autoscaling_config": scale | ({"policy": {"policy_function": by_outputs}} if sessions else {})}


def in_short(text: str) -> str:
    """The first and the last line of what Ray says, without the traceback between them."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys((*lines[:1], *lines[-1:])))


def build(args: Mapping[str, object]) -> Application:
    """The application, for Serve to build from `import_path` and `args`, as `serve deploy` and KubeRay make it do.

    Raises:
        ConfigurationError: the configuration cannot be used.
        NoCapacityError: nodes lack resources.
        NotServedError: nodes have another crossdraft.
    """
    configuration = parse(yaml.safe_dump(dict(args)), "args")
    with logged(configuration.log_format):
        plan = await_nodes(configuration, BUILDING)
        return application(hosted(with_fronts(configuration, plan), plan), deployed_before(), _free())


@dataclass(frozen=True)
class Deployed:
    """What runs now."""

    processes: tuple[Entry, ...]  # in the directory
    state: str  # Serve's, of the application
    deployments: tuple[tuple[str, str, int, str], ...]  # name, state, running replicas, Serve's message
    loads: Mapping[str, Load]  # of processes, by their ids
    missing: tuple[tuple[str, int, int], ...] = ()  # kinds of which not all serve: name, serving, configured

    def plain(self) -> dict[str, object]:
        """For JSON."""
        deployments = [dict(zip(DEPLOYMENT, one, strict=True)) for one in self.deployments]
        processes = [
            asdict(one) | {"role": one.role.value} | asdict(self.loads.get(one.id, Load())) for one in self.processes
        ]
        missing = [dict(zip(MISSING, one, strict=True)) for one in self.missing]
        return {"processes": processes, "state": self.state, "deployments": deployments, "missing": missing}


def deployed() -> Deployed:
    """Raises ValueError if nothing is deployed."""
    directory: Any = ray.get_actor(DIRECTORY, NAMESPACE)
    entries: tuple[Entry, ...]
    (_, entries), loads = ray.get([directory.entries.remote(), directory.loads.remote()])
    found = serve.status().applications.get(APPLICATION)
    state, has = ("not started", {}) if found is None else (found.status.value, found.deployments)
    counts = sorted((name, *replicas_of(one)) for name, one in has.items())
    missing = tuple((name, serving, wanted) for name, serving, wanted in counts if serving < wanted)
    deployments = tuple(
        (name, one.status.value, replicas_of(one)[0], in_short(one.message)) for name, one in has.items()
    )
    return Deployed(tuple(entries), state, deployments, loads, missing)


def replicas_of(deployment: DeploymentStatusOverview) -> tuple[int, int]:
    """How many serve, and how many are to: those that Serve ends count as neither."""
    states = deployment.replica_states.items()
    serving = sum(count for state, count in states if state == RUNNING)
    return serving, sum(count for state, count in states if state != STOPPING)
