"""Whether nodes that offer something have room for all that a configuration asks for."""

from collections.abc import Iterator, Mapping, Sequence

from crossdraft.serving.configuration import Configuration, Resources

Offer = Mapping[str, float]  # by Ray's names: CPU, GPU, and custom ones


def unplaced(configuration: Configuration, nodes: Sequence[Offer]) -> list[Offer]:
    """Demands that fit on no node, one after the other on the first that has room."""
    free = [dict(node) for node in nodes]
    left = []
    for demand in demands(configuration):
        room = next((node for node in free if _fits(demand, node)), None)
        if room is None:
            left.append(demand)
        else:
            room.update({name: room[name] - amount for name, amount in demand.items()})
    return left


def demands(configuration: Configuration) -> Iterator[Offer]:
    """What each replica takes of its node."""
    for model in configuration.models:
        for service in (model.target, *model.drafters):
            yield from [_demand(service.resources)] * service.replicas
        yield from [_demand(model.orchestrator_resources)] * model.orchestrators
    yield from [_demand(configuration.http.resources)] * configuration.http.replicas


def _demand(resources: Resources) -> Offer:
    asked = {"CPU": resources.cpus, "GPU": resources.gpus, **resources.custom}
    return {name: amount for name, amount in asked.items() if amount}


def _fits(demand: Offer, node: Offer) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in demand.items())
