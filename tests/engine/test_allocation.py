"""SlotAllocator: what is taken is free, aligned and nobody else's, and a gap that is there is found."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from crossdraft.engine.kv_cache_manager import UNIT, Extent, SlotAllocator, size_for

SIZES = st.integers(0, 4).map(lambda power: UNIT << power)


def gap(taken: list[Extent], slots: int, size: int) -> bool:
    """Whether some aligned extent of this size is free."""
    starts = range(0, slots - size + 1, size)
    return any(all(one.end <= start or start + size <= one.start for one in taken) for start in starts)


def assert_apart(taken: list[Extent], extents: SlotAllocator) -> None:
    ordered = sorted(taken)
    assert all(one.end <= other.start for one, other in pairwise(ordered))
    assert all(one.start >= 0 and one.end <= extents.slots and one.start % one.size == 0 for one in taken)
    assert extents.free_slots == extents.slots - sum(one.size for one in taken)


@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    slots = data.draw(st.integers(0, 40 * UNIT))
    extents = SlotAllocator(slots)
    taken: list[Extent] = []
    for _ in range(data.draw(st.integers(0, 40))):
        size = data.draw(SIZES)
        if taken and data.draw(st.booleans()):
            extents.free(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        elif taken and data.draw(st.booleans()):
            before = taken[-1]
            after = extents.extend(before, size)
            free = gap(taken[:-1], extents.slots, size) and before.start % size == 0
            mine = all(one.end <= before.start or before.start + size <= one.start for one in taken[:-1])
            assert (after is not None) == (size <= before.size or (free and mine and before.start + size <= slots))
            taken[-1] = before if after is None else after
        else:
            released = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
            rest = [one for one in taken if one not in released]
            assert extents.could_allocate(size, released) == gap(rest, extents.slots, size)
            extent = extents.allocate(size)
            assert (extent is not None) == gap(taken, extents.slots, size)
            taken += [] if extent is None else [extent]
        assert_apart(taken, extents)
    for one in taken:
        extents.free(one)
    while extents.free_slots:  # all of it can be taken again, largest first
        assert extents.allocate(1 << (extents.free_slots.bit_length() - 1)) is not None


@given(st.integers(1, 10_000))
def test_a_size_holds_what_it_is_for_and_no_smaller_one_would(slots: int) -> None:
    size = size_for(slots)
    assert size >= slots
    assert size == UNIT or size // 2 < slots
