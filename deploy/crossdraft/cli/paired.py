"""Speeds that are compared on the same prompts: ratios with their 95 % intervals, over prompts drawn again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRAWS = 4_000  # of the prompts, with replacement (the bootstrap)
SEED = 0
LOW, HIGH = 2.5, 97.5  # per cent

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
    """A generation: how many tokens it made, and how long that took."""

    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds, and between what it is in 95 of 100 sets of prompts like these."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speed_of(runs: Sequence[Timed]) -> float:
    """Tokens a second over all of them."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.tokens for run in runs) / seconds if seconds else 0.0


def speed_ratio(ours: Sequence[Timed], others: Sequence[Timed]) -> Ratio:
    """Of all tokens over all time, ours and others'; runs at the same place are of the same prompt."""

    def ratio(places: npt.NDArray[np.int64]) -> Floats:
        ours_, others_ = _speeds(ours, places), _speeds(others, places)
        found: Floats = ours_ / others_
        return found

    return _interval(ratio, len(ours), len(others))


def median_ratio(ours: Sequence[Timed], others: Sequence[Timed]) -> Ratio:
    """The median over prompts of the ratio of both speeds."""
    ratios = np.array([one.speed / other.speed for one, other in zip(ours, others, strict=True)])

    def median(places: npt.NDArray[np.int64]) -> Floats:
        found: Floats = np.median(ratios[places], axis=-1)
        return found

    return _interval(median, len(ours), len(others))


def rotated(count: int, turn: int) -> list[int]:
    """0 to count − 1, beginning further on with each turn, so that none of them always comes after the same one."""
    return [(turn + place) % count for place in range(count)]


def _speeds(runs: Sequence[Timed], places: npt.NDArray[np.int64]) -> Floats:
    tokens = np.array([run.tokens for run in runs], dtype=np.float64)[places].sum(axis=-1)
    speeds: Floats = tokens / np.array([run.seconds for run in runs])[places].sum(axis=-1)
    return speeds


def _interval(statistic: Callable[[npt.NDArray[np.int64]], Floats], count: int, as_many: int) -> Ratio:
    """Of a statistic of places, shape (..., count) to shape (...)."""
    if count != as_many or not count:
        raise ValueError(f"runs are compared in pairs, at least one: {count} and {as_many} were given")
    drawn = statistic(np.random.default_rng(SEED).integers(count, size=(DRAWS, count)))
    low, high = np.percentile(drawn, [LOW, HIGH])
    return Ratio(float(statistic(np.arange(count))), float(low), float(high))
