"""Mean and quantiles, of values or of counts by bins. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Spread:
    """How values lie."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Iterable[float], scale: float = 1.0) -> "Spread | None":
        """Of values times `scale`; None: there are none."""
        ordered = sorted(scale * value for value in values)
        if not ordered:
            return None
        mean = sum(ordered) / len(ordered)
        return Spread(len(ordered), mean, *(quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of ascending values lies, linear between the two nearest."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def binned_quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """The same of counts by bins, linear within a bin.

    Args:
        counts: of each bin, and at the end of what is above the last bound; any positive number of values in all.
        bounds: the bins' upper bounds. What is above the last one is taken for it.
        share: 0 to 1.
    """
    wanted = share * sum(counts)
    place = next(place for place, reached in enumerate(accumulate(counts)) if reached >= wanted and counts[place])
    if place == len(bounds):
        return bounds[-1]
    low = bounds[place - 1] if place else 0.0
    before = sum(counts[:place])
    return low + (bounds[place] - low) * max(0.0, wanted - before) / counts[place]
