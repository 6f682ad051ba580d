"""The keys and values of all sessions: one row of places a layer, allocated once, shared out in extents."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from crossdraft.engine.names import NumberOutOfRangeError

MIB = 1 << 20
SPARE = 2  # places that belong to nobody: `Store.nothing` and `Store.waste`


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for each token."""

    heads: int  # key-value heads
    key: int  # width of a key
    value: int  # width of a value


class Store(Cache):
    """A transformers cache that is written at given places and hands out all of them.

    Which places a token sees is for the attention function to know (`attention.Layout`).

    Zeros, not uninitialised memory: a masked place has weight zero, and zero times NaN is NaN.

    Layers whose keys or values have the same shape lie in one tensor, so that to copy, clear or move places in all of
    them is one call.
    """

    def __init__(self, shapes: Sequence[LayerShape], places: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        self.places = places
        self.nothing = places  # a place that is never written: read in place of what does not exist
        self.waste = places + 1  # a place that is never read: where padding is written
        parts = [(shape.heads, width) for shape in shapes for width in (shape.key, shape.value)]
        self._blocks = {
            part: _zeros((count, part[0], places + SPARE, part[1]), dtype, device)
            for part, count in Counter(parts).items()
        }
        rows = {part: iter(block.split(1)) for part, block in self._blocks.items()}
        tensors = [next(rows[part]) for part in parts]  # (1, heads, places, width) each
        self.keys, self.values = tensors[::2], tensors[1::2]
        self._target: slice | Tensor = slice(0, 0)

    @staticmethod
    def place_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
        """Bytes of one place, in all layers."""
        return sum(shape.heads * (shape.key + shape.value) for shape in shapes) * dtype.itemsize

    def populate(self) -> None:
        """Takes all its memory now, before anything is in it: else passes wait for it when they write first.

        A token's keys lie in as many pages as there are layers and heads, and a page of 2 MiB took 4 ms here: the first
        token of a session as much as three seconds.

        Raises:
            NumberOutOfRangeError: the machine has not so much.
        """
        wanted = sum(block.nbytes for block in self._blocks.values()) // MIB
        if self.keys[0].device.type == "cpu" and wanted > available():
            raise NumberOutOfRangeError(
                f"{wanted} MiB of keys and values are wanted, and {available():.0f} MiB of memory are left: lower the "
                "budget (--cache-mib)"
            )
        for block in self._blocks.values():
            block.zero_()

    def aim(self, target: slice | Tensor) -> None:
        """Says where the next forward's keys and values go: places in the order of its tokens, int64 if a tensor."""
        self._target = target

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies `count` places from `source` on to `target` and on; they must not overlap."""
        for block in self._blocks.values():
            block[:, :, target : target + count] = block[:, :, source : source + count]

    def clear(self, start: int, count: int) -> None:
        """Zeros in `count` places from `start` on, as in the beginning."""
        for block in self._blocks.values():
            block[:, :, start : start + count].zero_()

    def sound(self, start: int, count: int) -> bool:
        """Whether places hold numbers: a text is not what it should be where its own tree had a NaN, masked or not.

        Those of the last layer tell, as a NaN of any other is in all layers after it.
        """
        held = (tensor[:, :, start : start + count] for tensor in (self.keys[-1], self.values[-1]))
        return all(math.isfinite(tensor.sum(dtype=torch.float32)) for tensor in held)  # a tenth of isfinite's time

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies places to others, as if all at once; no target is named twice."""
        device = self.keys[0].device
        source, target = sent(torch.from_numpy(np.array([sources, targets])), device)
        for block in self._blocks.values():
            block.index_copy_(2, target, block.index_select(2, source))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes what a layer computed, (1, heads, tokens, width), and returns all its places."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        target = self._target
        if isinstance(target, slice):
            keys[:, :, target] = key_states
            values[:, :, target] = value_states
        else:
            keys.index_copy_(2, target, key_states)
            values.index_copy_(2, target, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero, since positions are explicit."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of what a mask would cover; there is none."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """All places but the spare ones."""
        return self.places


def available() -> float:
    """MiB of main memory that can be had now; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    found = [int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else math.inf


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; in main memory they take up room only once they are written (torch.zeros would touch every page)."""
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise NumberOutOfRangeError(
            f"{size // MIB} MiB of keys or values cannot be had on {device}: lower the budget (--cache-mib)"
        ) from error


# Extents of places in one long row of them: a buddy allocator (Knowlton, CACM 8(10), 1965). Pure.
#
# Sizes are UNIT times a power of two and an extent begins at a multiple of its size, so that two halves of one extent
# that are both free are one free extent again, and extents of one size often lie at equal distances.

UNIT = 64  # places


@dataclass(frozen=True, order=True)
class Extent:
    """Places that belong together."""

    start: int  # first place, a multiple of the size
    size: int  # places, UNIT times a power of two

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.start + self.size


def size_for(places: int) -> int:
    """The size of an extent for at least so many places."""
    return UNIT << max(0, -(-places // UNIT) - 1).bit_length()


class Extents:
    """Which places are free.

    Args:
        places: how many there are; those after the last whole unit are never given.
    """

    def __init__(self, places: int) -> None:
        self.places = places // UNIT * UNIT
        self.free = self.places
        self._starts: dict[int, set[int]] = {}  # of free extents, by size
        start = 0
        for bit in range(self.places.bit_length(), -1, -1):
            if self.places & (1 << bit):
                self._starts[1 << bit] = {start}
                start += 1 << bit

    def take(self, size: int) -> Extent | None:
        """A free extent, the first in the smallest gap that holds it; None if there is none."""
        gap = min((known for known, starts in self._starts.items() if known >= size and starts), default=None)
        if gap is None:
            return None
        start = min(self._starts[gap])
        self._claim(start, gap, size)
        return Extent(start, size)

    def give(self, extent: Extent) -> None:
        """Frees what was taken; what two halves of one extent were is whole again."""
        self.free += extent.size
        start, size = extent.start, extent.size
        while start ^ size in self._starts.get(size, ()):
            self._starts[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._starts.setdefault(size, set()).add(start)

    def grow(self, extent: Extent, size: int) -> Extent | None:
        """The same places and those after them, up to a larger size, if they can be had; else None, and no change."""
        steps = []
        reach = extent.size
        while reach < size:
            if extent.start & reach or extent.start + reach not in self._starts.get(reach, ()):
                return None
            steps.append(reach)
            reach *= 2
        for step in steps:
            self._starts[step].remove(extent.start + step)
            self.free -= step
        return Extent(extent.start, reach)

    def could_take(self, size: int, released: Iterable[Extent]) -> bool:
        """Whether an extent could be taken if others were given back before."""
        if any(starts for known, starts in self._starts.items() if known >= size):
            return True
        released = list(released)
        if any(extent.size >= size for extent in released):  # the usual case, and they may be thousands
            return True
        if self.free + sum(extent.size for extent in released) < size:
            return False
        trial = Extents(0)
        trial._starts = {known: set(starts) for known, starts in self._starts.items()}
        for extent in released:
            trial.give(extent)
        return any(starts for known, starts in trial._starts.items() if known >= size)

    def _claim(self, start: int, gap: int, size: int) -> None:
        """Takes the first `size` places of a gap; the rest is free in halves."""
        self._starts[gap].remove(start)
        self.free -= size
        while gap > size:
            gap //= 2
            self._starts.setdefault(gap, set()).add(start + gap)


# Numbers on their way to a device, without anybody waiting for them.


def staged(numbers: Tensor, device: torch.device) -> Tensor:
    """The same numbers in memory that CUDA can read while the host goes on; anywhere else they stay where they are.

    Such memory comes from a cache of torch's that gives none of it again before the copies out of it are done, so that
    nothing overwrites what is still on its way.
    """
    return numbers.pin_memory() if device.type == "cuda" else numbers


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """The same numbers on a device; those that are there already are not copied."""
    return staged(numbers, device).to(device, non_blocking=device.type == "cuda")
