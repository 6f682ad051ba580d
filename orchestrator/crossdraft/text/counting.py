"""Counts of pairs of ids in bounded memory: of 128k × 128k pairs a corpus has few, and of those few matter."""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
BUFFERED = 1 << 22  # pairs that wait to be merged
MOST = 1 << 22  # different pairs that are kept


class PairCounts:
    """How often each pair was seen. Of too many different pairs, those seen least are forgotten."""

    def __init__(self, width: int, most: int = MOST, buffered: int = BUFFERED) -> None:
        """`width`: above every right id; `most`: different pairs that are kept."""
        self._width = width
        self._most = most
        self._buffered = buffered
        self._keys: Ids = np.empty(0, dtype=np.int64)  # left * width + right, ascending
        self._counts: Ids = np.empty(0, dtype=np.int64)
        self._waiting: list[Ids] = []
        self._size = 0  # of what is waiting
        self.forgotten = 0  # sightings that no longer count

    def add(self, left: Ids, right: Ids) -> None:
        """Counts the pairs (left[i], right[i]), both of one shape."""
        self._waiting.append((left * self._width + right).ravel())
        self._size += left.size
        if self._size >= self._buffered:
            self._merge()

    def entries(self) -> tuple[Ids, Ids, Ids]:
        """Left ids, right ids and counts of the pairs that are kept, ascending."""
        self._merge()
        return self._keys // self._width, self._keys % self._width, self._counts

    def _merge(self) -> None:
        fresh, seen = np.unique(np.concatenate([np.empty(0, np.int64), *self._waiting]), return_counts=True)
        self._waiting, self._size = [], 0
        self._keys, places = np.unique(np.concatenate([self._keys, fresh]), return_inverse=True)
        self._counts = np.bincount(places, np.concatenate([self._counts, seen])).astype(np.int64)
        if len(self._keys) > self._most:
            self._forget()

    def _forget(self) -> None:
        """Keeps half of `most`, of equal ones the lowest, so that the next merge does not end here again."""
        kept = np.sort(np.argsort(-self._counts, kind="stable")[: self._most // 2])
        self.forgotten += int(self._counts.sum() - self._counts[kept].sum())
        self._keys, self._counts = self._keys[kept], self._counts[kept]
