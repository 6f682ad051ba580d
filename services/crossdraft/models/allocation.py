"""Extents of places in one long row of them: a buddy allocator (Knowlton, CACM 8(10), 1965). Pure.

Sizes are UNIT times a power of two and an extent begins at a multiple of its size, so that two halves of one extent
that are both free are one free extent again, and extents of one size often lie at equal distances.
"""

from collections.abc import Iterable
from dataclasses import dataclass

UNIT = 64  # places


@dataclass(frozen=True, order=True)
class Extent:
    """Places that belong together."""

    start: int  # first place, a multiple of the size
    size: int  # places, UNIT times a power of two

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.start + self.size


def size_for(places: int) -> int:
    """The size of an extent for at least so many places."""
    return UNIT << max(0, -(-places // UNIT) - 1).bit_length()


class Extents:
    """Which places are free.

    Args:
        places: how many there are; those after the last whole unit are never given.
    """

    def __init__(self, places: int) -> None:
        self.places = places // UNIT * UNIT
        self.free = self.places
        self._starts: dict[int, set[int]] = {}  # of free extents, by size
        start = 0
        for bit in range(self.places.bit_length(), -1, -1):
            if self.places & (1 << bit):
                self._starts[1 << bit] = {start}
                start += 1 << bit

    def take(self, size: int) -> Extent | None:
        """A free extent, the first in the smallest gap that holds it; None if there is none."""
        gap = min((known for known, starts in self._starts.items() if known >= size and starts), default=None)
        if gap is None:
            return None
        start = min(self._starts[gap])
        self._claim(start, gap, size)
        return Extent(start, size)

    def give(self, extent: Extent) -> None:
        """Frees what was taken; what two halves of one extent were is whole again."""
        self.free += extent.size
        start, size = extent.start, extent.size
        while start ^ size in self._starts.get(size, ()):
            self._starts[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._starts.setdefault(size, set()).add(start)

    def grow(self, extent: Extent, size: int) -> Extent | None:
        """The same places and those after them, up to a larger size, if they can be had; else None, and no change."""
        steps = []
        reach = extent.size
        while reach < size:
            if extent.start & reach or extent.start + reach not in self._starts.get(reach, ()):
                return None
            steps.append(reach)
            reach *= 2
        for step in steps:
            self._starts[step].remove(extent.start + step)
            self.free -= step
        return Extent(extent.start, reach)

    def could_take(self, size: int, released: Iterable[Extent]) -> bool:
        """Whether an extent could be taken if others were given back before."""
        if any(starts for known, starts in self._starts.items() if known >= size):
            return True
        released = list(released)
        if any(extent.size >= size for extent in released):  # the usual case, and they may be thousands
            return True
        if self.free + sum(extent.size for extent in released) < size:
            return False
        trial = Extents(0)
        trial._starts = {known: set(starts) for known, starts in self._starts.items()}
        for extent in released:
            trial.give(extent)
        return any(starts for known, starts in trial._starts.items() if known >= size)

    def _claim(self, start: int, gap: int, size: int) -> None:
        """Takes the first `size` places of a gap; the rest is free in halves."""
        self._starts[gap].remove(start)
        self.free -= size
        while gap > size:
            gap //= 2
            self._starts.setdefault(gap, set()).add(start + gap)
