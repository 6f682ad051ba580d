"""The one object through which all randomness of verification goes, so that tests can enumerate every outcome."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike


class Chooser(Protocol):
    """The random choices that a walk can make. Weights may have any sum but zero.

    `candidates` and `kept` together draw an index with probability in proportion to weights[i] keep[i]: draw blocks of
    candidates by `weights` until one is kept. `keep` is needed for the candidates only, because it is costly to learn.
    """

    def bernoulli(self, probability: float) -> bool:
        """True with this probability, clipped to [0, 1]."""

    def categorical(self, weights: ArrayLike) -> int:
        """An index, with probability in proportion to `weights` (shape (n,), none negative)."""

    def candidates(self, weights: ArrayLike, count: int) -> tuple[int, ...]:
        """`count` independent draws of an index by `weights`, shape (n,), in the order in which they are tried."""

    def kept(self, candidates: Sequence[int], weights: ArrayLike, keep: ArrayLike) -> int | None:
        """The first candidate that is kept, or None: draw another block.

        `candidates`: what `candidates(weights, count)` gave. `weights`: shape (n,). `keep`: the probability that each
        candidate is kept, float64 (len(candidates),).
        """


class RandomChooser:
    """The chooser of production: a seeded numpy Generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def bernoulli(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def categorical(self, weights: ArrayLike) -> int:
        return int(_cumulative(weights).searchsorted(self._rng.random(), side="right"))

    def candidates(self, weights: ArrayLike, count: int) -> tuple[int, ...]:
        return tuple(np.searchsorted(_cumulative(weights), self._rng.random(count), side="right").tolist())

    def kept(self, candidates: Sequence[int], weights: ArrayLike, keep: ArrayLike) -> int | None:
        chances = np.asarray(keep, dtype=np.float64)
        passed = np.flatnonzero(self._rng.random(len(chances)) < chances)
        return candidates[int(passed[0])] if len(passed) else None


def _cumulative(weights: ArrayLike) -> np.ndarray:
    values = np.asarray(weights, dtype=np.float64)
    total = float(values.sum())
    if not 0 < total < np.inf or values.min() < 0:
        raise ValueError(f"weights must be finite, none negative, not all zero; they sum to {total}")
    cumulative: np.ndarray = (values / total).cumsum()
    # From the last positive weight on the sum is exactly one, so that rounding never picks a zero weight.
    cumulative[cumulative == cumulative[-1]] = 1.0
    return cumulative
