"""The sampler: what jobs want to know of logits (distributions, rows, draws), computed in batches.

A sampler request names rows of logits and what to compute of them. Requests that are alike are computed together, each
bitwise as it would be alone; only small results leave the device, as columns, all requests' of a step in one copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, repeat
from math import log
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdraft.engine.device import Fetching, sent
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.clocks import Clocks, Moment, Moments
from crossdraft.engine.sampling.distributions import (
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
    numbers_of,
    row_table,
    scores,
    tempered,
    weights_of,
)
from crossdraft.types import quick_dataclass
from crossdraft.types.messages import IMPOSSIBLE, NoiseKey, Sample, SamplingOptions
from crossdraft.types.rows import NO_IDS, Ids, Probabilities, Row
from crossdraft.types.trees import ROOT

R = TypeVar("R")
T = TypeVar("T")
N = TypeVar("N")  # Row or Sample
Found = Callable[[], tuple[N, ...]]  # makes them of columns that all sessions of a batch share
Distribution = tuple[Ids, Probabilities]  # ids, by falling probability where rows are cut, and their probabilities
TOGETHER = 1 << 24  # logits that devices other than CPUs compute together: some hundred MiB in float64


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
            _check_required(requests, possible, logits)
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


def _check_required(requests: "Sequence[SampleRequest | RowRequest]", possible: NDArray[Any], logits: Tensor) -> None:
    """Raises ValueError unless something can be drawn at all nodes where it must be, and logits are finite."""
    fault, firsts = nothing_left(logits), accumulate((len(one.rows) for one in requests), initial=0)
    wanted = [first + node for first, one in zip(firsts, requests, strict=False) for node in range(one.required)]
    if not (isinstance(fault, NothingLeftError) and possible[wanted].all()):
        raise fault


@quick_dataclass(frozen=True, eq=False)
class RowRequest(_OfNodes[Found[Row]]):
    """The row of each node."""

    head: int  # as in `row_table`
    listed: Sequence[Ids] = ()  # as in `row_table`
    likely: int | None = None  # set: with log-probabilities, and so many most probable ids
    required: int = 1  # as in `SampleRequest`; other rows may be all tail

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
        table = yield from row_table(found, self.head, listed, own, self.likely or 0)
        if not table.possible.all():
            _check_required(requests, table.possible, logits)
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
        rows = zip(self.clocks.named(numbers_of(places, self.allowed)).tolist(), values.tolist(), strict=True)
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
        tokens = self.clocks.named(numbers_of(places[:, 0], self.allowed))
        found = draws_of(tokens, weights, more[: len(own) - 1], self.allowed, self.clocks)
        beside = self.clocks.named(numbers_of(more[-1], self.allowed)).tolist() if near else []
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
    return list(map(Draw, tokens.tolist(), cut_rows(weights, clocks.named(numbers_of(places[0], allowed)))))
