"""The KV cache manager: which session has which slots of the KV cache, and what ended sessions left in theirs.

Slots are handed out in extents by a buddy allocator. What an ended session computed stays until its slots are needed,
so that a later session whose text begins in the same way starts with it (prefix caching). No torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter

from crossdraft.engine.requests import (
    NO_TREE,
    NOTHING_CACHED,
    CachedTokens,
    Extent,
    ForwardRequest,
    InputTokens,
    common_prefix,
)

UNIT = 64  # slots of the smallest extent
BLOCK = 32  # ids that are hashed together; shorter common prefixes are not reused
TRIED = 8  # entries whose hashes match as many blocks, which differ in less than one more


def size_for(slots: int) -> int:
    return UNIT << max(0, -(-slots // UNIT) - 1).bit_length()


class SlotAllocator:
    """Which slots are free: a buddy allocator (Knowlton, CACM 8(10), 1965).

    Sizes are UNIT times a power of two and an extent begins at a multiple of its size, so that two free halves of one
    extent are one free extent again, and extents of one size often lie at equal distances. Slots after the last whole
    unit are never handed out.
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

    def allocate(self, size: int, wanted: int = -1) -> Extent | None:
        """A free extent: that which begins at the slot `wanted`, if it is free, else the first in the smallest gap that
        holds one; None if there is none."""
        gaps = sorted(known for known, starts in self._starts.items() if known >= size and starts)
        here = [gap for gap in gaps if wanted % size == 0 and wanted & -gap in self._starts[gap]]
        if not gaps:
            return None
        gap = (here or gaps)[0]
        start = wanted if here else min(self._starts[gap])
        self._starts[gap].remove(start & -gap)
        self.free_slots -= size
        while gap > size:  # the rest is free in halves
            gap //= 2
            self._starts.setdefault(gap, set()).add((start & -gap) ^ gap)
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


@dataclass(eq=False)
class CacheEntry:
    """An extent of each pool, and whose keys and values are in them."""

    extents: list[Extent]
    cached: CachedTokens = NOTHING_CACHED


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


class SlotPool(ABC):
    """Slots that are handed out to sessions, and what is in them.

    Args:
        slots: how many there are.
        window: tokens before a text's end that are read again; None: all of them.
        chunk: tokens that are computed at a time, where there is a window.
    """

    def __init__(self, slots: int, window: int | None = None, chunk: int = 0) -> None:
        self.window, self.chunk = window, chunk
        self.allocator = SlotAllocator(slots)

    @abstractmethod
    def copy(self, source: int, target: int, count: int) -> None:
        """Copies so many slots from `source` on to `target` and on."""

    @abstractmethod
    def clear(self, start: int, count: int) -> None:
        """Makes zeros of so many slots."""

    @abstractmethod
    def is_finite(self, start: int, count: int) -> bool:
        """Whether slots hold finite numbers."""

    def needed(self, request: ForwardRequest, cached: CachedTokens) -> int:
        """Slots that a session has for this request, cached tokens included."""
        count = request.size
        if self.window is None:
            return count
        nodes = 1 + len(request.tree.tokens) + request.more + len(cached.tree.tokens)
        return min(max(count, len(cached.ids) + len(cached.tree.tokens)), self.window + self.chunk + nodes)

    def base(self, before: int, first: int, last: int, size: int) -> int:
        """The base of an extent of so many slots if places from `first` to `last`, or what is cached, are computed."""
        if self.window is None or first < before:
            return 0
        return before if last - before < size else max(0, first - self.window - 1)


class KVCacheManager:
    """Allocates the slots of one KV cache to sessions.

    Layers with a window have a pool of slots of their own, in which a session's extent holds the end of its text: once
    it is full, what is still read moves to its front: so keys stay one strided view, where a ring would need a mask in
    every pass. Going back beyond what is kept, and a prefix of an older text, compute everything again, as the hidden
    states of the kept tokens depend on lost ones. The slots of ended sessions are reused least recently used first.
    A new session never sees another one's numbers beyond a common prefix: slots are cleared, since a masked NaN is
    still a NaN. With `reuse` a session may begin with a prefix that another one computed (prefix caching).
    """

    def __init__(self, pools: Sequence[SlotPool], reuse: bool = True) -> None:
        self.pools, self._reuse = pools, reuse
        self._windowed = any(pool.window is not None for pool in pools)
        self._live: dict[Hashable, CacheEntry] = {}  # least recently used first
        self._ended: dict[CacheEntry, None] = {}  # likewise
        self._prefixes = PrefixIndex()

    @property
    def slots(self) -> int:
        """Of the first pool."""
        return self.pools[0].allocator.slots

    @property
    def slots_in_use(self) -> int:
        """Of the first pool, or as large a share of them as sessions use of a pool of which they use more."""
        ended = [*self._ended]
        used = [
            1 - (pool.allocator.free_slots + sum(entry.extents[number].size for entry in ended)) / pool.allocator.slots
            for number, pool in enumerate(self.pools)
        ]
        return round(max(used) * self.slots)

    def get(self, session: Hashable) -> CacheEntry | None:
        return self._live.get(session)

    def could_ever_allocate(self, request: ForwardRequest) -> bool:
        """Whether its session would have slots if it were alone, also after another tree of this size."""
        counts = [pool.needed(request, CachedTokens(tree=request.tree)) for pool in self.pools]
        return all(size_for(count) <= pool.allocator.slots for count, pool in zip(counts, self.pools, strict=True))

    def can_allocate(self, request: ForwardRequest) -> bool:
        known = self._live.get(request.session)
        cached = NOTHING_CACHED if known is None else known.cached
        for number, pool in enumerate(self.pools):
            count = pool.needed(request, cached)
            if known is not None and known.extents[number].size >= count:
                continue
            entries = self._ended if known is None else chain(self._ended, (known,))
            if not pool.allocator.could_allocate(size_for(count), (entry.extents[number] for entry in entries)):
                return False
        return True

    def allocate(self, request: ForwardRequest) -> CacheEntry | None:
        """Slots for the whole request, cached tokens included; None: only other live sessions could free enough."""
        known = self._live.pop(request.session, None)
        entry = self._begin(request) if known is None else known
        if entry is None:
            return None
        fits = True
        for number, pool in enumerate(self.pools):
            count = pool.needed(request, entry.cached)
            fits = fits and (entry.extents[number].size >= count or self._grow(entry, number, size_for(count)))
        if fits or known is not None:
            self._live[request.session] = entry
        elif entry.cached.ids:
            self._ended[entry] = None
        return entry if fits else None

    def make_room(self, entry: CacheEntry, cached: CachedTokens, inputs: InputTokens, more: int = 0) -> None:
        """Moves what layers with a window still read to the front of the extent, where the inputs, and `more`, do not
        fit."""
        held = len(cached.ids) + len(cached.tree.tokens)
        first, last = inputs.move_start if inputs.moves else inputs.places[0], max(held - 1, inputs.places[-1] + more)
        for number, (pool, extent) in enumerate(zip(self.pools, entry.extents, strict=True)):
            base = pool.base(extent.base, first, last, extent.size)
            if base > extent.base:
                pool.copy(extent.origin + base, extent.start, held - base)
            if base != extent.base:
                entry.extents[number] = replace(extent, base=base)

    def record(self, entry: CacheEntry, cached: CachedTokens, kept: int) -> None:
        """Sets what is in the entry's slots now; its first `kept` ids have not changed."""
        if self._windowed and any(extent.base for extent in entry.extents):
            # Of what a token sees, the first is read again where only the last token is computed.
            pools = zip(self.pools, entry.extents, strict=True)
            least = max(own.base + pool.window + 1 for pool, own in pools if pool.window and own.base)
            cached = replace(cached, least=least)
        entry.cached = cached
        self._prefixes.note(entry, cached.ids, kept)

    def close(self, session: Hashable) -> None:
        """Ends a session; one that is not known has no slots."""
        entry = self._live.pop(session, None)
        if entry is None:
            return
        entry.cached = replace(entry.cached, tree=NO_TREE)
        if len(entry.cached.ids) < BLOCK or not self._reuse:
            self._release(entry)
        else:
            self._ended[entry] = None

    def cached_prefix(self, ids: tuple[int, ...]) -> tuple[CacheEntry, int] | None:
        """The entry with the longest common prefix with `ids`, and its length; None where it is not worth it."""
        if not self._reuse:
            return None
        found = [(common_prefix(entry.cached.ids, ids), entry) for entry in self._prefixes.longest(ids)]
        usable = [(shared, entry) for shared, entry in found if shared >= max(BLOCK, entry.cached.least)]
        shared, entry = max(usable, key=itemgetter(0), default=(0, None))
        return None if entry is None else (entry, shared)

    def _begin(self, request: ForwardRequest) -> CacheEntry | None:
        """An entry for a new session: an ended one whose whole text it continues, or a new one with a copied prefix."""
        found = self.cached_prefix(request.context)
        if found is not None:
            pools = zip(self.pools, found[0].extents, strict=True)
            if not all(pool.is_finite(extent.start, found[1] - extent.base) for pool, extent in pools):
                self._prefixes.forget(found[0])
                found = None
        if found is not None and found[0] in self._ended:
            if found[1] == len(found[0].cached.ids):
                del self._ended[found[0]]
                for pool, extent in zip(self.pools, found[0].extents, strict=True):
                    first = extent.origin + found[1]
                    pool.clear(first, extent.end - first)
                return found[0]
            self._ended[found[0]] = self._ended.pop(found[0])  # most recently used: the last to be released
        extents: list[Extent] = []
        for number, pool in enumerate(self.pools):
            taken = self._find(number, size_for(pool.needed(request, NOTHING_CACHED)))
            if taken is None:
                for extent, other in zip(extents, self.pools, strict=False):
                    other.allocator.free(extent)
                return None
            pool.clear(taken.start, taken.size)
            extents.append(taken)
        entry = CacheEntry(extents)
        if found is not None and found[0].cached.ids:  # empty: `_find` released it
            self._copy_prefix(found[0], entry, found[1])
            self.record(entry, CachedTokens(request.context[: found[1]]), 0)
        return entry

    def _copy_prefix(self, source: CacheEntry, entry: CacheEntry, shared: int) -> None:
        """Copies the first tokens of another entry, or what is still read of them."""
        for number, pool in enumerate(self.pools):
            before, extent = source.extents[number], entry.extents[number]
            base = max(before.base, pool.base(0, shared, shared - 1, extent.size))
            pool.copy(before.origin + base, extent.start, shared - base)
            entry.extents[number] = replace(extent, base=base)

    def _grow(self, entry: CacheEntry, number: int, size: int) -> bool:
        """Makes the extent larger, in place or elsewhere; False, and no change, where there is no room."""
        pool, before = self.pools[number], entry.extents[number]
        after, kept = self._find(number, size, before), before.size
        if after is None:
            return False
        if after.start != before.start:
            kept = len(entry.cached.ids) + len(entry.cached.tree) - before.base
            pool.copy(before.start, after.start, kept)
        pool.clear(after.start + kept, after.size - kept)
        entry.extents[number] = replace(after, base=before.base)
        return True

    def _find(self, number: int, size: int, own: Extent | None = None) -> Extent | None:
        """A free extent in place of the session's own, where that is if possible, after releasing as few entries of
        ended sessions as need be. None, and no change: there is none."""
        allocator, owned = self.pools[number].allocator, () if own is None else (own,)
        if not allocator.could_allocate(size, chain(owned, (entry.extents[number] for entry in self._ended))):
            return None
        for extent in owned:
            allocator.free(extent)
        while (found := allocator.allocate(size, -1 if own is None else own.start)) is None:
            entry = next(iter(self._ended))
            del self._ended[entry]
            self._release(entry)
        return found

    def _release(self, entry: CacheEntry) -> None:
        entry.cached = NOTHING_CACHED
        self._prefixes.forget(entry)
        for pool, extent in zip(self.pools, entry.extents, strict=True):
            pool.allocator.free(extent)
