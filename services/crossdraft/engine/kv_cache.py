"""Who holds which places: extents of live sessions, what ended ones left, and how a new one comes to its places."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from crossdraft.engine.kv_store import UNIT, Extent, Extents, size_for
from crossdraft.engine.requests import Feed, Held, Work, common


class Copying(Protocol):
    """What the places are of."""

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies places that do not overlap."""
        ...

    def clear(self, start: int, count: int) -> None:
        """Makes places what they were at first."""
        ...

    def sound(self, start: int, count: int) -> bool:
        """Whether what is in places are numbers."""
        ...


@dataclass(eq=False)
class Holding:
    """An extent and what is in it, from its first place on."""

    extent: Extent
    held: Held = field(default_factory=Held)
    planned: tuple[Work, Held, Feed] | None = None  # the last plan, for that work and what was held then


class Holdings:
    """The places of one store, shared out.

    What an ended session held stays until its places are needed, the least recently used first: a session whose text
    begins in the same way starts with it. Beyond that a session finds nothing of others in its places: a masked place
    has weight zero, but zero times NaN is NaN, and minus infinity cannot mask a NaN either.

    Args:
        reuse: whether a session may begin with what another one holds or left.
    """

    def __init__(self, store: Copying, places: int, reuse: bool = True) -> None:
        self._store = store
        self._reuse = reuse
        self._extents = Extents(places)
        self._written = bytearray(self._extents.places // UNIT)  # 1: something may have been written in this unit
        self._live: dict[Hashable, Holding] = {}  # least recently used first
        self._ended: dict[Holding, None] = {}  # likewise
        self._prefixes: Prefixes[Holding] = Prefixes()

    @property
    def places(self) -> int:
        """All places that can be given."""
        return self._extents.places

    @property
    def held(self) -> int:
        """Places in extents of live sessions."""
        return self.places - self._extents.free - sum(holding.extent.size for holding in [*self._ended])

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Hashable]:
        """Live sessions, least recently used first."""
        return iter(self._live)

    def of(self, session: Hashable) -> Holding | None:
        """What a live session holds."""
        return self._live.get(session)

    def admits(self, work: Work) -> bool:
        """Whether `seat` would give the work its places."""
        known = self._live.get(work.session)
        size = size_for(len(work.context) + len(work.tree))
        if known is not None and known.extent.size >= size:
            return True
        own = [] if known is None else [known.extent]
        return self._extents.could_take(size, [*(holding.extent for holding in self._ended), *own])

    def seat(self, work: Work) -> Holding | None:
        """Places for all of a work, what is held of it included; None: only other live sessions could give them."""
        known = self._live.pop(work.session, None)
        count = len(work.context) + len(work.tree)
        size = size_for(count)
        holding = self._begun(work.context, size) if known is None else known
        if holding is not None:
            fits = holding.extent.size >= size or self._grown(holding, size)
            if fits:
                self._mark(holding.extent.start // UNIT, -(-count // UNIT), True)
            if fits or known is not None:
                self._live[work.session] = holding
            elif holding.held.ids:
                self._ended[holding] = None
            return holding if fits else None
        return None

    def hold(self, holding: Holding, held: Held, kept: int) -> None:
        """What is in the holding's places now; its first `kept` ids are what they were."""
        holding.held = held
        self._prefixes.note(holding, held.ids, kept)

    def close(self, session: Hashable) -> None:
        """The session is over. One that is not known has no places."""
        holding = self._live.pop(session, None)
        if holding is None:
            return
        holding.held, holding.planned = Held(holding.held.ids), None
        if len(holding.held.ids) < BLOCK or not self._reuse:
            self._release(holding)
        else:
            self._ended[holding] = None

    def reusable(self, ids: tuple[int, ...]) -> tuple[Holding, int] | None:
        """A holding whose first ids are those of a text, and how many are; None where it is not worth it."""
        if not self._reuse:
            return None
        found = [(common(holding.held.ids, ids), holding) for holding in self._prefixes.longest(ids)]
        shared, holding = max(found, key=lambda one: one[0], default=(0, None))
        return (holding, shared) if holding is not None and shared >= BLOCK else None

    def _begun(self, ids: tuple[int, ...], size: int) -> Holding | None:
        """Places for a new session: those of an ended one that all of its text goes on from, or new ones."""
        found = self.reusable(ids)
        if found is not None and not self._store.sound(found[0].extent.start, found[1]):
            self._prefixes.forget(found[0])
            found = None
        if found is not None and found[0] in self._ended and found[1] == len(found[0].held.ids):
            del self._ended[found[0]]
            self._clear(found[0].extent, found[1])
            return found[0]
        if found is not None and found[0] in self._ended:
            self._ended[found[0]] = self._ended.pop(found[0])  # most recently used: the last to be released
        extent = self._room(size, None)
        if extent is None:
            return None
        holding = Holding(extent)
        self._clear(extent, 0)
        if found is not None and found[0].held.ids:
            source, shared = found
            self._store.copy(source.extent.start, extent.start, shared)
            self.hold(holding, Held(ids[:shared]), 0)
        return holding

    def _grown(self, holding: Holding, size: int) -> bool:
        """Makes the extent larger, where it lies or elsewhere; False, and no change, where there is no room."""
        before, kept = holding.extent, holding.extent.size
        after = self._extents.grow(before, size)
        if after is None:
            after = self._room(size, before)
            if after is None:
                return False
            if after.start != before.start:
                kept = len(holding.held.ids) + len(holding.held.tree)
                self._store.copy(before.start, after.start, kept)
            if not after.start <= before.start < after.end:
                self._extents.give(before)
        self._clear(after, kept)
        holding.extent = after
        return True

    def _room(self, size: int, own: Extent | None) -> Extent | None:
        """A free extent; what ended sessions left is released for it, and the session's own extent where that helps.

        In the last case what is returned contains the own extent.
        """
        extent = self._extents.take(size)
        if extent is not None:
            return extent
        owned = [] if own is None else [own]
        if not self._extents.could_take(size, [*(holding.extent for holding in self._ended), *owned]):
            return None
        for holding in list(self._ended):
            del self._ended[holding]
            self._release(holding)
            extent = self._extents.take(size)
            if extent is not None:
                return extent
        if own is not None:
            self._extents.give(own)
        return self._extents.take(size)

    def _release(self, holding: Holding) -> None:
        """Gives the places back; nothing is held any more."""
        holding.held = Held()
        self._prefixes.forget(holding)
        self._extents.give(holding.extent)

    def _clear(self, extent: Extent, kept: int) -> None:
        """Makes an extent as good as new after its first `kept` places; memory that nobody wrote stays untouched."""
        first = extent.start + kept
        last = self._written.rfind(1, first // UNIT, extent.end // UNIT)
        if last >= 0:
            self._store.clear(first, (last + 1) * UNIT - first)
        whole = -(-first // UNIT)
        self._mark(whole, extent.end // UNIT - whole, False)

    def _mark(self, unit: int, count: int, written: bool) -> None:
        """Says of some units whether anything may have been written there."""
        self._written[unit : unit + count] = bytes((written,)) * count


# Which of many texts begins as a new one does: a dict over their blocks, not a search through all of them. Pure.

BLOCK = 32  # ids
TRIED = 8  # owners of the same blocks, which differ in less than one more
Owner = TypeVar("Owner", bound=Hashable)


class Prefixes(Generic[Owner]):
    """The beginnings of texts, in whole blocks. A block's key is a hash of its ids and of the key before it."""

    def __init__(self) -> None:
        self._owners: dict[int, dict[Owner, None]] = {}  # latest last
        self._keys: dict[Owner, list[int]] = {}

    def note(self, owner: Owner, ids: Sequence[int], kept: int = 0) -> None:
        """What an owner's text is now; its first `kept` ids are what they were."""
        keys = self._keys.setdefault(owner, [])
        whole = len(ids) // BLOCK
        same = min(kept // BLOCK, len(keys))
        for key in keys[same:]:
            self._drop(key, owner)
        del keys[same:]
        for block in range(same, whole):
            keys.append(_key(keys[-1] if keys else 0, ids, block))
            self._owners.setdefault(keys[-1], {})[owner] = None

    def forget(self, owner: Owner) -> None:
        """An owner's text is no more."""
        for key in self._keys.pop(owner, ()):
            self._drop(key, owner)

    def longest(self, ids: Sequence[int]) -> list[Owner]:
        """The owners, by hashes, of the most first blocks of `ids`: the latest first and not more than TRIED."""
        found: dict[Owner, None] = {}
        key = 0
        for block in range(len(ids) // BLOCK):
            key = _key(key, ids, block)
            owners = self._owners.get(key)
            if owners is None:
                break
            found = owners
        return list(islice(reversed(found), TRIED))

    def _drop(self, key: int, owner: Owner) -> None:
        owners = self._owners[key]
        owners.pop(owner, None)
        if not owners:
            del self._owners[key]


def _key(before: int, ids: Sequence[int], block: int) -> int:
    return hash((before, *ids[block * BLOCK : (block + 1) * BLOCK]))
