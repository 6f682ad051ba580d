"""Whether nodes that offer something have room for all that a configuration asks for, at once."""

from collections.abc import Sequence

from crossdraft.cluster.capacity import Amounts, needs_of, placed
from crossdraft.cluster.config import processes_of
from crossdraft.config.cluster import Configuration


def unplaced(configuration: Configuration, nodes: Sequence[Amounts]) -> list[str]:
    """What has no place on these nodes."""
    named = {str(number): node for number, node in enumerate(nodes)}
    return list(placed(needs_of(processes_of(configuration)), named).faults)
