"""Paths: several tokens, each drawn from the row after the one before, step by step on the device.

The job that asks for a path waits once for all of them. Draws whose options are in tensors that stay can be captured as
CUDA graphs, as the forwards between them are.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.device import Fetched, sent, staged
from crossdraft.engine.distributions import (
    NOT_FINITE,
    Columns,
    Warping,
    columns_of,
    cut_distributions,
    cut_rows,
    greedy,
    warping_table,
    width_of,
)
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampler import TOGETHER, Clocks, Distribution, Moment, Moments, drawn_from, moments_table
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.rows import Probabilities

STANDING_WIDTH = 256  # columns to which drafts that are captured are narrowed, where `top_k` allows it


@dataclass(frozen=True, eq=False)
class PathRequest:
    """Asks for several tokens, each drawn from the row after the one before, without the job in between.

    While nobody else waits for the model they are drawn without the host in between, too.
    """

    forward: ForwardRequest  # for the first row, and for slots of all tokens but the last
    options: SamplingOptions
    clocks: Clocks
    at: Moment  # of the first draw
    row_width: int = 0  # as in `DistributionRequest`: above 0 the distributions are wanted, too
    allowed: Columns | None = None  # the only columns that may be drawn; None: all

    @property
    def tokens(self) -> int:
        return 1 + self.forward.more

    @property
    def plain(self) -> bool:
        """Whether any column may be drawn, and nothing but ids is wanted."""
        return not self.row_width and self.allowed is None

    def kind(self, columns: int) -> Hashable:
        """What must be equal in paths that are drawn together, as in `SamplerRequest`."""
        return Warping.kind(self.options, columns), self.clocks, self.row_width, self.allowed

    def after(self, tokens: Sequence[int]) -> "PathRequest":
        """What is left when these were drawn."""
        key, offset = self.at
        offset += sum(map(self.clocks.letters.__getitem__, tokens))
        return replace(self, forward=self.forward.after(tokens), at=(key, offset))


Drawn = tuple[int, Distribution | None]  # an id, and the distribution that it was drawn from, if that was wanted


class PathResult(NamedTuple):
    """What a job receives for a `PathRequest`."""

    drawn: list[Drawn]
    queued: float  # seconds from the request to its first step


class StandingDraws(ABC):
    """Draws after each of some rows, whose options and keys are in tensors that stay: they can be captured.

    Nothing here waits for the device.
    """

    @abstractmethod
    def serves(self, request: PathRequest) -> bool:
        """Whether the tokens of a path can be drawn by it."""

    @abstractmethod
    def begin(self, requests: Sequence[PathRequest]) -> None:
        """From now on it draws for these paths, the first row of logits for the first."""

    @abstractmethod
    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The ids after rows of logits (n, V), int64 (n,), and 1, or 0 where logits are not finite, float64 (n,).

        Rows beyond those that have a path get any id.
        """


class LikeliestDraws(StandingDraws):
    """The likeliest id of each row.

    Args:
        ids: int64, of each column of the logits; None: column i is id i.
    """

    def __init__(self, ids: Tensor | None) -> None:
        self._ids = ids

    def serves(self, request: PathRequest) -> bool:
        return request.plain and request.options.temperature == 0

    def begin(self, requests: Sequence[PathRequest]) -> None:
        pass

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        columns, possible = greedy(logits)
        return (columns if self._ids is None else self._ids[columns])[:, 0], possible[:, 0]


class KeyedDraws(StandingDraws):
    """Keyed draws of one kind of truncation.

    Args:
        clocks: of the model.
        width: best columns to which draws are narrowed, enough for half as many `top_k`; 0: to none.
        nucleus: whether `top_p` may be below 1; where draws are narrowed it always may.
        most: rows.
    """

    def __init__(self, clocks: Clocks, width: int, nucleus: bool, most: int) -> None:
        self._clocks, self._width, self._nucleus = clocks, width, nucleus
        device = clocks.lengths.device
        self._numbers = torch.ones(6, most, dtype=torch.float64, device=device)  # of `warping_table`, then of moments
        self._at = Moments(*self._numbers[4:].view(torch.int64))

    def serves(self, request: PathRequest) -> bool:
        options = request.options
        if not request.plain or options.temperature == 0:
            return False
        if self._width:
            return 0 < 2 * options.top_k <= self._width
        return options.top_k == 0 and (options.top_p < 1) == self._nucleus

    def begin(self, requests: Sequence[PathRequest]) -> None:
        table = torch.empty(6, len(requests), dtype=torch.float64)
        table[:4] = torch.from_numpy(warping_table([one.options for one in requests]))
        table[4:].view(torch.int64)[:] = torch.from_numpy(moments_table([one.at for one in requests]))
        self._numbers[:, : len(requests)].copy_(staged(table, self._numbers.device), non_blocking=True)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        count, clocks = len(logits), self._clocks
        temperatures, least, top_k, top_p = self._numbers[:4, :count, None]
        limited, width = top_k.long() if self._width else None, min(self._width, logits.shape[-1])
        nucleus = top_p if self._width or self._nucleus else None
        warping = Warping(False, temperatures, least, limited, self._width // 2, nucleus)
        at = Moments(*(each[:count] for each in self._at))
        drawn, possible = drawn_from(logits, warping, width, clocks, at)
        column = drawn[:, 0]
        at.offsets.add_(clocks.lengths[column])
        return column if clocks.ids is None else clocks.ids[column], possible[:, 0].double()


def standing_draws(clocks: Clocks, columns: int, most: int) -> list[tuple[StandingDraws, int]]:
    """What drafts are usually drawn by, and for how many rows at most, for so many columns of logits."""
    few = min(most, TOGETHER // columns)
    keyed = [KeyedDraws(clocks, *kind, few) for kind in ((STANDING_WIDTH, True), (0, False), (0, True))]
    return [(LikeliestDraws(clocks.ids), most), *((draws, few) for draws in keyed)]


class Paths:
    """Paths that are drawn step by step on the device: what each step adds, and the host need not know until the end.

    Nothing here waits for the device, and all may be captured: only the contents of tensors differ.

    Args:
        requests: what is left of each path.
        rows: the logits after each of them, floating (n, V).
    """

    def __init__(self, requests: Sequence[PathRequest], rows: Tensor) -> None:
        self.requests, self.rows = requests, rows
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
            kinds.setdefault(one.kind(self.rows.shape[-1]), []).append(place)
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

    def found(self, arrays: Fetched) -> list[list[Drawn]]:
        """What was drawn on each path, of what was fetched; raises ValueError: logits are not finite."""
        if self._taken:
            ids, possible = arrays
            if not possible.all():
                raise ValueError(NOT_FINITE)
            return [[(token, None) for token in path] for path in ids.T.astype(np.int64).tolist()]
        found: list[list[Drawn]] = []
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
        scores = columns_of(logits, one.allowed)
        allowed = None if one.allowed is None else one.allowed.on_device
        if one.row_width:
            weights, places = cut_distributions(scores, self._warping, one.row_width, self._width)
            first = None if self._at is None else clocks.draw(weights, self._at, allowed, places)
            drawn, found = places if first is None else places.gather(-1, first), [weights, places]
        else:
            drawn, possible = drawn_from(scores, self._warping, self._width, clocks, self._at, allowed)
            found = [possible]
        column = drawn[:, 0] if allowed is None else allowed[drawn[:, 0]]
        ids = column if clocks.ids is None else clocks.ids[column]
        if self._at is not None:
            self._at = Moments(self._at.beginnings, self._at.offsets + clocks.lengths[column])
        self.tensors += [ids, *found]
        return ids

    def found(self, arrays: Fetched) -> list[list[Drawn]]:
        """As of `Paths`."""
        each = 3 if self._one.row_width else 2
        steps = [self._step(*arrays[begin : begin + each]) for begin in range(0, len(arrays), each)]
        return [list(path) for path in zip(*steps, strict=True)]

    def _step(self, ids: Probabilities, weights: Probabilities, places: Probabilities | None = None) -> list[Drawn]:
        if not (weights[:, 0] > 0).all():
            raise ValueError(NOT_FINITE)
        tokens = ids.astype(np.int64).tolist()
        if places is None:
            return [(token, None) for token in tokens]
        kept, allowed = self._one.clocks.kept, self._one.allowed
        columns = places.astype(np.int64)
        rows = cut_rows(weights, columns if allowed is None else allowed.numbers[columns])
        return [
            (token, (ids if kept is None else kept[ids], row)) for token, (ids, row) in zip(tokens, rows, strict=True)
        ]
