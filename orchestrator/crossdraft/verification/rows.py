"""Rows and proposals: distributions over next tokens, as they were sampled from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Row:
    """A distribution over next tokens: its head, and how much lies in the tail.

    `ids` are distinct; an id that is not listed has an unknown share of `tail`.
    """

    ids: Ids  # shape (n,)
    probabilities: Probabilities  # shape (n,); with `tail` they sum to one
    tail: float = 0.0  # probability of all ids that are not listed
    _places: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", {int(token): place for place, token in enumerate(self.ids)})

    @staticmethod
    def of(ids: "Ids | list[int]", weights: "Probabilities | list[float]", total: float | None = None) -> "Row":
        """A row from weights. Without `total` it is whole; with it, what is missing to `total` is the tail."""
        values = np.asarray(weights, dtype=np.float64)
        listed = float(values.sum())
        scale = listed if total is None else max(total, listed)
        return Row(np.asarray(ids, dtype=np.int64), values / scale, max(0.0, 1.0 - listed / scale))

    @staticmethod
    def certain(token: int) -> "Row":
        """The one-hot row of temperature 0."""
        return Row(np.array([token], dtype=np.int64), np.ones(1))

    @property
    def whole(self) -> bool:
        """Whether every id with probability above zero is listed."""
        return self.tail == 0.0

    def lists(self, ids: Iterable[int]) -> bool:
        """Whether the probability of each of `ids` is known."""
        return self.whole or all(token in self._places for token in ids)

    def probability(self, token: int) -> float:
        """Probability of a listed id.

        Raises:
            KeyError: the id is in the tail, so its probability is not known.
        """
        place = self._places.get(token)
        if place is None:
            if self.whole:
                return 0.0
            raise KeyError(token)
        return float(self.probabilities[place])

    def probabilities_of(self, ids: Ids) -> Probabilities:
        """Probabilities of listed ids, shape of `ids`; raises KeyError as `probability` does."""
        return np.array([self.probability(int(token)) for token in ids], dtype=np.float64)


class Whose(Enum):
    """Whose ids a proposal uses."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True, eq=False)
class Proposal:
    """One draft token with the row that it was drawn from (none for methods that need none)."""

    token: int
    row: Row | None = None
    whose: Whose = Whose.DRAFTER
