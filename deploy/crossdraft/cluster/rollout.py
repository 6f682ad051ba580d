"""Actors started, replaced and ended for a configuration, so that open streams go on."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from crossdraft.cluster.actors import ModelServerConfig, ServerActor, ServerConfig
from crossdraft.cluster.capacity import Nodes, NotServedError, Say, amounts_of, fits, written
from crossdraft.cluster.config import FRONT_ENVIRONMENT, NAMESPACE, Configuration, actor_name, slot_name, slot_of
from crossdraft.cluster.directory import Entry
from crossdraft.cluster.fronts import GrpcFrontConfig

ALWAYS = -1  # restarts
MAX_CALLS = 1000  # of one actor at once
PROGRESS_SECONDS = 15.0  # between two lines about an actor that does not serve yet
BEYOND_GRACE = 30.0  # seconds after the grace period until an actor that has not ended is killed


def running() -> tuple[str, ...]:
    """Names of the actors that run servers."""
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return tuple(one["name"] for one in named if one["namespace"] == NAMESPACE and slot_of(one["name"]))


def free_nodes() -> Nodes:
    """Free resources of each node, by Ray's id of the node."""
    found: Nodes = ray._private.state.available_resources_per_node()  # no public API has it; Serve uses this one, too
    return found


@dataclass(frozen=True)
class Replica:
    """One actor that runs a server."""

    name: str
    config: ServerConfig

    @property
    def slot(self) -> str:
        """Of the actor; a replacement has the same."""
        return slot_of(self.name)


@dataclass(frozen=True)
class Changes:
    """From the actors that run to those that a configuration wants."""

    begun: tuple[Replica, ...]  # in free slots
    replaced: tuple[tuple[str, Replica], ...]  # the name of an actor, and its replacement
    kept: tuple[Replica, ...]
    ended: tuple[str, ...]  # names of actors whose slots are not wanted


class Rollout:
    """Carries out changes: `begin`, then, once all that uses the actors has switched over, `finish`.

    Args:
        changed: what to do.
        grace_seconds: for what is open in an actor that ends.
        say: shows progress.
    """

    def __init__(self, changed: Changes, grace_seconds: float, say: Say) -> None:
        self._changed = changed
        self._grace_seconds = grace_seconds
        self._say = say
        self._started: list[Replica] = []
        self._waiting: list[tuple[str, Replica]] = []  # no room beside those that they replace
        self._over: list[str] = []  # names of actors to end

    def begin(self) -> None:
        """Starts new actors, then replacements one by one as far as there is room.

        Raises:
            NotServedError: one cannot be served; `undo` then.
        """
        changed = self._changed
        self._over = list(changed.ended)
        self._ready(changed.begun)
        for old, new in changed.replaced:
            if _beside(new):
                self._ready([new])
                self._over.append(old)
            else:
                self._waiting.append((old, new))

    def finish(self) -> None:
        """Ends what is not needed any more, then replaces the rest, ending each old actor before the new one starts.

        Raises:
            NotServedError: as `begin`.
        """
        self._end(self._over)
        for old, new in self._waiting:
            if _beside(new):
                self._ready([new])
                self._end([old])
            elif _fits(new):  # the old one frees its port when it begins to drain
                draining = self._drain([old])
                self._ready([new])
                self._await([old], draining)
            else:
                self._end([old])
                self._ready([new])

    def undo(self) -> None:
        """Ends what was started; what ran before goes on."""
        _kill(one.name for one in self._started)

    def _ready(self, replicas: Sequence[Replica]) -> None:
        self._started += replicas
        started = [(one, _started(one)) for one in replicas]
        for one, actor in started:
            entry = self._entry(one, actor)
            self._say(f"{one.slot} serves at {entry.address}")

    def _entry(self, replica: Replica, actor: Any) -> Entry:
        answer = actor.ready.remote()
        while not ray.wait([answer], timeout=PROGRESS_SECONDS)[0]:
            room = (
                ""
                if _fits(replica)
                else f"; it may wait for a node with {written(amounts_of(replica.config.resources))} free"
            )
            self._say(f"{replica.slot} does not serve yet{room}")
        try:
            entry: Entry = ray.get(answer)
        except RayTaskError as error:
            raise NotServedError(f"{replica.slot} cannot be served: {error.cause}") from error
        except RayActorError as error:
            raise NotServedError(f"{replica.slot} cannot be served: {error}") from error
        return entry

    def _end(self, names: Collection[str]) -> None:
        self._await(names, self._drain(names))

    def _drain(self, names: Collection[str]) -> list[Any]:
        """Begins to drain actors; returns what to wait for."""
        draining: list[Any] = []
        for name in names:
            self._say(f"{slot_of(name)} ends")
            try:
                draining.append(ray.get_actor(name, NAMESPACE).drain.remote())
            except ValueError:  # it has ended
                continue
        return draining

    def _await(self, names: Collection[str], draining: list[Any]) -> None:
        if draining:
            ray.wait(draining, num_returns=len(draining), timeout=self._grace_seconds + BEYOND_GRACE)
        _kill(names)


def _started(replica: Replica) -> Any:
    resources = replica.config.resources
    return (
        ray.remote(ServerActor)
        .options(
            name=replica.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy="SPREAD",
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            resources=dict(resources.custom),
            max_restarts=ALWAYS,
            max_task_retries=0,
            max_concurrency=MAX_CALLS,
            runtime_env=FRONT_ENVIRONMENT if is_front(replica.name) else None,
        )
        .remote(replica.config)
    )


def _beside(replica: Replica) -> bool:
    """Whether it can serve before the one that it replaces has ended, which holds the port if it is fixed."""
    return replica.config.port == 0 and _fits(replica)


def _fits(replica: Replica) -> bool:
    return fits(amounts_of(replica.config.resources), free_nodes())


def _kill(names: Iterable[str]) -> None:
    for name in names:
        try:
            ray.kill(ray.get_actor(name, NAMESPACE))
        except ValueError:  # it has ended
            continue


def services_of(configuration: Configuration) -> tuple[Replica, ...]:
    """All targets and drafters."""
    return tuple(
        replica
        for model in configuration.models
        for service in (model.target, *model.drafters)
        for replica in _replicas(ModelServerConfig.of(model.name, service, configuration), service.replicas)
    )


def fronts_of(configuration: Configuration) -> tuple[Replica, ...]:
    """All fronts that are actors: those for gRPC."""
    grpc = configuration.grpc
    return () if grpc is None else tuple(_replicas(GrpcFrontConfig.of(grpc, configuration), grpc.replicas))


def _replicas(config: ServerConfig, count: int) -> Iterator[Replica]:
    for number in range(count):
        yield Replica(actor_name(slot_name(config.model, config.role, config.name, number), config.digest), config)


def is_front(name: str) -> bool:
    """Whether an actor of this name is a front: its slot names no model."""
    return slot_of(name).count("/") == 1


def changes(wanted: Sequence[Replica], running: Collection[str]) -> Changes:
    """From the actors with the names `running` to the replicas that are wanted."""
    kept = tuple(one for one in wanted if one.name in running)
    free = {one.slot: one for one in wanted if one not in kept}
    replaced, ended = [], []
    for name in sorted(set(running) - {one.name for one in kept}):
        instead = free.pop(slot_of(name), None)
        if instead is None:
            ended.append(name)
        else:
            replaced.append((name, instead))
    return Changes(tuple(free.values()), tuple(replaced), kept, tuple(ended))
