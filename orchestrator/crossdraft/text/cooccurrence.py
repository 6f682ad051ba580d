"""The co-occurrence matrix of RDK (Eq. 2): softmax(Ω/τ), Ω the covariance of the target's tokens in windows of text."""

import numpy as np

from crossdraft.text.counting import MOST, PairCounts
from crossdraft.text.kernels import Ids, Matrix, Probabilities, runs
from crossdraft.text.letters import from_bytes
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import Tokenization


class Windows:
    """Which of the target's tokens are found together in windows of consecutive tokens.

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
        """Counts one text."""
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
        """Sightings of rare pairs that no longer count, because there were too many different ones."""
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
