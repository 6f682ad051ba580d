"""Actors that are begun, replaced and ended, so that open streams go on."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from crossdraft.cluster.actors import HostActor, Hosted, HostedGrpc, HostedService
from crossdraft.cluster.capacity import Nodes, NotServedError, Say, amounts_of, fits, written
from crossdraft.cluster.config import ASKING, NAMESPACE, Configuration, actor_name, fronted, slot_name, slot_of, tls_of
from crossdraft.cluster.directory import Entry

ALWAYS = -1  # restarts
MOST_CALLS = 1000  # of one actor at once
TOLD_EVERY = 15.0  # seconds, while one does not serve yet
BEYOND_GRACE = 30.0  # seconds after the grace period in which an actor must have ended by itself


def running() -> tuple[str, ...]:
    """Names of the actors that host something."""
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return tuple(one["name"] for one in named if one["namespace"] == NAMESPACE and slot_of(one["name"]))


def free_nodes() -> Nodes:
    """What each node has left, by Ray's name of the node."""
    found: Nodes = ray._private.state.available_resources_per_node()  # Serve itself asks so
    return found


# The replicas that a configuration asks for, and what to do about those that run. Pure.


@dataclass(frozen=True)
class Replica:
    """One actor that hosts something."""

    name: str
    hosted: Hosted

    @property
    def slot(self) -> str:
        """Its place, which another one has had, perhaps."""
        return slot_of(self.name)


@dataclass(frozen=True)
class Changes:
    """From what runs to what is wanted."""

    begun: tuple[Replica, ...]  # in places where nothing runs
    replaced: tuple[tuple[str, Replica], ...]  # the name of an actor, and what comes instead
    kept: tuple[Replica, ...]
    ended: tuple[str, ...]  # names of actors in whose place nothing is wanted


class Rollout:
    """Brings actors to what is wanted; `finish` after everything that uses them has changed over.

    Args:
        changed: what is to be done.
        grace_seconds: for what is open in an actor that ends.
        say: where progress is told.
    """

    def __init__(self, changed: Changes, grace_seconds: float, say: Say) -> None:
        self._changed = changed
        self._grace_seconds = grace_seconds
        self._say = say
        self._started: list[Replica] = []
        self._waiting: list[tuple[str, Replica]] = []  # for which there is no room beside those that they replace
        self._over: list[str] = []  # that are not needed any more

    def begin(self) -> None:
        """Starts what is new, then what replaces something, one after the other as far as there is room.

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
        """Ends what is not needed any more, and replaces the rest: the old one ends, then the new one starts.

        Raises:
            NotServedError: as `begin`.
        """
        self._end(self._over)
        for old, new in self._waiting:
            if _beside(new):
                self._ready([new])
                self._end([old])
            elif _fits(new):  # the port is free as soon as the old one takes nothing new
                draining = self._drain([old])
                self._ready([new])
                self._await([old], draining)
            else:
                self._end([old])
                self._ready([new])

    def undo(self) -> None:
        """Ends what `begin` has started; what ran before goes on."""
        _kill(one.name for one in self._started)

    def _ready(self, replicas: Sequence[Replica]) -> None:
        self._started += replicas
        started = [(one, _started(one)) for one in replicas]
        for one, actor in started:
            entry = self._entry(one, actor)
            self._say(f"{one.slot} serves at {entry.address}")

    def _entry(self, replica: Replica, actor: Any) -> Entry:
        answer = actor.ready.remote()
        while not ray.wait([answer], timeout=TOLD_EVERY)[0]:
            room = (
                ""
                if _fits(replica)
                else f"; it may wait for a node with {written(amounts_of(replica.hosted.resources))} free"
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
        """They take nothing new from now on, and end once what is open has ended, or the grace period has."""
        draining: list[Any] = []
        for name in names:
            self._say(f"{slot_of(name)} ends")
            try:
                draining.append(ray.get_actor(name, NAMESPACE).drain.remote())
            except ValueError:  # it has ended already
                continue
        return draining

    def _await(self, names: Collection[str], draining: list[Any]) -> None:
        if draining:
            ray.wait(draining, num_returns=len(draining), timeout=self._grace_seconds + BEYOND_GRACE)
        _kill(names)


def _started(replica: Replica) -> Any:
    resources = replica.hosted.resources
    return (
        ray.remote(HostActor)
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
            max_concurrency=MOST_CALLS,
            runtime_env=ASKING if is_front(replica.name) else None,
        )
        .remote(replica.hosted)
    )


def _beside(replica: Replica) -> bool:
    """Whether it can serve before the one that it replaces has ended; of a port there is one on a node."""
    return replica.hosted.port == 0 and _fits(replica)


def _fits(replica: Replica) -> bool:
    return fits(amounts_of(replica.hosted.resources), free_nodes())


def _kill(names: Iterable[str]) -> None:
    for name in names:
        try:
            ray.kill(ray.get_actor(name, NAMESPACE))
        except ValueError:  # it has ended already
            continue


def services_of(configuration: Configuration) -> tuple[Replica, ...]:
    """All targets and drafters."""
    return tuple(_services(configuration))


def fronts_of(configuration: Configuration) -> tuple[Replica, ...]:
    """All fronts that are actors of their own."""
    if configuration.grpc is None:
        return ()
    hosted = HostedGrpc(fronted(configuration), configuration.grpc, configuration.grace_seconds)
    return tuple(_replicas(hosted, configuration.grpc.replicas))


def is_front(name: str) -> bool:
    """Whether an actor of this name hosts a front: it is of no model."""
    return slot_of(name).count("/") == 1


def changes(wanted: Sequence[Replica], running: Collection[str]) -> Changes:
    """Compares replicas with the names of the actors that run."""
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


def _services(configuration: Configuration) -> Iterator[Replica]:
    tls, grace = tls_of(configuration), configuration.grace_seconds
    for model in configuration.models:
        for service in (model.target, *model.drafters):
            hosted = HostedService(model.name, service, tls, grace, configuration.metrics, configuration.log_format)
            yield from _replicas(hosted, service.replicas)


def _replicas(hosted: Hosted, count: int) -> Iterator[Replica]:
    for number in range(count):
        slot = slot_name(hosted.model, hosted.role, hosted.name, number)
        yield Replica(actor_name(slot, hosted.digest), hosted)
