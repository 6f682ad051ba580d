"""Where draws come from: keyed noise, or a random generator."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from crossdraft.verification.exchange import NoiseKey
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Ids, Probabilities

Chance = float | tuple[NoiseKey, int]  # uniform in [0, 1); or what clocks are keyed by, with the offset in letters


class Draws(Protocol):
    """Where a session's draws come from, as far as their laws are here: few ids each. Others are `Ranking`s."""

    def draw(self, ids: Ids, probabilities: Probabilities, offset: int) -> int:
        """One of `ids` (n,) with its probability (n,); `offset` counts letters since the start of the output."""
        ...

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """The draw, then the ids that were nearest to being drawn instead, at most `count`, the nearest first."""
        ...

    def chance(self, offset: int) -> Chance:
        """What decides a draw from a whole law."""
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

    def chance(self, offset: int) -> Chance:
        """As in `Draws`: the same race over all ids."""
        return self.key, offset


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

    def chance(self, offset: int) -> Chance:
        """As in `Draws`: where the sums of probabilities are cut."""
        return self.generator.random()


def smallest(values: Probabilities, count: int) -> Ids:
    """The places of the smallest of some values (n,), at most `count`, the smallest first."""
    if count >= len(values):
        return np.argsort(values, kind="stable")
    places = np.argpartition(values, count - 1)[:count]
    return places[np.argsort(values[places], kind="stable")]
