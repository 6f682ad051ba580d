"""Requests are told apart by their ids, whatever row of the batch they are in."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.integrations.vllm.prefixes import HEAD, TAIL, Prefixes, TokenIds


class Request:
    """What the tests call a request; its identity is all that it has."""


def ids_of(ids: Sequence[int]) -> TokenIds:
    return np.array(ids, dtype=np.int32)


@pytest.fixture
def prefixes() -> Prefixes[Request]:
    return Prefixes(Request, seconds=10.0)


def test_a_request_is_found_again_when_rows_move(prefixes: Prefixes[Request]) -> None:
    one, other = prefixes.step([ids_of([1, 2, 3]), ids_of([4, 5, 6])], [1, 1], 0.0)
    again = prefixes.step([ids_of([4, 5, 6, 7, 8]), ids_of([9]), ids_of([1, 2, 3, 3])], [2, 1, 1], 1.0)
    assert again[0] is other
    assert again[2] is one
    assert again[1] not in (one, other)


def test_a_preempted_request_is_found_again_when_it_comes_back(prefixes: Prefixes[Request]) -> None:
    one, other = prefixes.step([ids_of([1, 2, 3]), ids_of([4, 5, 6])], [1, 1], 0.0)
    assert prefixes.step([ids_of([4, 5, 6, 7])], [1], 1.0) == [other]
    assert prefixes.forget(9.0) == []
    # Its prompt and output were read again, and one more token was sampled.
    assert prefixes.step([ids_of([4, 5, 6, 7, 8]), ids_of([1, 2, 3, 4])], [1, 1], 9.5) == [other, one]


def test_what_is_not_seen_for_long_is_forgotten(prefixes: Prefixes[Request]) -> None:
    (one,) = prefixes.step([ids_of([1, 2])], [1], 0.0)
    (other,) = prefixes.step([ids_of([3, 4])], [1], 5.0)
    assert prefixes.forget(11.0) == [one]
    assert len(prefixes) == 1
    assert prefixes.step([ids_of([1, 2, 3]), ids_of([3, 4, 5])], [1, 1], 12.0)[1] is other
    assert len(prefixes) == 2


def test_one_request_may_have_now_what_another_had_before(prefixes: Prefixes[Request]) -> None:
    short, long = prefixes.step([ids_of([1, 1]), ids_of([1, 1, 1])], [1, 1], 0.0)
    assert prefixes.step([ids_of([1, 1, 1]), ids_of([1, 1, 1, 1])], [1, 1], 1.0) == [short, long]


def test_equal_texts_stay_as_many_requests(prefixes: Prefixes[Request]) -> None:
    first = prefixes.step([ids_of([5, 6])] * 3, [1] * 3, 0.0)
    second = prefixes.step([ids_of([5, 6, 7]), ids_of([5, 6, 8]), ids_of([5, 6, 7])], [1] * 3, 1.0)
    assert len(set(map(id, first))) == 3
    assert set(map(id, second)) == set(map(id, first))


def test_long_texts_that_begin_or_end_differently_are_different(prefixes: Prefixes[Request]) -> None:
    middle = [7] * (HEAD + TAIL)
    found = prefixes.step([ids_of([1, *middle]), ids_of([2, *middle]), ids_of([*middle, 3])], [1] * 3, 0.0)
    again = prefixes.step([ids_of([*middle, 3, 9]), ids_of([2, *middle, 9]), ids_of([1, *middle, 9])], [1] * 3, 1.0)
    assert again == [found[2], found[1], found[0]]


@given(st.data())
def test_texts_are_followed_in_any_order_with_any_pauses(data: st.DataObject) -> None:
    """Each request that is given back had exactly the ids that the row had before."""
    prefixes = Prefixes(Request, seconds=100.0)
    texts = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)) for _ in range(4)]
    had: dict[int, list[int]] = {}  # by the identity of a request
    kept: list[Request] = []
    for step in range(6):
        batch = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
        new = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)) for _ in batch]
        rows = [texts[one] + more for one, more in zip(batch, new, strict=True)]
        found = prefixes.step([ids_of(row) for row in rows], [len(more) for more in new], float(step))
        assert len(set(map(id, found))) == len(found)
        for one, row, request in zip(batch, rows, found, strict=True):
            assert had.get(id(request), texts[one]) == texts[one]
            texts[one] = row
            had[id(request)] = row
        kept += found  # so that no identity is used twice
