"""Shapes of forwards that are few, and pieces as the numbers of one such forward. No torch.

Whatever differs between two forwards of a bucket is in these numbers. The attention of a batch is that of *seats*, each
with some rows, for the tokens of one piece; a piece with more tokens than a seat has rows takes several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from crossdraft.models.batches import Piece
from crossdraft.models.feeds import Feed
from crossdraft.verification.trees import ROOT

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
