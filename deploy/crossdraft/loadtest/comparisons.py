"""The same requests made in two ways: what one way adds. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from crossdraft.loadtest.spreads import Spread
from crossdraft.loadtest.timelines import Timeline

MILLISECONDS = 1000.0

Repetitions = Sequence[Sequence[Timeline]]  # of the same requests


@dataclass(frozen=True)
class Added:
    """Milliseconds that a way takes longer than another, over the requests that were answered in both."""

    way: str
    than: str
    first_token_ms: Spread | None
    per_token_ms: Spread | None  # of each request: its milliseconds a token after the first, less those of the other
    end_to_end_ms: Spread | None
    per_token_ratio: float | None  # median over requests


def added_by(way: str, made: Repetitions, than: str, others: Repetitions) -> Added:
    """Pairs the requests of each repetition by their numbers."""
    ordered = (zip(_ordered(one), _ordered(other), strict=True) for one, other in zip(made, others, strict=True))
    pairs = [pair for pair in chain.from_iterable(ordered) if all(one.fine for one in pair)]
    paces = [
        (one.per_token, other.per_token)
        for one, other in pairs
        if one.per_token is not None and other.per_token is not None
    ]
    ratios = [one / other for one, other in paces if other > 0]
    return Added(
        way,
        than,
        Spread.of((one.first_token - other.first_token for one, other in pairs), MILLISECONDS),
        Spread.of((one - other for one, other in paces), MILLISECONDS),
        Spread.of((one.end_to_end - other.end_to_end for one, other in pairs), MILLISECONDS),
        median(ratios) if ratios else None,
    )


def _ordered(timelines: Sequence[Timeline]) -> list[Timeline]:
    return sorted(timelines, key=lambda one: one.number)
