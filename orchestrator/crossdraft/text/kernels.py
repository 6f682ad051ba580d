"""Kernels (RDK, Algorithm 1): how the mass of a shared draft token is spread over the target's tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.pairing import Pair

Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]
Columns = NDArray[np.int32]
Weights = NDArray[np.float32]
SUM_TOLERANCE = 1e-4  # of a row's sum: weights are float32


class Kernel(Protocol):
    """What makes Mᵀq′ of q′."""

    @property
    def drafter_ids(self) -> Ids:
        """The draft tokens that it has rows for, ascending: T∩D."""

    def redistribute(self, ids: Ids, probabilities: Probabilities) -> tuple[Ids, Probabilities]:
        """As `Affinity.redistribute`."""

    def check(self, target_size: int) -> None:
        """Raises ValueError if it is not a row-stochastic map into the ids below `target_size`."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A row-stochastic sparse matrix over T∩D × T (RDK, Assumption 4.1), row after row."""

    drafter_ids: Ids  # shape (r,), ascending: whose row it is
    starts: Ids  # shape (r + 1,): row i is entries starts[i] to starts[i + 1]
    target_ids: Columns  # shape (n,), distinct in a row
    weights: Weights  # shape (n,), above 0; each row's sum to one

    @staticmethod
    def identity(pair: Pair) -> "Matrix":
        """The matrix with which `rdk` is `tli`."""
        shared = pair.shared_drafter_ids
        targets = pair.to_target_ids(shared).astype(np.int32)
        return Matrix(shared, np.arange(len(shared) + 1, dtype=np.int64), targets, np.ones(len(shared), np.float32))

    @staticmethod
    def strongest(pair: Pair, drafted: Ids, targets: Ids, weights: Probabilities, neighbours: int) -> "Matrix":
        """The matrix with the heaviest entries of each row, of equal ones the lowest ids, normalized.

        Args:
            pair: whose T∩D has the rows; a row without an entry above 0 is the token itself.
            drafted: shape (n,), the draft token of each entry, of T∩D.
            targets: shape (n,), its target token; no pair occurs twice.
            weights: shape (n,), not negative.
            neighbours: entries that a row has at most.
        """
        shared = pair.shared_drafter_ids
        empty = np.setdiff1d(shared, drafted[weights > 0])
        places = np.searchsorted(shared, np.concatenate([drafted, empty]))
        targets = np.concatenate([targets, pair.to_target_ids(empty)])
        weights = np.concatenate([weights, np.ones(len(empty))])
        order = np.lexsort((targets, -weights, places))
        starts = np.searchsorted(places[order], np.arange(len(shared) + 1))
        rank = np.arange(len(order)) - np.repeat(starts[:-1], np.diff(starts))
        order = order[(rank < neighbours) & (weights[order] > 0)]
        sums = np.bincount(places[order], weights[order], minlength=len(shared))
        shares = (weights[order] / sums[places[order]]).astype(np.float32)
        kept = shares > 0  # smaller ones are 0 in float32
        starts = np.searchsorted(places[order][kept], np.arange(len(shared) + 1)).astype(np.int64)
        return Matrix(shared, starts, targets[order][kept].astype(np.int32), shares[kept])

    def keeping(self, pair: Pair, share: float) -> "Matrix":
        """The mixture of the identity, with `share` between 0 and 1, and this matrix."""
        drafted = np.repeat(self.drafter_ids, np.diff(self.starts))
        own = pair.to_target_ids(drafted) == self.target_ids
        # the token itself may have no entry yet: all get one, and equal pairs are summed
        keys = np.concatenate([self.drafter_ids, drafted[~own]])
        targets = np.concatenate([pair.to_target_ids(self.drafter_ids), self.target_ids[~own].astype(np.int64)])
        kept = np.zeros(len(self.drafter_ids))
        kept[np.searchsorted(self.drafter_ids, drafted[own])] = self.weights[own]
        weights = np.concatenate([share + (1 - share) * kept, (1 - share) * self.weights[~own].astype(np.float64)])
        return Matrix.strongest(pair, keys, targets, weights, len(targets))

    def row(self, drafter_id: int) -> tuple[Columns, Weights]:
        """Target ids and weights of one draft token's row; ValueError if it is not shared."""
        place = int(_places(self.drafter_ids, np.array([drafter_id], dtype=np.int64))[0])
        part = slice(int(self.starts[place]), int(self.starts[place + 1]))
        return self.target_ids[part], self.weights[part]

    def redistribute(self, ids: Ids, probabilities: Probabilities) -> tuple[Ids, Probabilities]:
        """As `Affinity.redistribute`."""
        places = _places(self.drafter_ids, ids)
        lengths = self.starts[places + 1] - self.starts[places]
        entries = runs(self.starts[places], lengths)
        mass = np.repeat(probabilities, lengths) * self.weights[entries]
        return _gathered(self.target_ids[entries], mass)

    def check(self, target_size: int) -> None:
        """Raises ValueError if it is not a row-stochastic matrix into the ids below `target_size`."""
        _check_ids(self.drafter_ids, self.target_ids, target_size)
        lengths = np.diff(self.starts)
        if len(lengths) != len(self.drafter_ids) or self.starts[0] != 0 or (lengths <= 0).any():
            raise ValueError("a row has no entries, or their number is wrong")
        if self.starts[-1] != len(self.target_ids) or len(self.weights) != len(self.target_ids):
            raise ValueError("the number of entries is wrong")
        if not (self.weights > 0).all():
            raise ValueError("a weight is not above 0")
        sums = np.add.reduceat(self.weights, self.starts[:-1], dtype=np.float64) if len(lengths) else np.ones(1)
        if np.abs(sums - 1.0).max() > SUM_TOLERANCE:
            raise ValueError("the weights of a row do not sum to one")


@dataclass(frozen=True, eq=False)
class FirstOrder:
    """The first-order form (RDK, Eq. 3) for a fixed prior in place of the target's own row, which is not known."""

    drafter_ids: Ids  # shape (r,), ascending
    target_ids: Columns  # shape (r,): the target's token for each of them
    prior: Probabilities  # shape (N,), sums to one

    @staticmethod
    def of(pair: Pair, prior: Probabilities) -> "FirstOrder":
        """For a pair, with prior weights of the target's tokens, shape (target.size,); they are normalized."""
        shared = pair.shared_drafter_ids
        return FirstOrder(shared, pair.to_target_ids(shared).astype(np.int32), prior / prior.sum())

    def redistribute(self, ids: Ids, probabilities: Probabilities) -> tuple[Ids, Probabilities]:
        """As `Affinity.redistribute`; every target token with a prior above 0 gets some."""
        targets = self.target_ids[_places(self.drafter_ids, ids)]
        size = len(self.prior)
        proposed = np.bincount(targets, probabilities, minlength=size).astype(np.float64)
        spread = first_order(proposed, self.prior)
        found = np.flatnonzero(spread).astype(np.int64)
        return found, spread[found]

    def check(self, target_size: int) -> None:
        """Raises ValueError if the prior is not a distribution over the ids below `target_size`."""
        _check_ids(self.drafter_ids, self.target_ids, target_size)
        if len(self.target_ids) != len(self.drafter_ids):
            raise ValueError("the number of entries is wrong")
        if len(self.prior) != target_size or not (self.prior >= 0).all() or abs(self.prior.sum() - 1) > SUM_TOLERANCE:
            raise ValueError("the prior is not a distribution over the target's vocabulary")


def first_order(proposed: Probabilities, prior: Probabilities) -> Probabilities:
    """Eq. 3: (N q′ + θ p) / (N + p) with θ = p·q′, normalized; all of shape (N,)."""
    size = len(prior)
    theta = float(prior @ proposed)
    spread = (size * proposed + theta * prior) / (size + prior)
    return np.asarray(spread / spread.sum(), dtype=np.float64)


def runs(starts: Ids, lengths: Ids) -> Ids:
    """The numbers starts[i], starts[i] + 1, …, lengths[i] of them, for each i in turn."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def _places(rows: Ids, ids: Ids) -> Ids:
    places = np.searchsorted(rows, ids).astype(np.int64)
    known = rows[np.minimum(places, len(rows) - 1)] == ids if len(rows) else np.zeros(len(ids), dtype=np.bool_)
    if not known.all():
        raise ValueError(
            f"draft token {int(ids[~known][0])} is not a token of the target; only those of T∩D have a row"
        )
    return places


def _gathered(ids: Columns, mass: Probabilities) -> tuple[Ids, Probabilities]:
    """The sum of the mass of equal ids, normalized."""
    sums = np.bincount(ids, mass)
    found = np.flatnonzero(sums).astype(np.int64)
    return found, sums[found] / sums.sum()


def _check_ids(drafter_ids: Ids, target_ids: Columns, target_size: int) -> None:
    if (np.diff(drafter_ids) <= 0).any() or (len(drafter_ids) and drafter_ids[0] < 0):
        raise ValueError("its draft tokens are not in ascending order")
    if len(target_ids) and not 0 <= target_ids.min() <= target_ids.max() < target_size:
        raise ValueError("a target id is not in the target's vocabulary")
