"""Draws from laws, with keyed noise or with a random generator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from crossdraft.verification.exchange import NoiseKey, Sample
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Ids, Probabilities


class Draws(Protocol):
    """Where a session's draws come from."""

    def draw(self, ids: Ids, probabilities: Probabilities, offset: int) -> int:
        """One of `ids` (n,) with its probability (n,); `offset` counts letters since the start of the output."""
        ...

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """The draw, then the ids that were nearest to being drawn instead, at most `count`, the nearest first."""
        ...


@dataclass(frozen=True, eq=False)
class KeyedDraws:
    """The same draw for the same offset, always."""

    noise: KeyedNoise
    key: NoiseKey

    def draw(self, ids: Ids, probabilities: Probabilities, offset: int) -> int:
        """As in `Draws`."""
        return self.noise.draw(ids, probabilities, self.key, offset)

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """As in `Draws`: those that arrive next in the same race."""
        if not count:
            return [self.draw(ids, probabilities, offset)]
        possible = np.flatnonzero(probabilities > 0)
        arrivals = self.noise.exponentials(self.key, offset, ids[possible]) / probabilities[possible]
        ranked: list[int] = ids[possible[smallest(arrivals, 1 + count)]].tolist()
        return ranked


@dataclass(frozen=True, eq=False)
class RandomDraws:
    """A fresh draw each time."""

    generator: np.random.Generator

    def draw(self, ids: Ids, probabilities: Probabilities, offset: int) -> int:
        """As in `Draws`; the offset is not used."""
        cumulative = probabilities.cumsum()
        place = cumulative.searchsorted(self.generator.random() * cumulative[-1], side="right")
        if place == len(ids):  # by rounding: the last id that is possible at all is meant
            place = np.flatnonzero(probabilities)[-1]
        return int(ids[place])

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """As in `Draws`: the most probable ones."""
        drawn = self.draw(ids, probabilities, offset)
        if not count:
            return [drawn]
        likely: list[int] = ids[smallest(-probabilities, 1 + count)].tolist()
        return [drawn, *[token for token in likely if token != drawn][:count]]


def smallest(values: Probabilities, count: int) -> Ids:
    """The places of the smallest of some values (n,), at most `count`, the smallest first."""
    if count >= len(values):
        return np.argsort(values, kind="stable")
    places = np.argpartition(values, count - 1)[:count]
    return places[np.argsort(values[places], kind="stable")]


@torch.inference_mode()
def samples(logits: Tensor, laws: Tensor, draws: Draws, offsets: Sequence[int], likely: int = 0) -> tuple[Sample, ...]:
    """The target's own draw at each node.

    Args:
        logits: floating (n, V), of the model itself; log-probabilities are theirs, at temperature 1.
        laws: (n, V), what is drawn from.
        draws: where the draws come from.
        offsets: of each node, in letters since the start of the output.
        likely: most probable ids that are told beside each draw, fewer where the model has fewer.
    """
    normalizers = logits.logsumexp(-1)
    every, rows = np.arange(laws.shape[-1]), laws.cpu().numpy()
    drawn: list[int] = rows.argmax(-1).tolist()
    possible = np.count_nonzero(rows, axis=-1).tolist()  # one, at temperature 0: then there is nothing to draw
    for place, (probabilities, offset) in enumerate(zip(rows, offsets, strict=True)):
        if possible[place] != 1:
            drawn[place] = draws.draw(every, probabilities, offset)
    places = torch.tensor(drawn, dtype=torch.int64, device=logits.device)[:, None]
    log_probabilities = (logits.gather(-1, places)[:, 0] - normalizers).tolist()
    beside = _likely(logits, normalizers, likely)
    return tuple(map(Sample, drawn, log_probabilities, beside))


def _likely(logits: Tensor, normalizers: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The most probable ids of each node with their log-probabilities, the most probable first."""
    if not count:
        return [()] * len(logits)
    found = logits.topk(min(count, logits.shape[-1]), sorted=True)
    values = (found.values - normalizers[:, None]).tolist()
    return [tuple(zip(*pair, strict=True)) for pair in zip(found.indices.tolist(), values, strict=True)]
