"""The model runner: one forward for slices of many requests, as a flat batch or in a bucket that can be captured."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.engine.attention import Layout
from crossdraft.engine.batch import BatchSlice, batch_of
from crossdraft.engine.compatibility import embedding_weight, keeps_logits
from crossdraft.engine.cuda_graphs import GraphRunner
from crossdraft.engine.kv_cache import KVCache


class ModelRunner:
    """Runs a model over a KV cache.

    Args:
        model: with the engine's attention installed by the time of the first forward.
        cache: where keys and values are.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.inside: Callable[[], AbstractContextManager[object]] = nullcontext  # around each forward, to measure it
        self.graphs: GraphRunner | None = None  # for forwards that fit into a bucket; None: all are flat batches
        self._model, self._cache = model, cache
        self._device = embedding_weight(model).device
        self._heads: int = getattr(model.config.get_text_config(), "num_attention_heads", 1)
        self._keeps_logits = keeps_logits(model)
        # A 4-D mask is passed on as it is: the model then makes none of its own, and the layout says what is seen.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self._device)

    def use_graphs(self, longest: int) -> None:
        """From now on forwards that fit run in buckets, for sessions of at most so many slots."""
        self.graphs = GraphRunner(self._call, self._cache, self._model.dtype, self._device, longest)

    def run(self, slices: Sequence[BatchSlice]) -> dict[BatchSlice, Tensor]:
        """One forward for slices of different sessions: the logits of each, float32 (rows, V)."""
        prepared = self.graphs.prepare(slices) if self.graphs is not None else None
        if prepared is None:
            return self._flat(slices)
        with self.inside():
            logits = prepared()
        return _split(logits, slices)

    def _flat(self, slices: Sequence[BatchSlice]) -> dict[BatchSlice, Tensor]:
        batch = batch_of(slices, self._heads, self._model.dtype, self._device)
        self._cache.map_slots(batch.slot_mapping)
        with self.inside():
            options = {"logits_to_keep": batch.kept} if self._keeps_logits and batch.kept is not None else {}
            logits = self._call(batch.ids, batch.positions, batch.layout, **options)[0]
        if batch.kept is not None and not options:
            logits = logits.index_select(0, batch.kept)
        return _split(logits.float(), batch.slices)

    def _call(self, ids: Tensor, positions: Tensor, layout: Layout, **options: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
            layout=layout,
            **options,
        ).logits
        return logits


def _split(logits: Tensor, slices: Sequence[BatchSlice]) -> dict[BatchSlice, Tensor]:
    return dict(zip(slices, logits.split([one.rows for one in slices]), strict=True))
