"""Where draws come from: keyed noise, or a random generator."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.kv_store import sent
from crossdraft.engine.row_builder import (
    Columns,
    Nodes,
    columns_of,
    distributions,
    drafting_distributions,
    joined,
    scores,
    tempered,
    to_rows,
)
from crossdraft.types.messages import NoiseKey, Sample, SamplingOptions
from crossdraft.types.rows import NO_IDS, Ids, Probabilities, Row
from crossdraft.verification.noise import KeyedNoise, moment, uniform_words

Chance = float | tuple[NoiseKey, int]  # uniform in [0, 1); or what clocks are keyed by, with the offset in letters


class Draws(Protocol):
    """Where a session's draws come from, as far as their distributions are here: few ids each. Others are
    `Ranking`s.
    """

    def draw(self, ids: Ids, probabilities: Probabilities, offset: int) -> int:
        """One of `ids` (n,) with its probability (n,); `offset` counts letters since the start of the output."""
        ...

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """The draw, then the ids that were nearest to being drawn instead, at most `count`, the nearest first."""
        ...

    def chance(self, offset: int) -> Chance:
        """What decides a draw from a whole distribution."""
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


# Keyed noise on the device where the logits are.


class Clocks:
    """An exponential clock for each column of logits: the noise of its id, which `KeyedNoise` has too.

    Words of noise are equal bit by bit. Logarithms are the device's own: a draw differs from one of `KeyedNoise` only
    where the first two of a race arrive within rounding.
    """

    def __init__(self, noise: KeyedNoise, device: torch.device, kept: Ids | None = None) -> None:
        """`kept`: the id of each column; None: column i is id i."""
        hashes = noise.hashes if kept is None else noise.hashes[kept]
        self._hashes = torch.from_numpy(hashes).to(device)

    def arrivals(
        self, distributions: Tensor, moments: Sequence[tuple[NoiseKey, int]], columns: Tensor | None = None
    ) -> Tensor:
        """When each id arrives in the race that draws; the first is drawn. Impossible ones never arrive.

        Args:
            distributions: float64 (n, m).
            moments: of each row, its key and its offset in letters since the start of the output.
            columns: int64 (m,), those of the logits that distributions are of; None: all, or the first m.

        Returns:
            float64 (n, m).
        """
        hashes = self._hashes[: distributions.shape[-1]] if columns is None else self._hashes[columns]
        states = [moment(key, offset) for key, offset in moments]
        words = sent(torch.tensor(states, dtype=torch.int64).view(-1, 2), hashes.device)
        uniform = uniform_words(hashes, words[:, :1], words[:, 1:]).double().add_(0.5).mul_(2.0**-53)
        return uniform.log_().neg_().div_(distributions).masked_fill_(distributions == 0, torch.inf)


# What jobs want to know of logits that they hold: distributions, draws, rows. What several want alike is found
# together.

R = TypeVar("R")
T = TypeVar("T")
CACHED = 1 << 15  # logits that a CPU takes together: more leave its caches, and gain nothing
TOGETHER = 1 << 24  # that other devices take together: some hundred MiB in float64


class Reading(ABC, Generic[R]):
    """A question about rows of logits. Those of one kind are answered together, each as it would be alone.

    A job yields it, or better writes `yield from reading.found()`.
    """

    @property
    @abstractmethod
    def about(self) -> Tensor:
        """The logits: floating (n, V)."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """What must be equal in readings that are answered together, besides their class and V."""

    @abstractmethod
    def together(self, readings: Sequence[Self]) -> list[R]:
        """The answers to readings of one kind, this one among them.

        Raises:
            ValueError: one of them cannot be answered.
        """

    def found(self) -> "Generator[Reading[R], R, R]":
        """Asks the model thread; returns the answer."""
        return (yield self)


Asking = Generator[Reading[Any], Any, T]
"""Part of a job that holds logits: it yields readings, and returns what it has made of the answers."""


@dataclass(frozen=True)
class Likeness:
    """What is equal in readings that are answered together; of one of them, how much it asks."""

    reading: type[Reading[Any]]
    kind: Hashable
    columns: int
    most: int  # logits that are taken together
    size: int = field(compare=False)  # logits

    @staticmethod
    def of(reading: Reading[Any]) -> "Likeness":
        """That of one reading."""
        about = reading.about
        most = CACHED if about.device.type == "cpu" else TOGETHER
        found = Likeness(type(reading), reading.kind, about.shape[-1], most, about.numel())
        hash(found)  # a kind that has no hash is the fault of whoever asks
        return found


def groups(readings: Sequence[Likeness]) -> list[list[int]]:
    """The places of readings that are to be answered together, each in one group."""
    alike: dict[Likeness, list[int]] = {}
    for place, reading in enumerate(readings):
        alike.setdefault(reading, []).append(place)
    return [part for places in alike.values() for part in _parts(places, readings)]


def _parts(places: list[int], readings: Sequence[Likeness]) -> Iterator[list[int]]:
    """As many at once as the device takes together, at least one."""
    part: list[int] = []
    size = 0
    for place in places:
        if part and size + readings[place].size > readings[place].most:
            yield part
            part, size = [], 0
        part.append(place)
        size += readings[place].size
    yield part


def split(found: Sequence[T], sizes: Sequence[int]) -> list[tuple[T, ...]]:
    """Answers for rows, as those of each reading, which has so many rows."""
    rows = iter(found)
    return [tuple(islice(rows, size)) for size in sizes]


# What a target's passes and runs want of the logits they hold: its own draws, or rows.


@dataclass(frozen=True, eq=False)
class Sampling(Reading[tuple[Sample, ...]]):
    """The target's own keyed draw at each node. Only ids and log-probabilities leave the device, all at once."""

    nodes: Nodes
    clocks: Clocks
    key: NoiseKey
    offsets: Sequence[int]  # of each node, in letters since the start of the output
    likely: int = 0  # most probable ids that are told beside each draw, fewer where the model has fewer

    @property
    def about(self) -> Tensor:
        """As in `Reading`."""
        return self.nodes.logits

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.nodes.options, self.clocks, self.likely

    @torch.inference_mode()
    def together(self, readings: "Sequence[Sampling]") -> list[tuple[Sample, ...]]:
        """As in `Reading`; a distribution without any probability (logits that are no numbers) is what has no
        answer.
        """
        drawn, shares = self._drawn(readings)
        told = joined([reading.nodes.logits for reading in readings]).float().log_softmax(-1)
        likely = told.topk(min(self.likely, told.shape[-1]))
        columns = (drawn, shares, told.gather(-1, drawn), likely.indices, likely.values)
        found = torch.cat([column.double() for column in columns], -1).tolist()
        return split(list(_samples(found)), [len(reading.offsets) for reading in readings])

    def _drawn(self, readings: "Sequence[Sampling]") -> tuple[Tensor, Tensor]:
        """Ids and their probabilities, each (n, 1)."""
        options, found = self.nodes.options, scores([reading.nodes for reading in readings])
        if options.temperature == 0:  # there is one id to draw
            best = found.max(-1, keepdim=True)
            return best.indices, torch.ones_like(best.values)
        moments = [(reading.key, offset) for reading in readings for offset in reading.offsets]
        distribution = tempered(found, options)
        drawn = self.clocks.arrivals(distribution, moments).argmin(-1, keepdim=True)
        return drawn, distribution.gather(-1, drawn)


def _samples(found: list[list[float]]) -> Iterator[Sample]:
    """From id, probability, log-probability, likely ids, their log-probabilities."""
    for token, share, log_probability, *likely in found:
        if not share > 0:
            raise ValueError("no id has a probability above 0: the model's logits are not finite")
        half = len(likely) // 2
        beside = zip(map(int, likely[:half]), likely[half:], strict=True)
        yield Sample(int(token), log_probability, tuple(beside))


@dataclass(frozen=True, eq=False)
class Rows(Reading[tuple[Row, ...]]):
    """The row of each node."""

    nodes: Nodes
    head: int  # as in `to_rows`
    listed: Sequence[Ids] = ()  # alike

    @property
    def about(self) -> Tensor:
        """As in `Reading`."""
        return self.nodes.logits

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.nodes.options, self.head

    def together(self, readings: "Sequence[Rows]") -> list[tuple[Row, ...]]:
        """As in `Reading`."""
        listed = [ids for reading in readings for ids in reading.listed or [NO_IDS] * len(reading.nodes.logits)]
        rows = to_rows(distributions([reading.nodes for reading in readings]), self.head, listed)
        return split(rows, [len(reading.nodes.logits) for reading in readings])


# What a drafter wants of the logits it holds: distributions that are drawn from elsewhere, or draws from whole
# distributions.

Distribution = tuple[Ids, Probabilities]  # ids, by falling probability where rows are cut, and their probabilities


@dataclass(frozen=True, eq=False)
class _OfLogits(Reading[R]):
    logits: Tensor

    @property
    def about(self) -> Tensor:
        """As in `Reading`."""
        return self.logits


@dataclass(frozen=True, eq=False)
class Distributions(_OfLogits[tuple[Distribution, ...]]):
    """The distribution of each row, as in `drafting_distributions`, whose arguments these are."""

    options: SamplingOptions
    row_width: int
    allowed: Columns | None = None

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.options, self.row_width, self.allowed

    def together(self, readings: "Sequence[Distributions]") -> list[tuple[Distribution, ...]]:
        """As in `Reading`."""
        logits = [reading.logits for reading in readings]
        return split(
            drafting_distributions(joined(logits), self.options, self.row_width, self.allowed), list(map(len, logits))
        )


@dataclass(frozen=True, eq=False)
class Best(_OfLogits[tuple[list[int], ...]]):
    """The columns with the largest logits in each row, at most `count`, the largest first."""

    count: int
    allowed: Columns | None = None

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.count, self.allowed

    @torch.inference_mode()
    def together(self, readings: "Sequence[Best]") -> list[tuple[list[int], ...]]:
        """As in `Reading`."""
        scores = columns_of(joined([reading.logits for reading in readings]), self.allowed)
        places = scores.topk(min(self.count, scores.shape[-1])).indices.cpu().numpy()
        found = places if self.allowed is None else self.allowed.numbers[places]
        return split(found.tolist(), [len(reading.logits) for reading in readings])


@dataclass(frozen=True, eq=False)
class Ranking(_OfLogits[tuple[list[int], ...]]):
    """The draw of each row from its whole distribution; in the first row also what was nearest to being drawn instead.

    Only columns leave the device, all at once.
    """

    options: SamplingOptions  # penalties and biases are not used
    clocks: Clocks
    chances: Sequence[Chance]  # of each row, all of one kind
    beside: int = 0  # columns besides the draw in the first row, the nearest first; fewer where there are fewer
    allowed: Columns | None = None  # the only columns that may be drawn; None: all

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.options, self.clocks, type(self.chances[0]), self.beside, self.allowed

    @torch.inference_mode()
    def together(self, readings: "Sequence[Ranking]") -> list[tuple[list[int], ...]]:
        """As in `Reading`; a distribution without any probability (logits that are no numbers) is what has no
        answer.
        """
        sizes = [len(reading.logits) for reading in readings]
        scores = columns_of(joined([reading.logits for reading in readings]), self.allowed)
        drawn, distances, possible = self._drawn(scores, [chance for each in readings for chance in each.chances])
        places, certain = torch.stack([drawn, possible.long()]).tolist()
        if not all(certain):
            raise ValueError("no id has a probability above 0: the model's logits are not finite")
        found = [[place] for place in places]
        if self.beside:
            firsts = [sum(sizes[:place]) for place in range(len(sizes))]
            for first, others in zip(firsts, self._others(scores[firsts], distances[firsts]), strict=True):
                found[first] = list(dict.fromkeys([places[first], *others]))[: 1 + self.beside]
        if self.allowed is not None:
            found = [self.allowed.numbers[columns].tolist() for columns in found]
        return split(found, sizes)

    def _drawn(self, scores: Tensor, chances: list[Chance]) -> tuple[Tensor, Tensor, Tensor]:
        """Places, how far others were from being drawn (n, m), and whether what was drawn has a probability."""
        if self.options.temperature == 0:
            best = scores.argmax(-1)
            return best, -scores, torch.ones_like(best)
        distribution = tempered(scores, self.options)
        moments = [chance for chance in chances if not isinstance(chance, float)]
        if moments:
            distances = self.clocks.arrivals(
                distribution, moments, None if self.allowed is None else self.allowed.places
            )
            drawn = distances.argmin(-1)
        else:
            drawn = _at(distribution, torch.tensor(chances, dtype=distribution.dtype))
            distances = -distribution.where(distribution > 0, -torch.inf)
        return drawn, distances, distribution.gather(-1, drawn[:, None])[:, 0] > 0

    def _others(self, scores: Tensor, distances: Tensor) -> list[list[int]]:
        """The nearest of each row, and if some of them cannot be drawn, those with the best scores after them."""
        count = min(1 + self.beside, scores.shape[-1])
        near, best = distances.topk(count, largest=False), scores.topk(count).indices
        found = torch.cat([near.indices, near.values.isinf(), best], -1).tolist()
        return [_completed(row[:count], row[count : 2 * count], row[2 * count :]) for row in found]


def _at(distribution: Tensor, chances: Tensor) -> Tensor:
    """Where the sums of each row (n, m) reach their part (n,) of the whole."""
    sums, chances = distribution.cumsum(-1), sent(chances, distribution.device)
    last = (sums < sums[:, -1:]).sum(-1)  # the last place that adds anything: not to be passed by rounding
    return torch.minimum(torch.searchsorted(sums, chances[:, None] * sums[:, -1:], right=True)[:, 0], last)


def _completed(near: list[int], impossible: list[int], best: list[int]) -> list[int]:
    possible = [place for place, never in zip(near, impossible, strict=True) if not never]
    return possible if len(possible) == len(near) else [*possible, *best]
