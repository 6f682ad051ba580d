"""The sampler: what jobs want to know of logits (distributions, rows, draws), computed in batches.

A sampler request names rows of logits and what to compute of them. Requests that are alike are computed together, each
bitwise as it would be alone; only small results leave the device, as columns, all requests' of a step in one copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise, repeat
from math import log
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.device import Fetching, sent
from crossdraft.engine.distributions import (
    NOT_FINITE,
    Columns,
    Nodes,
    NothingLeftError,
    Warping,
    columns_of,
    cut_distributions,
    cut_rows,
    distributions,
    joined,
    likeliest,
    likely_pairs,
    log_probabilities_of,
    logits_of,
    nothing_left,
    row_table,
    scores,
    tempered,
    weights_of,
)
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types import quick_dataclass
from crossdraft.types.messages import IMPOSSIBLE, NoiseKey, Sample, SamplingOptions
from crossdraft.types.rows import NO_IDS, Ids, Probabilities, Row
from crossdraft.types.trees import ROOT
from crossdraft.verification.noise import (
    KeyedNoise,
    Unsigned,
    beginnings,
    exponentials_of,
    fill_uniform_words,
    moments,
    uniform_words,
)

R = TypeVar("R")
T = TypeVar("T")
N = TypeVar("N")  # Row or Sample
Found = Callable[[], tuple[N, ...]]  # makes them of columns that all sessions of a batch share
Distribution = tuple[Ids, Probabilities]  # ids, by falling probability where rows are cut, and their probabilities
Moment = tuple[NoiseKey, int]  # what a draw is keyed by, the offset in letters since the start of the output
MOST_IDS = 1 << 62  # above any id
SCRATCH = 1 << 14  # random words that a CPU mixes together
TOGETHER = 1 << 24  # logits that devices other than CPUs compute together: some hundred MiB in float64


# Draws.


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

    def named(self, places: Probabilities | Ids, allowed: Columns | None = None) -> Ids:
        """On the host the ids of places among columns, of those that are allowed or of all, in the same shape."""
        columns = numbers_of(places, allowed)
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


# Sampler requests.


class SamplerRequest(ABC, Generic[R]):
    """Asks for something about rows of logits. Requests of one kind run together, each as it would alone.

    A job yields it.
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
    def launch(self, requests: Sequence[Self]) -> Fetching[Sequence[R]]:
        """The results of requests of one kind, this one among them: asks for tensors on the host once. Raises
        ValueError: one of them has no result: its logits are not finite, or nothing is allowed."""


SamplerSteps = Generator[SamplerRequest[Any], Any, T]
"""Part of a job that holds logits: yields sampler requests, and returns what it made of their results."""


def _split(found: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    return [found[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


# Requests of targets.


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Samples at n nodes, of all sessions that were sampled together, as columns."""

    tokens: Ids  # int64 (n,)
    log_probabilities: Probabilities  # (n,), nats, of the model itself
    likely: Sequence[Probabilities]  # as of `likeliest`
    ranks: Ids | None = None  # int64 (n,), as `Sample.rank`

    def nodes(self, begin: int, end: int) -> tuple[Sample, ...]:
        tokens, values = self.tokens[begin:end].tolist(), self.log_probabilities[begin:end].tolist()
        ranks = repeat(0) if self.ranks is None else self.ranks[begin:end].tolist()
        return tuple(map(Sample, tokens, values, likely_pairs(self.likely, begin, end), ranks))


def _sliced(nodes: Callable[[int, int], tuple[N, ...]], sizes: Sequence[int]) -> list[Found[N]]:
    return [partial(nodes, begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


@quick_dataclass(frozen=True, eq=False)
class _OfNodes(SamplerRequest[R]):
    nodes: Nodes

    @property
    def rows(self) -> Tensor:
        return self.nodes.logits


@quick_dataclass(frozen=True, eq=False)
class SampleRequest(_OfNodes[Found[Sample]]):
    """The target's own keyed draw at each node; of those behind the root it may be IMPOSSIBLE."""

    clocks: Clocks
    key: NoiseKey
    offsets: Sequence[int]  # of each node, in letters since the start of the output
    likely: int | None = None  # most probable ids to return beside each draw, fewer where the model has fewer
    required: int = 1  # of the first nodes: there the draw must be possible, as at the root

    @property
    def kind(self) -> Hashable:
        return self.nodes.processor.kind, self.clocks, self.likely

    @torch.inference_mode()
    def launch(self, requests: "Sequence[SampleRequest]") -> Fetching[list[Found[Sample]]]:
        options = [request.nodes.processor.warping for request in requests]
        offsets = [request.offsets for request in requests]
        sizes = [*map(len, offsets)]
        logits = logits_of([request.nodes for request in requests])
        warping, at = Warping.of(options, sizes, logits.device), None
        if not warping.greedy:
            at = Moments.of_keys([request.key for request in requests], offsets, logits.device)
        drawn, certain = drawn_from(scores([request.nodes for request in requests], logits), warping, self.clocks, at)
        own = log_probabilities_of(logits)
        logged = own.gather(-1, drawn), *likeliest(own, self.likely)
        tokens, possible, values, *likely = yield drawn, *certain, *logged
        if not possible.all():
            fault, firsts = nothing_left(logits), accumulate(sizes, initial=0)
            wanted = [
                first + node for first, one in zip(firsts, requests, strict=False) for node in range(one.required)
            ]
            if not (isinstance(fault, NothingLeftError) and possible[wanted].all()):
                raise fault
            values = np.where(possible, values, IMPOSSIBLE)
        table = SampleTable(tokens[:, 0].astype(np.int64), values[:, 0], likely)
        return _sliced(table.nodes, sizes)


def drawn_from(
    scores: Tensor,
    warping: Warping,
    clocks: Clocks,
    at: Moments | None,
    columns: Tensor | None = None,
    row_width: int = 0,
) -> tuple[Tensor, Sequence[Tensor]]:
    """A draw from each row of scores (n, m), and whether it was possible, (n, 1) each; where rows have a width it is
    from these, and in place of the second come their weights and places, (n, width) each.

    `columns` are as in `Clocks`, and `at` is None where all are greedy.
    """
    if row_width:
        weights, cut = cut_distributions(scores, warping, row_width)
        return cut if at is None else cut.gather(-1, clocks.draw(weights, at, columns, cut)), [weights, cut]
    weights, places = weights_of(scores, warping)
    if at is None:
        assert places is not None  # the best of each
        return places, [weights > 0]
    first = clocks.draw(weights, at, columns, places)
    return first if places is None else places.gather(-1, first), [weights.gather(-1, first) > 0]


@quick_dataclass(frozen=True, eq=False)
class RowRequest(_OfNodes[Found[Row]]):
    """The row of each node."""

    head: int  # as in `row_table`
    listed: Sequence[Ids] = ()  # as in `row_table`
    likely: int | None = None  # set: with log-probabilities, and so many most probable ids

    @property
    def kind(self) -> Hashable:
        return self.nodes.processor.kind, self.head, self.likely

    @torch.inference_mode()
    def launch(self, requests: "Sequence[RowRequest]") -> Fetching[list[Found[Row]]]:
        sizes = [request.nodes.logits.shape[0] for request in requests]
        each = zip(requests, sizes, strict=True)
        listed = [ids for request, size in each for ids in request.listed or repeat(NO_IDS, size)]
        logits = logits_of([request.nodes for request in requests])
        found = distributions([request.nodes for request in requests], logits)
        own = None if self.likely is None else logits
        try:
            table = yield from row_table(found, self.head, listed, own, self.likely or 0)
        except ValueError:
            raise nothing_left(logits) from None
        return _sliced(table.nodes, sizes)


@quick_dataclass(frozen=True, eq=False)
class ScoreRequest(_OfNodes[Found[Sample]]):
    """The log-probability and the rank of a given id at each node, as a sample."""

    tokens: Sequence[int]  # one for each node
    likely: int  # as in `SampleRequest`

    @property
    def kind(self) -> Hashable:
        return self.likely

    @torch.inference_mode()
    def launch(self, requests: "Sequence[ScoreRequest]") -> Fetching[list[Found[Sample]]]:
        tokens = torch.tensor([token for request in requests for token in request.tokens], dtype=torch.int64)
        values = log_probabilities_of(logits_of([request.nodes for request in requests]))
        own = values.gather(-1, sent(tokens, values.device)[:, None])
        found, ranks, *likely = yield own, (values >= own).sum(-1), *likeliest(values, self.likely)
        if np.isnan(found).any():
            raise ValueError(NOT_FINITE)
        table = SampleTable(tokens.numpy(), found[:, 0], likely, ranks.astype(np.int64))
        return _sliced(table.nodes, [len(request.tokens) for request in requests])


# Requests of drafters.


@quick_dataclass(frozen=True, eq=False)
class _OfDrafter(SamplerRequest[R]):
    """About what the drafter draws from each row."""

    logits: Tensor
    options: SamplingOptions  # penalties and biases are not used

    @property
    def rows(self) -> Tensor:
        return self.logits

    def scores(self, requests: "Sequence[_OfDrafter[R]]", allowed: Columns | None) -> tuple[Tensor, Warping]:
        """Of all rows what may be drawn, and its options."""
        found = columns_of(joined([request.logits for request in requests]), allowed)
        sizes = [request.logits.shape[0] for request in requests]
        return found, Warping.of([request.options for request in requests], sizes, found.device)


@quick_dataclass(frozen=True, eq=False)
class DistributionRequest(_OfDrafter[Sequence[Distribution]]):
    """The distribution that a drafter draws from after each row: ids and probabilities, the largest first if cut."""

    row_width: int  # most probable columns that are kept; 0: all, without rounding
    allowed: Columns | None = None  # the only columns that may be drawn; None: all

    @property
    def kind(self) -> Hashable:
        return Warping.kind(self.options), self.row_width, self.allowed

    @torch.inference_mode()
    def launch(self, requests: "Sequence[DistributionRequest]") -> Fetching[list[Sequence[Distribution]]]:
        scores, warping = self.scores(requests, self.allowed)
        if self.row_width or warping.greedy:
            weights, places = yield cut_distributions(scores, warping, self.row_width or 1)
        else:  # nothing is cut, and to order a whole vocabulary is slow
            (weights,) = yield (tempered(scores, warping),)
            places = np.broadcast_to(np.arange(weights.shape[-1]), weights.shape)
        found = cut_rows(weights, numbers_of(places, self.allowed))
        return _split(found, [request.logits.shape[0] for request in requests])


def numbers_of(places: Probabilities | Ids, allowed: Columns | None) -> Ids:
    """The columns of logits that places among those that are allowed stand for."""
    found = places.astype(np.int64)
    return found if allowed is None else allowed.numbers[found]


@quick_dataclass(frozen=True, eq=False)
class _Drawing(_OfDrafter[Sequence[T]]):
    """About draws from whole distributions."""

    clocks: Clocks
    at: Sequence[Moment]  # of each row
    keyed: bool  # whether the target draws with the same noise
    count: int = 0  # columns that are wanted, fewer where fewer are possible
    allowed: Columns | None = None  # the only ones that may be drawn; None: all

    @property
    def kind(self) -> Hashable:
        return Warping.kind(self.options), self.clocks, self.keyed, self.count, self.allowed

    @property
    def columns(self) -> Tensor | None:
        return None if self.allowed is None else self.allowed.on_device

    def moments(self, requests: "Sequence[_Drawing[T]]") -> Moments:
        return Moments.of([at for request in requests for at in request.at], self.logits.device)


class TopRow(NamedTuple):
    """What may follow a node of a tree."""

    likeliest: Iterable[tuple[int, float]]  # ids and their costs, minus the logarithms of weights; the likeliest first
    place: int = ROOT - 1  # where a tree grew, of the node, in the order in which nodes were fed; ROOT: the text's end
    parent: int = ROOT  # place of its parent
    token: int = ROOT  # its id


@quick_dataclass(frozen=True, eq=False)
class TopRequest(_Drawing[TopRow]):
    """The `count` ids of each row that the target is likeliest to go on with, the likeliest first, with weights.

    Weights are what the drafter knows of the target's next token: its distribution; where both draw with the same
    noise, how soon each id arrives in the drafter's race, which the target's resembles; of greedy draws the model's own
    probabilities.

    With a forward, of which there is one row, a tree grows from there while nobody else waits, level by level. Each
    level expands the tip of the draft, which is the likeliest child of each node from the root on, and the likeliest
    others, `count` in all. The rows of all that were expanded are found, the root's first.
    """

    forward: ForwardRequest | None = None  # it has slots for the nodes that the levels after the first expand
    beside: int = 0  # nodes that are not the draft's, of which so many are wanted

    @property
    def levels(self) -> int:
        return 1 if self.forward is None else 1 + self.forward.more // self.count

    @torch.inference_mode()
    def launch(self, requests: "Sequence[TopRequest]") -> Fetching[list[Sequence[TopRow]]]:
        scores, warping = self.scores(requests, self.allowed)
        at = self.moments(requests) if self.keyed and not warping.greedy else None
        values, places = yield likeliest_of(scores, warping, self.clocks, at, self.count, self.columns)
        rows = zip(self.clocks.named(places, self.allowed).tolist(), values.tolist(), strict=True)
        found = [[(token, -log(value)) for token, value in zip(*row, strict=True) if value > 0] for row in rows]
        if not all(found):
            raise ValueError(NOT_FINITE)
        return _split([*map(TopRow, found)], [request.logits.shape[0] for request in requests])


def likeliest_of(
    scores: Tensor, warping: Warping, clocks: Clocks, at: Moments | None, count: int, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of rows of scores (n, m) the weights that `TopRequest` has, and their places, (n, count) each, the largest first.

    `columns` are as in `Clocks`; `at` is None where the target draws by itself.
    """
    count = min(count, scores.shape[-1])
    if warping.greedy:
        best = scores.topk(count).indices
        return scores.softmax(-1, dtype=torch.float64).gather(-1, best), best
    weights, near = weights_of(scores, warping)
    if at is not None:
        weights = 1 / clocks.arrivals_at(weights, at, columns, near)
        weights /= weights.cumsum(-1)[:, -1:]  # a sum whose rounding does not depend on other rows
    if warping.top_k is not None:
        own = scores.softmax(-1, dtype=torch.float64)
        weights = torch.where(warping.top_k == 1, own if near is None else own.gather(-1, near), weights)
    values, places = weights.topk(min(count, weights.shape[-1]))
    return values, places if near is None else near.gather(-1, places)


class Draw(NamedTuple):
    """What was drawn."""

    token: int  # an id
    distribution: Distribution | None = None  # that it was drawn from, if that was wanted
    others: Sequence[int] = ()  # as many as were asked for of those nearest to being drawn, then of the likeliest


@quick_dataclass(frozen=True, eq=False)
class DrawRequest(_Drawing[Draw]):
    """A draw from each row; for the first row also the `count` that came nearest to being drawn, the
    nearest first: those that arrive next in the same race, or without a key the likeliest.

    With a forward, of which there is one row, a path goes on from there while nobody else waits: further tokens, each
    drawn from the row after the one before.
    """

    row_width: int = 0  # as in `DistributionRequest`; above 0 the distributions are wanted, too
    forward: ForwardRequest | None = None  # it has slots for the `more` tokens that follow

    @property
    def kind(self) -> Hashable:
        return super().kind, self.row_width

    @torch.inference_mode()
    def launch(self, requests: "Sequence[DrawRequest]") -> Fetching[list[Sequence[Draw]]]:
        sizes = [request.logits.shape[0] for request in requests]
        scores, warping = self.scores(requests, self.allowed)
        at = None if warping.greedy else self.moments(requests)
        drawn, own = drawn_from(scores, warping, self.clocks, at, self.columns, self.row_width)
        firsts = [*accumulate(sizes, initial=0)][:-1]
        near = [self._nearest(scores, [drawn, *own], firsts, requests)] if self.count else []
        places, weights, *more = yield [drawn, *own, *near]
        tokens = self.clocks.named(places[:, 0], self.allowed)
        found = draws_of(tokens, weights, more[: len(own) - 1], self.allowed, self.clocks)
        beside = self.clocks.named(more[-1], self.allowed).tolist() if near else []
        for first, ids in zip(firsts, beside, strict=False):
            others = list(dict.fromkeys([found[first].token, *ids]))[1 : 1 + self.count]
            found[first] = found[first]._replace(others=others)
        return _split(found, sizes)

    def _nearest(
        self, scores: Tensor, drawn: Sequence[Tensor], firsts: Sequence[int], requests: "Sequence[DrawRequest]"
    ) -> Tensor:
        """Of the first row of each request the places of the nearest, then of the best; of those that cannot be drawn
        that of the drawn one."""
        at = sent(torch.tensor(firsts), scores.device)
        scores, (own, weights, *places) = scores[at], [each[at] for each in drawn]
        warping = Warping.of([request.options for request in requests], [1] * len(firsts), scores.device)
        if not places and not warping.greedy:
            weights = tempered(scores, warping)
        if warping.greedy:
            distances, places = -scores, []
        elif self.keyed:
            moments = Moments.of([request.at[0] for request in requests], scores.device)
            distances = self.clocks.arrivals_at(weights, moments, self.columns, places[0] if places else None)
        else:
            distances = -weights.where(weights > 0, -torch.inf)
        count = min(1 + self.count, scores.shape[-1])
        near, best = distances.topk(min(count, distances.shape[-1]), largest=False), scores.topk(count)
        indices = places[0].gather(-1, near.indices) if places else near.indices
        both = (indices, near.values), (best.indices, best.values)
        return torch.cat([torch.where(values.isinf(), own, found) for found, values in both], -1)


def draws_of(
    tokens: Ids, weights: Probabilities, places: Sequence[Probabilities], allowed: Columns | None, clocks: Clocks
) -> list[Draw]:
    """What was drawn of each row, ids (n,), of what was fetched: weights and their places, or whether it was possible.
    Raises ValueError: logits are not finite."""
    if not (weights[:, 0] > 0).all():
        raise ValueError(NOT_FINITE)
    if not places:
        return list(map(Draw, tokens.tolist()))
    return list(map(Draw, tokens.tolist(), cut_rows(weights, clocks.named(places[0], allowed))))
