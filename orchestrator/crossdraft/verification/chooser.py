"""All randomness of verification goes through one object."""

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike


class Chooser(Protocol):
    """The random choices that a walk can make. Weights need not sum to one; they must not all be zero."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability (values outside [0, 1] count as the nearer end)."""
        ...

    def categorical(self, weights: ArrayLike) -> int:
        """An index, with probability in proportion to `weights` (shape (n,), none negative)."""
        ...

    def thinned(self, weights: ArrayLike, keep: ArrayLike) -> int:
        """Draw an index by `weights` until it is kept, with probability `keep[index]`; both shape (n,)."""
        ...


class RandomChooser:
    """The chooser of production: a seeded numpy Generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def bernoulli(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def categorical(self, weights: ArrayLike) -> int:
        return int(np.searchsorted(_cumulative(weights), self._rng.random(), side="right"))

    def thinned(self, weights: ArrayLike, keep: ArrayLike) -> int:
        cumulative, kept = _cumulative(weights), np.asarray(keep, dtype=np.float64)
        if not np.any((np.asarray(weights) > 0) & (kept > 0)):
            raise ValueError("nothing would ever be kept")
        while True:
            index = int(np.searchsorted(cumulative, self._rng.random(), side="right"))
            if self._rng.random() < kept[index]:
                return index


def _cumulative(weights: ArrayLike) -> np.ndarray:
    values = np.asarray(weights, dtype=np.float64)
    total = float(values.sum())
    if not (total > 0 and np.isfinite(total)) or bool(np.any(values < 0)):
        raise ValueError(f"weights must be finite, none negative, not all zero; they sum to {total}")
    cumulative = np.cumsum(values / total)
    # Above the last positive weight the sum is exactly one, so that rounding never picks a zero weight.
    cumulative[int(np.flatnonzero(values)[-1]) :] = 1.0
    return cumulative
