"""Brings a configuration onto a running Ray cluster: services as detached actors, fronts and orchestrators by Serve."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _check_cached_client_alive, _get_global_client

from crossdraft.serving.cluster.application import Room, application
from crossdraft.serving.cluster.directing import DirectoryActor
from crossdraft.serving.cluster.installed import installed
from crossdraft.serving.cluster.naming import APPLICATION, DIRECTORY, NAMESPACE
from crossdraft.serving.cluster.nodes import NoRoomError, Waiting, await_nodes
from crossdraft.serving.cluster.replicas import changes, fronts_of, is_front, services_of
from crossdraft.serving.cluster.rolling import ALWAYS, MOST_CALLS, NotServedError, Rollout, Say, free_nodes, running
from crossdraft.serving.cluster.room import amounts_of, fits, needs_of
from crossdraft.serving.configuration import Configuration, Http

__all__ = ["NoRoomError", "NotServedError", "Waiting", "deploy", "undeploy"]

HEAD = {"node:__internal_head__": 0.001}  # Ray's own resource: the cluster ends with its head node anyway


def deploy(configuration: Configuration, waiting: Waiting | None = None) -> None:
    """Returns once everything serves. What runs already and is the same goes on; what differs is replaced.

    Raises:
        NoRoomError: nodes lack resources.
        NotServedError: something cannot be run with its options, or nodes have another crossdraft; what ran before
            goes on.
    """
    waiting = waiting or Waiting()
    await_nodes(needs_of(configuration), waiting)
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


def begin_directory() -> None:
    """It is there from now on, of this crossdraft; others find it by its name again."""
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
        max_task_retries=ALWAYS,  # whatever it is asked may be asked again
        max_concurrency=MOST_CALLS,
    ).remote()


@contextmanager
def _serve_begun(http: Http) -> Iterator[None]:
    """Serve runs with its proxies at this address; what fails in the block ends it, unless it ran before."""
    _check_cached_client_alive()  # Serve that another process has ended since this one used it is forgotten
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
