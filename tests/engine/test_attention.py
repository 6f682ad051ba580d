"""Groups of sessions, and attention over a layout against one softmax a token."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from crossdraft.engine import attention, requests
from crossdraft.engine import batch as batches
from crossdraft.engine.attention import Layout, Scores, Window, attend
from crossdraft.engine.requests import NO_TREE, CachedTokens, Extent, InputTokens, common_prefix, plan_inputs
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import MOST_NODES, ROOT, TokenTree, tree_of
from tests.engine.taped import by_marks
from tests.engine.tiny import examples

CPU = torch.device("cpu")
KERNEL = attention._by_kernel  # in its interpreter
WINDOWS = (None, Window(5), Window(6, chunked=True))
PLACES = 2048


def piece(number: int, start: int, size: int, held: int, tree: TokenTree = NO_TREE, text: int = 1) -> InputTokens:
    """A session of so many tokens that goes on with some more and a tree."""
    context = (0,) * (held + text)
    inputs = plan_inputs(CachedTokens(context[:held]), Request(number, context, tree))
    inputs.extents = [Extent(start, size)]
    return inputs


def starts(pieces: list[InputTokens], heads: int = 4) -> list[list[int]]:
    return [[one.extents[0].start for one in group] for group in batches.grouped(pieces, heads)]


def test_extents_of_one_size_at_equal_distances_are_one_group() -> None:
    row = [piece(n, 128 * n, 128, 100) for n in (5, 3, 1, 7)]
    assert starts(row) == [[128, 384, 640, 896]]
    others = [piece(9, 128 * 8, 128, 100), piece(10, 128 * 9, 128, 100)]
    assert starts([*row, *others]) == [[128, 384, 640, 896], [1024, 1152]]
    assert starts([*row, piece(9, 128 * 9, 64, 60)]) == [[1152], [128, 384, 640, 896]]


def test_long_pieces_attend_alone_and_wide_ones_with_their_like() -> None:
    wide = tree_of([tuple(range(30))], 40)
    long = [piece(n, 256 * n, 256, 20, text=batches.ALONE + 1) for n in (0, 1)]
    assert starts([*long, piece(2, 512, 256, 200), piece(3, 768, 256, 200, wide)]) == [[0], [256], [512], [768]]


def test_a_much_shorter_session_attends_apart() -> None:
    short, others = piece(0, 0, 512, 260), [piece(n, 512 * n, 512, 500) for n in (1, 2)]
    assert starts([short, *others], heads=1) == [[0, 512, 1024]]
    assert starts([short, *others], heads=batches.CALL) == [[0], [512, 1024]]


def sessions(data: st.DataObject, most: int = 6, longest: int = 40) -> list[InputTokens]:
    sizes = data.draw(st.lists(st.sampled_from([64, 64, 128]), min_size=1, max_size=most))
    trees = [TokenTree(), tree_of([(1, 2, 3), (1, 4), (5,)], 9), TokenTree((1, 2, 3), (ROOT, 0, 1))]
    pieces: list[InputTokens] = []
    for number, size in enumerate(sizes):
        held, text = data.draw(st.tuples(st.integers(0, size - 48), st.integers(1, longest)))
        place = 128 * data.draw(st.sampled_from([number, number, 2 * number]))
        if all(place + size <= one.extents[0].start or one.extents[0].end <= place for one in pieces):
            pieces.append(piece(number, place, size, held, data.draw(st.sampled_from(trees)), text))
    return pieces


def check(
    data: st.DataObject, layouts: Sequence[Layout | Tensor], slices: Sequence[InputTokens], spoilt: bool = False
) -> None:
    """Compares attention of slices, in order of their tokens, and of padding after them, with one softmax a token.

    There is a layout for each of WINDOWS; where it is `spoilt`, what no slice may read is NaN.
    """
    key_heads, share, width = data.draw(st.sampled_from([(1, 1, 8), (2, 1, 8), (2, 2, 8), (1, 4, 16), (3, 3, 8)]))
    number = data.draw(st.integers(0, len(WINDOWS) - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    key, value = (torch.randn(1, key_heads, PLACES, width, generator=generator) for _ in range(2))
    if spoilt:
        own = [range(one.extents[0].start, one.extents[0].start + one.used()) for one in slices]
        others = torch.tensor([slot for slot in range(PLACES) if not any(slot in each for each in own)])
        key[:, :, others] = value[:, :, others] = torch.nan
    tokens = sum(one.count for one in slices)
    layout, padding = layouts[number], 0
    if isinstance(layout, Tensor):
        padding = layout.shape[1] - tokens
    query = torch.randn(1, tokens + padding, key_heads * share, width, generator=generator).transpose(1, 2)
    sinks = data.draw(st.sampled_from([None, torch.randn(key_heads * share, generator=generator)]))
    how = Scores(0.4, data.draw(st.sampled_from([None, 1.5])), sinks)
    module = nn.Module()
    module.layer_layout = layout
    with patch.object(attention, "SCORES", data.draw(st.sampled_from([100, attention.SCORES]))):
        found, _ = attend(module, query, key, value, None, scaling=0.4, softcap=how.softcap, s_aux=sinks)
    assert found.shape == (1, tokens + padding, key_heads * share, width)
    expected = _expected(tuple(slices), query[0, :, :tokens], key[0], value[0], how, WINDOWS[number])
    torch.testing.assert_close(found[0, :tokens], expected, atol=1e-5, rtol=0)
    assert not found[0, tokens:].any()


@settings(max_examples=examples(25, 100))
@given(st.data())
def test_every_token_attends_to_what_it_sees(data: st.DataObject) -> None:
    batch = batches.batch_of(sessions(data), data.draw(st.sampled_from([1, batches.CALL])), torch.float32, CPU, WINDOWS)
    check(data, batch.layouts, batch.slices)
    (mapping,) = batch.slot_mappings
    target = torch.arange(PLACES)[mapping] if isinstance(mapping, slice) else mapping
    assert target.tolist() == [one.extents[0].start + place for one in batch.slices for place in one.places]


def marks_of(slices: Sequence[InputTokens], padding: int) -> tuple[Tensor, ...]:
    tokens = sum(one.count for one in slices) + padding
    numbers = batches.numbers_of(slices, tokens, WINDOWS, [PLACES - 1] * len(WINDOWS))
    return batches.StepInputs.of(torch.from_numpy(numbers)).marks


@settings(max_examples=examples(25, 100))
@given(st.data(), st.integers(0, 3))
def test_every_token_attends_to_what_its_marks_say(data: st.DataObject, padding: int) -> None:
    slices = sessions(data)
    check(data, marks_of(slices, padding), slices, spoilt=True)


@settings(max_examples=examples(8, 60))
@given(st.data(), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_the_kernel_does_too(data: st.DataObject, padding: int, parts: int) -> None:
    """In Triton's interpreter."""
    slices = sessions(data, most=3, longest=12)
    with patch.object(attention, "_by_kernel", KERNEL), patch.object(attention, "PARTS", parts):
        check(data, marks_of(slices, padding), slices, spoilt=True)


def test_the_kernel_hides_no_key_that_is_not_finite() -> None:
    """What a token computes of it must not look computed."""
    (marks, *_), draw = marks_of([piece(0, 0, 64, 20, text=1)], 0), torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, count, 8, generator=draw) for count in (1, PLACES, PLACES))
    key[:, 5] = torch.nan
    for sinks, parts in itertools.product((None, torch.zeros(2)), (1, 4)):
        with patch.object(attention, "PARTS", parts):
            assert KERNEL(query, key, value, marks, Scores(sinks=sinks)).isnan().all()


def test_keys_and_values_are_written_by_one_kernel() -> None:
    """In Triton's interpreter; of what is a view, and of different widths."""
    draw = torch.Generator().manual_seed(3)
    key, value = (torch.randn(1, 4, 3, width, generator=draw).transpose(1, 2) for width in (8, 5))
    slots = torch.tensor([7, 2, 9, 4])
    written = [(torch.zeros(1, 3, 12, 8), torch.zeros(1, 3, 12, 5)) for _ in range(2)]
    attention._write_by_kernel(*written[0], slots, key, value)
    attention.write_slots(*written[1], slots, key, value)
    for found, expected in zip(*written, strict=True):
        assert found.any()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
def test_the_kernel_divides_a_long_context(dtype: torch.dtype, apart: float, parts: int) -> None:
    """Widths are no powers of two and differ, and there are more heads than a tile has."""
    text, tree = piece(0, 0, 1024, 900, tree_of([(1, 2, 3), (1, 4)], 9)), piece(1, 1024, 64, 20, text=3)
    (marks, *_), draw = marks_of([text, tree], 2), torch.Generator().manual_seed(3)
    key, value = (torch.randn(1, PLACES, width, generator=draw).to(dtype) for width in (24, 20))
    query = torch.randn(10, marks.shape[1], 24, generator=draw).to(dtype)
    how = Scores(sinks=torch.randn(10, generator=draw).to(dtype))
    with patch.object(attention, "PARTS", parts):
        found = KERNEL(query, key, value, marks, how)
    torch.testing.assert_close(found, by_marks(query, key, value, marks, how), atol=apart, rtol=0)


FOR_A_GPU = """
import sys
from unittest.mock import Mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
# No kernel needs it, and its import takes longer than all of this.
sys.modules.update({f"transformers{part}": Mock() for part in ("", ".integrations.sdpa_attention", ".masking_utils")})
from crossdraft.engine import attention

def shared(kernel, pointers, fixed):
    types = {one.name: pointers.get(one.name, "constexpr" if one.name in fixed else "i32") for one in kernel.params}
    made = triton.compile(ASTSource(kernel, types, fixed), target=GPUTarget("cuda", 90, 32), options={"num_stages": 2})
    assert made.asm["cubin"]
    return made.metadata.shared

own = {name: "*fp32" for name in ("sums", "peaks", "totals")} | {"marks": "*i64"}
names = ("query", "key", "value", "keys", "values", "sinks", "found")
given = {name: "*bf16" for name in names} | {"scaling": "fp32", "softcap": "fp32", "slots": "*i64"}
sizes = {"tile": 8, "together": 4, "read": 64, "wide_key": 128, "wide_value": 128, "sinking": True}
for whole in (True, False):
    assert shared(attention._attend_part, own | given, sizes | {"whole": whole}) < 99 << 10
assert shared(attention._add_parts, own | given, {"sinking": True, "most": 32, "wide_value": 128}) < 99 << 10
assert shared(attention._write, given, {"wide": 128}) == 0
"""


def test_the_kernels_are_code_for_a_gpu() -> None:
    """Triton makes it without one, not in a process that interprets kernels, and is stricter about their types."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", FOR_A_GPU], env=environment, check=True)


def _expected(
    pieces: tuple[InputTokens, ...], query: Tensor, key: Tensor, value: Tensor, how: Scores, window: Window | None
) -> Tensor:
    """Token by token and head by head."""
    rows = []
    for one in pieces:
        for seen in torch.from_numpy(batches.visible([one], one.count, one.used(), window)[0]):
            places = one.extents[0].start + seen.nonzero()[:, 0]
            heads = []
            for head, asked in enumerate(query[:, len(rows)]):
                mine = head // (len(query) // len(key))
                scores = key[mine, places] @ asked * 0.4
                scores = scores if how.softcap is None else torch.tanh(scores / how.softcap) * how.softcap
                aside = torch.zeros(0) if how.sinks is None else how.sinks[head, None]
                heads.append(torch.softmax(torch.cat((scores, aside)), 0)[: len(places)] @ value[mine, places])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_without_a_layout_it_is_ordinary_causal_attention() -> None:
    module = nn.Module()
    module.num_key_value_groups = 2  # as attention modules of transformers have it
    draw = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, heads, 5, 8, generator=draw) for heads in (4, 2, 2))
    found, _ = attend(module, query, key, value, None, scaling=0.4)
    expected = _expected((piece(0, 0, 64, 0, text=5),), query[1], key[1], value[1], Scores(), None)
    torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="need its eager attention"):
        attend(module, query, key, value, None, softcap=2.0)


# What the numbers of a forward say.


@given(*[st.lists(st.integers(0, 2), max_size=12).map(tuple)] * 3)
def test_a_common_prefix_is_as_long_as_the_ids_are_equal(first, one, other):
    pairs = zip((*first, *one, None), (*first, *other), strict=False)
    equal = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    assert common_prefix((*first, *one), (*first, *other)) == equal


@pytest.mark.parametrize("held", [(1, 2, 3), (1, 9, 3), (1, 2), ()])
def test_what_a_context_was_made_of_is_believed_of_this_very_tuple_only(held: tuple[int, ...]) -> None:
    """Then it saves a comparison, and changes nothing."""
    before, tree = tuple(range(1, 4)), TokenTree.chain((4, 5, 6))  # no constant: those may be one tuple
    asked = Request(0, (*before, 4, 7), TokenTree.chain((8,)), grown_from=before)
    for ids in (before, held):
        cached = CachedTokens(ids, tree)
        with patch.object(requests, "common_prefix", Mock(wraps=common_prefix)) as compared:
            plan = plan_inputs(cached, asked)
        assert ((ids, asked.context) in [call.args for call in compared.mock_calls]) == (ids is not before)
        assert vars(plan) == vars(plan_inputs(cached, replace(asked, grown_from=None)))


@given(st.lists(st.tuples(st.integers(20, 60), st.integers(0, 20)), min_size=1, max_size=4), st.integers(1, 6))
def test_the_numbers_that_follow_are_those_of_the_tokens_after(places: list[tuple[int, int]], steps: int) -> None:
    """Layers with a window have their tokens from a base on."""
    extents = [(Extent(128 * at, 128), Extent(128 * at + 4096, 64, base)) for at, (_, base) in enumerate(places)]
    tokens, rest = batches.NextTokens([place for place, _ in places], extents), (len(places) + 2, WINDOWS, [9999] * 3)
    found = tokens.numbers(*rest, steps)
    assert len(found) == steps
    for step, later in enumerate(found):
        np.testing.assert_array_equal(later, batches.numbers_of(tokens.slices(step), *rest))


def test_a_tree_with_more_nodes_than_a_number_has_bits_is_too_large_and_a_chain_is_not() -> None:
    text, chain = piece(0, 0, 128, 9), TokenTree.chain((7,) * (MOST_NODES + 1))
    trees = [TokenTree((1,) * nodes, (ROOT,) * nodes) for nodes in (63, MOST_NODES + 1)]
    assert not batches.too_large([piece(1, 0, 128, 9, chain), piece(2, 0, 128, 3, trees[0])])
    assert batches.too_large([text, piece(1, 0, 128, 9, trees[1])])
