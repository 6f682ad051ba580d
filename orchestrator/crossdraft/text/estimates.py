"""Affinity matrices from how two tokenizers write the same text; not the paper's, but what its Algorithm 1 allows.

With one vocabulary cut short, as in the paper, only co-occurrence is left to estimate from. With two tokenizers there
is something better: which target tokens the text of a draft token becomes.
"""

import numpy as np

from crossdraft.text.counting import PairCounts
from crossdraft.text.kernels import Ids, Matrix
from crossdraft.text.letters import Letters, from_bytes
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import NotExpressible, Tokenization


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


def first_pieces(pair: Pair, drafter: Tokenization, counts: Ids, neighbours: int) -> Matrix:
    """A shared draft token stands for the target tokens that the drafter would begin to write with it.

    The row of d has d itself and the target tokens outside T∩D whose encoding by the drafter's own tokenizer begins
    with d, by their counts in a corpus (shape (|T|,)). Tokens of T∩D get nothing from their prefixes: the drafter
    would have proposed them. Nor do tokens that d begins but that the drafter writes in another way.
    """
    shared = pair.shared_drafter_ids
    own = pair.to_target_ids(shared)
    outside = np.setdiff1d(np.flatnonzero(counts), own)
    firsts = [(_first_piece(drafter, pair.target.letters[token]), int(token)) for token in outside]
    begun = np.array([(first, token) for first, token in firsts if first >= 0], dtype=np.int64).reshape(-1, 2)
    begun = begun[pair.to_target_ids(begun[:, 0]) >= 0]
    drafted, targets = np.concatenate([shared, begun[:, 0]]), np.concatenate([own, begun[:, 1]])
    return Matrix.strongest(pair, drafted, targets, counts[targets].astype(np.float64), neighbours)


def _first_piece(drafter: Tokenization, letters: Letters) -> int:
    """The draft token with which the drafter's tokenizer begins to write letters; -1 if it cannot."""
    try:
        return drafter.encode_continuation(letters)[0]
    except NotExpressible:
        return -1


def _letter_counts(side: Tokenization) -> Ids:
    return np.array([len(letters) for letters in side.vocabulary.letters], dtype=np.int64)


def _starts(lengths: Ids) -> Ids:
    """Offsets at which tokens of these lengths begin."""
    return np.cumsum(lengths) - lengths
