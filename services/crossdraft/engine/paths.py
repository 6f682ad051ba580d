"""Paths: several tokens, each drawn from the row after the one before, step by step on the device.

Draws whose options are in tensors that stay can be captured as CUDA graphs, as the forwards between them are.
"""

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.device import Fetched, Fetching, sent, staged
from crossdraft.engine.distributions import NOT_FINITE, Columns, Warping, columns_of, joined, warping_table, width_of
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampler import (
    TOGETHER,
    Clocks,
    Draw,
    Moment,
    Moments,
    OfLogits,
    drawn_from,
    drawn_with,
    draws_of,
    moments_table,
)
from crossdraft.types.messages import SamplingOptions

STANDING_WIDTH = 256  # columns to which drafts that are captured are narrowed, where `top_k` allows it


@dataclass(frozen=True, eq=False)
class PathRequest(OfLogits[list[Draw]]):
    """Asks for the next token of a path; while nobody else waits for the model those that follow are drawn, too."""

    forward: ForwardRequest  # whose row the logits are, (1, V); it has slots for `more` tokens that follow
    options: SamplingOptions
    clocks: Clocks
    at: Moment  # of the first draw
    row_width: int = 0  # as in `DistributionRequest`: above 0 the distributions are wanted, too
    allowed: Columns | None = None  # the only columns that may be drawn; None: all

    @cached_property
    def kind(self) -> Hashable:
        return Warping.kind(self.options, self.logits.shape[-1]), self.clocks, self.row_width, self.allowed

    def launch(self, requests: "Sequence[PathRequest]") -> Fetching[list[list[Draw]]]:
        paths = Paths(requests)
        paths.begin()
        return paths.found((yield paths.tensors))


def draw_path(
    forward: ForwardRequest,
    options: SamplingOptions,
    clocks: Clocks,
    at: Moment,
    row_width: int = 0,
    allowed: Columns | None = None,
) -> Generator[ForwardRequest | PathRequest, Any, tuple[list[Draw], float]]:
    """Part of a job: tokens, each drawn from the row after the one before, as `PathRequest` has it.

    `forward` is for the first row, and has slots for the `more` tokens after the first. With the tokens come the
    seconds from the first request to its first step.
    """
    drawn: list[Draw] = []
    queued: float | None = None
    while True:
        answer = yield forward
        queued = answer.queued if queued is None else queued
        found: list[Draw] = yield PathRequest(answer.logits, forward, options, clocks, at, row_width, allowed)
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

    def serves(self, request: PathRequest) -> bool:
        """Whether the tokens of a path can be drawn by it."""
        options = request.options
        if request.row_width or request.allowed is not None or (options.temperature == 0) != self._greedy:
            return False
        if self._width:
            return 0 < 2 * options.top_k <= self._width
        return self._greedy or (options.top_k == 0 and (options.top_p < 1) == self._nucleus)

    def begin(self, requests: Sequence[PathRequest]) -> None:
        """From now on it draws for these paths, the first row of logits for the first."""
        if self._greedy:
            return
        table = torch.empty(6, len(requests), dtype=torch.float64)
        table[:4] = torch.from_numpy(warping_table([one.options for one in requests]))
        table[4:].view(torch.int64)[:] = torch.from_numpy(moments_table([one.at for one in requests]))
        self._numbers[:, : len(requests)].copy_(staged(table, self._numbers.device), non_blocking=True)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The ids after rows of logits (n, V), int64 (n,), and 1, or 0 where logits are not finite, float64 (n,).

        Rows beyond those that have a path get any id.
        """
        count, clocks = len(logits), self._clocks
        temperatures, least, top_k, top_p = self._numbers[:4, :count, None]
        limited, width = top_k.long() if self._width else None, min(self._width, logits.shape[-1])
        nucleus = top_p if self._width or self._nucleus else None
        warping = Warping(self._greedy, temperatures, least, limited, self._width // 2, nucleus)
        at = None if self._greedy else Moments(*(each[:count] for each in self._at))
        drawn, possible = drawn_from(logits, warping, width, clocks, at)
        column = drawn[:, 0]
        if at is not None:
            at.offsets.add_(clocks.lengths[column])
        return column if clocks.ids is None else clocks.ids[column], possible[:, 0].double()


def standing_draws(clocks: Clocks, columns: int, most: int) -> list[tuple[StandingDraws, int]]:
    """What drafts are usually drawn by, and for how many rows at most, for so many columns of logits."""
    few = min(most, TOGETHER // columns)
    keyed = [(StandingDraws(clocks, few, *kind), few) for kind in ((STANDING_WIDTH, True), (0, False), (0, True))]
    return [(StandingDraws(clocks, most), most), *keyed]


class Paths:
    """Paths that are drawn step by step on the device: what each step adds, and the host need not know until the end.

    Nothing here waits for the device, and all may be captured: only the contents of tensors differ.
    """

    def __init__(self, requests: Sequence[PathRequest]) -> None:
        self.requests, self.rows = requests, joined([one.logits for one in requests])
        self.order = [*range(len(requests))]  # of the paths, in each step
        self._alike: list[_AlikePaths] = []
        self._taken: list[Tensor] = []

    @property
    def tensors(self) -> list[Tensor]:
        """To be fetched, all at once."""
        return [*self._taken, *(tensor for paths in self._alike for tensor in paths.tensors)]

    def begin(self) -> None:
        """Draws the first token of each, those that are alike together."""
        kinds: dict[Hashable, list[int]] = {}
        for place, one in enumerate(self.requests):
            kinds.setdefault(one.kind, []).append(place)
        self.order = [place for places in kinds.values() for place in places]
        self._alike = [_AlikePaths([self.requests[place] for place in places], self.rows) for places in kinds.values()]
        self.extend(self.rows if len(kinds) == 1 else self.rows[sent(torch.tensor(self.order), self.rows.device)])

    def extend(self, rows: Tensor) -> None:
        """Draws a token after each row of logits (n, V), whose ids on the device are `ids`, int64 (n,)."""
        parts = zip(self._alike, rows.split([paths.size for paths in self._alike]), strict=True)
        ids = [paths.extend(part) for paths, part in parts]
        self.ids = ids[0] if len(ids) == 1 else torch.cat(ids)

    def take(self, ids: Tensor, possible: Tensor) -> None:
        """In place of `begin` and `extend`: what was drawn in each step so far, as `StandingDraws.draw` has it for one,
        (steps, n) each."""
        self._taken = [ids, possible]

    def found(self, arrays: Fetched) -> list[list[Draw]]:
        """What was drawn on each path, of what was fetched; raises ValueError: logits are not finite."""
        if self._taken:
            ids, possible = arrays
            if not possible.all():
                raise ValueError(NOT_FINITE)
            return [list(map(Draw, path)) for path in ids.T.astype(np.int64).tolist()]
        found: list[list[Draw]] = []
        for paths in self._alike:
            own, arrays = arrays[: len(paths.tensors)], arrays[len(paths.tensors) :]
            found += paths.found(own)
        places = dict(zip(self.order, found, strict=True))
        return [places[place] for place in range(len(found))]


class _AlikePaths:
    """Paths of one kind."""

    def __init__(self, requests: Sequence[PathRequest], rows: Tensor) -> None:
        self.tensors: list[Tensor] = []
        self.size, one = len(requests), requests[0]
        self._one, columns = one, rows.shape[-1] if one.allowed is None else len(one.allowed.numbers)
        self._warping = Warping.of([one.options for one in requests], [1] * self.size, rows.device)
        self._width = width_of(one.options, columns)
        self._at = None if self._warping.greedy else Moments.of([request.at for request in requests], rows.device)

    @torch.inference_mode()
    def extend(self, logits: Tensor) -> Tensor:
        """As of `Paths`."""
        one, clocks = self._one, self._one.clocks
        allowed = None if one.allowed is None else one.allowed.on_device
        scores = columns_of(logits, one.allowed)
        drawn, found = drawn_with(scores, self._warping, self._width, clocks, self._at, allowed, one.row_width)
        column = drawn[:, 0] if allowed is None else allowed[drawn[:, 0]]
        ids = column if clocks.ids is None else clocks.ids[column]
        if self._at is not None:
            self._at = Moments(self._at.beginnings, self._at.offsets + clocks.lengths[column])
        self.tensors += [ids, *found]
        return ids

    def found(self, arrays: Fetched) -> list[list[Draw]]:
        """As of `Paths`."""
        one, each = self._one, 3 if self._one.row_width else 2
        steps = (arrays[begin : begin + each] for begin in range(0, len(arrays), each))
        drawn = (
            draws_of(ids.astype(np.int64), weights, places, one.allowed, one.clocks.kept)
            for ids, weights, *places in steps
        )
        return [list(path) for path in zip(*drawn, strict=True)]
