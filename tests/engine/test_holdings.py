"""Places over time: what a session is said to hold is what lies in its places, and nobody takes a live one's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.engine.kv_cache_manager import BLOCK, UNIT, CacheEntry, KVCacheManager, size_for
from crossdraft.engine.requests import CachedTokens
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import TokenTree

SLOTS = 14 * UNIT


class Cells:
    """A store of ids instead of keys and values."""

    def __init__(self, places: int) -> None:
        self.cells = [-1] * places
        self.writers: list[str | None] = [None] * places  # sessions; None: nobody, since the place was cleared

    def copy(self, source: int, target: int, count: int) -> None:
        assert source + count <= target or target + count <= source
        self.cells[target : target + count] = self.cells[source : source + count]
        self.writers[target : target + count] = self.writers[source : source + count]

    def clear(self, start: int, count: int) -> None:
        self.cells[start : start + count] = [-1] * count
        self.writers[start : start + count] = [None] * count

    def is_finite(self, start: int, count: int) -> bool:
        return -2 not in self.cells[start : start + count]

    def of(self, entry: CacheEntry) -> tuple[int, ...]:
        start = entry.extent.start
        return tuple(self.cells[start : start + len(entry.cached.ids)])


def fed(cells: Cells, manager: KVCacheManager, request: Request) -> int:
    """Seats the request and feeds it all; how many ids had to be fed."""
    entry = manager.allocate(request)
    assert entry is not None
    assert cells.of(entry) == entry.cached.ids
    shared = next((n for n, (a, b) in enumerate(zip(entry.cached.ids, request.context, strict=False)) if a != b), None)
    kept = min(len(entry.cached.ids), len(request.context)) if shared is None else shared
    start, end = entry.extent.start, entry.extent.start + len(request.context) + len(request.tree)
    session, own = str(request.session), start + len(entry.cached.ids)
    assert set(cells.writers[own : entry.extent.end]) <= {None, session}  # masked places have nothing of others
    cells.cells[start + kept : end] = [*request.context[kept:], *request.tree.tokens]
    cells.writers[start:end] = [session] * (end - start)
    cells.writers[start:own] = [session] * (own - start)
    manager.record(entry, CachedTokens(request.context, request.tree), kept)
    return len(request.context) - kept


def text(size: int, last: int = 0) -> tuple[int, ...]:
    return (*range(100, 100 + size - 1), last)


@settings(max_examples=60)
@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    cells = Cells(SLOTS)
    manager = KVCacheManager(cells, SLOTS)
    contexts: dict[str, tuple[int, ...]] = {}
    closed = dict.fromkeys("abcdef", 0)
    for _ in range(data.draw(st.integers(1, 25))):
        letter = data.draw(st.sampled_from("abcdef"))
        session = f"{letter}{closed[letter]}"
        if data.draw(st.integers(0, 3)) == 0:
            manager.close(session)
            contexts.pop(session, None)
            closed[letter] += 1
            continue
        before = contexts.get(session, data.draw(st.sampled_from([(), *contexts.values()])))
        kept = data.draw(st.sampled_from([len(before), len(before), len(before) // 2]))
        fresh = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        context = (*before[:kept], *(token for token in fresh for _ in range(data.draw(st.integers(1, 60)))))
        nodes = data.draw(st.sampled_from([0, 0, 9, 70]))
        request = Request(session, context[: 4 * UNIT - nodes], TokenTree((7,) * nodes, tuple(range(-1, nodes - 1))))
        admitted = manager.can_allocate(request)
        if admitted:
            fed(cells, manager, request)
            contexts[session] = request.context
        else:
            assert manager.allocate(request) is None
        assert set(manager) == set(contexts)
        for name, held in contexts.items():
            entry = manager.get(name)
            assert entry is not None
            assert cells.of(entry) == entry.cached.ids == held
        sizes = [size_for(len(held)) for held in contexts.values()]
        assert sum(sizes) <= manager.slots_in_use <= SLOTS
    for name in list(contexts):
        manager.close(name)
    assert manager.slots_in_use == 0
    assert manager.can_allocate(Request("all", (0,) * 8 * UNIT))


def test_a_session_starts_with_what_another_one_has_of_its_text() -> None:
    cells = Cells(SLOTS)
    manager = KVCacheManager(cells, SLOTS)
    assert fed(cells, manager, Request("a", text(100))) == 100
    assert fed(cells, manager, Request("b", text(101, 5))) == 2
    assert fed(cells, manager, Request("c", text(BLOCK))) == BLOCK  # 31 of them: less than a block
    manager.close("a")
    manager.close("b")
    assert manager.slots_in_use == UNIT
    assert fed(cells, manager, Request("d", (*text(101, 5), 9))) == 1  # in b's own places
    assert fed(cells, manager, Request("e", (*text(100), 9))) == 1  # in a's: it has one more than b
    assert manager.slots_in_use == UNIT + 4 * UNIT


def test_nobody_starts_with_what_others_have_where_that_is_not_wanted() -> None:
    cells = Cells(SLOTS)
    manager = KVCacheManager(cells, SLOTS, reuse=False)
    long = text(3 * BLOCK)
    assert fed(cells, manager, Request("one", long)) == 3 * BLOCK
    assert fed(cells, manager, Request("two", long)) == 3 * BLOCK
    manager.close("one")
    manager.close("two")
    assert manager.slots_in_use == 0
    assert fed(cells, manager, Request("three", long)) == 3 * BLOCK


def test_nobody_starts_with_what_are_no_numbers() -> None:
    cells = Cells(SLOTS)
    manager = KVCacheManager(cells, SLOTS)
    assert fed(cells, manager, Request("a", text(100))) == 100
    first = manager.get("a")
    assert first is not None
    cells.cells[first.extent.start + 70] = -2
    assert fed(cells, manager, Request("b", (*text(100), 9))) == 101
    manager.close("b")
    assert fed(cells, manager, Request("c", (*text(100), 9, 9))) == 1  # b's are numbers


def test_what_ended_sessions_left_goes_first_and_the_latest_used_last() -> None:
    cells = Cells(4 * UNIT)
    manager = KVCacheManager(cells, 4 * UNIT)
    for name, last in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        fed(cells, manager, Request(name, (last,) * 40))
        manager.close(name)
    assert fed(cells, manager, Request("again", (1,) * 41)) == 1  # a's own places
    assert fed(cells, manager, Request("new", (5,) * 40)) == 40  # b's places
    assert fed(cells, manager, Request("third", (3,) * 41)) == 1
    manager.close("third")
    assert fed(cells, manager, Request("fourth", (7,) * 40)) == 40  # d's: c's text was used later
    assert fed(cells, manager, Request("fifth", (3,) * 42)) == 1
    assert not manager.can_allocate(Request("sixth", (8,)))
    assert manager.allocate(Request("sixth", (8,))) is None
    assert manager.can_allocate(Request("fifth", (3,) * UNIT))
    assert not manager.can_allocate(Request("fifth", (3,) * (UNIT + 1)))


def test_an_extent_grows_where_it_lies_or_moves_even_over_itself() -> None:
    cells = Cells(4 * UNIT)
    manager = KVCacheManager(cells, 4 * UNIT)
    assert fed(cells, manager, Request("a", (1,) * 10)) == 10
    assert fed(cells, manager, Request("a", (1,) * UNIT * 2)) == UNIT * 2 - 10
    assert fed(cells, manager, Request("b", (2,) * UNIT)) == UNIT
    assert fed(cells, manager, Request("c", (3,) * UNIT)) == UNIT
    manager.close("a")
    assert fed(cells, manager, Request("c", (3,) * UNIT * 2)) == UNIT  # a's two units
    manager.close("b")
    manager.close("c")
    assert fed(cells, manager, Request("d", (2,) * (UNIT + 1))) == 1  # on from b's, whose place is too small
    assert fed(cells, manager, Request("d", (2,) * UNIT * 4)) == 3 * UNIT - 1  # all there is, its own places included
