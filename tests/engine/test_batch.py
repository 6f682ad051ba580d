"""What the numbers of a forward say."""

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.engine.attention import Window
from crossdraft.engine.batch import Numbers, following_numbers, numbers_of, too_large
from crossdraft.engine.kv_cache_manager import size_for
from crossdraft.engine.requests import NO_TREE, CachedTokens, Extent, InputTokens, common_prefix, plan_inputs
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import MOST_NODES, ROOT, TokenTree

NOBODYS = 9999


def piece(held: int, text: int = 1, tree: TokenTree = NO_TREE, start: int = 0) -> InputTokens:
    """A session of so many tokens that goes on with some more and a tree."""
    context = tuple(range(held + text))
    inputs = plan_inputs(CachedTokens(context[:held]), Request(start, context, tree))
    inputs.extents = [Extent(start, size_for(len(context) + len(tree)))]
    return inputs


def chain(nodes: int) -> TokenTree:
    return TokenTree((7,) * nodes, tuple(range(ROOT, nodes - 1)))


WINDOWS = (None, Window(9), Window(7, chunked=True))


def one_token(place: int, base: int, start: int) -> InputTokens:
    """The token with this number in a session; layers with a window have it from `base` on."""
    extents = Extent(start, 128), Extent(start + 4096, 64, base)
    return InputTokens([0], [place], [place], (0,), place + 1, NO_TREE, extents=extents)


@given(*[st.lists(st.integers(0, 2), max_size=12).map(tuple)] * 3)
def test_a_common_prefix_is_as_long_as_the_ids_are_equal(
    first: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    pairs = zip((*first, *one, None), (*first, *other), strict=False)
    equal = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    assert common_prefix((*first, *one), (*first, *other)) == equal


@given(st.lists(st.tuples(st.integers(20, 60), st.integers(0, 20)), min_size=1, max_size=4), st.integers(1, 6))
def test_the_numbers_that_follow_are_those_of_the_tokens_after(places: list[tuple[int, int]], steps: int) -> None:
    def numbers(step: int) -> tuple[list[InputTokens], Numbers]:
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
