"""Affinities (RDK): how the mass of a shared draft token is spread over the target's tokens; files of them; and
matrices that are estimated from a corpus, by co-occurrence (RDK, Eq. 2) or by alignment.

Files are safetensors: whoever reads one need not trust it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from crossdraft.text.letters import NO_LETTER, Ids, Letters, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import NotExpressible, Tokenization
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
        """The matrix with the heaviest entries of each row of T∩D, of equal ones the lowest ids, normalized.

        Entries, each of shape (n,): draft tokens, target tokens, no pair twice, and weights that are not negative. A
        row has at most `neighbours`, and without any above 0 it is the token itself.
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
        """Mᵀq′, the distribution over the target's tokens that `rdk` draws draft tokens from: target ids, int64, shape
        (m,), ascending, and their probabilities, all above 0.

        `ids` and `probabilities` are q′, each of shape (n,). Raises ValueError: an id is not in T∩D.
        """
        places = np.searchsorted(self.drafter_ids, ids)
        known = np.append(self.drafter_ids, -1)[places] == ids
        if not known.all():
            token = int(ids[~known][0])
            raise ValueError(f"draft token {token} is not a token of the target; only shared tokens have a row")
        lengths = self.starts[places + 1] - self.starts[places]
        entries = runs(self.starts[places], lengths)
        sums = np.bincount(self.target_ids[entries], np.repeat(probabilities, lengths) * self.weights[entries])
        found = np.flatnonzero(sums).astype(np.int64)
        return found, sums[found] / sums.sum()

    def check(self, target_size: int) -> None:
        """Raises ValueError if it is not a row-stochastic matrix into the ids below `target_size`."""
        rows, ids, lengths = self.drafter_ids, self.target_ids, np.diff(self.starts)
        if (np.diff(rows, prepend=-1) <= 0).any():
            raise ValueError("its draft tokens are not in ascending order")
        if len(ids) and not 0 <= ids.min() <= ids.max() < target_size:
            raise ValueError("a target id is not in the target's vocabulary")
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

        Raises ValueError: the matrix is not a row-stochastic map of this pair.
        """
        vocabulary = pair.target
        ranks = {token: rank for token in range(vocabulary.size) if (rank := vocabulary.rank(token))}
        digests = tokenizer_digest(target_json), tokenizer_digest(drafter_json)
        return Affinity(*digests, vocabulary.letters, ranks, matrix, made)

    def check_drafter(self, tokenizer_json: str, size: int) -> None:
        """Raises AffinityMismatch if it was made for another drafter than that of this tokenizer and so many ids."""
        if tokenizer_digest(tokenizer_json) != self.drafter:
            what = "this affinity file was made for a drafter with another tokenizer: make one for this drafter with"
            raise AffinityMismatch(f"{what} `crossdraft affinity --target TARGET --drafter DRAFTER CORPUS -o FILE`")
        if (highest := self.matrix.drafter_ids.max(initial=0)) >= size:
            what = f"this affinity file has draft token {highest}, and the drafter has {size}"
            raise AffinityMismatch(f"{what}: make it again with `crossdraft affinity`")

    def rank(self, target_id: int) -> int:
        """Place of a target id among the ids with the same letters, as `Vocabulary.rank`."""
        return self.ranks.get(target_id, 0)


def save_affinity(affinity: Affinity, path: Path) -> None:
    """Writes a file for `load_affinity`; OSError if that is not possible."""
    about = {"format": FORMAT, "target": affinity.target, "drafter": affinity.drafter, "made": affinity.made}
    about |= {"letters": json.dumps(affinity.letters), "ranks": json.dumps(sorted(affinity.ranks.items()))}
    path.write_bytes(save({name: np.ascontiguousarray(array) for name, array in vars(affinity.matrix).items()}, about))


def load_affinity(path: Path) -> Affinity:
    """Reads and checks a file of `save_affinity`; raises OSError, or AffinityMismatch: it is damaged or another."""
    try:
        with path.open("rb"), safe_open(path, "numpy") as file:  # that of safetensors does not say why it failed
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(f"its format is {about.get('format')}, this version reads {FORMAT}")
            arrays = [file.get_tensor(name) for name in ARRAYS]
        for (name, kind), found in zip(ARRAYS.items(), arrays, strict=True):
            if found.ndim != 1 or found.dtype != kind:
                raise ValueError(f"{name} is not a list of {np.dtype(kind).name}")
        letters, ranks = json.loads(about["letters"]), dict(json.loads(about["ranks"]))
        _check_vocabulary(letters, ranks)
        return Affinity(about["target"], about["drafter"], tuple(letters), ranks, Matrix(*arrays), about["made"])
    except (SafetensorError, ValueError, TypeError, LookupError, RecursionError) as error:
        what = f"{path} is damaged or not an affinity file ({error})"
        raise AffinityMismatch(f"{what}: make it again with `crossdraft affinity`") from error


def _check_vocabulary(letters: Any, ranks: dict[Any, Any]) -> None:
    """Raises ValueError or TypeError. A rank is above 0 and, as ids with the same letters are counted, below the number
    of ids."""
    if not (isinstance(letters, list) and all(letters)):
        raise ValueError("a token of the target has no letters")
    if found := NO_LETTER.search("".join(letters)):
        raise ValueError(f"U+{ord(found[0]):04X} is no letter")
    if not all(0 <= token < len(letters) and 0 < rank < len(letters) for token, rank in ranks.items()):
        raise ValueError("a rank is out of its range")


MAX_PAIRS = 1 << 22  # max different pairs that are kept: of 128k × 128k pairs a corpus has few, and of those few matter


class Windows:
    """The covariance Ω of the target's tokens in windows of text; the co-occurrence matrix of RDK is softmax(Ω/τ).

    The paper does not say how it estimates Ω. Here a text is cut into windows of `length` target tokens that do not
    overlap (the last one may be shorter), x_i is 1 if token i is in the window, else 0, and
    Ω_ij = E[x_i x_j] − E[x_i] E[x_j] over all windows.
    """

    def __init__(self, target: Tokenization, length: int) -> None:
        """`length`: tokens of a window, at least 2."""
        self._target = target
        self._length = length
        self._pairs = PairCounts(target.vocabulary.size)  # of i < j
        self._present: Ids = np.zeros(target.vocabulary.size, dtype=np.int64)  # windows that each token is in
        self._count = 0  # windows

    def add(self, text: str) -> None:
        ids = np.array(self._target.encode_continuation(from_bytes(text.encode())), dtype=np.int64)
        missing = -len(ids) % self._length
        windows = np.sort(np.concatenate([ids, np.full(missing, -1)]).reshape(-1, self._length))
        windows[:, 1:][windows[:, 1:] == windows[:, :-1]] = -1  # each token counts once in a window
        windows.sort()
        self._count += len(windows)
        self._present += np.bincount(windows[windows >= 0], minlength=len(self._present))
        for gap in range(1, self._length):
            left, right = windows[:, :-gap], windows[:, gap:]
            self._pairs.add(left[left >= 0], right[left >= 0])

    @property
    def forgotten(self) -> int:
        """Occurrences of rare pairs that were dropped because there were too many different pairs."""
        return self._pairs.forgotten

    def covariances(self) -> tuple[Ids, Ids, Probabilities]:
        """Ω's diagonal and, in both orders, the pairs that were seen: ids i, ids j and Ω_ij.

        A pair that was never in one window has −E[x_i] E[x_j], which is not listed. ValueError without any window.
        """
        if not self._count:
            raise ValueError("the corpus has no tokens")
        mean = self._present / self._count
        left, right, together = self._pairs.entries()
        shared = together / self._count - mean[left] * mean[right]
        every, omega = np.arange(len(mean), dtype=np.int64), np.concatenate([mean * (1 - mean), shared, shared])
        return np.concatenate([every, left, right]), np.concatenate([every, right, left]), omega


def co_occurrence(pair: Pair, windows: Windows, temperature: float, neighbours: int) -> Matrix:
    """Eq. 2, cut to the strongest of each token's neighbours, normalized; they are those with Ω_ij > 0, and itself.

    The cut is needed: in the whole softmax the rest, nearly |T| tokens each with about exp(0), would get most of a
    rare token's mass. Args: `temperature` is τ, above 0; `neighbours`: entries that a row has at most.
    """
    rows, columns, omega = windows.covariances()
    kept = (omega > 0) | (rows == columns)
    rows, columns, omega = rows[kept], columns[kept], omega[kept]
    highest = np.full(pair.target.size, -np.inf)
    np.maximum.at(highest, rows, omega)
    weights = np.exp((omega - highest[rows]) / temperature)
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(pair.target.size + 1))
    # each draft token takes the row of its target token; two may have the same
    own = pair.to_target_ids(pair.shared_drafter_ids)
    lengths = np.diff(starts)[own]
    entries = order[runs(starts[own], lengths)]
    drafted = np.repeat(pair.shared_drafter_ids, lengths)
    return Matrix.strongest(pair, drafted, columns[entries], weights[entries], neighbours)


# A matrix from how two tokenizers write the same text. It is not in the paper; its Algorithm 1 allows any matrix. If
# the drafter's vocabulary is a part of the target's, as in the paper, there is only co-occurrence to estimate from;
# with two tokenizers there is also which target tokens the text of a draft token becomes.


class Alignment:
    """Which target token begins where a draft token begins, when both tokenizers write the same text.

    The row of d is the frequency of each target token t at the places where d begins, where the two tokenizations
    have a boundary in common: an estimate of P(t | d). There one of the two begins with the other.
    """

    def __init__(self, pair: Pair, target: Tokenization, drafter: Tokenization) -> None:
        self._pair = pair
        self._sides = (target, drafter)
        self._lengths = [np.array([*map(len, side.vocabulary.letters)], dtype=np.int64) for side in self._sides]
        self._counts = PairCounts(target.vocabulary.size)
        self.left_out = 0  # characters of lines that the two tokenizers do not write alike

    def add(self, text: str) -> None:
        """Counts one text; of lines on which the two tokenizers disagree (one of them is lossy) nothing."""
        if self._add(text):
            return
        for line in text.splitlines(keepends=True):
            if not self._add(line):
                self.left_out += len(line)

    def matrix(self, neighbours: int) -> Matrix:
        """The rows, each with at most `neighbours` entries; of a draft token that was never seen, the token itself."""
        drafted, targets, counts = self._counts.entries()
        return Matrix.strongest(self._pair, drafted, targets, counts.astype(np.float64), neighbours)

    def _add(self, text: str) -> bool:
        letters = from_bytes(text.encode())
        try:
            ids = [side.encode_continuation(letters) for side in self._sides]
        except NotExpressible:
            return False
        if any(side.letters_of(found) != letters for side, found in zip(self._sides, ids, strict=True)):
            return False
        targets, drafted = (np.array(found, dtype=np.int64) for found in ids)
        ends = [np.cumsum(lengths[ids]) for lengths, ids in zip(self._lengths, (targets, drafted), strict=True)]
        ours, theirs = (np.append(0, end)[:-1] for end in ends)  # offsets at which the tokens begin
        _, left, right = np.intersect1d(ours, theirs, assume_unique=True, return_indices=True)
        shared = self._pair.to_target_ids(drafted[right]) >= 0
        self._counts.add(drafted[right][shared], targets[left][shared])
        return True


BUFFERED = 1 << 22  # pairs that wait to be merged


class PairCounts:
    """Counts of pairs of ids in bounded memory: of too many different pairs the rarest are dropped."""

    def __init__(self, width: int, most: int = MAX_PAIRS, buffered: int = BUFFERED) -> None:
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
        if len(self._keys) > self._most:  # of equal ones the lowest are kept; half, so that the next merge adds to them
            kept = np.sort(np.argsort(-self._counts, kind="stable")[: self._most // 2])
            self.forgotten += int(self._counts.sum() - self._counts[kept].sum())
            self._keys, self._counts = self._keys[kept], self._counts[kept]
