"""How many sequences of draft tokens write a target token, over a vocabulary: Section D of arXiv 2502.05202.

A count grows like 2 to the token's length, so counts are integers of any size here, and logarithms in what is reported.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10


@dataclass(frozen=True)
class OfLength:
    """Target tokens of one length; decadic logarithms of their numbers of combinations."""

    letters: int
    tokens: int  # that have a combination
    smallest: float
    quartiles: tuple[float, float, float]
    largest: float


@dataclass(frozen=True)
class Combinations:
    """Sequences of draft tokens that are exactly one target token, over the target tokens that have any."""

    tokens: int  # that have any
    quartiles: tuple[int, int, int]  # the second is the median
    log10_of_mean: float
    log10_of_deviation: float  # standard, of all of them; 0 if there is none
    log10_of_largest: float
    by_length: tuple[OfLength, ...]  # ascending
    by_power: tuple[tuple[int, int], ...]  # (n, tokens with 2ⁿ to 2ⁿ⁺¹ − 1 combinations), ascending


def combinations_of(lengths: Sequence[int], counts: Sequence[int]) -> Combinations:
    """The statistics of target tokens: their letters, and the ways to write each (0: none), both shape (n,)."""
    found: dict[int, list[int]] = {}
    for length, count in zip(lengths, counts, strict=True):
        if count:
            found.setdefault(length, []).append(count)
    every = sorted(count for same in found.values() for count in same)
    if not every:
        return Combinations(0, (0, 0, 0), 0.0, 0.0, 0.0, (), ())
    powers = Counter(count.bit_length() - 1 for count in every)
    return Combinations(
        tokens=len(every),
        quartiles=quartiles(every),
        log10_of_mean=log10(sum(every)) - log10(len(every)),
        log10_of_deviation=_log10_of_deviation(every),
        log10_of_largest=log10(every[-1]),
        by_length=tuple(_of_length(length, sorted(same)) for length, same in sorted(found.items())),
        by_power=tuple(sorted(powers.items())),
    )


def quartiles(values: Sequence[int]) -> tuple[int, int, int]:
    """The values at a quarter, a half and three quarters of `values`, which ascend; at least one."""
    first, second, third = (values[(len(values) - 1) * part // 4] for part in (1, 2, 3))
    return first, second, third


def _log10_of_deviation(counts: Sequence[int]) -> float:
    """n²·variance = n·Σ x² − (Σ x)², in integers."""
    size = len(counts)
    squared = size * sum(count * count for count in counts) - sum(counts) ** 2
    return log10(squared) / 2 - log10(size) if squared else 0.0


def _of_length(letters: int, counts: Sequence[int]) -> OfLength:
    low, middle, high = quartiles(counts)
    middles = (log10(low), log10(middle), log10(high))
    return OfLength(letters, len(counts), log10(counts[0]), middles, log10(counts[-1]))
