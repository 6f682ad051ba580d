"""Pieces of feeds as the tensors of one ordinary forward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crossdraft.models.feeds import Feed, visible
from crossdraft.models.slots import Placement

SHORT = 64  # tokens; pieces up to here are batched with any other, longer ones only with pieces of like length


@dataclass(frozen=True, eq=False)
class Piece:
    """The tokens begin..end of one request's feed, for one forward."""

    request: int  # index of the request
    slot: int
    feed: Feed
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def used(self) -> int:
        """Places up to the last token's own."""
        return self.feed.places[self.end - 1] + 1

    @property
    def asked(self) -> int:
        """Rows of logits that are asked for."""
        return sum(self.feed.wanted[self.begin : self.end])


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one forward of b rows, padded to q tokens."""

    ids: Tensor  # int64 (b, q)
    positions: Tensor  # int64 (b, q)
    mask: Tensor | None  # additive (b, 1, q, used), of the model's dtype; None: everything is seen
    keep: Tensor | None  # bool (b, q), the tokens whose logits are asked for; None: all
    placement: Placement


def pieces_of(request: int, slot: int, feed: Feed, chunk: int) -> list[Piece]:
    """A feed cut into pieces of at most `chunk` tokens; none if there is nothing to feed."""
    total = len(feed.tokens)
    return [Piece(request, slot, feed, at, min(at + chunk, total)) for at in range(0, total, chunk)]


def grouped(pieces: Sequence[Piece], chunk: int) -> Iterator[list[Piece]]:
    """Pieces that are worth one forward together: at most `chunk` tokens with padding, little of it wasted."""
    group: list[Piece] = []
    for piece in sorted(pieces, key=len, reverse=True):
        longest = len(group[0]) if group else len(piece)
        if group and ((len(group) + 1) * longest > chunk or (longest > SHORT and 2 * len(piece) < longest)):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def batch_of(group: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> Batch:
    """One forward for pieces of different sessions. `group` must be sorted by slot."""
    width = max(len(piece) for piece in group)
    used = max(piece.used for piece in group)
    ids = np.zeros((len(group), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    keep = np.zeros(ids.shape, dtype=np.bool_)
    for row, piece in enumerate(group):
        span = slice(piece.begin, piece.end)
        ids[row, : len(piece)] = piece.feed.tokens[span]
        positions[row, : len(piece)] = piece.feed.positions[span]
        keep[row, : len(piece)] = piece.feed.wanted[span]
    mask = _mask(group, width, used, dtype)
    return Batch(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(positions).to(device),
        None if mask is None else mask.to(device),
        None if keep.all() else torch.from_numpy(keep).to(device),
        _placement(group, used, used - 1 if mask is None else 0, device),
    )


def _mask(group: Sequence[Piece], width: int, used: int, dtype: torch.dtype) -> Tensor | None:
    """Zero where a token sees a place, the dtype's least number elsewhere; None for single tokens that see all.

    The least number instead of minus infinity: padding sees nothing, and its softmax must not be NaN.
    """
    seen = np.zeros((len(group), 1, width, used), dtype=np.bool_)
    for row, piece in enumerate(group):
        seen[row, 0, : len(piece)] = visible(piece.feed, piece.begin, piece.end, used)
    if width == 1 and seen.all():
        return None
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), torch.finfo(dtype).min)


_NONE = torch.zeros(0, dtype=torch.int64)


def _placement(group: Sequence[Piece], used: int, past: int, device: torch.device) -> Placement:
    slots = tuple(piece.slot for piece in group)
    first = group[0]
    start = first.feed.places[first.begin]
    if len(group) == 1 and first.used - start == len(first):
        return Placement(slots, used, (start, first.used), _NONE, _NONE, _NONE, _NONE, past)
    table = np.array(
        [
            (row, column, piece.slot, piece.feed.places[piece.begin + column])
            for row, piece in enumerate(group)
            for column in range(len(piece))
        ]
    ).T.copy()
    rows, columns, homes, places = torch.from_numpy(table).to(device)
    return Placement(slots, used, None, rows, columns, homes, places, past)
