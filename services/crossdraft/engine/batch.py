"""What a model runs in one forward: slices of requests as the tensors of a flat batch, or as the numbers of a bucket.

A flat batch has all tokens one after another, and only attention is padded. A bucket is one of few padded shapes; all
that differs between two forwards of a bucket is in a list of numbers, so that it can be captured as a CUDA graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdraft.engine.attention import Group, Layout, Strided
from crossdraft.engine.device import sent
from crossdraft.engine.kv_cache_manager import Extent
from crossdraft.engine.requests import InputTokens
from crossdraft.types.trees import ROOT

Numbers = NDArray[np.int64]
SHORT = 8  # tokens; slices up to here attend together, longer ones with those of similar length
ALONE = 64  # tokens; slices longer than this attend by themselves
CALL = 3000  # slots times rows times heads whose attention takes as long as one more call of the kernel
ZERO, INFINITY = np.float32(0), np.float32(np.inf)


class BatchSlice:
    """The tokens of one request in one forward, and the slots of its session.

    Args:
        extent: its slots.
        inputs: at least one token, or the slice is in no forward.
    """

    __slots__ = ("count", "extent", "inputs", "used")

    def __init__(self, extent: Extent, inputs: InputTokens) -> None:
        self.extent = extent
        self.inputs = inputs
        self.count = len(inputs.tokens)
        self.used = inputs.slots[-1] + 1 if inputs.slots else 0  # slots of the extent up to the last token's own

    @property
    def rows(self) -> int:
        return len(self.inputs.wanted)


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one flat forward of n tokens."""

    ids: Tensor  # int64 (1, n)
    positions: Tensor  # int64 (1, n)
    slot_mapping: slice | Tensor  # slots of the KV cache, in order of the tokens
    kept: Tensor | None  # int64, the tokens whose logits are asked for; None: all
    layout: Layout
    slices: tuple[BatchSlice, ...]  # in order of their tokens


def batch_of(slices: Sequence[BatchSlice], heads: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """One forward of a model with so many attention heads, for slices of different sessions."""
    ordered: list[BatchSlice] = []
    groups: list[Group] = []
    for members in grouped(slices, heads):
        begin = groups[-1].end if groups else 0
        groups.append(_group(members, begin, dtype, device))
        ordered += members
    tokens = _flat([one.inputs.tokens for one in ordered])
    positions = _flat([one.inputs.positions for one in ordered])
    slots = _flat([one.inputs.slots for one in ordered], [one.extent.start for one in ordered])
    first, one = int(slots[0]), ordered[0]
    in_a_row = len(ordered) == 1 and one.used - one.inputs.slots[0] == one.count
    kept = wanted_tokens(ordered)
    parts = (tokens, positions, slots[:0] if in_a_row else slots, kept[:0] if len(kept) == len(tokens) else kept)
    numbers = sent(torch.from_numpy(np.concatenate(parts)), device)  # one transfer of all
    ids, places, mapping, rows = numbers.split([len(part) for part in parts])
    return Batch(
        ids[None],
        places[None],
        slice(first, first + one.count) if in_a_row else mapping,
        None if len(kept) == len(tokens) else rows,
        tuple(groups),
        tuple(ordered),
    )


def _flat(lists: Sequence[Sequence[int]], added: Sequence[int] = ()) -> Numbers:
    """The numbers of all slices, one list each, one after another; `added` to those of each slice."""
    numbers = np.array([number for one in lists for number in one], dtype=np.int64)
    if added:
        numbers += np.repeat(np.array(added), [len(one) for one in lists])
    return numbers


def wanted_tokens(slices: Sequence[BatchSlice]) -> Numbers:
    """The tokens of a flat batch whose logits are asked for, ascending."""
    begins = [0, *accumulate(one.count for one in slices)][:-1]
    return _flat([one.inputs.wanted for one in slices], begins)


def grouped(slices: Sequence[BatchSlice], heads: int) -> Iterator[list[BatchSlice]]:
    """Slices whose extents are one strided view of the KV cache: of one size and at equal distances.

    All members of a group read as many slots as the one that needs most, so that a group ends where another call of the
    kernel costs less.
    """
    ordered = sorted(slices, key=lambda one: (_kind(one), one.extent.start))
    for (size, _), members in groupby(ordered, key=_kind):
        run: list[BatchSlice] = []
        step = rows = used = 0  # slots from one member to the next; of any member: tokens, slots, at most
        for one in members:
            distance = one.extent.start - run[-1].extent.start if run else 0
            wasted = max(rows, one.count) * (used - one.used if one.used < used else len(run) * (one.used - used))
            if run and (not size or (step and distance != step) or wasted * heads > CALL):
                yield run
                run, step, rows, used = [], 0, 0, 0
            elif run:
                step = distance
            run.append(one)
            rows, used = max(rows, one.count), max(used, one.used)
        yield run


def _kind(one: BatchSlice) -> tuple[int, int]:
    """What slices that attend together have in common; size 0 is for those that attend by themselves."""
    if one.count > ALONE:
        return 0, 0
    return one.extent.size, max(one.count, SHORT).bit_length()


def _group(members: Sequence[BatchSlice], begin: int, dtype: torch.dtype, device: torch.device) -> Group:
    counts = [one.count for one in members]
    end, width, used = begin + sum(counts), max(counts), max(one.used for one in members)
    first = members[0].extent.start
    step = members[1].extent.start - first if len(members) > 1 else 0
    seen = visible(members, width, used)
    rows = cells = mask = None
    if len(members) * width != end - begin:
        real = np.arange(width) < np.array(counts)[:, None]  # (sessions, width): the rows that are tokens
        cells = sent(torch.from_numpy(np.flatnonzero(real)), device)
        numbers = np.full(real.shape, begin)
        numbers[real] = np.arange(begin, end)
        rows = sent(torch.from_numpy(numbers.ravel()), device)
    if not seen.all():
        mask = sent(torch.from_numpy(np.where(seen[:, None], ZERO, -INFINITY)).to(dtype), device)
    return Group(begin, end, len(members), width, used, Strided(first, step), mask, rows, cells)


def visible(slices: Sequence[BatchSlice], width: int, used: int) -> NDArray[np.bool_]:
    """Which of the first `used` slots each token attends to, shape (slices, width, used); padding attends to all.

    Committed tokens see all slots up to their own; a node sees the committed ones, its ancestors and itself.
    """
    spare = [used]
    limits = np.array([[*one.inputs.slots, *spare * (width - one.count)] for one in slices], dtype=np.int64)
    seen: NDArray[np.bool_] = np.arange(used) <= limits[:, :, None]
    for row, one in enumerate(slices):
        inputs, within = one.inputs, max(0, used - one.inputs.committed)
        if not inputs.tree.is_chain:
            nodes = [token for token, slot in enumerate(inputs.slots) if slot >= inputs.committed]
            size = -(-len(inputs.tree.tokens) // 8)
            ancestors = _ancestor_bits(inputs)[one.count - len(nodes) :]
            bits = b"".join(line.to_bytes(size, "little") for line in ancestors)
            lines = np.unpackbits(np.frombuffer(bits, dtype=np.uint8).reshape(-1, size), 1, within, "little")
            seen[row, nodes, inputs.committed :] = lines
    return seen


# Buckets. Padded attention has *lanes* of equally many rows, each for tokens of one slice; a slice with more tokens
# than a lane has rows takes several lanes.

T = TypeVar("T")
TOKENS = 256  # of a bucket, at most: a larger forward is limited by its own matrix products
WIDTHS = (4, 8, 24)  # rows of a lane: for a few tokens, for a draft, and for a tree
SLOTS = 128  # of a lane, at least
NODES = 63  # of a tree, at most: a node's ancestors are the bits of one number
# A gathered key costs about three times what reading it costs, and a forward that is not captured some milliseconds.
FREE = 1 << 15  # slots that may be gathered in any case
WASTE = 8  # ... and so many times those that are seen


class Sections(NamedTuple, Generic[T]):
    """The parts of a forward's numbers, int64, in this order."""

    ids: T  # (tokens,), those of padding are 0
    positions: T  # (tokens,)
    targets: T  # (tokens,), slots of the KV cache
    cells: T  # (tokens,), the row of each token
    kept: T  # (tokens,), first the tokens whose logits are asked for
    rows: T  # (lanes * width,), the token in each row
    limits: T  # (lanes * width,), how many slots from the lane's first one on a row sees,
    lines: T  # ... and beyond them, from the lane's base on, those whose bits are set
    starts: T  # (lanes,), first slots
    lengths: T  # (lanes,), slots that a lane has
    bases: T  # (lanes,), the slot of its tree's first node, counted from the first slot


@dataclass(frozen=True)
class Bucket:
    """The shape of a forward, padding included."""

    tokens: int
    lanes: int
    width: int  # rows of a lane
    used: int  # slots of a lane

    @property
    def sizes(self) -> Sections[int]:
        each, rows, lanes = self.tokens, self.lanes * self.width, self.lanes
        return Sections(each, each, each, each, each, rows, rows, rows, lanes, lanes, lanes)

    def numbers(self, slices: Sequence[BatchSlice], padding_slot: int) -> Numbers:
        """All parts one after another; padding is written at `padding_slot`, and sees one slot that is nobody's."""
        parts: Sections[list[int]] = Sections(*([] for _ in self.sizes))
        for one in slices:
            self._put(one, parts)
        parts.kept.extend(wanted_tokens(slices).tolist())
        numbers = np.zeros(sum(self.sizes), dtype=np.int64)
        room = Sections(*np.split(numbers, [*accumulate(self.sizes)][:-1]))
        room.targets.fill(padding_slot)
        room.limits.fill(1)
        for empty, part in zip(room, parts, strict=True):
            empty[: len(part)] = part
        return numbers

    def _put(self, one: BatchSlice, parts: Sections[list[int]]) -> None:
        """Adds one slice; its lanes follow each other, and only the last one may have spare rows."""
        inputs, count, start = one.inputs, one.count, one.extent.start
        token, row, lanes = len(parts.ids), len(parts.rows), -(-count // self.width)
        spare = [0] * (lanes * self.width - count)
        parts.ids.extend(inputs.tokens)
        parts.positions.extend(inputs.positions)
        parts.targets.extend([start + slot for slot in inputs.slots])
        parts.cells.extend(range(row, row + count))
        parts.rows.extend([*range(token, token + count), *spare])
        parts.limits.extend([*(min(slot + 1, inputs.committed) for slot in inputs.slots), *([1] * len(spare))])
        parts.lines.extend([*_ancestor_bits(inputs), *spare])
        parts.starts.extend([start] * lanes)
        parts.lengths.extend([one.used] * lanes)
        parts.bases.extend([inputs.committed] * lanes)


LARGEST = Bucket(TOKENS, TOKENS, WIDTHS[-1], 0)  # no bucket has more numbers


def bucket_of(slices: Sequence[BatchSlice]) -> Bucket | None:
    """The smallest bucket for some slices; None: they run as a flat batch.

    That is where there is much to compute anyway, where a few long sessions would make all read as far as they do, and
    where a tree has too many nodes.
    """
    tokens = sum(one.count for one in slices)
    if tokens > TOKENS or any(len(one.inputs.tree) > NODES for one in slices):
        return None
    most = max(one.count for one in slices)
    width = next((width for width in WIDTHS if width >= most), WIDTHS[-1])
    lanes = [-(-one.count // width) for one in slices]
    used = max(SLOTS, _power_of_two(max(one.used for one in slices)))
    seen = sum(count * one.used for count, one in zip(lanes, slices, strict=True))
    bucket = Bucket(_power_of_two(tokens), _power_of_two(sum(lanes)), width, used)
    return bucket if bucket.lanes * used <= max(FREE, WASTE * seen) else None


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _ancestor_bits(inputs: InputTokens) -> list[int]:
    """For each token: bit i is set where it sees node i of the tree, an ancestor or itself."""
    lines: list[int] = []
    for node, parent in enumerate(inputs.tree.parents):
        lines.append((0 if parent == ROOT else lines[parent]) | 1 << node)
    return [lines[slot - inputs.committed] if slot >= inputs.committed else 0 for slot in inputs.slots]
