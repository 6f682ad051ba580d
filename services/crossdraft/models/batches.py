"""Pieces of feeds as the tensors of one flat forward: all tokens one after another, nothing padded but attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from crossdraft.models.allocation import Extent
from crossdraft.models.attention import Group, Layout, Strided
from crossdraft.models.feeds import Feed, visible
from crossdraft.models.transfers import sent

SHORT = 8  # tokens; pieces up to here attend together, longer ones with those of like length
ALONE = 64  # tokens; pieces longer than this attend by themselves

CALL = 3000  # places times rows times heads whose attention takes as long as calling the kernel once more

ZERO, INFINITY = np.float32(0), np.float32(np.inf)


@dataclass(frozen=True, eq=False)
class Piece:
    """The first `count` tokens of a feed, for one forward."""

    share: int  # index of the request
    extent: Extent
    feed: Feed
    count: int

    @property
    def used(self) -> int:
        """Places of the extent up to the last token's own."""
        return self.feed.places[self.count - 1] + 1

    @property
    def asked(self) -> int:
        """Rows of logits that are asked for."""
        return sum(self.feed.wanted[: self.count])


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one forward of n tokens."""

    ids: Tensor  # int64 (1, n)
    positions: Tensor  # int64 (1, n)
    target: slice | Tensor  # places of the store, in order of the tokens
    kept: Tensor | None  # int64, the tokens whose logits are asked for; None: all
    layout: Layout
    pieces: tuple[Piece, ...]  # in order of their tokens


def batch_of(pieces: Sequence[Piece], heads: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """One forward of a model with so many heads, for pieces of different sessions, each of at least one token."""
    ordered: list[Piece] = []
    groups = []
    begin = 0
    for members in grouped(pieces, heads):
        end = begin + sum(piece.count for piece in members)
        groups.append(_group(members, begin, end, dtype, device))
        ordered += members
        begin = end
    target = _target(ordered)
    asked = [wanted for piece in ordered for wanted in piece.feed.wanted[: piece.count]]
    parts = (
        [token for piece in ordered for token in piece.feed.tokens[: piece.count]],
        [place for piece in ordered for place in piece.feed.positions[: piece.count]],
        [] if isinstance(target, slice) else target,
        [] if all(asked) else [number for number, wanted in enumerate(asked) if wanted],
    )
    numbers = np.array([number for part in parts for number in part])  # for one transfer of all
    ids, positions, places, kept = sent(torch.from_numpy(numbers), device).split([len(part) for part in parts])
    return Batch(
        ids[None],
        positions[None],
        target if isinstance(target, slice) else places,
        None if all(asked) else kept,
        Layout(tuple(groups)),
        tuple(ordered),
    )


def grouped(pieces: Sequence[Piece], heads: int) -> Iterator[list[Piece]]:
    """Pieces that are one view of the store: their extents have one size and lie at equal distances.

    All read as many places as the one that needs most, so that a group ends where a call of its own costs less.
    """
    ordered = sorted(pieces, key=lambda piece: (_kind(piece), piece.extent.start))
    for (size, _), members in groupby(ordered, key=_kind):
        run: list[Piece] = []
        for piece in members:
            if run and (not size or not _regular(run, piece) or _wasted(run, piece) * heads > CALL):
                yield run
                run = []
            run.append(piece)
        yield run


def _kind(piece: Piece) -> tuple[int, int]:
    """What pieces that attend together have in common; size 0 is for those that attend by themselves."""
    if piece.count > ALONE:
        return 0, 0
    return piece.extent.size, max(piece.count, SHORT).bit_length()


def _regular(run: Sequence[Piece], piece: Piece) -> bool:
    """Whether a piece is as far from the last of a run as the others are from each other."""
    return len(run) == 1 or piece.extent.start - run[-1].extent.start == run[1].extent.start - run[0].extent.start


def _wasted(run: Sequence[Piece], piece: Piece) -> int:
    """Places that are read in vain, times rows that read them, where a piece joins a run."""
    most = max(one.used for one in run)
    rows = max(piece.count, *(one.count for one in run))
    return rows * (most - piece.used if piece.used < most else len(run) * (piece.used - most))


def _group(members: Sequence[Piece], begin: int, end: int, dtype: torch.dtype, device: torch.device) -> Group:
    width = max(piece.count for piece in members)
    used = max(piece.used for piece in members)
    first = members[0].extent.start
    step = members[1].extent.start - first if len(members) > 1 else 0
    mask = _mask(members, width, used, dtype)
    rows = cells = None
    if len(members) * width != end - begin:
        counts = np.array([[piece.count] for piece in members])
        taken = np.arange(width) < counts  # (sessions, width): the rows that are tokens
        cells = sent(torch.from_numpy(np.flatnonzero(taken)), device)
        numbers = np.full(taken.shape, begin)
        numbers[taken] = np.arange(begin, end)
        rows = sent(torch.from_numpy(numbers.ravel()), device)
    mask = None if mask is None else sent(mask, device)
    return Group(begin, end, len(members), width, used, Strided(first, step), mask, rows, cells)


def _mask(members: Sequence[Piece], width: int, used: int, dtype: torch.dtype) -> Tensor | None:
    """Zero where a token sees a place, minus infinity elsewhere; None where all see all. Padding sees everything."""
    seen = np.ones((len(members), 1, width, used), dtype=np.bool_)
    for row, piece in enumerate(members):
        seen[row, 0, : piece.count] = visible(piece.feed, piece.count, used)
    return None if seen.all() else torch.from_numpy(np.where(seen, ZERO, -INFINITY)).to(dtype)


def _target(ordered: Sequence[Piece]) -> slice | list[int]:
    piece = ordered[0]
    start = piece.extent.start
    if len(ordered) == 1 and piece.used - piece.feed.places[0] == piece.count:
        return slice(start + piece.feed.places[0], start + piece.used)
    return [piece.extent.start + place for piece in ordered for place in piece.feed.places[: piece.count]]
