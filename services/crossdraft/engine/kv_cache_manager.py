"""The KV cache manager: which session has which slots of the KV cache, and what ended sessions left in theirs.

Slots are handed out in extents by a buddy allocator. What an ended session computed stays until its slots are needed,
so that a later session whose text begins in the same way starts with it (prefix caching). No torch.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from crossdraft.engine.requests import CachedTokens, ForwardRequest, InputTokens, common_prefix, plan_inputs

if TYPE_CHECKING:
    from crossdraft.engine.kv_cache import KVCache

UNIT = 64  # slots of the smallest extent
BLOCK = 32  # ids that are hashed together; shorter common prefixes are not reused
TRIED = 8  # entries whose hashes match as many blocks, which differ in less than one more


@dataclass(frozen=True, order=True)
class Extent:
    """Consecutive slots."""

    start: int  # first slot, a multiple of the size
    size: int  # slots, UNIT times a power of two

    @property
    def end(self) -> int:
        return self.start + self.size


def size_for(slots: int) -> int:
    return UNIT << max(0, -(-slots // UNIT) - 1).bit_length()


class SlotAllocator:
    """Which slots are free: a buddy allocator (Knowlton, CACM 8(10), 1965).

    Sizes are UNIT times a power of two and an extent begins at a multiple of its size, so that two free halves of one
    extent are one free extent again, and extents of one size often lie at equal distances.

    Args:
        slots: how many there are; those after the last whole unit are never handed out.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots // UNIT * UNIT
        self.free_slots = self.slots
        self._starts: dict[int, set[int]] = {}  # of free extents, by size
        start = 0
        for bit in range(self.slots.bit_length(), -1, -1):
            if self.slots & (1 << bit):
                self._starts[1 << bit] = {start}
                start += 1 << bit

    def allocate(self, size: int) -> Extent | None:
        """A free extent, the first in the smallest gap that holds it; None if there is none."""
        gap = min((known for known, starts in self._starts.items() if known >= size and starts), default=None)
        if gap is None:
            return None
        start = min(self._starts[gap])
        self._claim(start, gap, size)
        return Extent(start, size)

    def free(self, extent: Extent) -> None:
        """Frees an extent, and joins free halves."""
        self.free_slots += extent.size
        start, size = extent.start, extent.size
        while start ^ size in self._starts.get(size, ()):
            self._starts[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._starts.setdefault(size, set()).add(start)

    def extend(self, extent: Extent, size: int) -> Extent | None:
        """The same slots and those after them, up to a larger size, where these are free; else None, and no change."""
        steps = []
        reach = extent.size
        while reach < size:
            if extent.start & reach or extent.start + reach not in self._starts.get(reach, ()):
                return None
            steps.append(reach)
            reach *= 2
        for step in steps:
            self._starts[step].remove(extent.start + step)
            self.free_slots -= step
        return Extent(extent.start, reach)

    def could_allocate(self, size: int, released: Iterable[Extent]) -> bool:
        """Whether `allocate` would succeed if other extents were freed before."""
        if any(starts for known, starts in self._starts.items() if known >= size):
            return True
        released = list(released)
        if any(extent.size >= size for extent in released):  # the usual case, and they may be thousands
            return True
        if self.free_slots + sum(extent.size for extent in released) < size:
            return False
        trial = SlotAllocator(0)
        trial._starts = {known: set(starts) for known, starts in self._starts.items()}
        for extent in released:
            trial.free(extent)
        return any(starts for known, starts in trial._starts.items() if known >= size)

    def _claim(self, start: int, gap: int, size: int) -> None:
        """Takes the first `size` slots of a gap; the rest is free in halves."""
        self._starts[gap].remove(start)
        self.free_slots -= size
        while gap > size:
            gap //= 2
            self._starts.setdefault(gap, set()).add(start + gap)


@dataclass(eq=False)
class CacheEntry:
    """An extent and whose keys and values are in it, from its first slot on."""

    extent: Extent
    cached: CachedTokens = field(default_factory=CachedTokens)
    planned: tuple[ForwardRequest, CachedTokens, InputTokens] | None = None  # the last plan, and what it was made from

    def plan(self, request: ForwardRequest) -> InputTokens:
        """The tokens to compute for a request; made once while nothing changes."""
        known = self.planned
        if known is None or known[0] is not request or known[1] is not self.cached:
            known = self.planned = request, self.cached, plan_inputs(self.cached, request)
        return known[2]


class PrefixIndex:
    """Which entries' texts begin as a given one does: a dict over hashes of their blocks.

    A block's key is a hash of its ids and of the key before it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, dict[CacheEntry, None]] = {}  # latest last
        self._keys: dict[CacheEntry, list[int]] = {}

    def note(self, entry: CacheEntry, ids: Sequence[int], kept: int = 0) -> None:
        """Sets an entry's text; its first `kept` ids have not changed."""
        keys = self._keys.setdefault(entry, [])
        same = min(kept // BLOCK, len(keys))
        if same == len(keys) == len(ids) // BLOCK:
            return
        for key in keys[same:]:
            self._drop(key, entry)
        del keys[same:]
        for block in range(same, len(ids) // BLOCK):
            keys.append(_block_key(keys[-1] if keys else 0, ids, block))
            self._entries.setdefault(keys[-1], {})[entry] = None

    def forget(self, entry: CacheEntry) -> None:
        for key in self._keys.pop(entry, ()):
            self._drop(key, entry)

    def longest(self, ids: Sequence[int]) -> list[CacheEntry]:
        """The entries that share the most first blocks with `ids`, by hashes; the latest first, at most TRIED."""
        found: dict[CacheEntry, None] = {}
        key = 0
        for block in range(len(ids) // BLOCK):
            key = _block_key(key, ids, block)
            entries = self._entries.get(key)
            if entries is None:
                break
            found = entries
        return list(islice(reversed(found), TRIED))

    def _drop(self, key: int, entry: CacheEntry) -> None:
        entries = self._entries[key]
        entries.pop(entry, None)
        if not entries:
            del self._entries[key]


def _block_key(before: int, ids: Sequence[int], block: int) -> int:
    return hash((before, *ids[block * BLOCK : (block + 1) * BLOCK]))


class KVCacheManager:
    """Allocates the slots of one KV cache to sessions.

    The slots of ended sessions are reused least recently used first. A new session never sees another one's numbers
    beyond a common prefix: slots are cleared, since a masked NaN is still a NaN.

    Args:
        memory: the KV cache.
        slots: how many it has.
        reuse: whether a session may begin with a prefix that another one computed (prefix caching).
    """

    def __init__(self, memory: "KVCache", slots: int, reuse: bool = True) -> None:
        self._memory = memory
        self._reuse = reuse
        self._allocator = SlotAllocator(slots)
        self._written = bytearray(self._allocator.slots // UNIT)  # 1: something may have been written in this unit
        self._live: dict[Hashable, CacheEntry] = {}  # least recently used first
        self._ended: dict[CacheEntry, None] = {}  # likewise
        self._prefixes = PrefixIndex()

    @property
    def slots(self) -> int:
        return self._allocator.slots

    @property
    def slots_in_use(self) -> int:
        return self.slots - self._allocator.free_slots - sum(entry.extent.size for entry in [*self._ended])

    def get(self, session: Hashable) -> CacheEntry | None:
        return self._live.get(session)

    def can_allocate(self, request: ForwardRequest) -> bool:
        known = self._live.get(request.session)
        count = len(request.context) + len(request.tree.tokens)
        if known is not None and known.extent.size >= count:
            return True
        own = [] if known is None else [known.extent]
        return self._allocator.could_allocate(size_for(count), [*(entry.extent for entry in self._ended), *own])

    def allocate(self, request: ForwardRequest) -> CacheEntry | None:
        """Slots for the whole request, cached tokens included; None: only other live sessions could free enough."""
        known = self._live.pop(request.session, None)
        count = len(request.context) + len(request.tree.tokens)
        entry = self._begin(request.context, size_for(count)) if known is None else known
        if entry is None:
            return None
        fits = entry.extent.size >= count or self._grow(entry, size_for(count))
        if fits:
            self._mark(entry.extent.start // UNIT, -(-count // UNIT), True)
        if fits or known is not None:
            self._live[request.session] = entry
        elif entry.cached.ids:
            self._ended[entry] = None
        return entry if fits else None

    def record(self, entry: CacheEntry, cached: CachedTokens, kept: int) -> None:
        """Sets what is in the entry's slots now; its first `kept` ids have not changed."""
        entry.cached = cached
        self._prefixes.note(entry, cached.ids, kept)

    def close(self, session: Hashable) -> None:
        """Ends a session; one that is not known has no slots."""
        entry = self._live.pop(session, None)
        if entry is None:
            return
        entry.cached, entry.planned = CachedTokens(entry.cached.ids), None
        if len(entry.cached.ids) < BLOCK or not self._reuse:
            self._release(entry)
        else:
            self._ended[entry] = None

    def cached_prefix(self, ids: tuple[int, ...]) -> tuple[CacheEntry, int] | None:
        """The entry with the longest common prefix with `ids`, and its length; None where it is not worth it."""
        if not self._reuse:
            return None
        found = [(common_prefix(entry.cached.ids, ids), entry) for entry in self._prefixes.longest(ids)]
        shared, entry = max(found, key=lambda one: one[0], default=(0, None))
        return (entry, shared) if entry is not None and shared >= BLOCK else None

    def _begin(self, ids: tuple[int, ...], size: int) -> CacheEntry | None:
        """An entry for a new session: an ended one whose whole text it continues, or a new one with a copied prefix."""
        found = self.cached_prefix(ids)
        if found is not None and not self._memory.is_finite(found[0].extent.start, found[1]):
            self._prefixes.forget(found[0])
            found = None
        if found is not None and found[0] in self._ended:
            if found[1] == len(found[0].cached.ids):
                del self._ended[found[0]]
                self._clear(found[0].extent, found[1])
                return found[0]
            self._ended[found[0]] = self._ended.pop(found[0])  # most recently used: the last to be released
        extent = self._find(size, None)
        if extent is None:
            return None
        entry = CacheEntry(extent)
        self._clear(extent, 0)
        if found is not None and found[0].cached.ids:  # empty: `_find` released it
            source, shared = found
            self._memory.copy(source.extent.start, extent.start, shared)
            self.record(entry, CachedTokens(ids[:shared]), 0)
        return entry

    def _grow(self, entry: CacheEntry, size: int) -> bool:
        """Makes the extent larger, in place or elsewhere; False, and no change, where there is no room."""
        before, kept = entry.extent, entry.extent.size
        after = self._allocator.extend(before, size)
        if after is None:
            after = self._find(size, before)
            if after is None:
                return False
            if after.start != before.start:
                kept = len(entry.cached.ids) + len(entry.cached.tree)
                self._memory.copy(before.start, after.start, kept)
            if not after.start <= before.start < after.end:
                self._allocator.free(before)
        self._clear(after, kept)
        entry.extent = after
        return True

    def _find(self, size: int, own: Extent | None) -> Extent | None:
        """A free extent, after releasing entries of ended sessions, and the session's own extent where that helps.

        In the last case the returned extent contains the own one.
        """
        extent = self._allocator.allocate(size)
        if extent is not None:
            return extent
        owned = [] if own is None else [own]
        if not self._allocator.could_allocate(size, [*(entry.extent for entry in self._ended), *owned]):
            return None
        for entry in list(self._ended):
            del self._ended[entry]
            self._release(entry)
            extent = self._allocator.allocate(size)
            if extent is not None:
                return extent
        if own is not None:
            self._allocator.free(own)
        return self._allocator.allocate(size)

    def _release(self, entry: CacheEntry) -> None:
        entry.cached = CachedTokens()
        self._prefixes.forget(entry)
        self._allocator.free(entry.extent)

    def _clear(self, extent: Extent, kept: int) -> None:
        """Zeros an extent after its first `kept` slots; memory that nobody wrote stays untouched."""
        first = extent.start + kept
        last = self._written.rfind(1, first // UNIT, extent.end // UNIT)
        if last >= 0:
            self._memory.clear(first, (last + 1) * UNIT - first)
        whole = -(-first // UNIT)
        self._mark(whole, extent.end // UNIT - whole, False)

    def _mark(self, unit: int, count: int, written: bool) -> None:
        """Notes of some units whether anything may have been written there."""
        self._written[unit : unit + count] = bytes((written,)) * count
