"""Keyed noise where the logits are: draws that are bit by bit those of `KeyedNoise`."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.device import sent
from crossdraft.types.rows import Ids, NoiseKey, Probabilities
from crossdraft.verification.noise import (
    KeyedNoise,
    Unsigned,
    beginnings,
    exponentials_of,
    fill_uniform_words,
    moments,
    uniform_words,
)

Moment = tuple[NoiseKey, int]  # what a draw is keyed by, the offset in letters since the start of the output
MOST_IDS = 1 << 62  # above any id
SCRATCH = 1 << 14  # random words that a CPU mixes together


class Moments(NamedTuple):
    """What the draws of several rows are keyed by, on the device."""

    beginnings: Tensor  # int64 (n,), of the keys
    offsets: Tensor  # int64 (n,), letters since the start of the output

    @staticmethod
    def of(at: Sequence[Moment], device: torch.device) -> "Moments":
        return Moments(*sent(torch.from_numpy(moments_table(at)), device))

    @staticmethod
    def of_keys(keys: Sequence[NoiseKey], offsets: Sequence[Sequence[int]], device: torch.device) -> "Moments":
        """Several offsets for each key."""
        flat = np.fromiter(chain.from_iterable(offsets), np.int64)
        numbers = np.stack([beginnings(keys).repeat([*map(len, offsets)]), flat])
        return Moments(*sent(torch.from_numpy(numbers), device))


def moments_table(at: Sequence[Moment]) -> Ids:
    """The numbers of `Moments`, int64 (2, n)."""
    return np.stack([beginnings([key for key, _ in at]), np.array([offset for _, offset in at], dtype=np.int64)])


class Clocks:
    """Keyed noise on the device where the logits are: an exponential clock for each column.

    A draw is that of `KeyedNoise`, bit by bit, from the same probabilities. Where all ids are in the race the device's
    own logarithm says which two arrive first, and the noise's definition which of them does. `kept` has the id of each
    column (None: column i is id i), and `lengths` the letters of each id, for paths.
    """

    def __init__(
        self, noise: KeyedNoise, device: torch.device, kept: Ids | None = None, lengths: Sequence[int] = ()
    ) -> None:
        every = np.arange(len(noise)) if kept is None else kept
        hashes, self.kept, self.letters, self.noise = noise.hashes[every], kept, lengths, noise
        self.ids = None if kept is None else torch.from_numpy(kept).to(device)
        self.lengths = torch.tensor([lengths[token] for token in every] if lengths else [], device=device)  # by column
        self._hashes = torch.from_numpy(hashes).to(device)
        self._on_host = device.type == "cpu"  # numpy is faster there
        self._scratch = np.empty((2, 0), dtype=np.uint64)  # of the CPU, whose caches it stays in

    def ids_of(self, columns: Tensor) -> Tensor:
        return columns if self.ids is None else self.ids[columns]

    def named(self, columns: Ids) -> Ids:
        """Their ids on the host, in the same shape."""
        return columns if self.kept is None else self.kept[columns]

    def give(self, columns: list[int], ids: list[int]) -> None:
        """These columns of a cut head are those of other ids now."""
        assert self.kept is not None
        assert self.ids is not None
        self.kept[columns] = ids
        self.ids[columns] = torch.tensor(ids, device=self.ids.device)
        self.lengths[columns] = torch.tensor([self.letters[token] for token in ids], device=self.ids.device)
        self._hashes[columns] = torch.from_numpy(self.noise.hashes[ids]).to(self.ids.device)

    def draw(
        self, distributions: Tensor, at: Moments, columns: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """The place in its row of what is drawn from each of some distributions, float64 (n, m): int64 (n, 1).

        They are of the columns `places`, int64 (n, m), or of the first; of logits those are counted that are in
        `columns`, int64 (k,), or all.
        """
        if places is not None:
            return self._first(distributions, at, places if columns is None else columns[places], None)
        arrivals = self.arrivals(distributions, at, columns)
        first = arrivals.argmin(-1, keepdim=True)
        near = torch.cat([first, arrivals.scatter_(-1, first, torch.inf).argmin(-1, keepdim=True)], -1)
        return self._first(distributions.gather(-1, near), at, near if columns is None else columns[near], near)

    def _first(self, distributions: Tensor, at: Moments, columns: Tensor, places: Tensor | None) -> Tensor:
        """Which of a few columns (n, m) arrives first, the lower one where two arrive at once."""
        arrivals = self.arrivals_of(distributions, at, columns)
        tied = columns.masked_fill(arrivals > arrivals.amin(-1, keepdim=True), MOST_IDS)
        first = tied.argmin(-1, keepdim=True)
        return first if places is None else places.gather(-1, first)

    def arrivals_at(self, distributions: Tensor, at: Moments, columns: Tensor | None, places: Tensor | None) -> Tensor:
        """When each arrives, of what `draw` is given: a few exactly, all up to rounding."""
        if places is None:
            return self.arrivals(distributions, at, columns)
        return self.arrivals_of(distributions, at, places if columns is None else columns[places])

    def arrivals_of(self, distributions: Tensor, at: Moments, columns: Tensor) -> Tensor:
        """When each of a few columns (n, m) arrives in the race that draws, exactly."""
        words: Any = self._hashes[columns]
        if self._on_host:
            words, moment = words.numpy(), moments(*(each.numpy() for each in at))
            words = uniform_words(words, *(each[:, None] for each in moment))
            exponentials = torch.from_numpy(exponentials_of(words, words.astype(np.float64)))
        else:
            words = uniform_words(words, *(each[:, None] for each in moments(*at)))
            exponentials = exponentials_of(words, words.double())
        return (exponentials / distributions).nan_to_num_(torch.inf, torch.inf)

    def arrivals(self, distributions: Tensor, at: Moments, columns: Tensor | None = None) -> Tensor:
        """When each id arrives in the race that draws, up to rounding, float64 (n, m): impossible ones never do."""
        hashes = self._hashes[: distributions.shape[-1]] if columns is None else self._hashes[columns]
        arrivals = torch.empty_like(distributions)
        if self._on_host:
            moment = np.stack(moments(*(each.numpy() for each in at)), axis=1)
            self._fill_uniform(arrivals.numpy(), hashes.numpy().view(np.uint64), moment.view(np.uint64))
        else:
            first, second = moments(*at)
            arrivals.copy_(uniform_words(hashes, first[:, None], second[:, None])).add_(0.5).mul_(2.0**-53)
        arrivals.log_().neg_().div_(distributions)
        return arrivals.nan_to_num_(torch.inf, torch.inf)  # 0 / 0 never arrives, either

    def _fill_uniform(self, uniform: Probabilities, hashes: Unsigned, at: Unsigned) -> None:
        """The same numbers as on other devices, a few rows at a time."""
        width = max(1, len(hashes))
        rows = max(1, SCRATCH // width)
        if self._scratch.shape[1] < rows * width:
            self._scratch = np.empty((2, rows * width), dtype=np.uint64)
        for begin in range(0, len(uniform), rows):
            part = uniform[begin : begin + rows]
            words, scratch = (memory[: part.size].reshape(part.shape) for memory in self._scratch)
            fill_uniform_words(words, scratch, hashes, at[begin : begin + rows])
            np.add(words.view(np.int64), 0.5, out=part)
        uniform *= 2.0**-53
