"""Actors started, replaced and ended for a configuration, so that open streams go on."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from crossdraft.cluster.actors import ModelServerConfig, ServerActor, ServerConfig
from crossdraft.cluster.capacity import Amounts, Nodes, NotServedError, Say, amounts_of, fits, shown, taken, written
from crossdraft.cluster.config import FRONT_ENVIRONMENT, NAMESPACE, Configuration, actor_name, slot_name, slot_of
from crossdraft.cluster.directory import Entry
from crossdraft.cluster.fronts import GrpcFrontConfig

ALWAYS = -1  # restarts
MAX_CALLS = 1000  # of one actor at once
PROGRESS_SECONDS = 15.0  # between two lines about what does not serve yet
BEYOND_GRACE = 30.0  # seconds after the grace period until an actor that has not ended is killed
SETTLED_SECONDS = 10.0  # until Ray has noticed that an actor is gone, and what it held is free
SETTLED_INTERVAL = 0.25
SERVES = ("ALIVE", "RESTARTING")  # states of actors


@dataclass(frozen=True)
class Actor:
    """What Ray knows of an actor."""

    id: str
    name: str
    node: str  # id
    state: str
    restarts: int


def actors() -> tuple[Actor, ...]:
    """Those that have names and are not dead, of the whole cluster."""
    found = ray._private.state.actors().values()  # no public API has it without Ray's dashboard
    return tuple(
        Actor(one["ActorID"], one["Name"], one["Address"]["NodeID"], one["State"], one["NumRestarts"])
        for one in found
        if one["Name"] and one["State"] != "DEAD"
    )


def running() -> dict[str, Actor]:
    """The actors that run servers, by name. Those that have never had room for a start are ended."""
    ours = [one for one in actors() if slot_of(one.name) and one.name in _named()]
    _kill(one.name for one in ours if one.state not in SERVES)
    return {one.name: one for one in ours if one.state in SERVES}


def _named() -> set[str]:
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in named if one["namespace"] == NAMESPACE}


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

    @property
    def what(self) -> str:
        """The kind of replica, as in a placement."""
        return shown(self.config.role, self.config.model, self.config.name)

    @property
    def amounts(self) -> Amounts:
        """What it takes of a node."""
        return amounts_of(self.config.resources)


@dataclass(frozen=True)
class Changes:
    """From the actors that run to those that a configuration wants."""

    begun: tuple[Replica, ...]  # in free slots
    replaced: tuple[tuple[str, Replica], ...]  # the name of an actor, and its replacement
    kept: tuple[Replica, ...]
    ended: tuple[str, ...]  # names of actors whose slots are not wanted


@dataclass(frozen=True)
class Means:
    """How changes are carried out."""

    nodes: Mapping[str, str]  # ids, by slot: where actors are to start, if they can
    grace_seconds: float  # for what is open in an actor that ends
    until: float  # when all must serve, seconds of the monotonic clock
    say: Say


class Rollout:
    """Carries out changes: `begin`, then, once all that uses the actors has switched over, `finish`.

    Nothing waits for room that this rollout itself may free: what has none is started after others have ended.
    """

    def __init__(self, changed: Changes, means: Means) -> None:
        self._means = means
        self._started: list[Replica] = []  # that end again if the deployment fails
        # What is to be started, with the name of the actor that ends instead, or none.
        self._waiting = [*(("", one) for one in changed.begun), *changed.replaced]
        self._over = list(changed.ended)  # names of actors to end

    def begin(self) -> None:
        """Starts what has room beside all that runs, and needs no port that an old actor holds.

        Raises:
            NotServedError: one cannot be served; `undo` then.
        """
        free = {node: dict(has) for node, has in free_nodes().items()}
        waiting, at_once = self._waiting, list[tuple[str, Replica]]()
        self._waiting = []
        for old, new in waiting:
            apart = not old or not new.config.port
            (at_once if apart and taken(new.amounts, free) else self._waiting).append((old, new))
        self._ready([new for _, new in at_once])
        self._over += [old for old, _ in at_once if old]

    def make_room(self) -> None:
        """Ends what is not needed any more, then replaces the rest, ending each old actor before the new one starts.

        What has no room even then is left for `finish`.

        Raises:
            NotServedError: as `begin`.
        """
        self._await(self._over, self._drain(self._over))
        self._over, waiting, self._waiting = [], self._waiting, []
        for old, new in waiting:
            ending, beside = [old] if old else [], _fits(new)
            # An old one frees its port when it begins to drain.
            draining = [] if beside and not new.config.port else self._drain(ending)
            if not beside:
                self._await(ending, draining)
            if beside or (old and _soon(partial(_fits, new), self._means.until)):
                self._ready([new])
                self._await(ending, draining or self._drain(ending))
            else:
                self._waiting.append(("", new))

    def finish(self) -> None:
        """As `make_room`, and waits for room for the rest.

        Raises:
            NotServedError: as `begin`.
        """
        self.make_room()
        left, self._waiting = [new for _, new in self._waiting], []
        self._ready(left)

    def undo(self) -> None:
        """Ends what was started beside what ran before, which goes on."""
        _kill(one.name for one in self._started)

    def _ready(self, replicas: Sequence[Replica]) -> None:
        self._started += replicas
        started = [(one, _started(one, self._means.nodes.get(one.slot))) for one in replicas]
        for one, actor in started:
            entry = self._entry(one, actor)
            self._means.say(f"{one.slot} serves at {entry.address}")

    def _entry(self, replica: Replica, actor: Any) -> Entry:
        answer, until, began = actor.ready.remote(), self._means.until, time.monotonic()
        while not ray.wait([answer], timeout=min(PROGRESS_SECONDS, max(0.0, until - time.monotonic())))[0]:
            state = next((one.state for one in actors() if one.name == replica.name), "DEAD")
            why = "it loads its model" if state == "ALIVE" else f"no node has {written(replica.amounts)} free"
            if time.monotonic() >= until:
                raise NotServedError(f"{replica.slot} does not serve in time: {why}")
            took, given = time.monotonic() - began, until - began
            self._means.say(f"{replica.slot} does not serve yet, after {took:.0f} s of {given:.0f}: {why}")
        try:
            entry: Entry = ray.get(answer)
        except RayTaskError as error:
            raise NotServedError(f"{replica.slot} cannot be served: {error.cause}") from error
        except RayActorError as error:
            raise NotServedError(f"{replica.slot} cannot be served: {error}") from error
        return entry

    def _drain(self, names: Collection[str]) -> list[Any]:
        """Begins to drain actors; returns what to wait for."""
        draining: list[Any] = []
        alive = {one.name for one in actors() if one.state == "ALIVE"} if names else set()
        for name in names:
            self._means.say(f"{slot_of(name)} ends")
            if name not in alive:
                continue
            try:
                draining.append(ray.get_actor(name, NAMESPACE).drain.remote())
            except ValueError:  # it has ended
                continue
        return draining

    def _await(self, names: Collection[str], draining: list[Any]) -> None:
        """Ends actors; what replaces them is final."""
        if draining:
            ray.wait(draining, num_returns=len(draining), timeout=self._means.grace_seconds + BEYOND_GRACE)
        _kill(names)
        slots = {slot_of(name) for name in names}
        self._started = [one for one in self._started if one.slot not in slots]


def _started(replica: Replica, node: str | None) -> Any:
    resources = replica.config.resources
    there = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True) if node else "SPREAD"
    return (
        ray.remote(ServerActor)
        .options(
            name=replica.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=there,
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


def _fits(replica: Replica) -> bool:
    return fits(replica.amounts, free_nodes())


def _soon(holds: Callable[[], bool], until: float = inf) -> bool:
    """Whether it holds once Ray has noticed that actors have ended, or at `until`, seconds of the monotonic clock."""
    until = min(until, time.monotonic() + SETTLED_SECONDS)
    while not (found := holds()) and time.monotonic() < until:
        time.sleep(SETTLED_INTERVAL)
    return found


def _kill(names: Iterable[str]) -> None:
    """Returns once they are gone, so that their names may be given again."""
    gone = set()
    for name in names:
        try:
            ray.kill(ray.get_actor(name, NAMESPACE))
        except ValueError:  # it has ended
            continue
        gone.add(name)
    _soon(lambda: not gone & _named())


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
    return () if grpc is None else tuple(_replicas(GrpcFrontConfig.of(grpc, configuration), grpc.replicas or 1))


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


def starts(changed: Changes, at: Mapping[str, str], places: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Nodes, by slot, of what is started, from those of a placement, by kind; `at` has nodes of running actors."""
    left = {what: list(nodes) for what, nodes in places.items()}
    for one in changed.kept:
        if at.get(one.name) in left.get(one.what, ()):
            left[one.what].remove(at[one.name])
    starting = (*changed.begun, *(new for _, new in changed.replaced))
    return {one.slot: left[one.what].pop(0) for one in starting if left.get(one.what)}
