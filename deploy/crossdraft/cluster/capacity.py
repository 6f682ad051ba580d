"""Where the replicas of a configuration have room on a cluster's nodes, and whether these have its crossdraft.

Places are sought before anything starts, as Ray waits for room without a word. Model servers and gRPC fronts are asked
to start where they were found; Ray decides about Serve's replicas, of which a node takes only so many of a deployment.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from crossdraft.cluster.config import Configuration, Resources
from crossdraft.cluster.directory import Role
from crossdraft.cluster.installed import installed, on_disk

CPUS, GPUS = "CPU", "GPU"  # as Ray names them
HEAD = "node:__internal_head__"  # Ray's resource of the head node
IMPLICIT_RESOURCE = "node:__internal_implicit_resource_"  # of resources beginning so every node has 1
INNER = ("node:", "memory", "object_store")  # beginnings of resources that every node has, its own included
EXACT = 1e-4  # Ray counts in ten-thousandths
SEARCH_STEPS = 5_000  # replicas that are tried somewhere until they count as not placed
SEARCHED = 100  # replicas; with more of them each takes the first place that is found
ADVICE = "ask for fewer replicas or for less of a node (`resources`), or add nodes that offer what is lacking"
Amounts = Mapping[str, float]  # of resources, by Ray's names
Nodes = Mapping[str, Amounts]  # by address
Places = Mapping[str, Sequence[str]]  # nodes of replicas, by what they are


@dataclass(frozen=True)
class Need:
    """Replicas with the same resources."""

    what: str  # shown to users
    count: int
    amounts: Amounts  # of one of them
    most: float = inf  # on one node
    spread: bool = False  # on as many nodes as there are for them
    more: bool = False  # one on each other node that has room left, too
    there: Sequence[str] = ()  # nodes where such replicas run and go on


@dataclass(frozen=True)
class Placement:
    """Nodes for replicas."""

    places: Places
    needs: tuple[Need, ...]
    faults: tuple[str, ...]  # what has no place; empty: nothing
    left: tuple[str, ...] = ()  # what each node has left then, if more room would help, and what to do

    def most(self, what: str) -> float:
        """Replicas of this kind on one node."""
        return max(map(self.places[what].count, self.places[what]))


def amounts_of(resources: Resources) -> dict[str, float]:
    """By Ray's names, without zeros."""
    amounts = {CPUS: resources.cpus, GPUS: resources.gpus, **resources.custom}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def shown(role: Role, model: str, name: str = "") -> str:
    """A kind of replica; `name` is of a drafter."""
    drafter = f" {name!r}" if name else ""
    return f"{role}{drafter} of {model!r}" if model else f"{role} front"


def needs_of(configuration: Configuration, there: Places | None = None) -> tuple[Need, ...]:
    """All replicas of a configuration; `there` is where replicas run that go on."""
    return tuple(replace(need, there=(there or {}).get(need.what, ())) for need in _needs(configuration))


def _needs(configuration: Configuration) -> Iterator[Need]:
    for model in configuration.models:
        for role, name, service in (
            (Role.TARGET, "", model.target),
            *((Role.DRAFTER, one.name, one) for one in model.drafters),
        ):
            most, ranks = 1 if service.port else inf, service.tensor_parallel_size
            amounts = amounts_of(service.resources.divided(ranks))
            yield Need(shown(role, model.name, name), service.replicas * ranks, amounts, most)
        amounts = amounts_of(model.orchestrator_resources)
        yield Need(shown(Role.ORCHESTRATOR, model.name), model.orchestrators.max, amounts, spread=True)
    for role, front in ((Role.HTTP, configuration.http), (Role.GRPC, configuration.grpc)):
        if front is not None:
            apart, amounts = role is Role.GRPC and front.port > 0, amounts_of(front.resources)
            most = 1 if apart else inf
            yield Need(shown(role, ""), front.replicas or 1, amounts, most, not apart, front.replicas is None)


def with_fronts(configuration: Configuration, plan: Placement) -> Configuration:
    """The configuration with the number of replicas of each front."""
    fronts: dict[str, Any] = {}
    for role, front in ((Role.HTTP, configuration.http), (Role.GRPC, configuration.grpc)):
        if front is not None:
            fronts[role.value] = replace(front, replicas=len(plan.places[shown(role, "")]))
    return replace(configuration, **fronts)


def placed(needs: Sequence[Need], nodes: Nodes) -> Placement:
    """Places for all replicas; those that run stay where they are."""
    packing = _Packing(needs, nodes)
    return Placement(packing.filled(), tuple(needs), packing.faults(), packing.left())


class _Packing:
    """Places replicas, the greatest first: each where the fewest of its kind are, and of such nodes where most is left.

    Where that leaves some out, a search tries others.
    """

    def __init__(self, needs: Sequence[Need], nodes: Nodes) -> None:
        self._needs, self._nodes = needs, nodes
        self._free = {name: dict(has) for name, has in nodes.items()}
        self._at: list[list[str]] = [[] for _ in needs]
        self._steps = SEARCH_STEPS
        for index, need in enumerate(needs):
            rooms = sum(_times(need.amounts, has) >= 1 for has in nodes.values())
            fair, at = -(-need.count // max(1, rooms)) if need.spread else inf, self._at[index]
            for node in need.there:
                wanted = at.count(node) < fair and (need.more or len(at) < need.count)
                if wanted and self._fits(index, node):
                    self._take(index, node)
        left = (index for index, need in enumerate(needs) for _ in range(need.count - len(self._at[index])))
        self._todo = sorted(left, key=lambda index: -self._share(needs[index]))

    def filled(self) -> Places:
        """Nodes of all replicas that have one."""
        if len(self._todo) > SEARCHED or not self._search(self._todo):
            for index in self._todo:
                for node in self._choices(index)[:1]:
                    self._take(index, node)
        for index, need in enumerate(self._needs):
            for node in self._choices(index) if need.more else ():
                if node not in self._at[index]:
                    self._take(index, node)
        return {need.what: tuple(at) for need, at in zip(self._needs, self._at, strict=True)}

    def faults(self) -> tuple[str, ...]:
        """What has no place."""
        return tuple(
            f"{need.what}: {need.count} wanted, each with {written(need.amounts)} on one node"
            f"{', on different nodes as they have one port' if need.most == 1 and not need.spread else ''}; "
            + (self._unknown(need) or f"there is room for {len(at)}")
            for need, at in self._lacking()
        )

    def left(self) -> tuple[str, ...]:
        """What nodes have left, and what to do, if some have no place; nothing where that cannot help."""
        lacking = [need for need, _ in self._lacking()]
        if not lacking:
            return ()
        enough = all(map(self._unknown, lacking))
        return (*(() if enough else map(self._left, sorted(self._nodes))), ADVICE)

    def _lacking(self) -> list[tuple[Need, list[str]]]:
        return [(need, at) for need, at in zip(self._needs, self._at, strict=True) if len(at) < need.count]

    def _unknown(self, need: Need) -> str:
        """Resources that no node has, with those that there are; empty: there are all."""
        known = {name for has in self._nodes.values() for name in has}
        offered = sorted(name for name in known if not name.startswith(INNER))
        unknown = ", ".join(f"`{name}`" for name in sorted(need.amounts) if name not in known)
        return f"no node offers {unknown}; offered are {', '.join(offered) or 'none'}" if unknown else ""

    def _left(self, node: str) -> str:
        free = {name: amount for name, amount in self._free[node].items() if not name.startswith(INNER)}
        whole = ", ".join(f"{name} {amount:g} of {self._nodes[node][name]:g}" for name, amount in sorted(free.items()))
        beside = [f"{at.count(node)} {need.what}" for need, at in zip(self._needs, self._at, strict=True) if node in at]
        return f"node {node} has {whole or 'nothing'} left" + (f" beside {', '.join(beside)}" if beside else "")

    def _share(self, need: Need) -> float:
        """Of a node that has most, what one replica takes of what is scarcest."""
        most = {name: max((has.get(name, 0.0) for has in self._nodes.values()), default=0.0) for name in need.amounts}
        return max((amount / (most[name] or EXACT) for name, amount in need.amounts.items()), default=0.0)

    def _fits(self, index: int, node: str) -> bool:
        need, free = self._needs[index], self._free.get(node, {})
        return self._at[index].count(node) < need.most and _times(need.amounts, free) >= 1

    def _choices(self, index: int) -> list[str]:
        """Nodes that have room for a replica, the best one first."""
        at, free = self._at[index], self._free
        fitting = (name for name in free if self._fits(index, name))
        return sorted(fitting, key=lambda name: (at.count(name), -free[name].get(CPUS, 0.0)))

    def _search(self, todo: Sequence[int]) -> bool:
        if not todo:
            return True
        for node in self._choices(todo[0]):
            self._steps -= 1
            if self._steps < 0:
                break
            self._take(todo[0], node)
            if self._search(todo[1:]):
                return True
            self._take(todo[0], node, -1)
        return False

    def _take(self, index: int, node: str, times: int = 1) -> None:
        for name, amount in self._needs[index].amounts.items():
            self._free[node][name] -= times * amount
        if times > 0:
            self._at[index].append(node)
        else:
            self._at[index].remove(node)


def fits(amounts: Amounts, nodes: Nodes) -> bool:
    """Whether one node has all of it."""
    return any(_times(amounts, has) >= 1 for has in nodes.values())


def taken(amounts: Amounts, free: Mapping[str, dict[str, float]], times: int = 1) -> bool:
    """Whether nodes have all of it so many times, each time on one of them, which has it then no more."""
    if sum(_times(amounts, has) for has in free.values()) < times:
        return False
    for _ in range(times):
        has = next(has for has in free.values() if _times(amounts, has) >= 1)
        has.update({name: has.get(name, 1.0) - amount for name, amount in amounts.items()})
    return True


def written(amounts: Amounts) -> str:
    """As text."""
    shown = sorted(item for item in amounts.items() if not item[0].startswith(IMPLICIT_RESOURCE))
    alone = " where none of its kind has its port" if len(shown) < len(amounts) else ""
    return (", ".join(f"{name} {amount:g}" for name, amount in shown) or "nothing") + alone


def _times(amounts: Amounts, has: Amounts) -> float:
    """How many replicas fit on a node."""
    found = {name: has.get(name, float(name.startswith(IMPLICIT_RESOURCE))) for name in amounts}
    return min(((found[name] + EXACT) // amount for name, amount in amounts.items()), default=inf)


POLL_SECONDS = 1.0
PROGRESS_SECONDS = 15.0  # between two lines about what is waited for
ANSWER_SECONDS = 60.0  # for a busy node to start a process


class NoCapacityError(ValueError):
    """The nodes lack resources; the text says which."""


class NotServedError(ValueError):
    """A service cannot be run as configured; the text says why."""


Say = Callable[[str], None]  # shows a line of progress


@dataclass(frozen=True)
class Waiting:
    """How a deployment waits."""

    node_seconds: float = 0.0  # for nodes that are being started, or get another crossdraft
    seconds: float = 1800.0  # until all serves that is to be started; then the deployment has failed
    say: Say = print


def await_nodes(configuration: Configuration, there: Places, waiting: Waiting) -> Placement:
    """Returns once there are places for all replicas, and the nodes have this process's crossdraft.

    Args:
        configuration: what is to be served.
        there: where replicas run that go on.
        waiting: how long.

    Raises:
        NoCapacityError: nodes lack resources.
        NotServedError: a node has another crossdraft.
    """

    def found() -> Placement:
        nodes = _nodes()
        return placed(needs_of(configuration, there), nodes)

    needs, began = found().needs, time.monotonic()
    if waiting.node_seconds and found().faults:  # for an autoscaler, if there is one
        request_resources(bundles=[dict(need.amounts) for need in needs for _ in range(need.count)])
    lacking = _left(lambda: found().faults, waiting, began)
    if waiting.node_seconds:
        request_resources(bundles=[])
    if lacking:
        raise NoCapacityError("\n".join((*lacking, *found().left)))
    different = _left(lambda: _different(needs), waiting, began)
    if different:
        raise NotServedError("\n".join(different))
    return found()


def _left(faults: Callable[[], Sequence[str]], waiting: Waiting, began: float) -> Sequence[str]:
    """What is still wrong when the time is over; returns as soon as nothing is.

    Nodes that Ray's autoscaler sets up are waited for as long as all that is to be started.
    """
    said, told = "", began
    while found := faults():
        now, pending = time.monotonic(), pending_nodes() if waiting.node_seconds else ()
        until = began + (max(waiting.node_seconds, waiting.seconds) if pending else waiting.node_seconds)
        if now >= until:
            break
        text = "\n".join((*found, *(f"pending: {one}" for one in pending)))
        if text != said or now - told >= PROGRESS_SECONDS:
            said, told = text, now
            waiting.say(f"waiting for nodes, {now - began:.0f} s of {until - began:.0f}:\n{text}")
        time.sleep(POLL_SECONDS)
    return found


def pending_nodes() -> tuple[str, ...]:
    """Nodes that Ray's autoscaler has begun to set up, as `ray status` shows them; none without an autoscaler."""
    status = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    return pending_in(status.decode()) if status else ()


def pending_in(status: str) -> tuple[str, ...]:
    """The same, of the JSON that the autoscaler writes about itself."""
    report = json.loads(status).get("autoscaler_report") or {}
    launching = (f"{count} of type {kind}, launching" for kind, count in report.get("pending_launches", {}).items())
    return (*(f"{ip} {state}" for ip, _, state in report.get("pending_nodes", ())), *launching)


def _different(needs: Sequence[Need]) -> Sequence[str]:
    """Nodes that may get a replica and have another crossdraft."""
    nodes = [node for node in _alive() if any(fits(need.amounts, {"": node["Resources"]}) for need in needs)]
    answers = [(_name(node), _asked(node)) for node in nodes]
    found: dict[str, list[str]] = {}
    for name, answer in answers:
        found.setdefault(_answer(answer), []).append(name)
    return [
        f"crossdraft {installed()} is to run, and node {', '.join(names)} has {other}: install the same one there"
        for other, names in found.items()
        if other != installed()
    ]


def _asked(node: Mapping[str, Any]) -> Any:
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(on_disk).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()


def _answer(asked: Any) -> str:
    try:
        found: str = ray.get(asked, timeout=ANSWER_SECONDS)
    except GetTimeoutError:
        return f"no answer for {ANSWER_SECONDS:.0f} s"
    except RayError as error:
        return f"none that can be asked ({type(error).__name__})"
    return found


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"


def node_ids() -> dict[str, str]:
    """Ray's ids of the nodes that are alive, by the names that placements have."""
    return {_name(node): node["NodeID"] for node in _alive()}


def _nodes() -> Nodes:
    """All resources of each node that is alive."""
    return {_name(node): node["Resources"] for node in _alive()}
