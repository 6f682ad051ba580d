"""Whether a cluster's nodes have the resources and the crossdraft that a configuration needs.

Only certain shortages are reported: replicas that fit one by one, and in sum, may still not fit on these nodes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from crossdraft.cluster.config import Configuration, Resources
from crossdraft.cluster.installed import installed, on_disk

CPUS, GPUS = "CPU", "GPU"  # as Ray names them
EXACT = 1e-4  # Ray counts in ten-thousandths
Amounts = Mapping[str, float]  # of resources, by Ray's names
Nodes = Mapping[str, Amounts]  # by address


@dataclass(frozen=True)
class Need:
    """Replicas with the same resources."""

    what: str  # shown to users
    count: int
    amounts: Amounts  # of one of them
    apart: bool = False  # each on a node of its own, as they share a port


def amounts_of(resources: Resources) -> Amounts:
    """By Ray's names, without zeros."""
    amounts = {CPUS: resources.cpus, GPUS: resources.gpus, **resources.custom}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def needs_of(configuration: Configuration) -> tuple[Need, ...]:
    """All replicas of a configuration."""
    return tuple(_needs(configuration))


def _needs(configuration: Configuration) -> Iterator[Need]:
    for model in configuration.models:
        target = model.target
        yield Need(f"target of {model.name!r}", target.replicas, amounts_of(target.resources), target.port > 0)
        for one in model.drafters:
            what = f"drafter {one.name!r} of {model.name!r}"
            yield Need(what, one.replicas, amounts_of(one.resources), one.port > 0)
        what = f"orchestrator of {model.name!r}"
        yield Need(what, model.orchestrators, amounts_of(model.orchestrator_resources))
    yield Need("HTTP front", configuration.http.replicas, amounts_of(configuration.http.resources))
    grpc = configuration.grpc
    if grpc is not None:
        yield Need("gRPC front", grpc.replicas, amounts_of(grpc.resources), grpc.port > 0)


def faults_of(needs: Sequence[Need], nodes: Nodes) -> tuple[str, ...]:
    """What is certainly missing, one text each."""
    return (*_faults_of_each(needs, nodes), *_faults_of_all(needs, nodes))


def fits(amounts: Amounts, nodes: Nodes) -> bool:
    """Whether one node has all of it."""
    return any(_times(amounts, has) >= 1 for has in nodes.values())


def written(amounts: Amounts) -> str:
    """As text."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(amounts.items())) or "nothing"


def _faults_of_each(needs: Sequence[Need], nodes: Nodes) -> Iterator[str]:
    for need in needs:
        per_node = 1 if need.apart else inf
        places = sum(min(per_node, _times(need.amounts, has)) for has in nodes.values())
        if places < need.count:
            wanted = f"{need.what}: {need.count} wanted, each with {written(need.amounts)} on one node"
            apart = ", on different nodes as they have one port" if need.apart else ""
            yield f"{wanted}{apart}; there is room for {places:g}"


def _faults_of_all(needs: Sequence[Need], nodes: Nodes) -> Iterator[str]:
    wanted, there = Counter[str](), Counter[str]()
    for need in needs:
        for name, amount in need.amounts.items():
            wanted[name] += need.count * amount  # type: ignore[assignment]  # a Counter takes any number
    for has in nodes.values():
        for name, amount in has.items():
            there[name] += amount  # type: ignore[assignment]
    for name, amount in sorted(wanted.items()):
        if amount > there[name] + EXACT:
            yield f"all replicas together want {name} {amount:g}, and the nodes have {there[name]:g}"


def _times(amounts: Amounts, has: Amounts) -> float:
    """How many replicas fit on a node."""
    return min(((has.get(name, 0.0) + EXACT) // amount for name, amount in amounts.items()), default=inf)


POLL_SECONDS = 1.0
ANSWER_SECONDS = 60.0  # for a busy node to start a process


class NoRoomError(ValueError):
    """The nodes lack resources; the text says which."""


class NotServedError(ValueError):
    """A service cannot be run as configured; the text says why."""


Say = Callable[[str], None]  # shows a line of progress


@dataclass(frozen=True)
class Waiting:
    """How a deployment waits."""

    node_seconds: float = 0.0  # for nodes that are being started, or get another crossdraft
    say: Say = print


def await_nodes(needs: Sequence[Need], waiting: Waiting) -> None:
    """Returns once no shortage is certain, and the nodes have this process's crossdraft.

    Raises:
        NoRoomError: nodes lack resources.
        NotServedError: a node has another crossdraft.
    """
    if waiting.node_seconds and faults_of(needs, _nodes()):  # for an autoscaler, if there is one
        request_resources(bundles=[dict(need.amounts) for need in needs for _ in range(need.count)])
    lacking = _left(lambda: faults_of(needs, _nodes()), waiting)
    if waiting.node_seconds:
        request_resources(bundles=[])
    if lacking:
        raise NoRoomError("\n".join((*lacking, *_offers(_nodes()))))
    different = _left(lambda: _different(needs), waiting)
    if different:
        raise NotServedError("\n".join(different))


def _left(faults: Callable[[], Sequence[str]], waiting: Waiting) -> Sequence[str]:
    """What is still wrong when the time is over; returns as soon as nothing is."""
    until, told = time.monotonic() + waiting.node_seconds, ""
    while (found := faults()) and time.monotonic() < until:
        if told != (told := "; ".join(found)):
            waiting.say(f"waiting for nodes: {told}")
        time.sleep(POLL_SECONDS)
    return found


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


def _nodes() -> Nodes:
    """All resources of each node that is alive."""
    return {_name(node): node["Resources"] for node in _alive()}


def _offers(nodes: Nodes) -> Iterator[str]:
    for name, has in sorted(nodes.items()):
        own = {key: amount for key, amount in has.items() if not key.startswith(("node:", "memory", "object_store"))}
        yield f"node {name} has {', '.join(f'{key} {amount:g}' for key, amount in sorted(own.items()))}"
