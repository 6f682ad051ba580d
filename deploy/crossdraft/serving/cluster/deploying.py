"""Brings a configuration onto a running Ray cluster: services as detached actors, fronts and orchestrators by Serve."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray import serve
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.serve.context import _get_global_client

from crossdraft.serving.cluster.application import Room, application
from crossdraft.serving.cluster.directing import DirectoryActor
from crossdraft.serving.cluster.naming import APPLICATION, DIRECTORY, NAMESPACE
from crossdraft.serving.cluster.replicas import changes, fronts_of, is_front, services_of
from crossdraft.serving.cluster.rolling import ALWAYS, MOST_CALLS, NotServedError, Rollout, Say, free_nodes, running
from crossdraft.serving.cluster.room import Nodes, amounts_of, faults_of, fits, needs_of
from crossdraft.serving.configuration import Configuration, Http

__all__ = ["NoRoomError", "NotServedError", "Waiting", "deploy", "undeploy"]

HEAD = {"node:__internal_head__": 0.001}  # Ray's own resource: the cluster ends with its head node anyway
ASKED_EVERY = 1.0  # seconds, while nodes are waited for


class NoRoomError(ValueError):
    """No node has what the configuration wants; the text says what is missing."""


@dataclass(frozen=True)
class Waiting:
    """For what, and for how long."""

    node_seconds: float = 0.0  # for nodes that are being started
    say: Say = print  # where progress is told


def deploy(configuration: Configuration, waiting: Waiting | None = None) -> None:
    """Returns once everything serves. What runs already and is the same goes on; what differs is replaced.

    Raises:
        NoRoomError: nodes lack resources.
        NotServedError: something cannot be run with its options; what ran before goes on.
    """
    waiting = waiting or Waiting()
    _await_nodes(configuration, waiting)
    with _serve_begun(configuration.http):
        begin_directory()
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
    """Of services, and of fronts that are not Serve's; from what runs now."""
    there, grace = running(), configuration.grace_seconds
    services = [name for name in there if not is_front(name)]
    fronts = [name for name in there if is_front(name)]
    below = Rollout(changes(services_of(configuration), services), grace, say)
    above = Rollout(changes(fronts_of(configuration), fronts), grace, say)
    return below, above


def undeploy() -> None:
    """Ends everything that `deploy` started; Serve itself, too, if nothing else uses it."""
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE:
            ray.kill(ray.get_actor(named["name"], NAMESPACE))


def _await_nodes(configuration: Configuration, waiting: Waiting) -> None:
    """Returns once the nodes that are there have what is wanted, as far as that can be said."""
    needs, until, told = needs_of(configuration), time.monotonic() + waiting.node_seconds, ""
    faults = faults_of(needs, _nodes())
    if faults and waiting.node_seconds:  # an autoscaler starts what is asked for; without one nobody hears it
        request_resources(bundles=[dict(need.amounts) for need in needs for _ in range(need.count)])
    while faults and time.monotonic() < until:
        if told != (told := "; ".join(faults)):
            waiting.say(f"waiting for nodes: {told}")
        time.sleep(ASKED_EVERY)
        faults = faults_of(needs, _nodes())
    if waiting.node_seconds:
        request_resources(bundles=[])
    if faults:
        raise NoRoomError("\n".join((*faults, *_offers(_nodes()))))


def _nodes() -> Nodes:
    """What each node that is alive has in all."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node["Resources"] for node in nodes}


def _offers(nodes: Nodes) -> Iterator[str]:
    for name, has in sorted(nodes.items()):
        own = {key: amount for key, amount in has.items() if not key.startswith(("node:", "memory", "object_store"))}
        yield f"node {name} has {', '.join(f'{key} {amount:g}' for key, amount in sorted(own.items()))}"


def begin_directory() -> None:
    """It is there from now on."""
    ray.remote(DirectoryActor).options(
        name=DIRECTORY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=HEAD,
        max_restarts=ALWAYS,
        max_task_retries=ALWAYS,  # whatever it is asked may be asked again
        max_concurrency=MOST_CALLS,
    ).remote()


@contextmanager
def _serve_begun(http: Http) -> Iterator[None]:
    """Serve runs with its proxies at this address; what fails in the block ends it, unless it ran before."""
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
        serve.run(application(configuration, room_now()), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise NotServedError(f"orchestrators or the HTTP front cannot be run: {error}") from error


def room_now() -> Room:
    """Whether something fits beside all that runs."""
    free = free_nodes()
    return lambda resources: fits(amounts_of(resources), free)


def _last_line(error: Exception) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
