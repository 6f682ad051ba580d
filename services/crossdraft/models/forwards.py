"""Forwards of pieces of feeds: flat and as long as they are, or in buckets of a few shapes where that is faster."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.models.attention import Layout
from crossdraft.models.batches import Piece, batch_of
from crossdraft.models.graphs import StaticForwards
from crossdraft.models.store import Store
from crossdraft.models.support import embedding_weight, keeps_logits


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
