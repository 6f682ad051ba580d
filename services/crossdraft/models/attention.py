"""Attention of a flat batch: the tokens of many sessions one after another, each session's keys where they lie.

Registered with transformers as an attention implementation. Sessions whose extents lie at equal distances are one
strided view of the store, so that a batch takes a few calls of the ordinary kernel, and no key is copied.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "crossdraft"  # of the implementation, in a model's configuration


@dataclass(frozen=True, eq=False)
class Group:
    """Sessions that attend together: token i of session n is row (n, i) of the kernel's batch."""

    begin: int  # their tokens in the flat batch, from and to
    end: int
    count: int  # sessions
    width: int  # rows of each, padding included
    start: int  # place of the first session's extent
    step: int  # places from one session's extent to the next one's
    used: int  # places of each that any of their tokens sees
    mask: Tensor | None  # additive (count, 1, width, used), of the model's dtype; None: everything is seen
    rows: Tensor | None = None  # int64 (count * width,), the token of the flat batch in each row; None: begin to end
    cells: Tensor | None = None  # int64 (end - begin,), the row of each token, where `rows` is not None
    _masks: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by rows that share one row of keys

    def folded(self, share: int) -> Tensor | None:
        """The mask where `share` query heads have the same keys: (count, 1, share * width, used)."""
        if self.mask is None or share == 1:
            return self.mask
        if share not in self._masks:
            self._masks[share] = self.mask.repeat(1, 1, share, 1)
        return self._masks[share]


@dataclass(frozen=True, eq=False)
class Layout:
    """What the tokens of one flat batch see. Groups follow each other."""

    groups: tuple[Group, ...]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As every attention function of transformers: (batch, heads, tokens, width) to (batch, tokens, heads, width).

    With a layout the batch is flat, (1, heads, tokens, width), and key and value are those of the whole store. Without
    one, as in plain calls of the same model, this is sdpa.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    parts = [_group(group, query[0], key[0], value[0], scaling, options.get("softcap")) for group in layout.groups]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _group(
    group: Group, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None
) -> Tensor:
    """Shape (tokens of the group, heads, width)."""
    heads, width = len(query), value.shape[-1]
    asked = query[:, group.begin : group.end] if group.rows is None else query.index_select(1, group.rows)
    share = heads // len(key)
    # Query heads that share keys become rows of one head: (sessions, key heads, share * rows, width).
    folded = asked.view(len(key), share, group.count, group.width, -1).permute(2, 0, 1, 3, 4).flatten(2, 3)
    keys, values = _extents(key, group), _extents(value, group)
    mask = group.folded(share)
    if softcap is None:
        seen = scaled_dot_product_attention(folded, keys, values, mask, scale=scaling)
    else:
        seen = _softcapped(folded, keys, values, mask, scaling, softcap)
    split = seen.view(group.count, len(key), share, group.width, width).permute(0, 3, 1, 2, 4)
    result = split.reshape(group.count * group.width, heads, width)
    return result if group.cells is None else result.index_select(0, group.cells)


def _extents(store: Tensor, group: Group) -> Tensor:
    """A view of the sessions' places: (sessions, heads, used, width)."""
    heads, places, width = store.shape
    shape = (group.count, heads, group.used, width)
    strides = (group.step * width, places * width, width, 1)
    return store.as_strided(shape, strides, store.storage_offset() + group.start * width)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Scores within +-softcap, as Gemma 2 has them (arXiv 2408.00118, section 2): no kernel has this on a CPU."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
