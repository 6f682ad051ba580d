"""How strings of one vocabulary are put together from those of another."""

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

from crossdraft.text.letters import Letters


@dataclass(frozen=True)
class Compositions:
    """The ways to write one string as a concatenation of pieces."""

    count: int  # exact concatenations; grows like 2 to the string's length
    look_ahead: int  # most pieces that can be needed until their concatenation begins with the string; 0: impossible


class Pieces:
    """The strings of a vocabulary, as pieces to write other strings with."""

    def __init__(self, strings: Collection[Letters]) -> None:
        self._known = frozenset(strings)
        self._ordered = sorted(self._known)
        self._longest = max(map(len, self._known), default=0)

    def can_write(self, string: Letters) -> bool:
        """Whether the string is a concatenation of pieces."""
        if string in self._known or self._known.issuperset(string):
            return True
        return self.compositions(string).count > 0

    def compositions(self, string: Letters) -> Compositions:
        """All ways to write the string: O(length²) look-ups."""
        length = len(string)
        ways = [1] + [0] * length
        most = [0] * (length + 1)  # pieces on the longest way to each offset
        for end in range(1, length + 1):
            for start in range(max(0, end - self._longest), end):
                if ways[start] and string[start:end] in self._known:
                    ways[end] += ways[start]
                    most[end] = max(most[end], most[start] + 1)
        if most[length] == length:  # no sequence has more pieces than letters
            return Compositions(ways[length], length)
        beyond = [most[start] + 1 for start in range(length) if ways[start] and self._some_exceeds(string[start:])]
        return Compositions(ways[length], max([most[length], *beyond]))

    def _some_exceeds(self, beginning: str) -> bool:
        place = bisect_right(self._ordered, beginning)
        return place < len(self._ordered) and self._ordered[place].startswith(beginning)
