"""What the nodes of a running cluster must have before anything is begun: room, and this crossdraft."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from crossdraft.serving.cluster.installed import installed, on_disk
from crossdraft.serving.cluster.rolling import NotServedError, Say
from crossdraft.serving.cluster.room import Need, Nodes, faults_of, fits

ASKED_EVERY = 1.0  # seconds
ANSWER_SECONDS = 60.0  # for a node that is busy to start a process


class NoRoomError(ValueError):
    """No node has what the configuration wants; the text says what is missing."""


@dataclass(frozen=True)
class Waiting:
    """For what, and for how long."""

    node_seconds: float = 0.0  # for nodes that are being started, or given another crossdraft
    say: Say = print  # where progress is told


def await_nodes(needs: Sequence[Need], waiting: Waiting) -> None:
    """Returns once the nodes have what is wanted, as far as that can be said, and crossdraft as it is here.

    Raises:
        NoRoomError: nodes lack resources.
        NotServedError: a node has another crossdraft.
    """
    if waiting.node_seconds and faults_of(needs, _nodes()):  # an autoscaler starts these; without one nobody hears it
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
    """What is still wrong when the time is over, or nothing as soon as nothing is."""
    until, told = time.monotonic() + waiting.node_seconds, ""
    while (found := faults()) and time.monotonic() < until:
        if told != (told := "; ".join(found)):
            waiting.say(f"waiting for nodes: {told}")
        time.sleep(ASKED_EVERY)
    return found


def _different(needs: Sequence[Need]) -> Sequence[str]:
    """Nodes where something may run, and whose crossdraft is not this one."""
    nodes = [node for node in _alive() if any(fits(need.amounts, {"": node["Resources"]}) for need in needs)]
    asked = [(_name(node), _asked(node)) for node in nodes]
    found: dict[str, list[str]] = {}
    for name, answer in asked:
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
    """What each node that is alive has in all."""
    return {_name(node): node["Resources"] for node in _alive()}


def _offers(nodes: Nodes) -> Iterator[str]:
    for name, has in sorted(nodes.items()):
        own = {key: amount for key, amount in has.items() if not key.startswith(("node:", "memory", "object_store"))}
        yield f"node {name} has {', '.join(f'{key} {amount:g}' for key, amount in sorted(own.items()))}"
