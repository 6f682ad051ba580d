"""The keys and values of all sessions: one row of places a layer, allocated once, shared out in extents."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from crossdraft.models.names import NumberOutOfRangeError
from crossdraft.models.transfers import sent

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
