"""Attention over a flat batch: the tokens of many sessions one after another, keys and values read where they lie.

Registered with transformers as an attention implementation. Sessions whose extents lie at equal distances are one
strided view of the KV cache, so that a batch takes a few calls of the ordinary kernel, and no key is copied. A captured
forward, in which only the contents of tensors may differ, gathers keys by their slots instead. Layers with a window
have a layout of their own, which begins where the window does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "crossdraft"  # of the implementation, in a model's configuration
WIDE = torch.complex128.itemsize
SCORES = 1 << 26  # that exist at a time, where no kernel computes them block by block
Position = TypeVar("Position", int, NDArray[np.int64], Tensor)


@dataclass(frozen=True)
class Window:
    """How far back the tokens of a layer see."""

    size: int  # tokens, the seeing one included
    chunked: bool = False  # a text is cut into chunks of so many tokens, none of which sees into the one before

    def first(self, position: Position) -> Position:
        """The first position that a token sees; a negative one is the beginning of the text."""
        return position // self.size * self.size if self.chunked else position - self.size + 1


@dataclass(frozen=True)
class Strided:
    """Sessions whose slots lie at equal distances: a view."""

    start: int  # first slot of the first session
    step: int  # slots from one session's first to the next one's

    def of(self, layer: Tensor, count: int, used: int) -> Tensor:
        """From all slots of a layer, (heads, slots, width), those of each session: (count, heads, used, width)."""
        heads, _, width = layer.shape
        head, slot, number = layer.stride()
        strides = (self.step * slot, head, slot, number)
        return layer.as_strided((count, heads, used, width), strides, layer.storage_offset() + self.start * slot)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Sessions whose slots lie anywhere: a copy, whose shape does not depend on where."""

    slots: Tensor  # int64 (sessions * slots of each,)

    def of(self, layer: Tensor, count: int, used: int) -> Tensor:
        row = layer.shape[-1] * layer.itemsize
        # As numbers of 16 bytes where they fit: a GPU gathers by the number, not by the byte.
        wide = layer.view(torch.complex128) if row % WIDE == 0 and layer.is_contiguous() else layer
        gathered = wide.index_select(1, self.slots).view(layer.dtype)
        return gathered.view(len(layer), count, used, -1).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Group:
    """Sessions that attend together: token i of session n is row (n, i) of the kernel's batch."""

    begin: int  # their tokens in the flat batch, from and to
    end: int
    count: int  # sessions
    width: int  # rows of each, padding included
    used: int  # slots of each that any of their tokens sees
    keys: Strided | Gathered  # where their keys and values are
    mask: Tensor | None  # additive (count, 1, width, used), of the model's dtype; None: everything is seen
    rows: Tensor | None = None  # int64 (count * width,), the token of the flat batch in each row; None: begin to end
    cells: Tensor | None = None  # int64 (end - begin,), the row of each token, where `rows` is not None
    _masks: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by query heads for each key head

    def folded(self, share: int) -> Tensor | None:
        """The mask where `share` query heads have the same keys: (count, 1, width * share, used)."""
        if self.mask is None or share == 1:
            return self.mask
        if share not in self._masks:
            self._masks[share] = self.mask.repeat_interleave(share, dim=2)
        return self._masks[share]


Layout = tuple[Group, ...]  # what the tokens of one flat batch see; groups follow each other


class Layouts:
    """What the layers of one model see in the forward that is running."""

    def __init__(self) -> None:
        self.of_layers: Sequence[Layout] | None = None  # in order of `LayerLayout.number`; None: a plain call


@dataclass(frozen=True, eq=False)
class LayerLayout:
    """The attribute of an attention module that leads to its layout.

    Keyword arguments would not do: some models keep them from their attention modules.
    """

    layouts: Layouts
    number: int  # of the module, among those of the model

    @property
    def current(self) -> Layout | None:
        layers = self.layouts.of_layers
        return None if layers is None else layers[self.number]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As every attention function of transformers: (batch, heads, tokens, width) to (batch, tokens, heads, width).

    With a layout the batch is flat, (1, heads, tokens, width), and key and value are those of all slots. Without one,
    in plain calls of the same model, this is transformers' sdpa, which has no soft-capped scores and no sinks.
    """
    known = getattr(module, "layer_layout", None)
    if torch.compiler.is_compiling() and isinstance(known, LayerLayout):  # the operator calls this again
        return torch.ops.crossdraft.attend(query, key, value, module.place, scaling, softcap, s_aux), None
    layout = known.current if isinstance(known, LayerLayout) else None
    if layout is not None:
        scores = Scores(scaling, softcap, s_aux)
        parts = [_group(group, query[0], key[0], value[0], scores) for group in layout]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None
    if softcap is not None or s_aux is not None:
        raise ValueError("plain calls of a model with soft-capped scores or sinks need its eager attention")
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


@dataclass(frozen=True, eq=False)
class Scores:
    """What becomes of products of queries and keys before they are weights."""

    scaling: float | None = None  # None: one by the root of the width
    softcap: float | None = None  # they are capped to +-softcap (Gemma 2, arXiv 2408.00118, section 2)
    sinks: Tensor | None = None  # (heads,), one score more for each head, of no value (gpt-oss)


def _group(group: Group, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
    """Shape (tokens of the group, heads, width)."""
    heads, key_heads = len(query), len(key)
    share = heads // key_heads
    asked = query[:, group.begin : group.end] if group.rows is None else query.index_select(1, group.rows)
    if share == 1:
        folded = asked.view(heads, group.count, group.width, -1).transpose(0, 1)
    else:  # query heads that have the same keys become rows of one head: (sessions, key heads, rows * share, width)
        split = asked.view(key_heads, share, group.count, group.width, -1)
        folded = split.permute(2, 0, 3, 1, 4).reshape(group.count, key_heads, group.width * share, -1)
    keys, values = (group.keys.of(layer, group.count, group.used) for layer in (key, value))
    if how.softcap is None and how.sinks is None:
        seen = scaled_dot_product_attention(folded, keys, values, group.folded(share), scale=how.scaling)
    else:
        seen = _by_blocks(folded, keys, values, group.folded(share), how)
    result = seen.transpose(1, 2)
    if share > 1:
        result = result.view(group.count, group.width, share, key_heads, -1).transpose(2, 3)
    result = result.reshape(group.count * group.width, heads, -1)
    return result if group.cells is None else result.index_select(0, group.cells)


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Scores) -> Tensor:
    """What no kernel computes on a CPU, for as many rows at a time as SCORES allows."""
    count, heads, rows, _ = query.shape
    most = max(1, SCORES // (count * heads * key.shape[2]))
    sinks = None if how.sinks is None else how.sinks.view(heads, -1).repeat(1, rows * heads // len(how.sinks))
    parts = []
    for begin in range(0, rows, most):
        block = slice(begin, begin + most)
        scores = query[:, :, block] @ key.transpose(2, 3)
        scores = scores * (query.shape[-1] ** -0.5 if how.scaling is None else how.scaling)
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        if mask is not None:
            scores = scores + mask[:, :, block]
        if sinks is not None:
            aside = sinks[None, :, block, None].expand(count, -1, -1, -1).to(scores.dtype)
            scores = torch.cat((scores, aside), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        parts.append(weights[..., : key.shape[2]] @ value)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
