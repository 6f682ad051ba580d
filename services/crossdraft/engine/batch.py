"""Pieces of feeds as the tensors of one flat forward: all tokens one after another, nothing padded but attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdraft.engine.attention import Group, Layout, Strided
from crossdraft.engine.kv_store import Extent, sent
from crossdraft.engine.requests import Feed, visible
from crossdraft.types.trees import ROOT

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


# Shapes of forwards that are few, and pieces as the numbers of one such forward. No torch.
#
# Whatever differs between two forwards of a bucket is in these numbers. The attention of a batch is that of *seats*,
# each with some rows, for the tokens of one piece; a piece with more tokens than a seat has rows takes several.

T = TypeVar("T")
TOKENS = 256  # of a bucket, at most: a forward of more is busy with its own products
WIDTHS = (4, 8, 24)  # rows of a seat: for a few tokens, for a draft, and for a tree
PLACES = 128  # of a seat, at least
NODES = 63  # of a tree, at most: a node's line is one number
# A copied key costs about three times what reading it costs, and a forward that is not captured some milliseconds.
FREE = 1 << 15  # places that may be gathered in any case
WASTE = 8  # ... and so many times those that are seen


class Sections(NamedTuple, Generic[T]):
    """The parts of a forward's numbers, int64, in this order."""

    ids: T  # (tokens,), those of padding are 0
    positions: T  # (tokens,)
    targets: T  # (tokens,), places of the store
    cells: T  # (tokens,), the row of each token
    kept: T  # (tokens,), first the tokens whose logits are asked for
    rows: T  # (seats * width,), the token in each row
    limits: T  # (seats * width,), the places from the seat's first one on that a row sees,
    lines: T  # ... and beyond them, from the seat's base on, those whose bits are set
    starts: T  # (seats,), first places
    lengths: T  # (seats,), places that a seat has
    bases: T  # (seats,), the place of its tree's first node, counted from the first place


@dataclass(frozen=True)
class Bucket:
    """The shape of a forward, padding included."""

    tokens: int
    seats: int
    width: int  # rows of a seat
    used: int  # places of a seat

    @property
    def sizes(self) -> Sections[int]:
        """How many numbers each part has."""
        each, rows, seats = self.tokens, self.seats * self.width, self.seats
        return Sections(each, each, each, each, each, rows, rows, rows, seats, seats, seats)

    def numbers(self, pieces: Sequence[Piece], waste: int) -> NDArray[np.int64]:
        """All parts one after another; padding is written at place `waste`, and sees one place that is nobody's."""
        parts: Sections[list[int]] = Sections(*([] for _ in self.sizes))
        for piece in pieces:
            self._put(piece, parts)
        asked = (wanted for piece in pieces for wanted in piece.feed.wanted[: piece.count])
        parts.kept.extend(token for token, wanted in enumerate(asked) if wanted)
        numbers = np.zeros(sum(self.sizes), dtype=np.int64)
        room = Sections(*np.split(numbers, [*accumulate(self.sizes)][:-1]))
        room.targets.fill(waste)
        room.limits.fill(1)
        for empty, part in zip(room, parts, strict=True):
            empty[: len(part)] = part
        return numbers

    def _put(self, piece: Piece, parts: Sections[list[int]]) -> None:
        """Adds one piece; its seats follow each other, and only the last one may have rows to spare."""
        feed, count, start = piece.feed, piece.count, piece.extent.start
        token, row, seats = len(parts.ids), len(parts.rows), -(-count // self.width)
        places, spare = feed.places[:count], [0] * (seats * self.width - count)
        parts.ids.extend(feed.tokens[:count])
        parts.positions.extend(feed.positions[:count])
        parts.targets.extend([start + place for place in places])
        parts.cells.extend(range(row, row + count))
        parts.rows.extend([*range(token, token + count), *spare])
        parts.limits.extend([*(min(place + 1, feed.committed) for place in places), *([1] * len(spare))])
        parts.lines.extend([*_lines(feed, places), *spare])
        parts.starts.extend([start] * seats)
        parts.lengths.extend([piece.used] * seats)
        parts.bases.extend([feed.committed] * seats)


def bucket_of(pieces: Sequence[Piece]) -> Bucket | None:
    """The smallest bucket for some pieces, none empty; None: they are to go as they are.

    That is where there is much to compute anyway, where a few long sessions would make all read as far as they do, and
    where a tree has too many nodes.
    """
    tokens = sum(piece.count for piece in pieces)
    if tokens > TOKENS or any(len(piece.feed.tree) > NODES for piece in pieces):
        return None
    most = max(piece.count for piece in pieces)
    width = next((width for width in WIDTHS if width >= most), WIDTHS[-1])
    seats = [-(-piece.count // width) for piece in pieces]
    used = max(PLACES, _doubled(max(piece.used for piece in pieces)))
    seen = sum(count * piece.used for count, piece in zip(seats, pieces, strict=True))
    bucket = Bucket(_doubled(tokens), _doubled(sum(seats)), width, used)
    return bucket if bucket.seats * used <= max(FREE, WASTE * seen) else None


def _doubled(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << (count - 1).bit_length()


def _lines(feed: Feed, places: Sequence[int]) -> list[int]:
    """For the tokens at these places: bit i is set where one sees node i of the tree, an ancestor or itself."""
    lines: list[int] = []
    for node, parent in enumerate(feed.tree.parents):
        lines.append((0 if parent == ROOT else lines[parent]) | 1 << node)
    return [lines[place - feed.committed] if place >= feed.committed else 0 for place in places]
