"""Extents: what is taken is free, aligned and nobody else's, and a gap that is there is found."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from crossdraft.engine.kv_store import UNIT, Extent, Extents, size_for

SIZES = st.integers(0, 4).map(lambda power: UNIT << power)


def gap(taken: list[Extent], places: int, size: int) -> bool:
    """Whether some aligned extent of this size is free."""
    starts = range(0, places - size + 1, size)
    return any(all(one.end <= start or start + size <= one.start for one in taken) for start in starts)


def assert_apart(taken: list[Extent], extents: Extents) -> None:
    ordered = sorted(taken)
    assert all(one.end <= other.start for one, other in pairwise(ordered))
    assert all(one.start >= 0 and one.end <= extents.places and one.start % one.size == 0 for one in taken)
    assert extents.free == extents.places - sum(one.size for one in taken)


@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    places = data.draw(st.integers(0, 40 * UNIT))
    extents = Extents(places)
    taken: list[Extent] = []
    for _ in range(data.draw(st.integers(0, 40))):
        size = data.draw(SIZES)
        if taken and data.draw(st.booleans()):
            extents.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        elif taken and data.draw(st.booleans()):
            before = taken[-1]
            after = extents.grow(before, size)
            free = gap(taken[:-1], extents.places, size) and before.start % size == 0
            mine = all(one.end <= before.start or before.start + size <= one.start for one in taken[:-1])
            assert (after is not None) == (size <= before.size or (free and mine and before.start + size <= places))
            taken[-1] = before if after is None else after
        else:
            released = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
            rest = [one for one in taken if one not in released]
            assert extents.could_take(size, released) == gap(rest, extents.places, size)
            extent = extents.take(size)
            assert (extent is not None) == gap(taken, extents.places, size)
            taken += [] if extent is None else [extent]
        assert_apart(taken, extents)
    for one in taken:
        extents.give(one)
    while extents.free:  # all of it can be taken again, largest first
        assert extents.take(1 << (extents.free.bit_length() - 1)) is not None


@given(st.integers(1, 10_000))
def test_a_size_holds_what_it_is_for_and_no_smaller_one_would(places: int) -> None:
    size = size_for(places)
    assert size >= places
    assert size == UNIT or size // 2 < places
