"""The sampler: what jobs want to know of logits (distributions, rows, draws), computed in batches.

A sampler request names rows of logits and what to compute of them. Requests that are alike are computed together, each
bitwise as it would be alone; only small results leave the device, all at once, as columns for all requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, repeat
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.device import sent
from crossdraft.engine.distributions import (
    NOT_FINITE,
    Columns,
    Likely,
    Nodes,
    columns_of,
    distributions,
    drafting_distributions,
    greedy,
    joined,
    log_probabilities_of,
    row_table,
    scores,
    tempered,
)
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types.messages import NoiseKey, Sample, SamplingOptions
from crossdraft.types.rows import NO_IDS, Ids, Probabilities, Row
from crossdraft.verification.noise import KeyedNoise, Unsigned, fill_uniform_words, moments, uniform_words

R = TypeVar("R")
T = TypeVar("T")
N = TypeVar("N")  # Row or Sample
Found = Callable[[], tuple[N, ...]]  # makes them of columns that all sessions of a batch share
Distribution = tuple[Ids, Probabilities]  # ids, by falling probability where rows are cut, and their probabilities
Chance = float | tuple[NoiseKey, int]  # uniform in [0, 1); or a noise key with the offset in letters
SCRATCH = 1 << 14  # random words that a CPU mixes together
CACHED = 1 << 16  # logits that a CPU computes together: more leave its caches, and gain nothing
TOGETHER = 1 << 24  # that other devices compute together: some hundred MiB in float64


# Draws on the host.


class Draws(Protocol):
    """Draws of a session from distributions on the host, few ids each; `DrawRequest` draws from whole ones."""

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """One of `ids` (n,), drawn with its probability (n,), then those that came nearest to being drawn instead.

        Args:
            ids: distinct.
            probabilities: with a sum of one.
            offset: letters since the start of the output.
            count: ids besides the draw, at most, the nearest first.
        """
        ...

    def chance(self, offset: int) -> Chance:
        """What decides a draw from a whole distribution."""
        ...


@dataclass(frozen=True, eq=False)
class KeyedDraws:
    """The same draw for the same offset, always."""

    noise: KeyedNoise
    key: NoiseKey

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """As in `Draws`: those that arrive next in the same exponential race."""
        if not count:
            return [self.noise.draw(ids, probabilities, self.key, offset)]
        possible = np.flatnonzero(probabilities > 0)
        arrivals = self.noise.exponentials(self.key, offset, ids[possible]) / probabilities[possible]
        ranked: list[int] = ids[possible[_smallest(arrivals, 1 + count)]].tolist()
        return ranked

    def chance(self, offset: int) -> Chance:
        """As in `Draws`: the same race over all ids."""
        return self.key, offset


@dataclass(frozen=True, eq=False)
class RandomDraws:
    """A fresh draw each time."""

    generator: np.random.Generator

    def ranked(self, ids: Ids, probabilities: Probabilities, offset: int, count: int) -> list[int]:
        """As in `Draws`: the most probable ones. The offset is not used."""
        cumulative = probabilities.cumsum()
        place = cumulative.searchsorted(self.generator.random() * cumulative[-1], side="right")
        if place == len(ids):  # by rounding: the last id that has a probability is meant
            place = np.flatnonzero(probabilities)[-1]
        drawn = int(ids[place])
        if not count:
            return [drawn]
        likely: list[int] = ids[_smallest(-probabilities, 1 + count)].tolist()
        return [drawn, *[token for token in likely if token != drawn][:count]]

    def chance(self, offset: int) -> Chance:
        """As in `Draws`: where the cumulative probabilities are cut."""
        return self.generator.random()


def _smallest(values: Probabilities, count: int) -> Ids:
    """Indices of the smallest of some values (n,), at most `count`, the smallest first."""
    if count >= len(values):
        return np.argsort(values, kind="stable")
    places = np.argpartition(values, count - 1)[:count]
    return places[np.argsort(values[places], kind="stable")]


class Clocks:
    """Keyed noise on the device where the logits are: an exponential clock for each column.

    The random words are bitwise those of `KeyedNoise`. Logarithms are the device's own: a draw differs from one of
    `KeyedNoise` only where the first two of a race arrive within rounding.
    """

    def __init__(self, noise: KeyedNoise, device: torch.device, kept: Ids | None = None) -> None:
        """`kept`: the id of each column; None: column i is id i."""
        hashes = noise.hashes if kept is None else noise.hashes[kept]
        self._hashes = torch.from_numpy(hashes).to(device)
        self._scratch = np.empty((2, 0), dtype=np.uint64)  # of the CPU, whose caches it stays in

    def arrivals(
        self, distributions: Tensor, at: Sequence[tuple[NoiseKey, int]], columns: Tensor | None = None
    ) -> Tensor:
        """When each id arrives in the race that draws: the first is drawn, impossible ones never arrive.

        Args:
            distributions: float64 (n, m).
            at: of each row, its key and its offset in letters since the start of the output.
            columns: int64 (m,), those of the logits that distributions are of; None: all, or the first m.

        Returns:
            float64 (n, m).
        """
        hashes = self._hashes[: distributions.shape[-1]] if columns is None else self._hashes[columns]
        arrivals = torch.empty_like(distributions)
        if hashes.device.type == "cpu":
            self._fill_uniform(arrivals.numpy(), hashes.numpy().view(np.uint64), moments(at).view(np.uint64))
        else:
            words = sent(torch.from_numpy(moments(at)), hashes.device)
            arrivals.copy_(uniform_words(hashes, words[:, :1], words[:, 1:])).add_(0.5).mul_(2.0**-53)
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


# Sampler requests.


class SamplerRequest(ABC, Generic[R]):
    """Asks for something about rows of logits. Requests of one kind run together, each as it would alone.

    A job yields it, or better writes `yield from request.result()`.
    """

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The logits: floating (n, V)."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """What must be equal in requests that run together, besides their class and V."""

    @abstractmethod
    def run(self, requests: Sequence[Self]) -> Sequence[R]:
        """The results of requests of one kind, this one among them.

        Raises:
            ValueError: one of them has no result.
        """

    def result(self) -> "Generator[SamplerRequest[R], R, R]":
        """Asks the model thread; returns the result."""
        return (yield self)


SamplerSteps = Generator[SamplerRequest[Any], Any, T]
"""Part of a job that holds logits: yields sampler requests, and returns what it made of their results."""


class BatchKey(NamedTuple):
    """What is equal in requests that run together; and the size of one of them."""

    request: type[SamplerRequest[Any]]
    kind: Hashable
    columns: int
    most: int  # logits that run together

    @staticmethod
    def of(request: SamplerRequest[Any]) -> "tuple[BatchKey, int]":
        """The key of one request, and how many logits it has; raises TypeError if its kind has no hash."""
        rows = request.rows
        key = BatchKey(type(request), request.kind, rows.shape[-1], TOGETHER if rows.is_cuda else CACHED)
        hash(key)  # an error here is that of whoever asks
        return key, rows.numel()


def batched(requests: Sequence[tuple[BatchKey, int]]) -> Iterator[list[int]]:
    """The indices of requests that run together, each in one batch of as many as the device computes together."""
    alike: dict[BatchKey, list[int]] = {}
    for index, (key, _) in enumerate(requests):
        alike.setdefault(key, []).append(index)
    for key, indices in alike.items():
        batch: list[int] = []
        size = 0
        for index in indices:
            if batch and size + requests[index][1] > key.most:
                yield batch
                batch, size = [], 0
            batch.append(index)
            size += requests[index][1]
        yield batch


def _split(found: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    return [found[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True, eq=False)
class _OfLogits(SamplerRequest[R]):
    logits: Tensor

    @property
    def rows(self) -> Tensor:
        return self.logits


# Requests of targets.


@dataclass(frozen=True, eq=False)
class SampleTable:
    """The target's keyed draws at n nodes, of all sessions that were sampled together, as columns."""

    tokens: Ids  # int64 (n,)
    log_probabilities: Probabilities  # (n,), nats, of the model itself
    likely: Likely | None  # None: not asked for
    ranks: Ids | None = None  # int64 (n,), as `Sample.rank`

    def nodes(self, begin: int = 0, end: int | None = None) -> tuple[Sample, ...]:
        tokens, values = self.tokens[begin:end].tolist(), self.log_probabilities[begin:end].tolist()
        likely = repeat(()) if self.likely is None else self.likely.pairs(begin, end)
        ranks = repeat(0) if self.ranks is None else self.ranks[begin:end].tolist()
        return tuple(map(Sample, tokens, values, likely, ranks))


def _sliced(nodes: Callable[[int, int], tuple[N, ...]], sizes: Sequence[int]) -> list[Found[N]]:
    return [partial(nodes, begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True, eq=False)
class _OfNodes(SamplerRequest[R]):
    nodes: Nodes

    @property
    def rows(self) -> Tensor:
        return self.nodes.logits


@dataclass(frozen=True, eq=False)
class SampleRequest(_OfNodes[Found[Sample]]):
    """The target's own keyed draw at each node."""

    clocks: Clocks
    key: NoiseKey
    offsets: Sequence[int]  # of each node, in letters since the start of the output
    likely: int | None = None  # most probable ids to return beside each draw, fewer where the model has fewer

    @property
    def kind(self) -> Hashable:
        return self.nodes.processor.warping, self.clocks, self.likely

    @torch.inference_mode()
    def run(self, requests: "Sequence[SampleRequest]") -> list[Found[Sample]]:
        """As in `SamplerRequest`; ValueError: logits are not finite."""
        logits = joined([one.nodes.logits for one in requests])
        drawn, shares = self._drawn(requests, logits)
        log_probabilities = log_probabilities_of(logits)
        columns = [drawn, shares, log_probabilities.gather(-1, drawn)]
        found = torch.cat([column.double() for column in columns], -1).cpu().numpy()
        if not (found[:, 1] > 0).all():
            raise ValueError(NOT_FINITE)
        likely = Likely.of(log_probabilities, self.likely) if self.likely else None
        table = SampleTable(found[:, 0].astype(np.int64), found[:, 2], likely)
        return _sliced(table.nodes, [len(one.offsets) for one in requests])

    def _drawn(self, requests: "Sequence[SampleRequest]", logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and their probabilities, each (n, 1)."""
        options = self.nodes.processor.warping
        found = scores([one.nodes for one in requests], logits)
        if options.temperature == 0:
            return greedy(found)
        distribution = tempered(found, options)
        at = [(one.key, offset) for one in requests for offset in one.offsets]
        drawn = self.clocks.arrivals(distribution, at).argmin(-1, keepdim=True)
        return drawn, distribution.gather(-1, drawn)


@dataclass(frozen=True, eq=False)
class RowRequest(_OfNodes[Found[Row]]):
    """The row of each node."""

    head: int  # as in `row_table`
    listed: Sequence[Ids] = ()  # as in `row_table`
    likely: int | None = None  # set: with log-probabilities, and so many most probable ids

    @property
    def kind(self) -> Hashable:
        return self.nodes.processor.warping, self.head, self.likely

    def run(self, requests: "Sequence[RowRequest]") -> list[Found[Row]]:
        sizes = [one.nodes.logits.shape[0] for one in requests]
        listed = [ids for one, size in zip(requests, sizes, strict=True) for ids in one.listed or repeat(NO_IDS, size)]
        table = row_table(distributions([one.nodes for one in requests]), self.head, listed)
        return _sliced(table.logged(joined([one.nodes.logits for one in requests]), self.likely).nodes, sizes)


@dataclass(frozen=True, eq=False)
class ScoreRequest(_OfLogits[Found[Sample]]):
    """The log-probability and the rank of a given id in each row, as a sample."""

    tokens: Sequence[int]  # one for each row
    likely: int  # as in `SampleRequest`

    @property
    def kind(self) -> Hashable:
        return self.likely

    @torch.inference_mode()
    def run(self, requests: "Sequence[ScoreRequest]") -> list[Found[Sample]]:
        """As in `SamplerRequest`; ValueError: logits are not finite."""
        tokens = torch.tensor([token for one in requests for token in one.tokens], dtype=torch.int64)
        values = log_probabilities_of(joined([one.logits for one in requests]))
        own = values.gather(-1, sent(tokens, values.device)[:, None])
        found = torch.cat([own.double(), (values >= own).sum(-1, keepdim=True).double()], -1).cpu().numpy()
        if np.isnan(found).any():
            raise ValueError(NOT_FINITE)
        likely, ranks = Likely.of(values, self.likely), found[:, 1].astype(np.int64)
        table = SampleTable(tokens.numpy(), found[:, 0], likely, ranks)
        return _sliced(table.nodes, [len(one.tokens) for one in requests])


# Requests of drafters.


@dataclass(frozen=True, eq=False)
class DistributionRequest(_OfLogits[Sequence[Distribution]]):
    """The distribution of each row, as in `drafting_distributions`, whose arguments these are."""

    options: SamplingOptions
    row_width: int
    allowed: Columns | None = None

    @property
    def kind(self) -> Hashable:
        return self.options, self.row_width, self.allowed

    def run(self, requests: "Sequence[DistributionRequest]") -> list[Sequence[Distribution]]:
        logits = [one.logits for one in requests]
        found = drafting_distributions(joined(logits), self.options, self.row_width, self.allowed)
        return _split(found, [each.shape[0] for each in logits])


@dataclass(frozen=True, eq=False)
class _Drawing(_OfLogits[Sequence[T]]):
    """About what the drafter draws from each row."""

    options: SamplingOptions  # penalties and biases are not used
    clocks: Clocks
    chances: Sequence[Chance]  # of each row, all of one kind
    count: int = 0  # columns that are wanted, fewer where fewer are possible
    allowed: Columns | None = None  # the only ones that may be drawn; None: all

    @property
    def kind(self) -> Hashable:
        return self.options, self.clocks, type(self.chances[0]), self.count, self.allowed

    def arrivals(self, distribution: Tensor, chances: list[Chance]) -> Tensor | None:
        """As of `Clocks`; None: the draws are not keyed."""
        at = [chance for chance in chances if not isinstance(chance, float)]
        columns = None if self.allowed is None else self.allowed.on_device
        return self.clocks.arrivals(distribution, at, columns) if at else None


@dataclass(frozen=True, eq=False)
class TopRequest(_Drawing[list[tuple[int, float]]]):
    """The `count` columns of each row that the target is likeliest to go on with, the likeliest first, with weights.

    Weights are what the drafter knows of the target's next token: its distribution; where both draw with the same
    noise, how soon each id arrives in the drafter's race, which the target's resembles; of greedy draws the model's own
    probabilities.
    """

    @torch.inference_mode()
    def run(self, requests: "Sequence[TopRequest]") -> list[Sequence[list[tuple[int, float]]]]:
        """As in `SamplerRequest`; ValueError: logits are not finite."""
        scores = columns_of(joined([one.logits for one in requests]), self.allowed)
        weights = self._weights(scores, [chance for one in requests for chance in one.chances])
        top = weights.topk(min(self.count, weights.shape[-1]))
        places, values = top.indices.cpu().numpy(), top.values.tolist()
        columns = places if self.allowed is None else self.allowed.numbers[places]
        found = [
            [(column, value) for column, value in zip(*row, strict=True) if value > 0]
            for row in zip(columns.tolist(), values, strict=True)
        ]
        if not all(found):
            raise ValueError(NOT_FINITE)
        return _split(found, [one.logits.shape[0] for one in requests])

    def _weights(self, scores: Tensor, chances: list[Chance]) -> Tensor:
        if self.options.temperature == 0 or self.options.top_k == 1:
            return scores.softmax(-1, dtype=torch.float64)
        distribution = tempered(scores, self.options)
        arrivals = self.arrivals(distribution, chances)
        if arrivals is None:
            return distribution
        rates = 1 / arrivals
        return rates / rates.cumsum(-1)[:, -1:]  # a sum whose rounding does not depend on other rows


@dataclass(frozen=True, eq=False)
class DrawRequest(_Drawing[list[int]]):
    """A draw from the whole distribution of each row; for the first row also the `count` columns that came nearest to
    being drawn, the nearest first."""

    @torch.inference_mode()
    def run(self, requests: "Sequence[DrawRequest]") -> list[Sequence[list[int]]]:
        """As in `SamplerRequest`; ValueError: logits are not finite."""
        sizes = [one.logits.shape[0] for one in requests]
        scores = columns_of(joined([one.logits for one in requests]), self.allowed)
        drawn, distances, possible = self._drawn(scores, [chance for one in requests for chance in one.chances])
        places, certain = torch.stack([drawn, possible.long()]).tolist()
        if not all(certain):
            raise ValueError(NOT_FINITE)
        found = [[place] for place in places]
        if self.count:
            firsts = [*accumulate(sizes, initial=0)][:-1]
            for first, others in zip(firsts, self._nearest(scores[firsts], distances[firsts]), strict=True):
                found[first] = list(dict.fromkeys([places[first], *others]))[: 1 + self.count]
        if self.allowed is not None:
            found = [self.allowed.numbers[columns].tolist() for columns in found]
        return _split(found, sizes)

    def _drawn(self, scores: Tensor, chances: list[Chance]) -> tuple[Tensor, Tensor, Tensor]:
        """Columns, how far others were from being drawn (n, m), and whether what was drawn has a probability."""
        if self.options.temperature == 0:
            best, certain = greedy(scores)
            return best[:, 0], -scores, certain[:, 0] > 0
        distribution = tempered(scores, self.options)
        distances = self.arrivals(distribution, chances)
        if distances is not None:
            drawn = distances.argmin(-1)
        else:
            drawn = _inverted(distribution, torch.tensor(chances, dtype=distribution.dtype))
            distances = -distribution.where(distribution > 0, -torch.inf)
        return drawn, distances, distribution.gather(-1, drawn[:, None])[:, 0] > 0

    def _nearest(self, scores: Tensor, distances: Tensor) -> list[list[int]]:
        """The nearest columns of each row; if some of them cannot be drawn, the best scores follow the others."""
        count = min(1 + self.count, scores.shape[-1])
        near, best = distances.topk(count, largest=False), scores.topk(count).indices
        found = torch.cat([near.indices, near.values.isinf(), best], -1).tolist()
        return [_completed(row[:count], row[count : 2 * count], row[2 * count :]) for row in found]


@dataclass(frozen=True, eq=False)
class PathRequest:
    """Asks for several tokens, each drawn from the row after the one before, without the job in between.

    The first row is that of `forward`, which asks for one. The ids that were drawn are the result, a `PathResult`.
    """

    forward: ForwardRequest
    asks: Callable[[Tensor, Sequence[int]], SamplerRequest[Sequence[list[int]]]]  # given logits (1, V) after the tokens
    id_of: Callable[[int], int]  # that a column of the logits stands for
    tokens: int  # at least 1; the session has room for all


class PathResult(NamedTuple):
    """What a job receives for a `PathRequest`."""

    tokens: list[int]
    queued: float  # seconds from the request to its first step


def _inverted(distribution: Tensor, chances: Tensor) -> Tensor:
    """Where the cumulative sums of each row (n, m) reach their part (n,) of the total."""
    sums, chances = distribution.cumsum(-1), sent(chances, distribution.device)
    last = (sums < sums[:, -1:]).sum(-1)  # the last column that adds anything: not to be passed by rounding
    return torch.minimum(torch.searchsorted(sums, chances[:, None] * sums[:, -1:], right=True)[:, 0], last)


def _completed(near: list[int], impossible: list[int], best: list[int]) -> list[int]:
    possible = [place for place, never in zip(near, impossible, strict=True) if not never]
    return possible if len(possible) == len(near) else [*possible, *best]
