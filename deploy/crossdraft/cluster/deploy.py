"""Brings a configuration onto a running Ray cluster: services as detached actors, fronts and orchestrators by Serve."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.context import _check_cached_client_alive, _get_global_client
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview

from crossdraft.cluster.application import Room, application
from crossdraft.cluster.capacity import NotServedError, Say, Waiting, amounts_of, await_nodes, fits, needs_of
from crossdraft.cluster.config import APPLICATION, DIRECTORY, NAMESPACE, Configuration, Http, parse
from crossdraft.cluster.directory import DirectoryActor, Entry
from crossdraft.cluster.installed import installed
from crossdraft.cluster.rollout import (
    ALWAYS,
    MOST_CALLS,
    Rollout,
    changes,
    free_nodes,
    fronts_of,
    is_front,
    running,
    services_of,
)
from crossdraft.serving.logs import logged

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


# The application where Serve builds it by itself from `import_path` and `args`, as KubeRay has it do.
#
# Services are begun while it is built. What they replace ends once Serve runs the application, which an actor waits
# for.

log = logging.getLogger(__name__)
FINISHER = "finisher"
ASKED_EVERY = 1.0  # seconds


def build(args: Mapping[str, object]) -> Application:
    """The application of a configuration, whose services serve already.

    Raises:
        ConfigurationError: the configuration cannot be used.
        NotServedError: a service cannot be run with its options; what ran before goes on.
    """
    configuration = parse(yaml.safe_dump(dict(args)), "args")
    with logged(configuration.log_format):
        begin_directory()
        below, _ = rollouts(configuration, log.info)
        try:
            below.begin()
        except ValueError:
            below.undo()
            raise
    actor: Any = ray.remote(Finisher)
    finisher = actor.options(name=FINISHER, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0)
    finisher.remote().finish.remote(configuration)
    return application(configuration, room_now())


class Finisher:
    """One at a time: it ends what an application does not need any more."""

    def finish(self, configuration: Configuration) -> None:
        """Waits for Serve; if that fails, everything stays as it is."""
        with logged(configuration.log_format):
            while (state := _state()) not in (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOY_FAILED):
                time.sleep(ASKED_EVERY)
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


# What runs on a cluster.

RUNNING = "RUNNING"
DEPLOYMENT = ("name", "state", "replicas", "message")


@dataclass(frozen=True)
class Deployed:
    """What runs now."""

    processes: tuple[Entry, ...]  # that answer
    state: str  # of the application, in Serve's words
    deployments: tuple[tuple[str, str, int, str], ...]  # of Serve: name, state, replicas that run, what is wrong

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
