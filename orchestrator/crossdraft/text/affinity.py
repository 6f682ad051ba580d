"""Affinities (RDK): how the mass of a shared draft token is spread over the target's tokens, and files of them, which
are safetensors: whoever reads one need not trust it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from crossdraft.text.letters import FIRST_CONTROL, ControlRole, Ids, Letters, Side
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import tokenizer_digest

FORMAT = "2"  # of the file; raised when its fields change
# Of `Matrix`, as they are in the file.
ARRAYS: dict[str, type[Any]] = {
    "drafter_ids": np.int64,
    "starts": np.int64,
    "target_ids": np.int32,
    "weights": np.float32,
}


class AffinityMismatch(ValueError):  # noqa: N818
    """The file is for other vocabularies, or damaged; the message says what to do."""


Probabilities = NDArray[np.float64]
Columns = NDArray[np.int32]
Weights = NDArray[np.float32]
SUM_TOLERANCE = 1e-4  # of a row's sum: weights are float32


@dataclass(frozen=True, eq=False)
class Matrix:
    """A row-stochastic sparse matrix over T∩D × T (RDK, Assumption 4.1), row after row."""

    drafter_ids: Ids  # shape (r,), ascending: whose row it is
    starts: Ids  # shape (r + 1,): row i is entries starts[i] to starts[i + 1]
    target_ids: Columns  # shape (n,), distinct in a row
    weights: Weights  # shape (n,), above 0; each row's sum to one

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

    def redistribute(self, ids: Ids, probabilities: Probabilities) -> tuple[Ids, Probabilities]:
        """Mᵀq′, the distribution over the target's tokens that `rdk` draws draft tokens from.

        Args:
            ids: shape (n,), draft tokens of T∩D.
            probabilities: float64, shape (n,), q′: they sum to one.

        Returns:
            Target ids, int64, shape (m,), ascending; their probabilities, float64, all above 0, summing to one.

        Raises:
            ValueError: an id is not in T∩D.
        """
        places = _places(self.drafter_ids, ids)
        lengths = self.starts[places + 1] - self.starts[places]
        entries = runs(self.starts[places], lengths)
        sums = np.bincount(self.target_ids[entries], np.repeat(probabilities, lengths) * self.weights[entries])
        found = np.flatnonzero(sums).astype(np.int64)
        return found, sums[found] / sums.sum()

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


def runs(starts: Ids, lengths: Ids) -> Ids:
    """The numbers starts[i], starts[i] + 1, …, lengths[i] of them, for each i in turn."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def _places(rows: Ids, ids: Ids) -> Ids:
    places = np.searchsorted(rows, ids).astype(np.int64)
    known = rows[np.minimum(places, len(rows) - 1)] == ids if len(rows) else np.zeros(len(ids), dtype=np.bool_)
    if not known.all():
        raise ValueError(
            f"draft token {int(ids[~known][0])} is not a token of the target; only shared tokens have a row"
        )
    return places


def _check_ids(drafter_ids: Ids, target_ids: Columns, target_size: int) -> None:
    if (np.diff(drafter_ids) <= 0).any() or (len(drafter_ids) and drafter_ids[0] < 0):
        raise ValueError("its draft tokens are not in ascending order")
    if len(target_ids) and not 0 <= target_ids.min() <= target_ids.max() < target_size:
        raise ValueError("a target id is not in the target's vocabulary")


@dataclass(frozen=True, eq=False)
class Affinity:
    """A matrix with the vocabularies that it is for: what a drafter needs to draw target tokens."""

    target: str  # `tokenizer_digest` of the target's tokenizer.json
    drafter: str  # of the drafter's
    letters: tuple[Letters, ...]  # of the target's tokens, by id
    ranks: dict[int, int]  # `Vocabulary.rank` of the target's ids, only those above 0
    matrix: Matrix
    made: str = ""  # how it was made, for people

    def __post_init__(self) -> None:
        self.matrix.check(len(self.letters))

    @staticmethod
    def of(pair: Pair, matrix: Matrix, target_json: str, drafter_json: str, made: str = "") -> "Affinity":
        """The affinity of a pair, whose tokenizer.json texts are given.

        Raises:
            ValueError: the matrix is not a row-stochastic map of this pair.
        """
        vocabulary = pair.target
        ranks = {token: rank for token in range(vocabulary.size) if (rank := vocabulary.rank(token))}
        digests = tokenizer_digest(target_json), tokenizer_digest(drafter_json)
        return Affinity(*digests, vocabulary.letters, ranks, matrix, made)

    def check_drafter(self, tokenizer_json: str, size: int) -> None:
        """Raises AffinityMismatch if it was made for another drafter than that of this tokenizer and so many ids."""
        if tokenizer_digest(tokenizer_json) != self.drafter:
            raise AffinityMismatch(
                "this affinity file was made for a drafter with another tokenizer: make one for this drafter with "
                "`crossdraft affinity --target TARGET --drafter DRAFTER CORPUS -o FILE`"
            )
        highest = self.matrix.drafter_ids.max(initial=0)
        if highest >= size:
            raise AffinityMismatch(
                f"this affinity file has draft token {highest}, and the drafter has {size}: make it again with "
                "`crossdraft affinity`"
            )

    def rank(self, target_id: int) -> int:
        """Place of a target id among the ids with the same letters, as `Vocabulary.rank`."""
        return self.ranks.get(target_id, 0)


def save_affinity(affinity: Affinity, path: Path) -> None:
    """Writes a file for `load_affinity`; OSError if that is not possible."""
    about = {"format": FORMAT, "target": affinity.target, "drafter": affinity.drafter, "made": affinity.made}
    about |= {"letters": json.dumps(affinity.letters), "ranks": json.dumps(sorted(affinity.ranks.items()))}
    path.write_bytes(save({name: np.ascontiguousarray(one) for name, one in vars(affinity.matrix).items()}, about))


def load_affinity(path: Path) -> Affinity:
    """Reads and checks a file of `save_affinity`.

    Raises:
        OSError: it cannot be read.
        AffinityMismatch: it is damaged or no affinity file; the text says what to do.
    """
    try:
        with path.open("rb"), safe_open(path, "numpy") as file:  # that of safetensors does not say why it failed
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(f"its format is {about.get('format')}, this version reads {FORMAT}")
            arrays = [_vector(file.get_tensor(name), name, kind) for name, kind in ARRAYS.items()]
        letters, ranks = json.loads(about["letters"]), dict(json.loads(about["ranks"]))
        _check_vocabulary(letters, ranks)
        return Affinity(about["target"], about["drafter"], tuple(letters), ranks, Matrix(*arrays), about["made"])
    except (SafetensorError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise AffinityMismatch(
            f"{path} is damaged or not an affinity file ({error}): make it again with `crossdraft affinity`"
        ) from error


def _check_vocabulary(letters: Any, ranks: dict[Any, Any]) -> None:
    """Raises ValueError or TypeError. A rank is above 0 and, as ids with the same letters are counted, below the number
    of ids."""
    if not (isinstance(letters, list) and all(letters)):
        raise ValueError("a token of the target has no letters")
    roles = {role.value for role in ControlRole}
    for letter in set("".join(letters)):
        if not (ord(letter) < FIRST_CONTROL or ord(letter) in roles or ord(letter) >= Side.TARGET.value):
            raise ValueError(f"U+{ord(letter):04X} is no letter")
    if not all(0 <= token < len(letters) and 0 < rank < len(letters) for token, rank in ranks.items()):
        raise ValueError("a rank is out of its range")


def _vector(found: NDArray[Any], name: str, kind: type[Any]) -> NDArray[Any]:
    if found.ndim != 1 or found.dtype != kind:
        raise ValueError(f"{name} is not a list of {np.dtype(kind).name}")
    return found
