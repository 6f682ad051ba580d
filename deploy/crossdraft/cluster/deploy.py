"""Deploys a configuration on a running Ray cluster, as one application of Ray Serve's: a deployment for each kind of
process, which are targets, drafters, orchestrators, fronts, and the directory.

Serve starts, checks, scales, replaces and ends all of them, and leaves the rest as it is where something does not
start. What `crossdraft deploy` adds: it seeks room, files and ports on the nodes first and says what is missing; it
starts other models before it ends those before; and if something does not start, it brings back what was deployed.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from secrets import token_hex
from typing import Any

import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _check_cached_client_alive, _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from crossdraft.cluster import capacity
from crossdraft.cluster.capacity import Free, NotServedError, Say, Waiting, take, waited
from crossdraft.cluster.config import CPUS, GPUS, ConfigurationError, Process, parse, processes_of
from crossdraft.cluster.directory import DirectoryOwner
from crossdraft.cluster.fronts import GrpcFront, Ingress
from crossdraft.cluster.orchestrators import Orchestrator
from crossdraft.cluster.serve_grpc import PROXY, Elsewhere
from crossdraft.cluster.servers import ModelReplica, by_outputs, faults_of
from crossdraft.cluster.status import APPLICATION, NAMESPACE, Mark, Role, application_status, hosted, in_short
from crossdraft.config.api import ConnectionOptions
from crossdraft.config.cluster import Configuration, Http, Scale, ServedService, Service
from crossdraft.config.fields import part_of
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.logs import logged
from crossdraft.rpc.server import Listening
from crossdraft.serving.http.connections import LIMITS

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
ASKING = "asking the nodes whether they have room, this crossdraft, models, files and free ports"
DEPLOYING = "deploying"  # an actor, while a `deploy` is under way
UNDO_SECONDS = 600.0  # for what is started again after a deployment has failed
# For nodes: on Kubernetes Serve begins with the first pod. Serve says nothing meanwhile.
BUILDING = Waiting(1800.0 if "KUBERNETES_SERVICE_HOST" in os.environ else 60.0, say=log.info)
HEALTHY = "HEALTHY"  # a state of a deployment
Processes = Sequence[Process]  # of an application: the directory first, the HTTP front last
FRONTS, SPREAD = (Role.HTTP, Role.GRPC), (Role.HTTP, Role.ORCHESTRATOR)
KINDS: Mapping[Role, Any] = {
    Role.TARGET: ModelReplica,
    Role.DRAFTER: ModelReplica,
    Role.ORCHESTRATOR: Orchestrator,
    Role.GRPC: GrpcFront,
    Role.HTTP: serve.ingress()(Ingress),
    Role.DIRECTORY: DirectoryOwner,
}


def deploy(configuration: Configuration, waiting: Waiting) -> None:
    """Returns once everything serves. What runs already and is unchanged goes on; what differs is replaced. Raises
    NotServedError: nodes lack resources or have another crossdraft, something cannot be run with its options, or
    another deployment is under way; what ran before goes on."""
    with alone():
        wanted, before = _checked(configuration, waiting)
        until = time.monotonic() + waiting.seconds
        _start_serve(configuration.http, waiting.say)
        nothing = application_status() is None
        try:
            for step in steps(wanted, before, _free()):
                _run(step, before, until, waiting.say)
        except NotServedError as error:
            if nothing:
                undeploy()
            raise (_undone(error, wanted, before, waiting.say) if before else error) from error


@contextmanager
def alone() -> Iterator[None]:
    """No other deployment begins meanwhile; raises NotServedError if one is under way."""
    try:  # it ends with this process, however that ends
        mark: Any = ray.remote(Mark).options(name=DEPLOYING, namespace=NAMESPACE, num_cpus=0).remote()
    except ValueError as error:  # the name is taken
        raise NotServedError("another `crossdraft deploy` is under way on this cluster: wait until it ends") from error
    try:
        yield
    finally:
        ray.kill(mark)


def _checked(configuration: Configuration, waiting: Waiting) -> tuple[Processes, Processes]:
    """What is to be served, once nodes have all that it lacks; and what Serve runs now. Raises NotServedError."""
    waiting.say(ASKING)
    sought = [process for process in processes_of(configuration) if process.role is not Role.DIRECTORY]
    plan = capacity.await_nodes(sought, waiting)
    wanted, before, found = replicas_of(configuration, plan), deployed_before(), application_status()
    states = {} if found is None else {name: deployment.status.value for name, deployment in found.deployments.items()}
    versions = versions_of([process for process in before if states.get(process.deployment) == HEALTHY])
    checks: dict[str, list[Process]] = {}
    for process in wanted:
        if process.role is not Role.DIRECTORY and process.version != versions.get(process.deployment):
            for node in {*plan.places[process.what]}:
                checks.setdefault(node, []).append(process)
    faults = capacity.asked(faults_of, {node: (node, of) for node, of in checks.items()})
    if any(faults.values()):
        raise NotServedError("\n".join(filter(None, faults.values())))
    return wanted, before


def _undone(error: NotServedError, wanted: Processes, before: Processes, say: Say) -> NotServedError:
    """The same error, once what was deployed before serves again; or with what does not."""
    say(f"{error}\nwhat was deployed before is brought back")
    try:
        _run(before, wanted, time.monotonic() + UNDO_SECONDS, say)
    except NotServedError as missing:
        return NotServedError(f"{error}\nmissing now: {missing}; deploy again what can be served")
    return error


def _start_serve(http: Http, say: Say) -> None:
    """Runs Serve with its proxies at this address, unless it runs there already; raises NotServedError."""
    _check_cached_client_alive()  # forgets a Serve instance that another process has ended
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        has = client.http_config
        if (has.host, has.port) != (http.host, http.port):
            raise NotServedError(
                f"Serve listens at {has.host}:{has.port} and cannot be moved to {http.host}:{http.port} "
                "while it runs: use that address, or undeploy first"
            )
        return
    try:
        Listening(http.host, http.port).check_free()
    except CannotListen as error:
        raise NotServedError(f"Ray Serve cannot listen for HTTP: {error}; choose another port") from error
    say("starting Ray Serve")
    proxies = PROXY | {LIMITS: json.dumps(vars(part_of(ConnectionOptions, http)))}
    starting = ray.remote(serve.start).options(num_cpus=0, runtime_env={"env_vars": proxies})  # which proxies inherit
    try:
        ray.get(starting.remote(proxy_location="EveryNode", http_options={"host": http.host, "port": http.port}))
    except (RayError, TimeoutError) as error:
        serve.shutdown()
        why = in_short(str(error)) or type(error).__name__
        raise NotServedError(f"Ray Serve cannot listen for HTTP on {http.host}:{http.port}: {why}") from error


def _run(wanted: Processes, before: Processes, until: float, say: Say) -> None:
    """Returns once Serve runs these; raises NotServedError, with Serve's reasons."""
    target = serve.RunTarget(application(wanted, before, _free()), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)

    def missing() -> str:
        found = application_status()
        if found is None or found.status is ApplicationStatus.RUNNING:
            return "" if found else "Ray Serve starts the application"
        starting = [hosted(name, deployment) for name, deployment in found.deployments.items()]
        reasons = [
            f"{deployment.name}: {deployment.progress}; {deployment.message or deployment.state.lower()}"
            for deployment in starting
            if deployment.state != HEALTHY
        ]
        text = "\n".join(reasons) or in_short(found.message) or "Ray Serve starts the application"
        if found.status is ApplicationStatus.DEPLOY_FAILED:
            raise NotServedError(f"Ray Serve cannot run all:\n{text}")
        return text

    if late := waited(missing, lambda: until, lambda text: say(f"waiting for Ray Serve:\n{text}")):
        raise NotServedError(f"Ray Serve cannot run all, and the time for it is over:\n{late}")


def undeploy() -> None:
    """Ends everything that `deploy` started; Serve, too, if nothing else uses it."""
    if application_status() is not None:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()


def replicas_of(configuration: Configuration, plan: capacity.Placement) -> Processes:
    """All processes: how many fronts there is room for, and how many of what a node takes, also if others are lost."""
    found = []
    for process in processes_of(configuration):
        if process.role in FRONTS:
            number = len(plan.places[process.what])
            process = replace(process, replicas=Scale(min=number, max=number))
        found.append(replace(process, most=plan.most(process.what)) if process.role in SPREAD else process)
    return found


def versions_of(found: Processes) -> dict[str, str]:
    """By deployment."""
    return {process.deployment: process.version for process in found}


def deployed_before() -> Processes:
    """What Serve has been told to run, the HTTP front last; nothing if by a crossdraft with other options."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return ()
    # Asked of the controller: the status of an application lists no deployments while Serve builds it, or after that
    # failed, although they run.
    told = ray.get(client._controller.list_deployments_internal.remote())
    infos = [info for id, (info, _) in told.items() if id.app_name == APPLICATION]
    try:
        found = [replace(info.replica_config.init_args[0], version=info.version) for info in infos]
    except (AttributeError, ImportError, TypeError):
        return ()
    return sorted(found, key=lambda process: process.role is Role.HTTP)


def steps(wanted: Processes, before: Processes, free: Free) -> tuple[Processes, ...]:
    """What Serve is to run, one after the other.

    If there is room in `free` (changed), new models begin beside all before; then fronts change; then the others end.
    """
    names = versions_of(before)
    new = [process for process in wanted if process.deployment not in names and process.role not in FRONTS]
    room = all(take(process.amounts, free, process.count) for process in new)
    if not (before and new and room):
        return (wanted,)
    both = {process.deployment: process for process in (*before[:-1], *wanted)}
    first = both | {process.deployment: process for process in before if process.role in FRONTS}
    return tuple(first.values()), tuple(both.values()), wanted


def _free() -> Free:
    """Free resources of each node."""
    has = ray._private.state.available_resources_per_node()  # no public API has it; Serve uses this one, too
    return {node: dict(amounts) for node, amounts in has.items()}


def application(wanted: Processes, before: Processes, free: Free) -> Application:
    """For Serve, with the HTTP front as ingress.

    Where replicas have room in `free` (changed) beside those that they replace, they start before these end. Serve ends
    none while there are fewer than wanted: if there are to be more of them, all these must have room, too. So must all
    of those of which a node takes only some, as it is not Serve's choice then which one makes room for which.
    """
    there, versions = {process.deployment: process.replicas.max for process in before}, versions_of(before)
    more = {
        process.deployment: 1 + max(0, process.replicas.max - there.get(process.deployment, 0)) for process in wanted
    }
    beside = {}
    # What is new first.
    for process in sorted(wanted, key=lambda process: versions.get(process.deployment) == process.version):
        times = process.replicas.max if process.most < inf else more[process.deployment]
        beside[process.deployment] = take(process.amounts, free, process.ranks * times, process.most)
    *others, front = (_deployment(process, beside[process.deployment], more[process.deployment]) for process in wanted)
    bound = [deployment.bind(process) for deployment, process in zip(others, wanted, strict=False)]
    return front.bind(wanted[-1], *bound)


def _deployment(process: Process, beside: bool, more: int) -> Deployment:
    """`beside`: new replicas start before old ones end; else so many may be missing meanwhile."""
    custom = {name: amount for name, amount in process.amounts.items() if name not in (CPUS, GPUS)}
    if process.most < inf:
        # By Serve's `max_replicas_per_node` a new replica could not start beside the one that it replaces.
        custom[f"{IMPLICIT_RESOURCE}{process.deployment}-{process.version}-{process.most:g}"] = 1 / process.most
    takes = {"num_cpus": process.resources.cpus, "num_gpus": process.resources.gpus, "resources": custom}
    bundles = [process.amounts] * process.ranks
    group: dict[str, Any] = {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    deployment = serve.deployment(
        name=process.deployment,
        ray_actor_options=takes,
        health_check_period_s=HEALTH_INTERVAL,
        health_check_timeout_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=DRAINED_INTERVAL,
        max_surge_percent=ALL if beside else 0,
        rolling_update_percentage=min(1.0, more / process.replicas.max),
        **(group if process.ranks > 1 else {}),
        **_number(process.replicas, isinstance(process.own, Service)),
        **_options(process),
    )(KINDS[process.role])
    # Serve replaces replicas when the version changes, and without one at each deployment.
    return deployment.options(version=process.version, _internal=True)


def _options(process: Process) -> dict[str, Any]:
    """More of Serve's: how many calls each replica takes at once, and how long it may take to end."""
    options: dict[str, Any] = {"graceful_shutdown_timeout_s": process.grace_seconds}
    if isinstance(process.own, ServedService):
        options["max_ongoing_requests"] = process.own.max_outputs + EXTRA_CALLS
        options["request_router_config"] = RequestRouterConfig.model_validate({"request_router_class": Elsewhere})
    elif process.role is Role.HTTP:
        options["max_ongoing_requests"] = MAX_STREAMS
    else:  # it ends by itself
        options["graceful_shutdown_timeout_s"] += BEYOND_GRACE
    return options


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


def build(args: Mapping[str, object]) -> Application:
    """The application, for Serve to build from `import_path` and `args`, as `serve deploy` and KubeRay make it do.
    Raises RayServeException, whose text Serve shows at once; after any other error it would try three times more, and
    show all that led to it."""
    try:
        configuration = parse(yaml.safe_dump(dict(args)), "")
        with logged(configuration.log_format):
            wanted, before = _checked(configuration, BUILDING)
            # Serve replaces all: under a version that has not changed the old ones have the places of their nodes.
            new = f"-{token_hex(4)}"
            return application([replace(process, version=process.version + new) for process in wanted], before, _free())
    except (ConfigurationError, NotServedError) as error:
        raise RayServeException(str(error)) from error
