"""Where the replicas of a configuration have room on a cluster's nodes, and whether these have its crossdraft.

Room is sought before anything starts, as Serve waits for it, and says what a replica needs, but not what nodes lack.
Where replicas start is Serve's choice; of some deployments a node takes only as many as are placed on it here.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from crossdraft.cluster.config import CPUS, Process
from crossdraft.cluster.status import installed, on_disk, pending_nodes

INNER = ("node:", "memory", "object_store")  # beginnings of resources that every node has, its own included
EXACT = 1e-4  # Ray counts in ten-thousandths
ADVICE = "ask for fewer replicas or for less of a node (`resources`), or add nodes that offer what is lacking"
Amounts = Mapping[str, float]  # of resources, by Ray's names
Nodes = Mapping[str, Amounts]  # by address
Free = Mapping[str, dict[str, float]]  # what is left of them, changed by who takes some
Places = Mapping[str, Sequence[str]]  # nodes of replicas, by what they are


@dataclass(frozen=True)
class Placement:
    """Nodes for replicas."""

    places: Places
    faults: tuple[str, ...]  # what has no place, what each node has left then, and what may be done

    def most(self, what: str) -> int:
        """Replicas of this kind on one node."""
        return max(map(self.places[what].count, self.places[what]), default=1)


def placed(needs: Sequence[Process], nodes: Nodes) -> Placement:
    """Places for all replicas, the greatest first: where the fewest of its kind are, and of such nodes most is left."""
    free, at = {name: dict(has) for name, has in nodes.items()}, {need.what: list[str]() for need in needs}
    most = {name: max(has.get(name, EXACT) for has in nodes.values()) for need in needs for name in need.amounts}

    def choices(need: Process) -> list[str]:
        """Nodes that have room for a replica, the best one first."""
        there = at[need.what].count
        fitting = (name for name, has in free.items() if there(name) < need.most and _times(need.amounts, has) >= 1)
        return sorted(fitting, key=lambda name: (there(name), -free[name].get(CPUS, 0.0)))

    def take(need: Process, node: str) -> None:
        at[need.what].append(node)
        free[node].update({name: free[node][name] - amount for name, amount in need.amounts.items()})

    def share(need: Process) -> float:
        """What one replica takes of a node that has most of it."""
        return max((amount / most[name] for name, amount in need.amounts.items()), default=0.0)

    for need in sorted(needs, key=share, reverse=True):
        while len(at[need.what]) < need.count and (best := choices(need)):
            take(need, best[0])
    for need in (need for need in needs if need.everywhere):
        for node in choices(need):
            if node not in at[need.what]:
                take(need, node)
    faults = [_fault(need, len(at[need.what])) for need in needs if len(at[need.what]) < need.count]
    left = [_left_of(name, nodes[name], has, at) for name, has in sorted(free.items())]
    places = {what: tuple(there) for what, there in at.items()}
    return Placement(places, (*faults, *left, ADVICE) if faults else ())


def _fault(need: Process, room: int) -> str:
    apart = ", on different nodes as they have one port" if need.most == 1 else ""
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in sorted(need.amounts.items())) or "nothing"
    return f"{need.what}: {need.count} wanted, each with {wanted} on one node{apart}; there is room for {room}"


def _left_of(node: str, whole: Amounts, free: Amounts, at: Places) -> str:
    """What a node has left, and what it has taken."""
    shown = sorted((name, amount) for name, amount in free.items() if not name.startswith(INNER))
    left = ", ".join(f"{name} {amount:g} of {whole[name]:g}" for name, amount in shown)
    beside = ", ".join(f"{there.count(node)} {what}" for what, there in at.items() if node in there)
    return f"node {node} has {left or 'nothing'} left{f' beside {beside}' if beside else ''}"


def take(amounts: Amounts, free: Free, times: int, most: float = inf) -> bool:
    """Takes it so many times from nodes, at most `most` times of each; False, and no change, if there is too little."""
    at: list[dict[str, float]] = []
    for has in free.values():
        at += [has] * int(min(_times(amounts, has), most, times - len(at)))
    if len(at) < times:
        return False
    for has in at:
        has.update({name: has[name] - amount for name, amount in amounts.items()})
    return True


def _times(amounts: Amounts, has: Amounts) -> float:
    """How many replicas fit on a node."""
    return min(((has.get(name, 0.0) + EXACT) // amount for name, amount in amounts.items()), default=inf)


POLL_SECONDS = 0.5
SOON_SECONDS = 5.0  # before what is waited for is said
PROGRESS_SECONDS = 15.0  # before the same is said again
ANSWER_SECONDS = 60.0  # for a busy node to start a process


class NotServedError(ValueError):
    """What is configured cannot be run; the text says why, and what nodes lack."""


Say = Callable[[str], None]  # shows a line of progress


@dataclass(frozen=True)
class Waiting:
    """How a deployment waits."""

    node_seconds: float = 0.0  # for nodes that are being started, or get another crossdraft
    seconds: float = 1800.0  # until all serves that is to be started; then the deployment has failed
    say: Say = print


def waited(look: Callable[[], str], until: Callable[[], float], say: Say) -> str:
    """Looks until nothing is missing, or `until()`, of the monotonic clock, is past; returns what was missing last.

    Says what is waited for: after SOON_SECONDS, when it changes, and every PROGRESS_SECONDS.
    """
    said, told = "", time.monotonic()
    while (found := look()) and (now := time.monotonic()) < until():
        if now - told >= (PROGRESS_SECONDS if found == said else SOON_SECONDS):
            said, told = found, now
            say(found)
        time.sleep(POLL_SECONDS)
    return found


def await_nodes(needs: Sequence[Process], waiting: Waiting) -> Placement:
    """Places for all replicas, once nodes have them and this crossdraft; those that Ray's autoscaler sets up are waited
    for as long as all that is to be started. Raises NotServedError."""
    began = time.monotonic()

    def faults() -> str:
        found = placed(needs, all_nodes())
        pending = [f"pending: {node}" for node in pending_nodes()] if found.faults and waiting.node_seconds else ()
        return "\n".join((*found.faults, *pending) or _different(needs))

    def until() -> float:
        longest = waiting.seconds if waiting.node_seconds and pending_nodes() else 0.0
        return began + max(waiting.node_seconds, longest)

    if waiting.node_seconds and faults():  # for an autoscaler, if there is one
        request_resources(bundles=[need.amounts for need in needs for _ in range(need.count)])
    lacking = waited(faults, until, lambda text: waiting.say(f"waiting for nodes:\n{text}"))
    if waiting.node_seconds:
        request_resources(bundles=[])
    if lacking:
        raise NotServedError(lacking)
    return placed(needs, all_nodes())


def _different(needs: Sequence[Process]) -> Sequence[str]:
    """Nodes that may get a replica and have another crossdraft."""
    nodes = [name for name, has in all_nodes().items() if any(_times(need.amounts, has) >= 1 for need in needs)]
    found: dict[str, list[str]] = {}
    for name, answer in asked(on_disk, dict.fromkeys(nodes, ())).items():
        found.setdefault(answer, []).append(name)
    return [
        f"crossdraft {installed()} is to run, and node {', '.join(names)} has {other}: install the same one there"
        for other, names in found.items()
        if other != installed()
    ]


def asked(what: Callable[..., str], of: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """What a function returns on nodes, by their names, with these arguments; or why there is no answer."""
    ids, running = {_name(node): node["NodeID"] for node in _alive()}, dict[str, Any]()
    run: Any = ray.remote(what)
    for name in ids.keys() & of.keys():
        there = NodeAffinitySchedulingStrategy(ids[name], soft=False)
        running[name] = run.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(*of[name])
    return {name: _answer(answer) for name, answer in running.items()}


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


def all_nodes() -> Nodes:
    """All resources of each node that is alive."""
    return {_name(node): node["Resources"] for node in _alive()}
