"""Paths: several tokens, each drawn from the row after the one before, step by step on the device. And trees of what is
likeliest, level by level.

What reads its options in tensors that stay can be captured as CUDA graphs, as the forwards between are.
"""

from collections.abc import Generator, Hashable, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.attention import Marks
from crossdraft.engine.batch import StepInputs
from crossdraft.engine.device import Fetched, sent, staged
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.clocks import Clocks, Moment, Moments, moments_table
from crossdraft.engine.sampling.distributions import NOT_FINITE, Columns, Warping, columns_of, joined, warping_table
from crossdraft.engine.sampling.sampler import (
    TOGETHER,
    Draw,
    DrawRequest,
    TopRequest,
    TopRow,
    drawn_from,
    draws_of,
    likeliest_of,
)
from crossdraft.text.letters import Letters, is_plain
from crossdraft.types.messages import ONLY_TARGETS, SamplingOptions
from crossdraft.types.rows import Probabilities
from crossdraft.types.trees import MOST_NODES, ROOT

STANDING_WIDTH = 256  # columns to which drafts that are captured are narrowed, where `top_k` allows it
KNOWN = ("temperature", "top_k", "top_p", "min_p")  # options of drafts that are in `warping_table`, and so in these
UNKNOWN = [field for field in fields(SamplingOptions) if field.name not in (*KNOWN, *ONLY_TARGETS, "grammar")]


def draw_path(
    forward: ForwardRequest,
    options: SamplingOptions,
    clocks: Clocks,
    at: Moment,
    row_width: int = 0,
    allowed: Columns | None = None,
) -> Generator[ForwardRequest | DrawRequest, Any, tuple[list[Draw], float]]:
    """Part of a job: tokens, each drawn from the row after the one before, as `DrawRequest` has it.

    `forward` is for the first row, and has slots for the `more` tokens after the first. With the tokens come the
    seconds from the first request to its first step.
    """
    drawn: list[Draw] = []
    queued: float | None = None
    while True:
        answer = yield forward
        queued = answer.queued if queued is None else queued
        found = yield DrawRequest(
            answer.logits, options, clocks, (at,), keyed=True, allowed=allowed, row_width=row_width, forward=forward
        )
        drawn += found
        if len(found) > forward.more:
            return drawn, queued
        tokens = [token for token, *_ in found]
        forward = forward.after(tokens)
        at = at[0], at[1] + sum(map(clocks.letters.__getitem__, tokens))


class StandingDraws:
    """Draws of one kind after each of some rows, whose options and keys are in tensors that stay: they can be captured.

    Nothing here waits for the device.

    Args:
        clocks: of the model.
        most: rows.
        width: best columns to which draws are narrowed, enough for half as many `top_k`; 0: to none; None: the draws
            are greedy.
        nucleus: whether `top_p` may be below 1; where draws are narrowed it always may.
    """

    def __init__(self, clocks: Clocks, most: int, width: int | None = None, nucleus: bool = False) -> None:
        self._clocks, self._greedy, self._width, self._nucleus = clocks, width is None, width or 0, nucleus
        device = clocks.lengths.device
        self._numbers = torch.ones(6, most, dtype=torch.float64, device=device)  # of `warping_table`, then of moments
        self._at = Moments(*self._numbers[4:].view(torch.int64))

    def serves(self, options: SamplingOptions) -> bool:
        """Whether tokens can be drawn by it."""
        unknown = UNKNOWN and any(getattr(options, field.name) != field.default for field in UNKNOWN)
        if unknown or (options.temperature == 0) != self._greedy:
            return False
        if self._width:
            return 0 < 2 * options.top_k <= self._width
        return self._greedy or (options.top_k == 0 and (options.top_p < 1) == self._nucleus)

    def begin(self, options: Sequence[SamplingOptions], at: Sequence[Moment]) -> None:
        """From now on it draws for these, the first row of logits for the first."""
        if self._greedy:
            return
        table = torch.empty(6, len(options), dtype=torch.float64)
        table[:4] = torch.from_numpy(warping_table(options))
        table[4:].view(torch.int64)[:] = torch.from_numpy(moments_table(at))
        self._numbers[:, : len(options)].copy_(staged(table, self._numbers.device), non_blocking=True)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The ids after rows of logits (n, V), int64 (n,), and 1, or 0 where logits are not finite, float64 (n,).

        Rows beyond those that have a path get any id.
        """
        at = None if self._greedy else Moments(*(each[: len(logits)] for each in self._at))
        ids, (possible,) = _next_ids(logits, self._warping(logits, 1), self._clocks, at)
        return ids, possible[:, 0].double()

    def likeliest(self, logits: Tensor, offsets: Tensor, each: int, count: int) -> tuple[Tensor, Tensor]:
        """As `likeliest_of`, after so many rows `each` of those for which it draws, at other offsets, int64 (n,)."""
        at = None
        if not self._greedy:
            beginnings = self._at.beginnings[: len(logits) // each, None].expand(-1, each).flatten()
            at = Moments(beginnings, offsets)
        return likeliest_of(logits, self._warping(logits, each), self._clocks, at, count)

    def _warping(self, logits: Tensor, each: int) -> Warping:
        numbers = self._numbers[:4, : len(logits) // each, None].expand(-1, -1, each)
        temperatures, least, top_k, top_p = numbers.reshape(4, -1, 1)
        limited, nucleus = top_k.long() if self._width else None, top_p if self._width or self._nucleus else None
        return Warping(self._greedy, temperatures, least, limited, self._width // 2, nucleus, self._width)


def _next_ids(
    logits: Tensor,
    warping: Warping,
    clocks: Clocks,
    at: Moments | None,
    allowed: Columns | None = None,
    row_width: int = 0,
) -> tuple[Tensor, Sequence[Tensor]]:
    """The ids after rows of logits (n, V), int64 (n,), and the rest as of `drawn_from`; the moments move on."""
    columns = None if allowed is None else allowed.on_device
    drawn, found = drawn_from(columns_of(logits, allowed), warping, clocks, at, columns, row_width)
    column = drawn[:, 0] if columns is None else columns[drawn[:, 0]]
    if at is not None:
        at.offsets.add_(clocks.lengths[column])
    return clocks.ids_of(column), found


def standing_draws(clocks: Clocks, columns: int, most: int) -> list[tuple[StandingDraws, int]]:
    """What drafts are usually drawn by, and for how many rows at most, for so many columns of logits."""
    few = min(most, TOGETHER // columns)
    keyed = [(StandingDraws(clocks, few, *kind), few) for kind in ((STANDING_WIDTH, True), (0, False), (0, True))]
    return [(StandingDraws(clocks, most), most), *keyed]


class Paths:
    """Paths that are drawn step by step on the device: what each step adds, and the host need not know until the end.

    Nothing here waits for the device, and all may be captured: only the contents of tensors differ.
    """

    def __init__(self, requests: Sequence[DrawRequest]) -> None:
        self.requests, self.rows = requests, joined([request.logits for request in requests])
        self.forwards = [request.forward for request in requests if request.forward is not None]
        self.taken = 0  # steps whose tokens are where `take` has said
        self._alike: list[_AlikePaths] = []
        self._drawn: Sequence[Tensor] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """To be fetched, all at once."""
        drawn = [each[: self.taken] for each in self._drawn]
        return [*drawn, *(tensor for paths in self._alike for tensor in paths.tensors)]

    def begin(self) -> None:
        """Draws the first token of each, those that are alike together."""
        kinds: dict[Hashable, list[int]] = {}
        for place, request in enumerate(self.requests):
            kinds.setdefault(request.kind, []).append(place)
        self._alike = [_AlikePaths(self.requests, places, self.rows.device) for places in kinds.values()]
        self.extend(self.rows)

    def extend(self, rows: Tensor) -> None:
        """Draws a token after each row of logits (n, V), whose ids on the device are `ids`, int64 (n,)."""
        if len(self._alike) == 1:
            self.ids = self._alike[0].extend(rows)
            return
        self.ids = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for paths in self._alike:
            self.ids.index_copy_(0, paths.rows, paths.extend(rows.index_select(0, paths.rows)))

    def take(self, ids: Tensor, possible: Tensor) -> None:
        """In place of `begin` and `extend`: what each step draws will be there, as `StandingDraws.draw` has it for one,
        (steps, n) each."""
        self._drawn = ids, possible

    def found(self, arrays: Fetched) -> list[list[Draw]]:
        """What was drawn on each path, of what was fetched; raises ValueError: logits are not finite."""
        if self._drawn:
            ids, possible = arrays
            if not possible.all():
                raise ValueError(NOT_FINITE)
            return [list(map(_plain_draw, path)) for path in ids.T.astype(np.int64).tolist()]
        found: dict[int, list[Draw]] = {}
        for paths in self._alike:
            own, arrays = arrays[: len(paths.tensors)], arrays[len(paths.tensors) :]
            found |= zip(paths.places, paths.found(own), strict=True)
        return [found[place] for place in range(len(found))]


_plain_draw = lru_cache(1 << 14)(Draw)  # of an id alone, of which a draft makes hundreds


class _AlikePaths:
    """Paths of one kind, those in some places among all."""

    def __init__(self, requests: Sequence[DrawRequest], places: Sequence[int], device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        self.places, self._request, self._device = places, requests[places[0]], device
        self._warping = Warping.of([requests[place].options for place in places], [1] * len(places), device)
        self._at = None if self._warping.greedy else Moments.of([requests[place].at[0] for place in places], device)

    @cached_property
    def rows(self) -> Tensor:
        """Their rows among all, which are read where there are several kinds, (n,)."""
        return sent(torch.tensor(self.places), self._device)

    @torch.inference_mode()
    def extend(self, logits: Tensor) -> Tensor:
        """As of `Paths`."""
        request = self._request
        ids, found = _next_ids(logits, self._warping, request.clocks, self._at, request.allowed, request.row_width)
        self.tensors += [ids, *found]
        return ids

    def found(self, arrays: Fetched) -> list[list[Draw]]:
        """As of `Paths`."""
        request, each = self._request, 3 if self._request.row_width else 2
        steps = (arrays[begin : begin + each] for begin in range(0, len(arrays), each))
        drawn = (
            draws_of(ids.astype(np.int64), weights, places, request.allowed, request.clocks)
            for ids, weights, *places in steps
        )
        return [list(path) for path in zip(*drawn, strict=True)]


# Trees.

TREE_WIDTHS = 4, 7  # of trees whose levels are captured: those of the controller's
MAX_TREES = 32  # that grow together, at most


# What is known of a node on the device, int64: its cost, minus the logarithm of its weight, a float64; the place of its
# parent; its id; the places on the path to it, at first to its parent, as bits; its depth; letters since the start of
# the output; whether it was expanded. The last line of a session is none: level, tokens of the text, and `beside`.
COST, PARENT, ID, PATH, DEPTH, END, EXPANDED = range(7)


def _costs(nodes: Tensor) -> Tensor:
    return nodes.view(torch.float64)[..., COST]


def _picked(nodes: Tensor, places: Tensor) -> Tensor:
    return nodes.gather(1, places[..., None].expand(-1, -1, nodes.shape[-1]))


class StandingTrees:
    """Trees that grow on the device, in tensors that stay: a level can be captured. Nothing here waits for the device.

    Of each there are the nodes that a level expands, and, in order of their costs, the likeliest of those that are not
    the draft's: others are neither sent nor expanded.

    Args:
        width: nodes that a level expands.
        clocks: of the model.
        letters: of each id. What is no text begins no branch, and of ids with the same letters one is enough.
    """

    def __init__(self, width: int, clocks: Clocks, letters: Sequence[Letters]) -> None:
        self.width, self.kept, self.levels, self._clocks = width, 4 * width, 1 + MOST_NODES // width, clocks
        device, numbers = clocks.lengths.device, dict[Letters, int]()
        self._written = torch.tensor([numbers.setdefault(own, len(numbers)) for own in letters], device=device)
        self._plain = torch.tensor([*map(is_plain, letters)], device=device)
        self._nodes = torch.zeros(MAX_TREES, width + self.kept + 1, 7, dtype=torch.int64, device=device)
        self.found = torch.zeros(self.levels, MAX_TREES, width, 3 + 2 * width, dtype=torch.float64, device=device)
        self._ranks = torch.arange(self.kept, device=device)
        self._ones = torch.ones(width, dtype=torch.int64, device=device)
        self._before = torch.ones(width, width, dtype=torch.bool, device=device).tril(-1)

    def serves(self, request: TopRequest) -> bool:
        keyed = request.keyed or request.options.temperature == 0
        fits = request.count == self.width and request.levels <= self.levels and request.beside <= self.kept
        return fits and keyed and request.allowed is None and request.forward is not None

    def begin(self, requests: Sequence[TopRequest], trees: int) -> None:
        """Starts so many trees: one for each request, the others are padding."""
        nodes = np.zeros((trees, *self._nodes.shape[1:]), dtype=np.int64)
        costs = nodes.view(np.float64)[..., COST]
        costs[:], costs[:, 0] = np.inf, 0
        nodes[:, 0, PARENT : ID + 1], nodes[:, -1] = ROOT, 0
        for own, request in zip(nodes, requests, strict=False):
            assert request.forward is not None
            own[0, END], own[-1, 1:3] = request.at[0][1], (len(request.forward.context), request.beside)
        self._nodes[:trees].copy_(staged(torch.from_numpy(nodes), self._nodes.device), non_blocking=True)

    def grow(self, draws: StandingDraws, logits: Tensor, inputs: StepInputs) -> None:
        """A level: of the logits after its nodes, (trees * width, V), and what the forward has read, the next nodes."""
        width, trees = self.width, len(logits) // self.width
        nodes = self._nodes[:trees]
        rows, level, own = nodes[:, :width], nodes[:, -1, :1], (trees, width, width)
        values, columns = draws.likeliest(logits.float(), rows[..., END].flatten(), width, width)
        ids, costs = self._clocks.ids_of(columns).view(own), -values.log().view(own)
        noted = [_costs(rows)[..., None], rows[..., PARENT:PATH].double(), costs, ids.double()]
        self.found[:, :trees].index_copy_(0, level[0], torch.cat(noted, -1)[None])
        costs = (costs + _costs(rows)[..., None]).nan_to_num_(torch.inf, torch.inf)
        places = (level - 1) * width + self._ranks[:width]
        lengths = self._clocks.lengths[columns].view(own)
        children = self._children(rows, costs, ids, lengths, places.clamp(ROOT))
        tip = children[:, 0, :1].clone()
        _costs(tip).copy_(costs[:, 0, :1])
        kept = self._kept(torch.cat([nodes[:, width:-1], children.flatten(1, 2)], 1), nodes[:, -1, 2:3])
        rows = torch.cat([tip, self._heaviest(kept, nodes[:, -1, 2:3], tip)], 1)
        rows[..., PATH].bitwise_or_(self._ones << places + width)
        self._write(inputs, rows, nodes[:, -1, 1:2])
        nodes[:, :-1].copy_(torch.cat([rows, kept], 1))
        level.add_(1)

    def _children(self, rows: Tensor, costs: Tensor, ids: Tensor, lengths: Tensor, places: Tensor) -> Tensor:
        """Those of each row: of infinite cost where they are the draft's, no text, or what one before them writes."""
        written = self._written[ids]
        out = (written[..., None] == written[..., None, :]).logical_and_(self._before).any(-1)
        out = out.logical_or_(self._plain[ids].logical_not_())
        out[:, 0, 0].fill_(True)
        paths, depths, ends = rows[..., PATH : END + 1, None].unbind(2)
        own = costs.masked_fill(out, torch.inf).view(torch.int64), places[..., None], ids, paths, depths + 1
        return torch.stack(torch.broadcast_tensors(*own, ends + lengths, torch.zeros_like(ids)), -1)

    def _kept(self, nodes: Tensor, beside: Tensor) -> Tensor:
        """The likeliest, `beside` of each tree."""
        kept = _picked(nodes, _costs(nodes).argsort(stable=True)[:, : self.kept])
        _costs(kept).masked_fill_(self._ranks >= beside, torch.inf)
        return kept

    def _heaviest(self, kept: Tensor, beside: Tensor, tip: Tensor) -> Tensor:
        """Those that are expanded next besides the tip, and noted as such; what takes the place of missing ones sees
        the text alone."""
        free = kept[..., EXPANDED].bool().logical_or_(self._ranks >= beside - 1)
        costs, places = _costs(kept).masked_fill(free, torch.inf).topk(self.width - 1, largest=False)
        chosen = _picked(kept, places)
        kept[..., EXPANDED].scatter_(1, places, 1)
        _costs(chosen).copy_(costs)
        none = tip.clone()
        none[..., PATH].zero_()
        _costs(none).fill_(torch.inf)
        return torch.where(costs[..., None] < torch.inf, chosen, none)

    def _write(self, inputs: StepInputs, rows: Tensor, sizes: Tensor) -> None:
        """What the next forward reads; padding stays padding."""
        shape, count = rows.shape[:2], rows.shape[0] * rows.shape[1]
        marks = Marks(*inputs.marks[0][:, :count])
        inputs.ids[:count].view(shape).copy_(rows[..., ID])
        inputs.positions[:count].view(shape).copy_(rows[..., DEPTH] + (sizes - 1))
        marks.lines.view(shape).copy_(rows[..., PATH])
        marks.targets.add_(marks.blocks.ne(0), alpha=self.width)


def rows_of(found: Probabilities) -> list[list[TopRow]]:
    """The rows of each tree, of `StandingTrees.found`, (levels, trees, width, 3 + 2 * width), which was fetched. Raises
    ValueError: logits are not finite."""
    width = found.shape[2]
    if not (found[found[..., 0] < np.inf][:, 3] < np.inf).all():
        raise ValueError(NOT_FINITE)
    trees = []
    for own in found.swapaxes(0, 1).reshape(found.shape[1], -1, found.shape[3]):
        live = np.flatnonzero(own[:, 0] < np.inf)
        table = own[live]
        parents, tokens = table[:, 1:3].T.astype(np.int64).tolist()
        ids = table[:, 3 + width :].astype(np.int64).tolist()
        likeliest = map(zip, ids, table[:, 3 : 3 + width].tolist())
        places = (live - width).clip(ROOT).tolist()
        trees.append(list(map(TopRow, likeliest, places, parents, tokens)))
    return trees
