"""Places over time: what a session is said to hold is what lies in its places, and nobody takes a live one's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.engine.kv_cache import BLOCK, Holding, Holdings
from crossdraft.engine.kv_store import UNIT, size_for
from crossdraft.engine.requests import Held, Work
from crossdraft.types.trees import TokenTree

PLACES = 14 * UNIT


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

    def sound(self, start: int, count: int) -> bool:
        return -2 not in self.cells[start : start + count]

    def of(self, holding: Holding) -> tuple[int, ...]:
        start = holding.extent.start
        return tuple(self.cells[start : start + len(holding.held.ids)])


def fed(cells: Cells, holdings: Holdings, work: Work) -> int:
    """Seats the work and feeds it all; how many ids had to be fed."""
    holding = holdings.seat(work)
    assert holding is not None
    assert cells.of(holding) == holding.held.ids
    shared = next((n for n, (a, b) in enumerate(zip(holding.held.ids, work.context, strict=False)) if a != b), None)
    kept = min(len(holding.held.ids), len(work.context)) if shared is None else shared
    start, end = holding.extent.start, holding.extent.start + len(work.context) + len(work.tree)
    session, own = str(work.session), start + len(holding.held.ids)
    assert set(cells.writers[own : holding.extent.end]) <= {None, session}  # masked places have nothing of others
    cells.cells[start + kept : end] = [*work.context[kept:], *work.tree.tokens]
    cells.writers[start:end] = [session] * (end - start)
    cells.writers[start:own] = [session] * (own - start)
    holdings.hold(holding, Held(work.context, work.tree), kept)
    return len(work.context) - kept


def text(size: int, last: int = 0) -> tuple[int, ...]:
    return (*range(100, 100 + size - 1), last)


@settings(max_examples=60)
@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    cells = Cells(PLACES)
    holdings = Holdings(cells, PLACES)
    contexts: dict[str, tuple[int, ...]] = {}
    closed = dict.fromkeys("abcdef", 0)
    for _ in range(data.draw(st.integers(1, 25))):
        letter = data.draw(st.sampled_from("abcdef"))
        session = f"{letter}{closed[letter]}"
        if data.draw(st.integers(0, 3)) == 0:
            holdings.close(session)
            contexts.pop(session, None)
            closed[letter] += 1
            continue
        before = contexts.get(session, data.draw(st.sampled_from([(), *contexts.values()])))
        kept = data.draw(st.sampled_from([len(before), len(before), len(before) // 2]))
        fresh = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        context = (*before[:kept], *(token for token in fresh for _ in range(data.draw(st.integers(1, 60)))))
        nodes = data.draw(st.sampled_from([0, 0, 9, 70]))
        work = Work(session, context[: 4 * UNIT - nodes], TokenTree((7,) * nodes, tuple(range(-1, nodes - 1))))
        admitted = holdings.admits(work)
        if admitted:
            fed(cells, holdings, work)
            contexts[session] = work.context
        else:
            assert holdings.seat(work) is None
        assert set(holdings) == set(contexts)
        for name, held in contexts.items():
            holding = holdings.of(name)
            assert holding is not None
            assert cells.of(holding) == holding.held.ids == held
        sizes = [size_for(len(held)) for held in contexts.values()]
        assert sum(sizes) <= holdings.held <= PLACES
    for name in list(contexts):
        holdings.close(name)
    assert holdings.held == 0
    assert holdings.admits(Work("all", (0,) * 8 * UNIT))


def test_a_session_starts_with_what_another_one_has_of_its_text() -> None:
    cells = Cells(PLACES)
    holdings = Holdings(cells, PLACES)
    assert fed(cells, holdings, Work("a", text(100))) == 100
    assert fed(cells, holdings, Work("b", text(101, 5))) == 2
    assert fed(cells, holdings, Work("c", text(BLOCK))) == BLOCK  # 31 of them: less than a block
    holdings.close("a")
    holdings.close("b")
    assert holdings.held == UNIT
    assert fed(cells, holdings, Work("d", (*text(101, 5), 9))) == 1  # in b's own places
    assert fed(cells, holdings, Work("e", (*text(100), 9))) == 1  # in a's: it has one more than b
    assert holdings.held == UNIT + 4 * UNIT


def test_nobody_starts_with_what_others_have_where_that_is_not_wanted() -> None:
    cells = Cells(PLACES)
    holdings = Holdings(cells, PLACES, reuse=False)
    long = text(3 * BLOCK)
    assert fed(cells, holdings, Work("one", long)) == 3 * BLOCK
    assert fed(cells, holdings, Work("two", long)) == 3 * BLOCK
    holdings.close("one")
    holdings.close("two")
    assert holdings.held == 0
    assert fed(cells, holdings, Work("three", long)) == 3 * BLOCK


def test_nobody_starts_with_what_are_no_numbers() -> None:
    cells = Cells(PLACES)
    holdings = Holdings(cells, PLACES)
    assert fed(cells, holdings, Work("a", text(100))) == 100
    first = holdings.of("a")
    assert first is not None
    cells.cells[first.extent.start + 70] = -2
    assert fed(cells, holdings, Work("b", (*text(100), 9))) == 101
    holdings.close("b")
    assert fed(cells, holdings, Work("c", (*text(100), 9, 9))) == 1  # b's are numbers


def test_what_ended_sessions_left_goes_first_and_the_latest_used_last() -> None:
    cells = Cells(4 * UNIT)
    holdings = Holdings(cells, 4 * UNIT)
    for name, last in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        fed(cells, holdings, Work(name, (last,) * 40))
        holdings.close(name)
    assert fed(cells, holdings, Work("again", (1,) * 41)) == 1  # a's own places
    assert fed(cells, holdings, Work("new", (5,) * 40)) == 40  # b's places
    assert fed(cells, holdings, Work("third", (3,) * 41)) == 1
    holdings.close("third")
    assert fed(cells, holdings, Work("fourth", (7,) * 40)) == 40  # d's: c's text was used later
    assert fed(cells, holdings, Work("fifth", (3,) * 42)) == 1
    assert not holdings.admits(Work("sixth", (8,)))
    assert holdings.seat(Work("sixth", (8,))) is None
    assert holdings.admits(Work("fifth", (3,) * UNIT))
    assert not holdings.admits(Work("fifth", (3,) * (UNIT + 1)))


def test_an_extent_grows_where_it_lies_or_moves_even_over_itself() -> None:
    cells = Cells(4 * UNIT)
    holdings = Holdings(cells, 4 * UNIT)
    assert fed(cells, holdings, Work("a", (1,) * 10)) == 10
    assert fed(cells, holdings, Work("a", (1,) * UNIT * 2)) == UNIT * 2 - 10
    assert fed(cells, holdings, Work("b", (2,) * UNIT)) == UNIT
    assert fed(cells, holdings, Work("c", (3,) * UNIT)) == UNIT
    holdings.close("a")
    assert fed(cells, holdings, Work("c", (3,) * UNIT * 2)) == UNIT  # a's two units
    holdings.close("b")
    holdings.close("c")
    assert fed(cells, holdings, Work("d", (2,) * (UNIT + 1))) == 1  # on from b's, whose place is too small
    assert fed(cells, holdings, Work("d", (2,) * UNIT * 4)) == 3 * UNIT - 1  # all there is, its own places included
