"""Extents, the prefix index and the KV cache manager: what is recorded as cached lies in the slots, and no live
session loses its own."""

import math
import os
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.engine import device, kv_cache_manager
from crossdraft.engine.device import available_memory
from crossdraft.engine.kv_cache import MIB, CachePlan, KVCache, LayerShape, MemoryShare, WindowedLayers
from crossdraft.engine.kv_cache_manager import BLOCK, UNIT, Extent, KVCacheManager, PrefixIndex, SlotAllocator, size_for
from crossdraft.engine.names import NumberOutOfRangeError
from crossdraft.engine.requests import CachedTokens, common_prefix
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.served_model import ModelOptions
from crossdraft.types.trees import TokenTree
from tests.engine.tiny import examples

SIZES = st.integers(0, 4).map(lambda power: UNIT << power)
SLOTS = 14 * UNIT
SHAPES = [LayerShape(4, 16, 16)] * 4
LLAMA_8B = 2 * 32 * 8 * 128 * 2  # bytes of a token in Llama-3.1-8B, bfloat16: keys and values of 32 layers
CONTEXT = 131_072


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
def test_extents_never_overlap_and_gaps_are_found(data: st.DataObject) -> None:
    slots = data.draw(st.integers(0, 40 * UNIT))
    extents = SlotAllocator(slots)
    taken: list[Extent] = []
    for _ in range(data.draw(st.integers(0, 40))):
        size = data.draw(SIZES)
        if taken and data.draw(st.booleans()):
            extents.free(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        elif taken and data.draw(st.booleans()):
            before = taken.pop()  # it grows, where it lies if that is possible
            extents.free(before)
            extent = extents.allocate(size, before.start)
            assert (extent is not None) == gap(taken, extents.slots, size)
            apart = all(one.end <= before.start or before.start + size <= one.start for one in taken)
            if apart and before.start % size == 0 and before.start + size <= extents.slots:
                assert extent == Extent(before.start, size)
            taken += [] if extent is None else [extent]
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


@given(st.data())
def test_the_longest_is_found_whatever_came_and_went(data: st.DataObject) -> None:
    texts: dict[str, list[int]] = {}
    prefixes: PrefixIndex = PrefixIndex()
    part = st.sampled_from([[0] * BLOCK, [1] * BLOCK, [0] * 7, [1] * 40])
    for _ in range(data.draw(st.integers(1, 12))):
        owner = data.draw(st.sampled_from("abcd"))
        before = texts.get(owner, [])
        if data.draw(st.integers(0, 4)) == 0:
            prefixes.forget(owner)
            texts.pop(owner, None)
            continue
        kept = data.draw(st.integers(0, len(before)))
        texts[owner] = before[:kept] + [token for one in data.draw(st.lists(part, max_size=4)) for token in one]
        prefixes.note(owner, texts[owner], kept)
    asked = [token for one in data.draw(st.lists(part, max_size=5)) for token in one]
    shared = {owner: common_prefix(text, asked) // BLOCK for owner, text in texts.items()}
    most = max(shared.values(), default=0)
    assert set(prefixes.longest(asked)) == {owner for owner, count in shared.items() if most and count == most}


class Cells(kv_cache_manager.SlotPool):
    """A store of ids instead of keys and values."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
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

    def of(self, entry: kv_cache_manager.CacheEntry) -> tuple[int, ...]:
        start = entry.extents[0].start
        return tuple(self.cells[start : start + len(entry.cached.ids)])


def managed(places: int = SLOTS, reuse: bool = True) -> tuple[Cells, KVCacheManager]:
    cells = Cells(places)
    return cells, KVCacheManager([cells], reuse=reuse)


def fed(manager: KVCacheManager, request: Request) -> int:
    """Seats the request and feeds it all; how many ids had to be fed."""
    (cells,), entry = manager.pools, manager.allocate(request)
    assert cells.of(entry) == entry.cached.ids
    kept = common_prefix(entry.cached.ids, request.context)
    start, end = entry.extents[0].start, entry.extents[0].start + len(request.context) + len(request.tree)
    session, own = str(request.session), start + len(entry.cached.ids)
    assert set(cells.writers[own : entry.extents[0].end]) <= {None, session}  # masked places have nothing of others
    cells.cells[start + kept : end] = [*request.context[kept:], *request.tree.tokens]
    cells.writers[start:end] = [session] * (end - start)
    cells.writers[start:own] = [session] * (own - start)
    manager.record(entry, CachedTokens(request.context, request.tree), kept)
    return len(request.context) - kept


def text(size: int, last: int = 0) -> tuple[int, ...]:
    return (*range(100, 100 + size - 1), last)


@settings(max_examples=examples(30, 60))
@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    cells, manager = managed()
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
            fed(manager, request)
            contexts[session] = request.context
        else:
            assert manager.allocate(request) is None
        assert set(manager._live) == set(contexts)
        for name, held in contexts.items():
            entry = manager.get(name)
            assert cells.of(entry) == entry.cached.ids == held
        sizes = [size_for(len(held)) for held in contexts.values()]
        assert sum(sizes) <= manager.slots_in_use <= SLOTS
    for name in list(contexts):
        manager.close(name)
    assert manager.slots_in_use == 0
    assert manager.can_allocate(Request("all", (0,) * 8 * UNIT))


def test_a_session_starts_with_what_another_one_has_of_its_text() -> None:
    _, manager = managed()
    assert fed(manager, Request("a", text(100))) == 100
    assert fed(manager, Request("b", text(101, 5))) == 2
    assert fed(manager, Request("c", text(BLOCK))) == BLOCK  # 31 of them: less than a block
    manager.close("a")
    manager.close("b")
    assert manager.slots_in_use == UNIT
    assert fed(manager, Request("d", (*text(101, 5), 9))) == 1  # in b's own places
    assert fed(manager, Request("e", (*text(100), 9))) == 1  # in a's: it has one more than b
    assert manager.slots_in_use == UNIT + 4 * UNIT


def test_nobody_starts_with_what_others_have_where_that_is_not_wanted() -> None:
    _, manager = managed(reuse=False)
    long = text(3 * BLOCK)
    assert fed(manager, Request("one", long)) == 3 * BLOCK
    assert fed(manager, Request("two", long)) == 3 * BLOCK
    manager.close("one")
    manager.close("two")
    assert manager.slots_in_use == 0
    assert fed(manager, Request("three", long)) == 3 * BLOCK


def test_nobody_starts_with_what_are_no_numbers() -> None:
    cells, manager = managed()
    assert fed(manager, Request("a", text(100))) == 100
    cells.cells[manager.get("a").extents[0].start + 70] = -2
    assert fed(manager, Request("b", (*text(100), 9))) == 101
    manager.close("b")
    assert fed(manager, Request("c", (*text(100), 9, 9))) == 1  # b's are numbers


def test_what_ended_sessions_left_goes_first_and_the_latest_used_last() -> None:
    _, manager = managed(4 * UNIT)
    for name, last in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        fed(manager, Request(name, (last,) * 40))
        manager.close(name)
    assert fed(manager, Request("again", (1,) * 41)) == 1  # a's own places
    assert fed(manager, Request("new", (5,) * 40)) == 40  # b's places
    assert fed(manager, Request("third", (3,) * 41)) == 1
    manager.close("third")
    assert fed(manager, Request("fourth", (7,) * 40)) == 40  # d's: c's text was used later
    assert fed(manager, Request("fifth", (3,) * 42)) == 1
    assert not manager.can_allocate(Request("sixth", (8,)))
    assert manager.allocate(Request("sixth", (8,))) is None
    assert manager.can_allocate(Request("fifth", (3,) * UNIT))
    assert not manager.can_allocate(Request("fifth", (3,) * (UNIT + 1)))


def test_an_extent_grows_where_it_lies_or_moves_even_over_itself() -> None:
    _, manager = managed(4 * UNIT)
    assert fed(manager, Request("a", (1,) * 10)) == 10
    assert fed(manager, Request("a", (1,) * UNIT * 2)) == UNIT * 2 - 10
    assert fed(manager, Request("b", (2,) * UNIT)) == UNIT
    assert fed(manager, Request("c", (3,) * UNIT)) == UNIT
    manager.close("a")
    assert fed(manager, Request("c", (3,) * UNIT * 2)) == UNIT  # a's two units
    manager.close("b")
    manager.close("c")
    assert fed(manager, Request("d", (2,) * (UNIT + 1))) == 1  # on from b's, whose place is too small
    assert fed(manager, Request("d", (2,) * UNIT * 4)) == 3 * UNIT - 1  # all there is, its own places included


# The memory of the KV cache: how much it is, and when it is taken.


def new(slots: int) -> KVCache:
    return KVCache(SHAPES, [slots], torch.float32, torch.device("cpu"))


def resident() -> float:
    """MiB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_memory_is_taken_before_it_is_needed_where_that_is_asked_for() -> None:
    """So large a block is always new: it is none that this process has freed."""
    shapes, begin = [LayerShape(1, 64, 64)], resident()
    slots = 96 * MIB // KVCache.slot_bytes(shapes, torch.float32)
    cache = KVCache(shapes, [slots], torch.float32, torch.device("cpu"))
    assert resident() - begin < 24
    cache.populate(48)
    assert 36 < resident() - begin < 72
    cache.populate()
    assert resident() - begin > 84
    assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    many = int(available_memory()) * 2 * MIB // KVCache.slot_bytes(SHAPES, torch.float32)
    with pytest.raises(NumberOutOfRangeError, match=r"left: set --cache-mib to \d+ or less|set a smaller --cache-mib"):
        new(many).populate()
    with pytest.raises(NumberOutOfRangeError, match="set a smaller --cache-mib"):
        new(1 << 50)


@pytest.mark.parametrize(
    ("budget", "unused", "planned"),
    [
        (512, math.inf, CachePlan(4096, 4096)),
        (MemoryShare(), 56_000.0, CachePlan(448_000, CONTEXT)),  # what 0.9 of a GPU of 80 GiB leaves
        (MemoryShare(), 5_600.0, CachePlan(44_800, 32_768)),  # ... of 24 GiB
        (MemoryShare(sessions=1), 56_000.0, CachePlan(CONTEXT, CONTEXT)),
        (MemoryShare(), math.inf, CachePlan(4096, 4096)),  # the system does not say
    ],
)
def test_a_model_of_real_size_gets_the_context_that_fits(budget: int | MemoryShare, unused: float, planned: CachePlan):
    assert CachePlan.of(LLAMA_8B, budget, unused, CONTEXT, asked=False) == planned


@pytest.mark.parametrize("asked", [True, False])
def test_what_does_not_fit_says_which_numbers_do(asked: bool) -> None:
    mib = 512 if asked else 7
    with pytest.raises(NumberOutOfRangeError) as raised:
        CachePlan.of(LLAMA_8B, mib, math.inf, CONTEXT, asked)
    said = str(raised.value)
    lengths, sizes = (re.findall(rf"set --{name} to (\d+)", said) for name in ("max-model-len", "cache-mib"))
    assert (lengths, sizes) == ((["4096"], ["16384"]) if asked else ([], ["8"]))
    for length in map(int, lengths):
        assert CachePlan.of(LLAMA_8B, mib, math.inf, length, asked).length == length
    assert CachePlan.of(LLAMA_8B, int(sizes[0]), math.inf, CONTEXT, asked).length == (CONTEXT if asked else 64)


@pytest.mark.parametrize("names", device.CONTAINER_MEMORY)
def test_a_container_has_the_memory_that_it_is_limited_to(names, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "CONTAINER", tmp_path)
    free = available_memory()
    written = (f"{8 * MIB}\n", f"{6 * MIB}\n", f"anon {5 * MIB}\ninactive_file {MIB}\n")
    for name, text in zip(names, written, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory() == 3.0 < free
    (tmp_path / names[0]).write_text("max\n")
    assert available_memory() > 3.0


def test_caches_of_two_models_on_a_device_hold_about_as_many_tokens():
    """Of weights that are there already; the cache of the second takes what the first has left."""
    small, share, unused = LLAMA_8B // 11, MemoryShare(0.9, 1 << 20), 50_000.0
    first = CachePlan.of(small, replace(share, beside=LLAMA_8B), unused, CONTEXT, asked=False)
    second = CachePlan.of(LLAMA_8B, share, unused - first.slots * small / MIB, CONTEXT, asked=False)
    assert first.slots == pytest.approx(second.slots, rel=0.01)
    windowed = WindowedLayers(small, 1024)
    kept = CachePlan.of(small, replace(share, beside=LLAMA_8B), unused, CONTEXT, False, windowed)
    taken = kept.slots * small + kept.window_slots * small
    assert taken / MIB == pytest.approx(unused * 2 * small / (2 * small + LLAMA_8B), rel=0.01)


def test_a_share_is_left_on_the_same_device_only():
    options = ModelOptions("bundled:target", device="cpu")
    assert options.beside(torch.device("cpu"), 77).budget == MemoryShare(beside=77)
    assert options.beside(torch.device("meta"), 77) == options
    assert replace(options, cache_mib=64).beside(torch.device("cpu"), 77).budget == 64
