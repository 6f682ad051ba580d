"""Attention over a flat batch: the tokens of many sessions one after another, keys and values read where they lie.

Registered with transformers as an attention implementation. On a CPU sessions whose extents lie at equal distances are
one strided view of the KV cache, so that a batch takes a few calls of the ordinary kernel. On a GPU one kernel reads
for each token what its *marks* say: its shape is the number of tokens alone, so that a forward can be captured as a
CUDA graph. Neither copies a key. Layers with a window have a layout of their own, which begins where the window does.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if torch.version.cuda or "TRITON_INTERPRET" in os.environ:
    import triton  # torch brings it for CUDA; nothing else needs it
    import triton.language as tl
else:
    triton = None

constexpr: Any = int if triton is None else tl.constexpr  # a number that a kernel is compiled for
KERNEL_FAILURES = () if triton is None else (triton.TritonError,)  # a device that has too little for the kernel
NAME = "crossdraft"  # of the implementation, in a model's configuration
SCORES = 1 << 26  # that exist at a time, where no kernel computes them block by block
TILE = 8  # tokens of one session that read their keys together, at most
PARTS = 32  # that a context is divided into, at most, where there are few tokens; a power of two
SPREAD = 1024  # programs that a device runs at once, about
Position = TypeVar("Position", int, NDArray[np.int64], Tensor)
Row = TypeVar("Row", NDArray[np.int64], Tensor)


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
class Group:
    """Sessions that attend together: token i of session n is row (n, i) of the kernel's batch."""

    begin: int  # their tokens in the flat batch, from and to
    end: int
    count: int  # sessions
    width: int  # rows of each, padding included
    used: int  # slots of each that any of their tokens sees
    keys: Strided  # where their keys and values are
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


class Marks(NamedTuple, Generic[Row]):
    """What each token of a flat batch sees, int64 (tokens,); slots are those of the KV cache, bits those of a tree."""

    targets: Row  # the slot that its key and value are written to
    blocks: Row  # so many tokens of a session begin here, up to TILE; -1: it is one of these; 0: padding, sees nothing
    firsts: Row  # it sees the slots from this one on
    limits: Row  # ... to before this one,
    bases: Row  # ... and from here on, where a tree begins,
    lines: Row  # ... those whose bits are set


Layout = tuple[Group, ...]  # what the tokens of one flat batch see; groups follow each other


# The attribute of an attention module that says what its tokens see in the forward that is running, a Layout or Marks
# (6, tokens); None: a plain call. Keyword arguments would not do: some models keep them from their attention modules.
LAYOUT = "layer_layout"


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
    if torch.compiler.is_compiling() and hasattr(module, "place"):  # the operator calls this again
        return torch.ops.crossdraft.attend(query, key, value, module.place, scaling, softcap, s_aux), None
    layout: Layout | Tensor | None = getattr(module, LAYOUT, None)
    if isinstance(layout, Tensor):
        return attend_slots(query[0], key[0], value[0], layout, scaling, softcap, s_aux)[None], None
    if layout is not None:
        how = Scores(scaling, softcap, s_aux)
        parts = [_group(group, query[0], key[0], value[0], how) for group in layout]
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


@torch.library.custom_op("crossdraft::attend_slots", mutates_args=())
def attend_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    marks: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of tokens, (heads, tokens, width), over all slots, (key heads, slots, width): (tokens, heads, width).

    `marks` are `Marks`, int64 (6, tokens), and the others as in `Scores`.
    """
    return _by_kernel(query, key, value, marks, Scores(scaling, softcap, sinks))


@attend_slots.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, marks: Tensor, *how: Any) -> Tensor:
    return query.new_empty(query.shape[1], len(query), value.shape[2])


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, marks: Tensor, how: Scores) -> Tensor:
    (heads, tokens, width), key_heads, out = query.shape, len(key), value.shape[2]
    share = heads // key_heads
    together = min(TILE, max(2, triton.next_power_of_2(share)))  # query heads; the rows of a product are at least 16
    programs = tokens * key_heads * -(-share // together)
    # Where there are few programs a context is divided, so that all of the device reads it.
    parts = max(1, min(PARTS, triton.next_power_of_2(SPREAD // programs)))
    found = value.new_empty(tokens, heads, out)
    sums = peaks = totals = found  # of the parts, where there are several
    if parts > 1:
        sums = torch.empty(parts, tokens, heads, out, dtype=torch.float32, device=query.device)
        peaks, totals = torch.empty(2, parts, tokens, heads, dtype=torch.float32, device=query.device)
    wide_key, wide_value = (max(16, triton.next_power_of_2(size)) for size in (width, out))
    read = max(16, min(64, (1 << 14) // (max(wide_key, wide_value) * key.itemsize)))  # slots at a time: 16 KiB of keys
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    strides = [tensor.stride(axis) for tensor in (query, key, value) for axis in (0, 1)]
    sizes = (tokens, share, width, out, *strides)
    scaling, softcap = width**-0.5 if how.scaling is None else how.scaling, how.softcap or 0.0
    sinking = how.sinks is not None
    with torch.cuda.device_of(query):
        _attend_part[tokens, key_heads * -(-share // together), parts](
            *(query, key, value, marks, sums, peaks, totals, how.sinks, found, scaling, softcap, *sizes),
            *(TILE, together, read, wide_key, wide_value, parts == 1, sinking),
            num_stages=2,
        )
        if parts > 1:
            _add_parts[tokens, heads](
                sums, peaks, totals, how.sinks, found, tokens, parts, out, sinking, PARTS, wide_value
            )
    return found


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Writes keys and values, (1, heads, tokens, width), to slots, int64 (tokens,), of (1, heads, slots, width).

    On CUDA by one kernel, as a step writes those of each layer.
    """
    if not keys.is_cuda:
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)
        return
    with torch.cuda.device_of(keys):
        _write_by_kernel(keys, values, slots, key, value)


def _write_by_kernel(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    strides = [tensor.stride(axis) for tensor in (keys, values, key, value) for axis in (1, 2)]
    widths = key.shape[3], value.shape[3]
    wide = triton.next_power_of_2(max(widths))
    key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (key, value))
    _write[key.shape[2], key.shape[1]](keys, values, slots, key, value, *strides, *widths, wide)


def _jit(function: Any) -> Any:
    """A kernel of Triton's, which is run for each part of a grid; no argument is worth another program."""
    if triton is None:
        return function
    return triton.jit(
        function, do_not_specialize=["tokens", "parts"], do_not_specialize_on_alignment=["marks", "slots"]
    )


@_jit
def _seen(slots, firsts, limits, bases, lines):  # type: ignore[no-untyped-def]
    """Which of some slots each row sees, (rows, slots), by its marks."""
    nodes = slots[None] - bases[:, None]
    bits = (lines[:, None] >> tl.minimum(tl.maximum(nodes, 0), 63)) & 1
    before = (slots[None] >= firsts[:, None]) & (slots[None] < limits[:, None])
    return before | ((nodes >= 0) & (nodes < 64) & (bits != 0))


@_jit
def _with_sink(peak, total, summed, sink):  # type: ignore[no-untyped-def]
    """The same over one score more of each row, which has no value."""
    higher = tl.maximum(peak, sink)
    kept = tl.exp(peak - higher)
    return total * kept + tl.exp(sink - higher), summed * kept[:, None]


@_jit
def _attended(  # type: ignore[no-untyped-def]
    asked, key, value, begin, end, firsts, limits, bases, lines, scaling, softcap, width, out, key_slot, value_slot,
    read: constexpr, wide_key: constexpr, wide_value: constexpr,
):  # fmt: skip
    """Of each row: the peak of the scores of slots from `begin` to `end`, the sum of their weights, and of values."""
    key_places, value_places = tl.arange(0, wide_key), tl.arange(0, wide_value)
    peak = tl.full((asked.shape[0],), -1e30, tl.float32)  # finite: rows that see nothing here have no NaN
    total, summed = tl.zeros((asked.shape[0],), tl.float32), tl.zeros((asked.shape[0], wide_value), tl.float32)
    for start in range(begin, end, read):
        slots = start + tl.arange(0, read)
        there = (slots < end)[:, None]  # others' slots may hold NaN, which no mask hides
        keys = tl.load(key + (slots * key_slot)[:, None] + key_places, there & (key_places < width), 0.0)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scaling
        if softcap > 0:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        scores = tl.where(_seen(slots, firsts, limits, bases, lines), scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        peak, total = higher, total * kept + tl.sum(weights, 1)
        values = tl.load(value + (slots * value_slot)[:, None] + value_places, there & (value_places < out), 0.0)
        summed = summed * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, total, summed


@_jit
def _attend_part(  # type: ignore[no-untyped-def]
    query, key, value, marks, sums, peaks, totals, sinks, found,
    scaling, softcap,
    tokens, share, width, out, query_head, query_token, key_head, key_slot, value_head, value_slot,
    tile: constexpr, together: constexpr, read: constexpr,
    wide_key: constexpr, wide_value: constexpr, whole: constexpr, sinking: constexpr,
):  # fmt: skip
    """One block of tokens, some query heads of one key head, a part of what they see (online softmax), or all of it."""
    token, part, parts = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    count = tl.load(marks + tokens + token)
    if count < 0:
        return
    kinds = tl.cdiv(share, together)
    key_number = (tl.program_id(1) // kinds).to(tl.int64)
    rows = tl.arange(0, tile * together)
    own = tl.program_id(1) % kinds * together + rows % together
    live = (rows // together < tl.maximum(count, 1)) & (own < share)
    heads, mine = key_number * share + own, marks + token + rows // together
    targets = tl.load(mine, live, -1)
    firsts = tl.load(mine + 2 * tokens, live, 1 << 60)
    begin = tl.min(firsts, 0)
    end = tl.where(count > 0, tl.max(targets, 0) + 1, begin)  # padding sees nothing
    size = tl.cdiv(tl.maximum(tl.cdiv(end - begin, parts), 2 * read), read) * read
    begin += part * size
    end = tl.minimum(begin + size, end)
    at = (token + rows // together).to(tl.int64) * (tl.num_programs(1) // kinds * share) + heads
    if not whole:
        at += part.to(tl.int64) * tokens * (tl.num_programs(1) // kinds * share)
        if begin >= end:
            tl.store(totals + at, 0.0, live)
            return
    limits, bases = tl.load(mine + 3 * tokens, live, 0), tl.load(mine + 4 * tokens, live, 0)
    lines = tl.load(mine + 5 * tokens, live, 0)
    key_places, value_places = tl.arange(0, wide_key), tl.arange(0, wide_value)
    at_query = heads * query_head + (token + rows // together) * query_token
    asked = tl.load(query + at_query[:, None] + key_places, live[:, None] & (key_places < width), 0.0)
    peak, total, summed = _attended(
        asked, key + key_number * key_head, value + key_number * value_head, begin, end, firsts, limits, bases, lines,
        scaling, softcap, width, out, key_slot, value_slot, read, wide_key, wide_value,
    )  # fmt: skip
    if whole:
        if sinking:
            total, summed = _with_sink(peak, total, summed, tl.load(sinks + heads, live, 0.0).to(tl.float32))
        result = (summed / tl.where(total != 0, total, 1.0)[:, None]).to(found.dtype.element_ty)  # not 0: NaN stays
        tl.store(found + at[:, None] * out + value_places, result, live[:, None] & (value_places < out))
    else:
        tl.store(peaks + at, peak, live)
        tl.store(totals + at, total, live)
        tl.store(sums + at[:, None] * out + value_places, summed, (live & (total != 0))[:, None] & (value_places < out))


@_jit
def _add_parts(  # type: ignore[no-untyped-def]
    sums, peaks, totals, sinks, found, tokens, parts, out,
    sinking: constexpr, most: constexpr, wide_value: constexpr,
):  # fmt: skip
    """What one head of one token sees in all; zeros for padding."""
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    numbers, places = tl.arange(0, most), tl.arange(0, wide_value)
    at = (numbers.to(tl.int64) * tokens + token) * heads + head
    total = tl.load(totals + at, numbers < parts, 0.0)
    some = total != 0  # not 0: what is NaN stays it
    peak = tl.load(peaks + at, some, -1e30)
    highest = tl.max(peak, 0)
    if sinking:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weights = tl.where(some, tl.exp(peak - highest), 0.0)
    part = tl.load(sums + at[:, None] * out + places, some[:, None] & (places < out), 0.0)
    whole = tl.sum(total * weights, 0)
    if sinking:
        whole += tl.exp(sink - highest)
    result = tl.sum(part * weights[:, None], 0) / tl.where(whole != 0, whole, 1.0)
    at = (token.to(tl.int64) * heads + head) * out
    tl.store(found + at + places, result.to(found.dtype.element_ty), places < out)


@_jit
def _write(  # type: ignore[no-untyped-def]
    keys, values, slots, key, value,
    keys_head, keys_slot, values_head, values_slot, key_head, key_token, value_head, value_token,
    key_width, value_width, wide: constexpr,
):  # fmt: skip
    """The key and value of one token in one head."""
    token, head, places = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, wide)
    slot = tl.load(slots + token)
    own = tl.load(key + head * key_head + token * key_token + places, places < key_width)
    tl.store(keys + head * keys_head + slot * keys_slot + places, own, places < key_width)
    own = tl.load(value + head * value_head + token * value_token + places, places < value_width)
    tl.store(values + head * values_head + slot * values_slot + places, own, places < value_width)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
