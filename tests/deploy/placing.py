"""Whether nodes that offer something have room for all that a configuration asks for, at once."""

from collections.abc import Sequence

from crossdraft.cluster.capacity import Amounts, needs_of
from crossdraft.cluster.config import Configuration


def unplaced(configuration: Configuration, nodes: Sequence[Amounts]) -> list[str]:
    """Replicas that fit on no node, one after the other on the first that has room."""
    free = [dict(node) for node in nodes]
    left = []
    for need in needs_of(configuration):
        for _ in range(need.count):
            room = next((node for node in free if _fits(need.amounts, node)), None)
            if room is None:
                left.append(need.what)
            else:
                room.update({name: room[name] - amount for name, amount in need.amounts.items()})
    return left


def _fits(amounts: Amounts, node: Amounts) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in amounts.items())
