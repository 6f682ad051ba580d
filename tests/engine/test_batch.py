"""Buckets: shapes that are few, and what the numbers of a forward say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.engine.attention import Window
from crossdraft.engine.batch import FREE, TOKENS, WASTE, BatchSlice, Bucket, Sections, bucket_of, visible
from crossdraft.engine.kv_cache_manager import Extent, size_for
from crossdraft.engine.requests import NO_TREE, CachedTokens, plan_inputs
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


@pytest.mark.parametrize(
    ("pieces", "bucket"),
    [
        ([piece(9)], Bucket(1, 1, 4, 128)),
        ([piece(9, tree=chain(5))], Bucket(8, 1, 8, 128)),
        ([piece(200, tree=chain(16))], Bucket(32, 1, 24, 256)),
        ([piece(100)] * 16, Bucket(16, 16, 4, 128)),
        ([piece(100, tree=chain(4))] * 3 + [piece(500)], Bucket(16, 4, 8, 512)),
        ([piece(0, 200)], Bucket(256, 16, 24, 256)),
        ([piece(0, TOKENS)], Bucket(256, 16, 24, 256)),
    ],
)
def test_shapes_are_rounded_up(pieces: list[BatchSlice], bucket: Bucket) -> None:
    assert bucket_of(pieces) == bucket


def test_what_is_better_as_it_is() -> None:
    assert bucket_of([piece(0, TOKENS + 1)]) is None
    assert bucket_of([piece(9, tree=chain(MOST_NODES + 1))]) is None
    assert bucket_of([piece(9, tree=chain(MOST_NODES))]) is not None
    long, short = piece(2047), piece(9)
    assert bucket_of([long] + [short] * (FREE // 2048 - 1)) is not None
    assert bucket_of([long] + [short] * (4 * FREE // 2048)) is None  # WASTE times what is seen, and more
    assert bucket_of([long] * (WASTE * FREE // 2048)) is not None


TREES = [
    NO_TREE,
    chain(3),
    chain(MOST_NODES),
    tree_of([(1, 2, 3), (1, 4), (5,)], 9),
    TokenTree((1, 2, 3), (ROOT, ROOT, 0)),
]


WINDOWS = (None, Window(9), Window(7, chunked=True))


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30), st.sampled_from(TREES)), min_size=1, max_size=5))
def test_the_numbers_say_what_each_token_sees(sessions: list[tuple[int, int, TokenTree]]) -> None:
    pieces = [piece(held, text, tree, 256 * number) for number, (held, text, tree) in enumerate(sessions)]
    bucket = bucket_of(pieces, WINDOWS)
    if bucket is None:
        assert sum(one.count for one in pieces) > TOKENS
        return
    numbers = bucket.numbers(pieces, [NOBODYS] * len(WINDOWS))
    parts = Sections.of(np.split(numbers, np.cumsum(bucket.sizes)[:-1]))
    token = 0
    for one in pieces:
        for place, rank in zip(one.inputs.slots, range(one.count), strict=True):
            row = parts.cells[token + rank]
            assert parts.rows[row] == token + rank
            for marks in parts.marks:
                assert marks.targets[token + rank] == one.extent.start + place
                assert marks.starts[row // bucket.width] == one.extent.start
        for window, marks in zip(WINDOWS, parts.marks, strict=True):
            (seen,) = visible([one], one.count, one.used, window)
            for sees, row in zip(seen, parts.cells[token : token + one.count], strict=True):
                lane = row // bucket.width
                line = {marks.bases[lane] + bit for bit in range(MOST_NODES) if int(marks.lines[row]) >> bit & 1}
                found = {*range(marks.lows[row], marks.limits[row]), *line}
                assert {marks.skips[lane] + place for place in found} == {*np.flatnonzero(sees)}
                assert max(found) < marks.lengths[lane] <= bucket.used_in(window)
        token += one.count
    assert (parts.ids[:token] == [id_ for one in pieces for id_ in one.inputs.tokens]).all()
    assert all((marks.targets[token:] == NOBODYS).all() for marks in parts.marks)
    assert len({*parts.cells[:token]}) == token
