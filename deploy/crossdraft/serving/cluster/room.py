"""Whether a cluster's nodes have what a configuration asks for. Pure.

Only what is certain is said: replicas that fit one by one, and all together, may still not fit on these nodes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from crossdraft.serving.configuration import Configuration, Resources

CPUS, GPUS = "CPU", "GPU"  # as Ray names them
EXACT = 1e-4  # Ray counts in ten-thousandths

Amounts = Mapping[str, float]  # of resources, by Ray's names
Nodes = Mapping[str, Amounts]  # by address


@dataclass(frozen=True)
class Need:
    """Replicas that take the same."""

    what: str  # for people
    count: int
    amounts: Amounts  # of one of them
    apart: bool = False  # each on a node of its own, as they have one port


def amounts_of(resources: Resources) -> Amounts:
    """By Ray's names, without what is 0."""
    all_of_them = {CPUS: resources.cpus, GPUS: resources.gpus, **resources.custom}
    return {name: amount for name, amount in all_of_them.items() if amount > 0}


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
    """What is missing, each with what to do about it; empty if nothing is for certain."""
    return (*_faults_of_each(needs, nodes), *_faults_of_all(needs, nodes))


def fits(amounts: Amounts, nodes: Nodes) -> bool:
    """Whether one node has it all."""
    return any(_times(amounts, has) >= 1 for has in nodes.values())


def written(amounts: Amounts) -> str:
    """For people."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(amounts.items())) or "nothing"


def _faults_of_each(needs: Sequence[Need], nodes: Nodes) -> Iterator[str]:
    for need in needs:
        most = 1 if need.apart else inf
        places = sum(min(most, _times(need.amounts, has)) for has in nodes.values())
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
    """How often a node has it."""
    return min(((has.get(name, 0.0) + EXACT) // amount for name, amount in amounts.items()), default=inf)
