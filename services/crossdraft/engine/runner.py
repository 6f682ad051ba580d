"""Forwards of pieces of feeds: flat and as long as they are, or in buckets of a few shapes where that is faster."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crossdraft.engine.attention import Layout
from crossdraft.engine.batch import Piece, batch_of
from crossdraft.engine.compatibility import embedding_weight, keeps_logits
from crossdraft.engine.cuda_graphs import StaticForwards
from crossdraft.engine.kv_store import Store


class Forwards:
    """The model's forwards over a store.

    Args:
        model: with the engine's attention installed by the time of the first forward.
        store: where keys and values are.
    """

    def __init__(self, model: PreTrainedModel, store: Store) -> None:
        self.inside: Callable[[], AbstractContextManager[object]] = nullcontext  # around each, for measurements
        self.static: StaticForwards | None = None  # the way for those that fit into a bucket; None: all are flat
        self._model, self._store = model, store
        self._device = embedding_weight(model).device
        self._heads: int = getattr(model.config.get_text_config(), "num_attention_heads", 1)
        self._keeps_logits = keeps_logits(model)
        # A 4-D mask is passed on as it is: no model makes one of its own, and the layout says what is seen.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self._device)

    def fix(self, longest: int) -> None:
        """From now on forwards that fit go in buckets, for sessions of at most so many places."""
        self.static = StaticForwards(self._call, self._store, self._model.dtype, self._device, longest)

    def run(self, pieces: Sequence[Piece]) -> dict[int, Tensor]:
        """One forward of pieces of different sessions, none empty: logits, float32 (rows, V), by their requests."""
        ready = self.static.ready(pieces) if self.static is not None else None
        if ready is None:
            return self._flat(pieces)
        with self.inside():
            logits = ready()
        return _split(logits, pieces)

    def _flat(self, pieces: Sequence[Piece]) -> dict[int, Tensor]:
        batch = batch_of(pieces, self._heads, self._model.dtype, self._device)
        self._store.aim(batch.target)
        with self.inside():
            options = {"logits_to_keep": batch.kept} if self._keeps_logits and batch.kept is not None else {}
            logits = self._call(batch.ids, batch.positions, batch.layout, **options)[0]
        if batch.kept is not None and not options:
            logits = logits.index_select(0, batch.kept)
        return _split(logits.float(), batch.pieces)

    def _call(self, ids: Tensor, positions: Tensor, layout: Layout, **options: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask,
            past_key_values=self._store,
            use_cache=True,
            layout=layout,
            **options,
        ).logits
        return logits


def _split(logits: Tensor, pieces: Sequence[Piece]) -> dict[int, Tensor]:
    parts = logits.split([piece.asked for piece in pieces])
    return {piece.share: rows for piece, rows in zip(pieces, parts, strict=True)}


# Linear layers on a CPU with their weights reordered once, for the few rows that a pass or a drafting step has.
#
# What torch calls otherwise reorders the weights in each call, or reads them badly for 2 to 16 rows: a pass of 9 tokens
# then costs up to 2.5 times one of a single token, and with packed weights 1.5 times.
#
# For each number of rows oneDNN makes a program of its own, in a millisecond, and keeps it: a third of a MiB, and up to
# 1,024 of them. So rows beyond a few are filled up to one of few numbers.

ROWS = 8  # that the order of the weights is made for; others are as right
STEPS = ((32, 1), (128, 8))  # up to so many rows their number is a multiple of this
COARSEST = 32  # ... and of this beyond


class PackedLinear(nn.Module):
    """A linear layer on a CPU, for inference; the same numbers but for rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """Shape (..., in) to (..., out)."""
        flat = rows.reshape(-1, self.in_features)
        count = len(flat)
        filled = nn.functional.pad(flat, (0, 0, 0, padded(count) - count)) if padded(count) > count else flat
        result: Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self._bias, "none", [], "")
        return result[:count].view(*rows.shape[:-1], self.out_features)


def padded(rows: int) -> int:
    """The number of rows that so many are filled up to."""
    step = next((step for most, step in STEPS if rows <= most), COARSEST)
    return -(-rows // step) * step


def packable(weight: Tensor) -> bool:
    """Whether oneDNN has layers of these numbers: float32 on a CPU, bfloat16 on one that multiplies them."""
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.device.type == "cpu" and (weight.dtype == torch.float32 or bfloat16)


def pack(model: PreTrainedModel) -> None:
    """Replaces the plain linear layers of a model that can be packed, where torch has oneDNN; others stay.

    Their own weights are given back, but for those of the head: they are read, and often those of the embedding too.
    """
    if not torch.backends.mkldnn.is_available():
        return
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and packable(child.weight):
                packed = PackedLinear(child)
                if child is head:
                    packed.weight = child.weight
                setattr(module, name, packed)


# When a device was done with a step, by the host's clock.


class Span:
    """From now on, until a device has done what it is given before `end` is called.

    CUDA works on while the host is elsewhere: the device notes both moments itself, and whoever asks first when it was
    done waits until it is. Anything else has done its work when the call returns.

    Args:
        device: for the calling thread's stream of it.
        clock: of the host, in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.began = clock()
        self._clock, self._device = clock, device
        self._returned = self.began  # when the host had given it all
        self._notes: list[torch.cuda.Event] = []
        self._note()

    def end(self) -> None:
        """All is given."""
        self._returned = self._clock()
        self._note()

    @cached_property
    def ended(self) -> float:
        """When it was done; not before the host had given it all. RuntimeError: the device failed."""
        if not self._notes:
            return self._returned
        first, last = self._notes
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return max(self._returned, self.began + milliseconds / 1000)

    def _note(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._notes.append(event)
