"""Keyed noise on the device where the logits are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossdraft.models.transfers import sent
from crossdraft.verification.exchange import NoiseKey
from crossdraft.verification.noise import KeyedNoise, moment, uniform_words
from crossdraft.verification.rows import Ids


class Clocks:
    """An exponential clock for each column of logits: the noise of its id, which `KeyedNoise` has too.

    Words of noise are equal bit by bit. Logarithms are the device's own: a draw differs from one of `KeyedNoise` only
    where the first two of a race arrive within rounding.
    """

    def __init__(self, noise: KeyedNoise, device: torch.device, kept: Ids | None = None) -> None:
        """`kept`: the id of each column; None: column i is id i."""
        hashes = noise.hashes if kept is None else noise.hashes[kept]
        self._hashes = torch.from_numpy(hashes).to(device)

    def arrivals(self, laws: Tensor, moments: Sequence[tuple[NoiseKey, int]], columns: Tensor | None = None) -> Tensor:
        """When each id arrives in the race that draws; the first is drawn. Impossible ones never arrive.

        Args:
            laws: float64 (n, m).
            moments: of each row, its key and its offset in letters since the start of the output.
            columns: int64 (m,), those of the logits that laws are of; None: all, or the first m.

        Returns:
            float64 (n, m).
        """
        hashes = self._hashes[: laws.shape[-1]] if columns is None else self._hashes[columns]
        states = [moment(key, offset) for key, offset in moments]
        words = sent(torch.tensor(states, dtype=torch.int64).view(-1, 2), hashes.device)
        uniform = uniform_words(hashes, words[:, :1], words[:, 1:]).double().add_(0.5).mul_(2.0**-53)
        return uniform.log_().neg_().div_(laws).masked_fill_(laws == 0, torch.inf)
