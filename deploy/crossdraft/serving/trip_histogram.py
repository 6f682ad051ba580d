"""A histogram whose observations come counted already: round trips of lanes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from crossdraft.pipeline.trips import BOUNDS, LaneFigures
from crossdraft.rpc.exposition import PREFIX

UPPER = (*map(str, BOUNDS), "+Inf")


@dataclass
class _Trips:
    counts: list[int] = field(default_factory=lambda: [0] * len(UPPER))
    seconds: float = 0.0


class TripHistogram:
    """A Prometheus collector of `round_trip_seconds`, by role and address of the service."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, str], _Trips] = {}

    def add(self, lane: LaneFigures) -> None:
        """Counts the round trips of one session."""
        peer = self._peers.setdefault((lane.role, lane.address), _Trips())
        peer.counts = [before + more for before, more in zip(peer.counts, lane.trips.counts, strict=True)]
        peer.seconds += lane.trips.seconds

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client wants it."""
        family = HistogramMetricFamily(
            f"{PREFIX}round_trip_seconds",
            "Seconds from a question to a service to its first answer, less those in its model.",
            labels=("role", "peer"),
        )
        for labels, peer in sorted(self._peers.items()):
            family.add_metric(labels, list(zip(UPPER, map(float, accumulate(peer.counts)), strict=True)), peer.seconds)
        yield family
