"""The keys and values of all sessions: one slot each, in tensors that are allocated once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

MIB = 1 << 20


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for each token."""

    heads: int  # key-value heads
    key: int  # width of a key
    value: int  # width of a value


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the keys and values of one forward go: one row of the batch for each slot, slots ascending."""

    slots: tuple[int, ...]  # slot of each row
    used: int  # places that any token of this forward sees
    span: tuple[int, int] | None  # of a single row without gaps: its places, from and to; else the four below
    rows: Tensor  # int64 (n,), row of each token that is not padding
    columns: Tensor  # int64 (n,), its column
    homes: Tensor  # int64 (n,), its slot
    places: Tensor  # int64 (n,), its place in the slot
    past: int = 0  # cached tokens, where no mask is passed and the model derives its own


class SlotCache(Cache):
    """A transformers cache whose rows are slots, written at given places.

    Zeros, not uninitialised memory: a masked place has weight zero, and zero times NaN is NaN.
    """

    def __init__(self, shapes: Sequence[LayerShape], slots: int, length: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[])
        self.keys = [_zeros((slots, shape.heads, length, shape.key), dtype, device) for shape in shapes]
        self.values = [_zeros((slots, shape.heads, length, shape.value), dtype, device) for shape in shapes]
        self.length = length  # places in a slot
        self._placement: Placement | None = None

    @staticmethod
    def slot_bytes(shapes: Sequence[LayerShape], length: int, dtype: torch.dtype) -> int:
        """Bytes of one slot of `length` places."""
        return sum(shape.heads * (shape.key + shape.value) for shape in shapes) * length * dtype.itemsize

    def place(self, placement: Placement) -> None:
        """Says where the next forward's keys and values go."""
        self._placement = placement

    def move(self, slot: int, sources: Sequence[int], start: int) -> None:
        """Copies the entries at `sources`, in any order, to `start` and on."""
        index = torch.tensor(sources, device=self.keys[0].device)
        end = start + len(sources)
        for tensor in (*self.keys, *self.values):
            tensor[slot, :, start:end] = tensor[slot].index_select(1, index)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes what a layer computed (batch, heads, new tokens, width) and returns all that it may see."""
        placement = self._placement
        if placement is None:
            raise RuntimeError("place() must be called before a forward")
        return (
            _write(self.keys[layer_idx], key_states, placement),
            _write(self.values[layer_idx], value_states, placement),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero, since positions are explicit, unless the model has to derive the mask of a single token."""
        return self._placement.past if self._placement is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of what `update` returns."""
        return (self._placement.used if self._placement is not None else query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Places in a slot."""
        return self.length


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; in main memory they take up room only once they are written (torch.zeros would touch every page)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _write(store: Tensor, states: Tensor, placement: Placement) -> Tensor:
    """Writes one layer's states; a view of the slots where they lie together, else a copy of those in use."""
    first, count = placement.slots[0], len(placement.slots)
    if placement.span is not None:
        start, end = placement.span
        store[first, :, start:end] = states[0]
    else:
        new = states.transpose(1, 2)[placement.rows, placement.columns]
        store[placement.homes, :, placement.places] = new
    if placement.slots[-1] - first + 1 == count:
        return store[first : first + count, :, : placement.used]
    return store[list(placement.slots), :, : placement.used]
