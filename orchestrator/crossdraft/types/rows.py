"""Rows (truncated next-token distributions), the draft tokens drawn from them, and the keys of such draws."""

from collections.abc import Sequence
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import Ids as Ids
from crossdraft.types import quick_dataclass

Probabilities = NDArray[np.float64]
MAX_SORTED = 1024  # ids of a row that are sorted for look-ups; a table over the vocabulary costs 50 to 200 us at first
NO_IDS: Ids = np.empty(0, dtype=np.int64)


@quick_dataclass(frozen=True, eq=False)
class Row:
    """A truncated next-token distribution: some ids with their probabilities, and the mass of all others, the tail.

    `ids` are distinct; an unlisted id has an unknown share of `tail`.
    """

    ids: Ids  # shape (n,)
    probabilities: Probabilities  # shape (n,); with `tail` they sum to one
    tail: float = 0.0  # probability of all unlisted ids together
    # Of a target's row, where they were asked for; as those of `messages.Sample`.
    log_probabilities: Probabilities | None = None  # shape (n,), of `ids`
    likely: tuple[tuple[int, float], ...] = ()

    @cached_property
    def _order(self) -> tuple[Ids, Ids]:
        """Indices that sort the ids, and the ids so sorted."""
        order = np.argsort(self.ids)
        return order, self.ids[order]

    @cached_property
    def _table(self) -> NDArray[np.int32]:
        """Index by id; unlisted ids have garbage (a sparse set, Briggs and Torczon 1993)."""
        table = np.empty(int(self.ids.max()) + 1, dtype=np.int32)
        table[self.ids] = np.arange(len(self.ids), dtype=np.int32)
        return table

    @staticmethod
    def certain(token: int) -> "Row":
        return Row(np.array([token], dtype=np.int64), np.ones(1))

    @property
    def whole(self) -> bool:
        """Whether every id with probability above zero is listed."""
        return self.tail == 0.0

    def places(self, ids: Ids) -> Ids:
        """Index of each of `ids` in `self.ids`, same shape; -1 where it is not listed."""
        if not len(self.ids):
            return np.full(ids.shape, -1, dtype=np.int64)
        if len(self.ids) <= MAX_SORTED:
            order, ordered = self._order
            guessed = order[np.minimum(ordered.searchsorted(ids), len(ordered) - 1)]
        else:  # unset entries of the table are garbage: clamp them to the range, then compare ids
            guessed = np.minimum(self._table.take(ids, mode="clip").view(np.uint32), len(self.ids) - 1).astype(np.int64)
        return np.where(self.ids[guessed] == ids, guessed, -1)

    def lists(self, ids: Sequence[int] | Ids) -> bool:
        """Whether the probabilities of all of `ids` are known."""
        if self.whole or not len(ids):
            return True
        if len(ids) == 1:  # needs no table
            return bool((self.ids == ids[0]).any())
        return bool(self.places(np.asarray(ids, dtype=np.int64)).min() >= 0)

    def probability(self, token: int) -> float:
        """Probability of an id. Raises KeyError: the id may be in the tail, so its probability is not known."""
        found = self.probabilities[self.ids == token]
        if len(found):
            return float(found[0])
        if self.whole:
            return 0.0
        raise KeyError(token)

    def aligned(self, other: "Row") -> Probabilities:
        """The other row's probabilities at this row's ids, shape (n,); 0 where it does not list them.

        Raises KeyError: the other row lists an id that may be in this one's tail.
        """
        places = self.places(other.ids)
        found = np.zeros(len(self.ids) + 1)
        found[places] = other.probabilities
        if not self.whole and len(places) and places.min() < 0:
            raise KeyError(int(other.ids[places.argmin()]))
        return found[:-1]

    def probabilities_of(self, ids: Ids) -> Probabilities:
        """Probabilities of ids, in their shape; raises KeyError as `probability` does."""
        places = self.places(ids)
        if not self.whole and bool((places < 0).any()):
            raise KeyError(int(ids[places < 0][0]))
        return np.where(places < 0, 0.0, np.append(self.probabilities, 0.0)[places])


class Whose(Enum):
    """Whose token ids a draft token and its row use."""

    DRAFTER = "drafter"
    TARGET = "target"


@quick_dataclass(frozen=True, eq=False)
class DraftToken:
    """One draft token, with the row that it was drawn from if the method needs it."""

    token: int
    row: Row | None = None
    whose: Whose = Whose.DRAFTER


def masses_of(kinds: NDArray[np.integer], weights: Probabilities, count: int) -> Probabilities:
    """Sum of the weights of each kind, float64 (count,); `kinds` (0 to count - 1) and `weights` have shape (n,)."""
    return np.bincount(kinds, weights, count).astype(np.float64, copy=False)


@quick_dataclass(frozen=True)
class NoiseKey:
    """Key of the noise of `verification.noise`; the other inputs are letter offset, letters and rank."""

    seed: int  # 64 bits; the request's seed, or the session's nonce
    choice: int = 0  # index among the n outputs of one request
