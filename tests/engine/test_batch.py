"""What the numbers of a forward say."""

from itertools import accumulate

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.engine.attention import TILE, Marks, Window
from crossdraft.engine.batch import (
    BatchSlice,
    Numbers,
    StepInputs,
    following_numbers,
    numbers_of,
    too_large,
    visible,
    wanted_tokens,
)
from crossdraft.engine.kv_cache_manager import Extent, size_for
from crossdraft.engine.requests import NO_TREE, CachedTokens, InputTokens, plan_inputs
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import MOST_NODES, ROOT, TokenTree, tree_of

NOBODYS = 9999


def piece(held: int, text: int = 1, tree: TokenTree = NO_TREE, start: int = 0) -> BatchSlice:
    """A session of so many tokens that goes on with some more and a tree."""
    context = tuple(range(held + text))
    inputs = plan_inputs(CachedTokens(context[:held]), Request(start, context, tree))
    return BatchSlice(Extent(start, size_for(len(context) + len(tree))), inputs)


def chain(nodes: int) -> TokenTree:
    return TokenTree((7,) * nodes, tuple(range(ROOT, nodes - 1)))


TREES = [
    NO_TREE,
    chain(3),
    chain(MOST_NODES),
    tree_of([(1, 2, 3), (1, 4), (5,)], 9),
    TokenTree((1, 2, 3), (ROOT, ROOT, 0)),
]


WINDOWS = (None, Window(9), Window(7, chunked=True))


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30), st.sampled_from(TREES)), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_the_numbers_say_what_each_token_sees(sessions: list[tuple[int, int, TokenTree]], padding: int) -> None:
    pieces = [piece(held, text, tree, 256 * number) for number, (held, text, tree) in enumerate(sessions)]
    tokens = sum(one.count for one in pieces)
    numbers = numbers_of(pieces, tokens + padding, WINDOWS, [NOBODYS] * len(WINDOWS))
    inputs = StepInputs.of(torch.from_numpy(numbers))
    assert inputs.ids[:tokens].tolist() == [id_ for one in pieces for id_ in one.inputs.tokens]
    wanted = wanted_tokens(pieces)
    assert (numbers[2, : len(wanted)] == wanted).all()
    for window, rows in zip(WINDOWS, inputs.marks, strict=True):
        marks, token = Marks(*rows.numpy()), 0
        for one in pieces:
            (seen,) = visible([one], one.count, one.used, window)
            blocks = marks.blocks[token : token + one.count]
            assert [*accumulate(int(size) for size in blocks if size > 0)] == [
                *np.flatnonzero(blocks[1:] > 0) + 1,
                one.count,
            ]
            assert blocks.max() <= TILE
            for sees, slot in zip(seen, one.inputs.slots, strict=True):
                line = {marks.bases[token] + bit for bit in range(MOST_NODES) if int(marks.lines[token]) >> bit & 1}
                found = {*range(marks.firsts[token], marks.limits[token]), *line}
                assert {slot - one.extent.start for slot in found} == {*np.flatnonzero(sees)}
                assert max(found) <= marks.targets[token] == one.extent.start + slot
                token += 1
        assert (marks.targets[tokens:] == NOBODYS).all()
        assert not marks.blocks[tokens:].any()


def one_token(place: int, base: int, start: int) -> BatchSlice:
    """The token with this number in a session; layers with a window have it from `base` on."""
    inputs = InputTokens([0], [place], [place], (0,), place + 1, NO_TREE)
    apart = InputTokens([0], [place], [place - base], (0,), place - base + 1, NO_TREE, base=base)
    return BatchSlice(Extent(start, 128), inputs, BatchSlice(Extent(start + 4096, 64), apart))


@given(st.lists(st.tuples(st.integers(20, 60), st.integers(0, 20)), min_size=1, max_size=4), st.integers(1, 6))
def test_the_numbers_that_follow_are_those_of_the_tokens_after(places: list[tuple[int, int]], steps: int) -> None:
    def numbers(step: int) -> tuple[list[BatchSlice], Numbers]:
        slices = [one_token(place + step, base, 128 * at) for at, (place, base) in enumerate(places)]
        return slices, numbers_of(slices, len(slices) + 2, WINDOWS, [NOBODYS] * len(WINDOWS))

    slices, first = numbers(0)
    found = following_numbers(first, slices, WINDOWS, steps)
    assert len(found) == steps
    for step, later in enumerate(found):
        np.testing.assert_array_equal(later, numbers(step)[1])


def test_a_tree_with_more_nodes_than_a_number_has_bits_is_too_large_and_a_chain_is_not() -> None:
    assert not too_large(
        [piece(9, tree=chain(MOST_NODES + 1)), piece(3, tree=TokenTree((1,) * MOST_NODES, (ROOT,) * 63))]
    )
    assert too_large([piece(9), piece(9, tree=TokenTree((1,) * (MOST_NODES + 1), (ROOT,) * (MOST_NODES + 1)))])
