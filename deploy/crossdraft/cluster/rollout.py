"""Actors started, replaced and ended for a configuration, so that open streams go on."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from crossdraft.cluster.actors import ModelServerConfig, ServerActor, ServerConfig
from crossdraft.cluster.capacity import (
    ANSWER_SECONDS,
    CPUS,
    GPUS,
    IMPLICIT_RESOURCE,
    PROGRESS_SECONDS,
    Amounts,
    NotServedError,
    Say,
    amounts_of,
    shown,
    taken,
    written,
)
from crossdraft.cluster.config import NAMESPACE, Configuration, actor_name, slot_name, slot_of
from crossdraft.cluster.directory import Entry
from crossdraft.cluster.fronts import GrpcFrontConfig

ALWAYS = -1  # restarts
MAX_CALLS = 1000  # of one actor at once
LOG_SECONDS = 60.0  # after which a process that does not serve yet is told with its log
LOGS = "/tmp/ray/session_latest/logs/worker-*-{}.err"  # of a process with this id
UNDO_SECONDS = 600.0  # for what is started again after a deployment has failed
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
    process: int  # id on the node; 0: there is none yet


def actors() -> tuple[Actor, ...]:
    """Those that have names and are not dead, of the whole cluster."""
    found = ray._private.state.actors().values()  # no public API has it without Ray's dashboard
    return tuple(
        Actor(one["ActorID"], one["Name"], one["Address"]["NodeID"], one["State"], one["NumRestarts"], one["Pid"])
        for one in found
        if one["Name"] and one["State"] != "DEAD"
    )


def servers() -> list[Actor]:
    """The actors that run servers, or are to."""
    named = named_actors()
    return [one for one in actors() if slot_of(one.name) and one.name in named]


def running(say: Say) -> dict[str, Actor]:
    """The actors that run servers, by name. Those that have never had room for a start or do not serve are ended."""
    ours = servers()
    useless = {one.name for one in ours if one.state not in SERVES}
    for name in _failed([one.name for one in ours if one.name not in useless]):
        say(f"{slot_of(name)} does not serve, and ends")
        useless.add(name)
    kill(useless)
    return {one.name: one for one in ours if one.name not in useless}


def _failed(names: Collection[str]) -> list[str]:
    """Those of these actors that live and will never serve."""
    failed = []
    for name, answer in _asked(names, "ready", SETTLED_SECONDS).items():
        try:
            ray.get(answer, timeout=0)
        except GetTimeoutError:  # it loads its model
            continue
        except RayError:
            failed.append(name)
    return failed


def _asked(names: Iterable[str], method: str, seconds: float) -> dict[str, Any]:
    """What actors answer, by name, to a call that may take so long; not of those that are gone or lack the method."""
    asked = {}
    for name in names:
        with suppress(ValueError, AttributeError):
            asked[name] = getattr(ray.get_actor(name, NAMESPACE), method).remote()
    if asked:
        ray.wait([*asked.values()], num_returns=len(asked), timeout=seconds)
    return asked


def named_actors() -> set[str]:
    """All that `deploy` has started."""
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in named if one["namespace"] == NAMESPACE}


def free_nodes() -> dict[str, dict[str, float]]:
    """Free resources of each node, by Ray's id of the node."""
    has = ray._private.state.available_resources_per_node()  # no public API has it; Serve uses this one, too
    found = {node: dict(amounts) for node, amounts in has.items()}
    for one in actors():  # Ray leaves out what is used up, which of an implicit resource means one
        if slot_of(one.name) and one.node in found:
            found[one.node][_alone(one.name)] = 0.0
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
        """What each of its processes takes of a node: with a fixed port also a resource of which each node has 1.

        Ray starts an actor that has lost its node wherever there is room, also where another one has the port.
        """
        return amounts_of(self.config.resources) | ({_alone(self.name): 1.0} if self.config.port else {})


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

    nodes: Mapping[str, str]  # ids, where actors are to start, if they can: by slot, and by name of those that run
    grace_seconds: float  # for what is open in an actor that ends
    until: float  # when all must serve, seconds of the monotonic clock
    say: Say


class Rollout:
    """Carries out changes: `begin`, then, once all that uses the actors has switched over, `finish`.

    Nothing waits for room that this rollout itself may free: what has none is started after others have ended.
    """

    def __init__(self, changed: Changes, means: Means) -> None:
        self._means = means
        self._kept = changed.kept
        self._started: list[Replica] = []  # that end again if the deployment fails
        self._before: Mapping[str, Replica] = {}  # what runs and is to end, by name
        self._gone: list[str] = []  # names of actors that have ended, and that nothing has replaced yet
        # What is to be started, with the name of the actor that ends instead, or none.
        self._waiting = [*(("", one) for one in changed.begun), *changed.replaced]
        self._over = list(changed.ended)  # names of actors to end

    def begin(self) -> None:
        """Starts what has room beside all that runs, and needs no port that an old actor holds; checks the rest.

        Raises:
            NotServedError: one cannot be served; `undo` then.
        """
        waiting, at_once = self._waiting, list[tuple[str, Replica]]()
        self._before = self._configured([*self._over, *(old for old, _ in waiting if old)])
        self._waiting, free = [], free_nodes()
        for old, new in waiting:
            beside = self._beside(old, new) and taken(new.amounts, free, new.config.ranks)
            (at_once if beside else self._waiting).append((old, new))
        self._check()
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
            draining = [] if beside and self._beside(old, new) else self._drain(ending)
            if not beside:
                self._await(ending, draining)
            if beside or (old and _soon(partial(_fits, new), self._means.until)):
                self._ready([new])
                self._await(ending, draining or self._drain(ending))
            else:
                self._waiting.append(("", new))

    def finish(self) -> None:
        """As `make_room`, and waits for room for the rest, and until what goes on serves, too.

        Raises:
            NotServedError: as `begin`.
        """
        self.make_room()
        left, self._waiting = [new for _, new in self._waiting], []
        self._ready(left)
        self._wait(self._kept)
        self._started, self._gone = [], []

    def undo(self) -> tuple[str, ...]:
        """Ends what was started beside what ran before, which goes on; what has ended for it is started again.

        Returns:
            The slots in which nothing serves now.
        """
        kill([*(one.name for one in self._started), *self._gone])
        self._means = replace(self._means, until=time.monotonic() + UNDO_SECONDS)
        gone, self._started, self._gone = self._gone, [], []
        return tuple(slot_of(name) for name in gone if not self._again(self._before.get(name)))

    def _again(self, before: Replica | None) -> bool:
        """Whether an actor that has ended serves again."""
        if before is None or not _soon(partial(_fits, before)):
            return False
        self._means.say(f"{before.slot} is started again as it was")
        try:
            self._wait([before])
        except NotServedError as error:
            self._means.say(str(error))
            kill([before.name])
            return False
        return True

    def _configured(self, names: Sequence[str]) -> Mapping[str, Replica]:
        """What these actors run, by name, as far as they say."""
        found = {}
        for name, answer in _asked(names, "config", ANSWER_SECONDS).items():
            with suppress(RayError):
                found[name] = Replica(name, ray.get(answer, timeout=0))
        return found

    def _beside(self, old: str, new: Replica) -> bool:
        """Whether the ports of an actor and its replacement allow both at once."""
        return not old or not new.config.port or self._port(old, new) != new.config.port

    def _port(self, old: str, new: Replica) -> int:
        """That an actor holds; where it does not say, that of its replacement."""
        return self._before[old].config.port if old in self._before else new.config.port

    def _check(self) -> None:
        """Before anything ends for what has no room beside it: whether its node has its files and its port."""
        asked = []
        for old, new in self._waiting:
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": _near(self._node(new))}
            held = self._port(old, new) if old else 0
            asked.append((new, ray.remote(_checked).options(**options).remote(new.config, held)))
        if asked:
            ray.wait([answer for _, answer in asked], num_returns=len(asked), timeout=ANSWER_SECONDS)
        for new, answer in asked:
            try:
                ray.get(answer, timeout=0)
            except RayTaskError as error:
                raise self._fault(new, error.cause) from error
            except RayError:  # a node that is too busy to answer; the start will tell
                continue

    def _node(self, one: Replica) -> str | None:
        """Where it is to start."""
        return self._means.nodes.get(one.name) or self._means.nodes.get(one.slot)

    def _ready(self, replicas: Sequence[Replica]) -> None:
        self._started += replicas
        self._wait(replicas)

    def _wait(self, replicas: Sequence[Replica]) -> None:
        """Starts actors, unless they run, and returns once all of them serve; raises NotServedError."""
        free, began = free_nodes(), time.monotonic()
        roomy = {one.name for one in replicas if taken(one.amounts, free, one.config.ranks)}
        waiting = {_started(one, self._node(one)).ready.remote(): one for one in replicas}
        while waiting:
            left = max(0.0, self._means.until - time.monotonic())
            found, _ = ray.wait([*waiting], timeout=min(PROGRESS_SECONDS, left))
            for answer in found:
                one = waiting.pop(answer)
                address = self._entry(one, answer).address
                if one not in self._kept:
                    self._means.say(f"{one.slot} serves at {address}")
            if not found:
                self._tell([*waiting.values()], roomy, began)

    def _tell(self, waiting: Sequence[Replica], roomy: Collection[str], began: float) -> None:
        """What the first of these waits for; raises NotServedError if the time is over."""
        first, now = waiting[0], time.monotonic()
        actor = next((one for one in actors() if one.name == first.name), None)
        if actor is not None and actor.state == "ALIVE":
            why = "it waits for Ray Serve" if is_front(first.name) else "it loads its model"
        elif first.name in roomy or _fits(first):
            why = "its process is being started"
        else:
            why = f"no node has {written(first.amounts)} free"
        if now >= self._means.until:
            raise NotServedError(f"{first.slot} does not serve in time: {why}")
        took, given = now - began, self._means.until - began
        log = ""
        if took > LOG_SECONDS and actor is not None and actor.process:
            log = f"; its log is {LOGS.format(actor.process)} on node {_address(actor.node)}"
        more = f"; {len(waiting) - 1} more are waited for" if len(waiting) > 1 else ""
        self._means.say(f"{first.slot} does not serve yet, after {took:.0f} s of {given:.0f}: {why}{log}{more}")

    def _entry(self, replica: Replica, answer: Any) -> Entry:
        try:
            entry: Entry = ray.get(answer)
        except RayTaskError as error:
            raise self._fault(replica, error.cause) from error
        except RayActorError as error:
            raise self._fault(replica, error) from error
        return entry

    def _fault(self, replica: Replica, why: object) -> NotServedError:
        at = next((one.node for one in actors() if one.name == replica.name), None) or self._node(replica)
        where = f" on node {_address(at)}" if at else ""
        return NotServedError(f"{replica.slot} cannot be served{where}: {why}")

    def _drain(self, names: Collection[str]) -> list[Any]:
        """Begins to drain actors; returns what to wait for."""
        self._gone += [name for name in names if name not in self._gone]
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
        kill(names)
        final = {slot_of(name) for name in names} & {one.slot for one in self._started}
        self._started = [one for one in self._started if one.slot not in final]
        self._gone = [name for name in self._gone if slot_of(name) not in final]


def _started(replica: Replica, node: str | None) -> Any:
    config, takes = replica.config, dict(replica.amounts)
    return (
        ray.remote(ServerActor)
        .options(
            name=replica.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=_near(node) if config.ranks == 1 else _first_place(replica),
            num_cpus=takes.pop(CPUS, 0),
            num_gpus=takes.pop(GPUS, 0),
            resources=takes,
            max_restarts=ALWAYS,
            max_task_retries=0,
            max_concurrency=MAX_CALLS,
        )
        .remote(config)
    )


def _first_place(replica: Replica) -> PlacementGroupSchedulingStrategy:
    """Of a group with places for all its processes, on few nodes, which lasts until the replica is ended."""
    group = _groups().get(replica.name)
    if group is None:
        group = placement_group([dict(replica.amounts)] * replica.config.ranks, "PACK", replica.name, "detached")
    return PlacementGroupSchedulingStrategy(group, 0)


def _groups() -> dict[str, PlacementGroup]:
    """Placement groups by the names of their replicas; Ray itself finds only names of its own job's namespace."""
    found = {one["name"]: id for id, one in placement_group_table().items() if one["state"] != "REMOVED"}
    return {name: PlacementGroup(PlacementGroupID.from_hex(id)) for name, id in found.items()}


def _alone(name: str) -> str:
    return f"{IMPLICIT_RESOURCE}{name.rpartition('@')[2]}"


def _near(node: str | None) -> Any:
    """On this node if it can be."""
    return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True) if node else "SPREAD"


def _checked(config: ServerConfig, held: int) -> None:
    """Runs on a node, in a task."""
    config.check(held)


def _address(node: str) -> str:
    """Of the node with this id of Ray's; the id where it is unknown."""
    return next((str(one["NodeManagerAddress"]) for one in ray.nodes() if one["NodeID"] == node), node)


def _fits(replica: Replica) -> bool:
    return taken(replica.amounts, free_nodes(), replica.config.ranks)


def _soon(holds: Callable[[], bool], until: float = inf) -> bool:
    """Whether it holds once Ray has noticed that actors have ended, or at `until`, seconds of the monotonic clock."""
    until = min(until, time.monotonic() + SETTLED_SECONDS)
    while not (found := holds()) and time.monotonic() < until:
        time.sleep(SETTLED_INTERVAL)
    return found


def kill(names: Iterable[str]) -> None:
    """Returns once they are gone, so that their names may be given again."""
    gone, groups = set(), _groups()
    for name in names:
        if name in groups:
            remove_placement_group(groups[name])
        try:
            ray.kill(ray.get_actor(name, NAMESPACE))
        except ValueError:  # it has ended
            continue
        gone.add(name)
    _soon(lambda: not gone & named_actors())


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
