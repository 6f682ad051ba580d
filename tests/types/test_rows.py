"""Rows: what they know and what they do not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.types.messages import NoiseKey
from crossdraft.types.rows import MAX_SORTED, NO_IDS, Row
from crossdraft.types.trees import Path, TokenTree, tree_of
from tests.verification.toys import as_ids, row_of

HEAD = Row(as_ids(7, 2, 5), np.array([0.5, 0.2, 0.1]), 0.2)


@given(st.lists(st.integers(0, 50), max_size=20, unique=True), st.lists(st.integers(0, 50), max_size=20))
def test_places_are_where_ids_are_listed(ids: list[int], asked: list[int]) -> None:
    for more in (0, MAX_SORTED):  # of so many ids they are looked up in a table
        row = Row(as_ids(*ids, *range(52, 52 + more)), np.full(len(ids) + more, 1e-4), 0.5)
        assert row.places(as_ids(*asked)).tolist() == [ids.index(one) if one in ids else -1 for one in asked]
        assert row.lists(asked) == set(asked).issubset(ids)
        assert row.lists(as_ids(*asked)) == row.lists(asked)


def test_what_a_row_knows_of_ids_in_its_tail_or_beyond_it() -> None:
    """An id in the tail is not known; a whole row gives nothing to others; an empty one is all tail."""
    assert [HEAD.probability(token) for token in (7, 2, 5)] == [0.5, 0.2, 0.1]
    assert HEAD.probabilities_of(as_ids(5, 7)).tolist() == [0.1, 0.5]
    for unknown in (lambda: HEAD.probability(3), lambda: HEAD.probabilities_of(as_ids(7, 3))):
        with pytest.raises(KeyError):
            unknown()
    whole = row_of([7, 2], [3.0, 1.0])
    assert whole.probability(3) == 0
    assert whole.probabilities_of(as_ids(3, 7)).tolist() == [0, 0.75]
    assert whole.lists([3, 4])
    empty = Row(NO_IDS, np.empty(0), 1.0)
    assert not empty.lists([1])
    assert empty.lists([])
    assert empty.places(as_ids(1, 2)).tolist() == [-1, -1]
    with pytest.raises(KeyError):
        empty.probability(1)


def test_another_row_is_aligned_to_this_one() -> None:
    assert HEAD.aligned(row_of([5, 7], [1.0, 3.0])).tolist() == [0.75, 0, 0.25]
    with pytest.raises(KeyError, match="3"):
        HEAD.aligned(Row.certain(3))
    assert Row.certain(1).aligned(Row.certain(3)).tolist() == [0]


def test_values_are_compared_by_their_fields_unless_that_would_compare_arrays() -> None:
    assert (NoiseKey(1, 2), hash(NoiseKey(1, 2))) == (NoiseKey(1, 2), hash(NoiseKey(1, 2)))
    assert NoiseKey(1, 2) != NoiseKey(1, 3)
    assert Row.certain(1) != Row.certain(1)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), max_size=4), st.integers(0, 8))
def test_a_tree_has_the_beginnings_of_its_paths(paths: list[Path], budget: int) -> None:
    tree = tree_of(paths, budget)
    every = list(dict.fromkeys(path[:end] for path in paths for end in range(1, 1 + len(path))))
    assert tree.paths() == [(), *every[:budget]]
    assert tree.is_chain == (tree == TokenTree.chain(tree.tokens))


@pytest.mark.parametrize(
    ("tokens", "parents", "why"),
    [
        ((1, 2), (-1,), "2 tokens but 1 parents"),
        ((1, 2), (-1, 1), "node 1 has parent 1; parents must come first"),
        ((1, 2, 3), (-1, -2, 3), "node 1 has parent -2"),
    ],
)
def test_a_tree_has_parents_before_children(tokens: Path, parents: Path, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TokenTree(tokens, parents)
    assert TokenTree((1, 2, 0), (-1, -1, 1)).ends(["", "a", "bcd"]) == [0, 1, 3, 3]
