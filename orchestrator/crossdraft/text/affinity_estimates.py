"""Affinity matrices estimated from a corpus: co-occurrence (RDK, Eq. 2), and alignment."""

import numpy as np

from crossdraft.text.affinity import Matrix, Probabilities, runs
from crossdraft.text.letters import Ids, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import NotExpressible, Tokenization

MOST = 1 << 22  # max different pairs that are kept: of 128k × 128k pairs a corpus has few, and of those few matter


class Windows:
    """The covariance Ω of the target's tokens in windows of text; the co-occurrence matrix of RDK is softmax(Ω/τ).

    The paper does not say how it estimates Ω. Here a text is cut into windows of `length` target tokens that do not
    overlap (the last one may be shorter), x_i is 1 if token i is in the window, else 0, and
    Ω_ij = E[x_i x_j] − E[x_i] E[x_j] over all windows.
    """

    def __init__(self, target: Tokenization, length: int, most: int = MOST) -> None:
        """`length`: tokens of a window, at least 2; `most`: different pairs that are kept."""
        self._target = target
        self._length = length
        self._pairs = PairCounts(target.vocabulary.size, most)  # of i < j
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
        every = np.arange(len(mean), dtype=np.int64)
        return (
            np.concatenate([every, left, right]),
            np.concatenate([every, right, left]),
            np.concatenate([mean * (1 - mean), shared, shared]),
        )


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
        self._lengths = (_letter_counts(target), _letter_counts(drafter))
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
        starts = _starts(self._lengths[0][targets]), _starts(self._lengths[1][drafted])
        _, left, right = np.intersect1d(*starts, assume_unique=True, return_indices=True)
        shared = self._pair.to_target_ids(drafted[right]) >= 0
        self._counts.add(drafted[right][shared], targets[left][shared])
        return True


def _letter_counts(side: Tokenization) -> Ids:
    return np.array([len(letters) for letters in side.vocabulary.letters], dtype=np.int64)


def _starts(lengths: Ids) -> Ids:
    """Offsets at which tokens of these lengths begin."""
    return np.cumsum(lengths) - lengths


BUFFERED = 1 << 22  # pairs that wait to be merged


class PairCounts:
    """Counts of pairs of ids in bounded memory: of too many different pairs the rarest are dropped."""

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
