"""What a model runs in one forward: tokens of requests as the tensors of a flat batch, or as a table of numbers.

Both have all tokens one after another. In a flat batch attention is padded, by groups of sessions. Where a kernel reads
what the numbers of each token say, nothing but these differs between two forwards of as many tokens, so that one can be
captured as a CUDA graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdraft.engine.attention import TILE, Group, Layout, Marks, Strided, Window
from crossdraft.engine.device import sent
from crossdraft.engine.requests import NO_TREE, Extent, InputTokens
from crossdraft.types.trees import MOST_NODES, ROOT

Numbers = NDArray[np.int64]
Windows = tuple[Window | None, ...]  # the different ones of a model's layers; None: a layer sees the whole text
WHOLE: Windows = (None,)
SHORT = 8  # tokens; slices up to here attend together, longer ones with those of similar length
ALONE = 64  # tokens; slices longer than this attend by themselves
CALL = 3000  # slots times rows times heads whose attention takes as long as one more call of the kernel
ZERO, INFINITY = np.float32(0), np.float32(np.inf)


def pool_of(window: Window | None) -> int:
    """Which of the pools that there are, and of a session's extents, layers with this window have."""
    return 0 if window is None else -1


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one flat forward of n tokens."""

    ids: Tensor  # int64 (n,)
    positions: Tensor  # int64 (n,)
    slot_mappings: tuple[slice | Tensor, ...]  # for each pool of the KV cache, slots in order of the tokens
    kept: Tensor | None  # int64, indices of the tokens whose logits are asked for; None: all
    layouts: tuple[Layout, ...]  # for each window
    slices: tuple[InputTokens, ...]  # in order of their tokens
    gathered: Tensor | None = None  # int64, slots: the layouts count among these; None: among all of the KV cache


def batch_of(
    slices: Sequence[InputTokens],
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Windows = WHOLE,
    gathers: bool = False,
) -> Batch:
    """One forward of a model with so many attention heads, for slices of different sessions, at least one.

    `gathers`: what is cached is gathered before it becomes keys and values.
    """
    ordered: list[InputTokens] = []
    groups: dict[Window | None, list[Group]] = {window: [] for window in windows}
    slots_of: list[Numbers] = []  # of each group
    end = 0
    for members in grouped(slices, heads):
        begin, end = end, end + sum(inputs.count for inputs in members)
        ordered += members
        apart = len(members[0].extents) > 1  # layers with a window have a pool, where members lie otherwise
        own = [window for window in windows if window is None or not apart]
        keys, used = _strided(members, 0), max(inputs.used() for inputs in members)
        if gathers:
            slots_of.append(np.concatenate([np.arange(used) + inputs.extents[0].start for inputs in members]))
            keys = Strided(sum(map(len, slots_of[:-1])), used)
        _add_groups(groups, members, begin, keys, own, dtype, device)
        others = [window for window in windows if window not in own]
        for run in _runs(members, heads, -1) if others else ():
            _add_groups(groups, run, begin, _strided(run, -1), others, dtype, device, -1)
            begin += sum(inputs.count for inputs in run)
    layouts = tuple(tuple(groups[window]) for window in windows)
    return _sent_batch(ordered, layouts, np.concatenate(slots_of) if gathers else None, device)


def _sent_batch(
    ordered: Sequence[InputTokens], layouts: tuple[Layout, ...], gathered: Numbers | None, device: torch.device
) -> Batch:
    """The numbers of slices in the order of their tokens, on the device."""
    tokens = _flat([inputs.tokens for inputs in ordered])
    positions = _flat([inputs.positions for inputs in ordered])
    kept = _flat([inputs.wanted for inputs in ordered], [0, *accumulate(inputs.count for inputs in ordered[:-1])])
    mappings = [_mapping(ordered, pool) for pool in range(len(ordered[0].extents))]
    some = [] if len(kept) == len(tokens) else [kept]
    parts = [tokens, positions, *some, *(mapping for mapping in mappings if not isinstance(mapping, slice))]
    numbers = sent(torch.from_numpy(np.concatenate(parts)), device)  # one transfer of all
    ids, places, *rest = numbers.split([*map(len, parts)])
    rows = rest.pop(0) if some else None
    slots = tuple(mapping if isinstance(mapping, slice) else rest.pop(0) for mapping in mappings)
    read = None if gathered is None else sent(torch.from_numpy(gathered), device)
    return Batch(ids, places, slots, rows, layouts, tuple(ordered), read)


def _mapping(slices: Sequence[InputTokens], pool: int) -> slice | Numbers:
    """The slots of all tokens."""
    slots = _flat([inputs.places for inputs in slices], [inputs.extents[pool].origin for inputs in slices])
    first = slices[0]
    if len(slices) == 1 and first.places[-1] + 1 - first.places[0] == first.count:  # in a row
        return slice(int(slots[0]), int(slots[0]) + first.count)
    return slots


def _flat(lists: Sequence[Sequence[int]], added: Sequence[int] | Numbers | None = None) -> Numbers:
    """The numbers of all slices, one list each, one after another; `added` to those of each slice."""
    numbers = np.fromiter(chain.from_iterable(lists), np.int64)
    if added is not None:
        numbers += np.repeat(added, [*map(len, lists)])
    return numbers


def grouped(slices: Sequence[InputTokens], heads: int) -> Iterator[list[InputTokens]]:
    """Slices whose extents are one strided view of the KV cache: of one size and at equal distances.

    All members of a group read as many slots as the one that needs most, so that a group ends where another call of the
    kernel costs less.
    """
    ordered = sorted(slices, key=lambda inputs: (_kind(inputs, 0), inputs.extents[0].start))
    return _runs(ordered, heads, 0)


def _runs(slices: Sequence[InputTokens], heads: int, pool: int) -> Iterator[list[InputTokens]]:
    """Consecutive ones that may be a group."""
    for (size, _), members in groupby(slices, key=lambda inputs: _kind(inputs, pool)):
        run: list[InputTokens] = []
        step = rows = used = 0  # slots from one member to the next; of any member: tokens, slots, at most
        for inputs in members:
            distance, own = inputs.extents[pool].start - run[-1].extents[pool].start if run else 1, inputs.used(pool)
            wasted = max(rows, inputs.count) * (used - own if own < used else len(run) * (own - used))
            apart = distance <= 0 or (step and distance != step)
            if run and (not size or apart or wasted * heads > CALL):
                yield run
                run, step, rows, used = [], 0, 0, 0
            elif run:
                step = distance
            run.append(inputs)
            rows, used = max(rows, inputs.count), max(used, own)
        yield run


def _kind(inputs: InputTokens, pool: int) -> tuple[int, int]:
    """What slices that attend together have in common; size 0 is for those that attend by themselves."""
    if inputs.count > ALONE:
        return 0, 0
    return inputs.extents[pool].size, max(inputs.count, SHORT).bit_length()


def _strided(members: Sequence[InputTokens], pool: int) -> Strided:
    first = members[0].extents[pool].start
    return Strided(first, members[1].extents[pool].start - first if len(members) > 1 else 0)


def _add_groups(
    groups: Mapping[Window | None, list[Group]],
    members: Sequence[InputTokens],
    begin: int,
    keys: Strided,
    windows: Sequence[Window | None],
    dtype: torch.dtype,
    device: torch.device,
    pool: int = 0,
) -> None:
    """Adds the group as each window has it: from the first slot on that any of its tokens sees."""
    counts = [inputs.count for inputs in members]
    end, width, used = begin + sum(counts), max(counts), max(inputs.used(pool) for inputs in members)
    real = np.arange(width) < np.array(counts)[:, None]  # (sessions, width): the rows that are tokens
    rows = cells = None
    if not real.all():
        cells = sent(torch.from_numpy(np.flatnonzero(real)), device)
        numbers = np.full(real.shape, begin)
        numbers[real] = np.arange(begin, end)
        rows = sent(torch.from_numpy(numbers.ravel()), device)
    longest = max(max(inputs.positions) for inputs in members)
    made: dict[Window | None, Group] = {}
    for full in windows:
        window = full if full is not None and full.first(longest) > 0 else None
        if window in made:
            groups[full].append(made[window])
            continue
        seen = visible(members, width, used, window, pool)
        skip = 0 if window is None else int(seen[real].any(0).argmax())
        seen = seen[:, :, skip:]
        mask: Tensor | None = None
        if not seen.all():
            mask = sent(torch.from_numpy(np.where(seen[:, None], ZERO, -INFINITY)).to(dtype), device)
        view = Strided(keys.start + skip, keys.step)
        made[window] = Group(begin, end, len(members), width, used - skip, view, mask, rows, cells)
        groups[full].append(made[window])


def visible(
    slices: Sequence[InputTokens], width: int, used: int, window: Window | None = None, pool: int = 0
) -> NDArray[np.bool_]:
    """Which of the first `used` slots each token attends to, shape (slices, width, used); padding attends to all.

    Committed tokens see all slots up to their own; a node sees the committed ones, its ancestors and itself. Of these a
    window leaves those whose positions are in it.
    """
    bases = np.array([inputs.extents[pool].base for inputs in slices])[:, None]
    rows = [[*inputs.places, *[1 << 62] * (width - inputs.count)] for inputs in slices]
    limits = np.array(rows, dtype=np.int64) - bases
    seen: NDArray[np.bool_] = np.arange(used) <= limits[:, :, None]
    for row, inputs in enumerate(slices):
        base = inputs.extents[pool].base
        first, within = inputs.committed - base, max(0, used - inputs.committed + base)
        if not inputs.tree.is_chain:
            nodes = [token for token, place in enumerate(inputs.places) if place >= inputs.committed]
            size = -(-len(inputs.tree.tokens) // 8)
            ancestors = _ancestor_bits(inputs)[inputs.count - len(nodes) :]
            bits = b"".join(line.to_bytes(size, "little") for line in ancestors)
            lines = np.unpackbits(np.frombuffer(bits, dtype=np.uint8).reshape(-1, size), 1, within, "little")
            seen[row, nodes, first:] = lines
        if window is not None:
            positions = np.arange(used) + base
            depths = inputs.depths[:within]
            positions[first : first + len(depths)] = inputs.committed + np.array(depths, np.int64)
            seen[row, : inputs.count] &= positions >= window.first(np.array(inputs.positions))[:, None]
    return seen


# Numbers: all that differs between two forwards of as many tokens.


class StepInputs(NamedTuple):
    """What a forward of flat tokens reads, on the device, int64; padding included."""

    ids: Tensor  # (tokens,), those of padding are 0
    positions: Tensor  # (tokens,)
    kept: Tensor  # (tokens,), first the tokens whose logits are asked for
    marks: tuple[Tensor, ...]  # for each window `Marks`, (6, tokens)

    @staticmethod
    def of(numbers: Tensor) -> "StepInputs":
        """The parts of what `numbers_of` makes: views."""
        ids, positions, kept = numbers[:OWN]
        return StepInputs(ids, positions, kept, numbers[OWN:].split(len(Marks._fields)))


OWN = len(StepInputs._fields) - 1  # rows of numbers before those of marks


def _marks_of(numbers: Numbers, window: int) -> Numbers:
    """The rows of numbers that are the marks of the window with this number."""
    first = OWN + window * len(Marks._fields)
    return numbers[first : first + len(Marks._fields)]


def padding_of(size: int, padding_slots: Sequence[int]) -> Numbers:
    """The numbers of a forward of nothing but padding, (rows, size); for each window, where its keys are written."""
    numbers = np.zeros((OWN + len(Marks._fields) * len(padding_slots), size), dtype=np.int64)
    numbers[OWN :: len(Marks._fields)] = np.array(padding_slots)[:, None]
    return numbers


def numbers_of(slices: Sequence[InputTokens], size: int, windows: Windows, padding_slots: Sequence[int]) -> Numbers:
    """The numbers of a forward of `size` tokens, padding included, (rows, size), as `StepInputs` has them.

    There is at least one slice, and none has a tree that is `too_large`; `padding_slots` are as in `padding_of`.
    """
    numbers, counts = padding_of(size, padding_slots), np.array([len(inputs.tokens) for inputs in slices])
    begins = counts.cumsum() - counts
    end = int(begins[-1] + counts[-1])
    ids, positions, kept = numbers[:OWN, :end]
    trees = [at for at, inputs in enumerate(slices) if not inputs.tree.is_chain]
    places = _flat([inputs.places for inputs in slices])
    ids[:] = _flat([inputs.tokens for inputs in slices])
    positions[:] = _flat([inputs.positions for inputs in slices]) if trees else places
    wanted = _flat([inputs.wanted for inputs in slices], begins)
    kept[: len(wanted)] = wanted
    ranks = np.arange(end) - begins.repeat(counts)  # among the tokens of a slice
    blocks = np.where(ranks % TILE, -1, np.minimum(TILE, counts.repeat(counts) - ranks))
    for number, window in enumerate(windows):
        marks = Marks(*_marks_of(numbers, number)[:, :end])
        extents = [inputs.extents[pool_of(window)] for inputs in slices]
        starts = np.array([extent.start for extent in extents]).repeat(counts)
        origins = np.array([extent.origin for extent in extents]).repeat(counts)
        marks.blocks[:], marks.targets[:] = blocks, origins + places
        marks.limits[:], marks.firsts[:] = marks.targets + 1, starts
        marks.bases[:] = origins + np.array([inputs.committed for inputs in slices]).repeat(counts)
        if window is not None:
            marks.firsts[:] += (window.first(positions) - (starts - origins)).clip(0)
        for at in trees:  # what its tokens see before the tree, and in it
            own = slice(begins[at], begins[at] + counts[at])
            for row in (marks.limits, marks.firsts):
                row[own] = np.minimum(row[own], marks.bases[own])
            firsts = None if window is None else window.first(positions[own]).tolist()
            marks.lines[own] = _ancestor_bits(slices[at], firsts)
    return numbers


class NextTokens(NamedTuple):
    """The next token of each of some sessions, whose id is not known yet, and those that follow it step by step."""

    places: Sequence[int]  # of the first in each session
    extents: Sequence[Sequence[Extent]]  # of each session

    def slices(self, step: int) -> list[InputTokens]:
        """Those after so many steps."""
        each = zip(self.places, self.extents, strict=True)
        numbers = [(place + step, extents) for place, extents in each]
        return [InputTokens([0], [at], [at], (0,), at + 1, NO_TREE, extents=extents) for at, extents in numbers]

    def numbers(self, size: int, windows: Windows, padding_slots: Sequence[int], steps: int) -> NDArray[np.int64]:
        """As `numbers_of` for the slices of each step, (steps, rows, size)."""
        found = np.repeat(padding_of(size, padding_slots)[None], steps, 0)
        own = found[:, :, : len(self.places)]
        own[:, 1] = positions = np.array(self.places) + np.arange(steps)[:, None]
        own[:, 2] = np.arange(len(self.places))
        for number, window in enumerate(windows):
            marks = Marks(*_marks_of(own.swapaxes(0, 1), number))
            of_pool = [extents[pool_of(window)] for extents in self.extents]
            # Two lists, as numpy takes ten times as long for one of pairs.
            starts, bases = np.array([at.start for at in of_pool]), np.array([at.base for at in of_pool])
            marks.targets[:], marks.blocks[:] = starts - bases + positions, 1
            marks.limits[:] = marks.bases[:] = marks.targets + 1
            marks.firsts[:] = starts if window is None else starts + (window.first(positions) - bases).clip(0)
        return found


def too_large(slices: Sequence[InputTokens]) -> bool:
    """Whether a tree has more nodes than one number has bits."""
    return any(len(inputs.tree) > MOST_NODES and not inputs.tree.is_chain for inputs in slices)


def _ancestor_bits(inputs: InputTokens, firsts: Sequence[int] | None = None) -> list[int]:
    """For each token: bit i is set where it sees node i of the tree, an ancestor or itself.

    `firsts` are the first positions that tokens see; None: all.
    """
    lines: list[int] = []
    for node, parent in enumerate(inputs.tree.parents):
        lines.append((0 if parent == ROOT else lines[parent]) | 1 << node)
    base = inputs.committed
    found = [lines[place - base] if place >= base else 0 for place in inputs.places]
    if firsts is None or max(firsts) <= base:
        return found
    deep = [0] * (max(inputs.positions) - base + 2)  # by depth, the nodes that lie so deep or deeper
    for node, depth in enumerate(inputs.depths):
        deep = [bits | 1 << node if least <= depth else bits for least, bits in enumerate(deep)]
    return [line & deep[max(0, first - base)] for line, first in zip(found, firsts, strict=True)]
