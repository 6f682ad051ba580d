"""The keys and values of all sessions: for each layer one tensor of slots, allocated once."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from crossdraft.engine.attention import write_slots
from crossdraft.engine.device import available_memory, least, sent
from crossdraft.engine.kv_cache_manager import UNIT, SlotPool, size_for
from crossdraft.engine.names import NumberOutOfRangeError

MIB = 1 << 20
BUDGET = 512  # MiB, where nothing says how much is there; and what is taken at start of main memory of a size not named
SPARE = 1  # slots beyond those that are handed out: the padding slot


@dataclass(frozen=True)
class MemoryShare:
    """A size of the KV cache that is not named: it takes what is there once the model is loaded."""

    utilization: float = 0.9  # of a GPU's memory, with all that is in it; of main memory it is half of what is free
    sessions: int = 256  # at most what so many sessions of full length can use
    beside: int = 0  # bytes of a token in a cache that is still to be made there: both hold about as many tokens

    def mib(self, unused: float, token_bytes: int) -> float:
        """What a cache takes of so many MiB that are there; infinite: the system does not say."""
        return (unused if math.isfinite(unused) else BUDGET) * token_bytes / (token_bytes + self.beside)


@dataclass(frozen=True)
class WindowedLayers:
    """What the layers with a window keep."""

    slot_bytes: int  # of a token, in all of them
    kept: int  # slots of a session, however long it is


@dataclass(frozen=True)
class CachePlan:
    """How many tokens the KV cache holds."""

    slots: int  # tokens of all sessions; of layers that see the whole text, if there are any
    length: int  # tokens of a session, at most
    window_slots: int = 0  # tokens of all sessions in layers with a window, if there are others

    @staticmethod
    def of(
        slot_bytes: int,
        budget: int | MemoryShare,
        unused: float,
        context: int,
        asked: bool,
        windowed: WindowedLayers | None = None,
    ) -> "CachePlan":
        """What fits.

        Slots of layers with a window are as many as sessions need that are a quarter as long as the context, or eight
        times as what these layers keep: where sessions are shorter these slots are used up first, where they are longer
        the others.

        Args:
            slot_bytes: of a token, in all layers that see the whole text.
            budget: MiB, or all that is there.
            unused: MiB that are there; infinite where the system does not say.
            context: tokens that a session is to have.
            asked: whether the user named these tokens: then they are not cut to what fits.
            windowed: the other layers; None: there are none.

        Raises:
            NumberOutOfRangeError: a session of so many tokens, or any session at all, does not fit.
        """
        each = slot_bytes + (0 if windowed is None else windowed.slot_bytes)
        most: float = budget.sessions if isinstance(budget, MemoryShare) else math.inf
        mib = budget.mib(unused, each) if isinstance(budget, MemoryShare) else budget
        size, cost, apart, longest = max(0.0, mib * MIB), slot_bytes, 0, context
        if windowed is not None and slot_bytes:
            apart = windowed.kept * windowed.slot_bytes  # one session's
        elif windowed is not None:
            cost, longest = windowed.slot_bytes, min(context, windowed.kept)
        slots = max(0, size - apart) // cost  # of one session, at most
        fits = UNIT << (int(slots) // UNIT).bit_length() - 1 if slots >= UNIT else 0
        least = size_for(longest if asked else 1)
        if fits < least:
            raise _too_small(least, -(-(least * cost + apart) // MIB), mib, fits)
        length = context if fits >= longest else fits
        if windowed is None or not apart:
            return CachePlan(int(min(slots, most * size_for(longest))), length)
        usual = max(windowed.kept, min(context / 4, 8 * windowed.kept))
        shared = (size - apart) // (cost + windowed.slot_bytes * windowed.kept / usual)
        slots = min(max(shared, min(slots, size_for(longest))), most * size_for(longest))
        left = (size - slots * cost) // windowed.slot_bytes
        return CachePlan(int(slots), length, int(min(left, most * windowed.kept)))


def _too_small(tokens: int, needed: int, mib: float, fits: int) -> NumberOutOfRangeError:
    """A cache of so many MiB, for a session of so many tokens, which needs more; as many as `fits` have room."""
    shorter = f"set --max-model-len to {fits} or less, or " if fits else ""
    return NumberOutOfRangeError(
        f"a session of up to {tokens} tokens needs {needed} MiB of keys and values, and the KV cache has "
        f"{max(0, mib):.0f} MiB: {shorter}set --cache-mib to {needed} or more"
    )


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for each token."""

    heads: int  # key-value heads
    key: int  # width of a key
    value: int  # width of a value


class KVPool(SlotPool):
    """The slots of some layers, of which sessions have the same.

    Memory starts as zeros: a masked slot has weight zero, and zero times NaN is NaN. Layers whose keys or values have
    the same shape share one tensor, so that copying, clearing or moving slots in all of them is one call. Each of the
    processes that share a model, its `ranks`, has its heads' slots. `kept` are `window` and `chunk` of `SlotPool`.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], slots: int, dtype: torch.dtype, device: torch.device, ranks: int, *kept: int
    ) -> None:
        super().__init__(slots, *kept)
        self.slots, self.ranks = slots, ranks
        self.padding_slot = slots  # never read: where padding is written
        parts = [(shape.heads, width) for shape in shapes for width in (shape.key, shape.value)]
        self.blocks = {
            part: _zeros((count, part[0], slots + SPARE, part[1]), dtype, device)
            for part, count in Counter(parts).items()
        }
        rows = {part: iter(block.split(1)) for part, block in self.blocks.items()}
        tensors = [next(rows[part]) for part in parts]  # (1, heads, slots, width) each
        self.keys, self.values = tensors[::2], tensors[1::2]

    def copy(self, source: int, target: int, count: int) -> None:
        apart = abs(source - target) >= count
        for block in self.blocks.values():
            copied = block[:, :, source : source + count]
            block[:, :, target : target + count] = copied if apart else copied.clone()

    def clear(self, start: int, count: int) -> None:
        for block in self.blocks.values():
            block[:, :, start : start + count].zero_()

    def is_finite(self, start: int, count: int) -> bool:
        """As of `SlotPool`: a NaN in a tree also reaches the text's keys, masked or not.

        The last layer is enough, as a NaN of any layer is in all layers after it.
        """
        held = (tensor[:, :, start : start + count] for tensor in (self.keys[-1], self.values[-1]))
        finite = all(math.isfinite(tensor.sum(dtype=torch.float32)) for tensor in held)  # a tenth of isfinite's time
        return bool(least(finite, self.keys[0].device, self.ranks))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots to others, as if all at once; no target is named twice."""
        device = self.keys[0].device
        source, target = sent(torch.from_numpy(np.array([sources, targets])), device)
        for block in self.blocks.values():
            block.index_copy_(2, target, block.index_select(2, source))


class KVCache(Cache):
    """A transformers cache that is written at given slots and returns all of them.

    Which slots a token attends to is in `attention.Layout`; `pool_of` says in which pool each layer is. A model that
    makes keys and values of what is cached anew in each forward (multi-head latent attention) gathers: only the slots
    that the forward reads are returned. The model itself expands them: absorbing the expansion into queries would be
    code for one architecture. `kept` is of the last pool.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        gathers: bool = False,
        pool_of: Sequence[int] | None = None,
        ranks: int = 1,
        kept: Sequence[int] = (),
    ) -> None:
        super().__init__(layers=[])
        self.gathers, self.ranks = gathers, ranks
        self.pool_of = pool_of or [0] * len(shapes)
        parts = [[shape for shape, of in zip(shapes, self.pool_of, strict=True) if of == n] for n in range(len(slots))]
        self.pools = [KVPool(*given, dtype, device, ranks) for given in zip(parts[:-1], slots[:-1], strict=True)]
        self.pools.append(KVPool(parts[-1], slots[-1], dtype, device, ranks, *kept))
        tensors = [zip(pool.keys, pool.values, strict=True) for pool in self.pools]
        self.keys, self.values = zip(*(next(tensors[number]) for number in self.pool_of), strict=True)
        self._mappings: Sequence[slice | Tensor] = ()
        self._positions: Tensor | None = None
        self._gathered: Tensor | None = None

    @staticmethod
    def slot_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
        return sum(shape.heads * (shape.key + shape.value) for shape in shapes) * dtype.itemsize

    @property
    def _blocks(self) -> list[Tensor]:
        return [block for pool in self.pools for block in pool.blocks.values()]

    @property
    def mib(self) -> int:
        """Its size."""
        return sum(block.nbytes for block in self._blocks) // MIB

    def populate(self, most: int | None = None) -> None:
        """Touches its memory now, while it is still empty; otherwise the first passes to write there wait for it.

        A token's keys lie in as many pages as there are layers and heads, and a page of 2 MiB takes about 4 ms: the
        first token of a session took up to three seconds. At most so many MiB are touched, of the first slots. Raises
        NumberOutOfRangeError: the machine has less memory.
        """
        size = self.mib
        share = 1.0 if most is None or size <= most else most / size
        wanted, left = int(share * size), available_memory()
        if self.keys[0].device.type == "cpu" and wanted > left:
            raise NumberOutOfRangeError(
                f"{wanted} MiB of keys and values are wanted, and {left:.0f} MiB of memory are left: "
                f"set --cache-mib to {left / 2:.0f} or less"
            )
        for block in self._blocks:
            block[:, :, : int(share * block.shape[2])].zero_()

    def map_slots(
        self, mappings: Sequence[slice | Tensor], positions: Tensor | None = None, gathered: Tensor | None = None
    ) -> None:
        """Sets where the next forward's keys and values go: of each pool slots in the order of its tokens; and what it
        reads, `gathered`, or all. Tensors are int64."""
        self._mappings, self._positions, self._gathered = mappings, positions, gathered

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes what a layer computed, (1, heads, tokens, width), and returns its slots, all or the gathered."""
        if torch.compiler.is_compiling():  # attention writes it, or the operator calls this again
            if self._gathered is None:
                return key_states, value_states
            gathered: tuple[Tensor, Tensor] = torch.ops.crossdraft.update(key_states, value_states, len(self._gathered))
            return gathered
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        mapping = self._mappings[self.pool_of[layer_idx]]
        if isinstance(mapping, slice):
            keys[:, :, mapping] = key_states
            values[:, :, mapping] = value_states
        else:
            write_slots(keys, values, mapping, key_states, value_states)
        if self._gathered is None:
            return keys, values
        return keys.index_select(2, self._gathered), values.index_select(2, self._gathered)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """What to add to the tokens' numbers to have their positions, int64 (tokens,), where a layer asks (Llama 4).

        Models do not ask, since positions are explicit, or use it for a mask, which is explicit too: 0.
        """
        if layer_idx is None or self._positions is None:
            return 0
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of what a mask would cover; there is none."""
        return query_length, 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; in main memory they are allocated when they are first written (torch.zeros would touch every page)."""
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise NumberOutOfRangeError(
            f"{size // MIB} MiB of keys or values cannot be had on {device}: set a smaller --cache-mib"
        ) from error
