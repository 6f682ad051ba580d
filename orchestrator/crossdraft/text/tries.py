"""A vocabulary as a trie: its strings in order, so that all tokens with a common prefix stand side by side."""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import Letters
from crossdraft.text.vocabulary import Vocabulary

Ids = NDArray[np.int64]
_AFTER_ALL = "\U0010ffff"  # above every letter


class Trie:
    """All tokens of one vocabulary by their letters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        letters = vocabulary.letters
        order = sorted(range(len(letters)), key=letters.__getitem__)
        self.order: Ids = np.array(order, dtype=np.int64)  # shape (V,), ids by letters
        self.order.flags.writeable = False
        self._strings = [letters[token] for token in order]
        self._vocabulary = vocabulary
        self._longest = max(map(len, letters), default=0)

    def span(self, prefix: Letters) -> tuple[int, int]:
        """The places in `order`, first and behind the last, of the tokens that start with `prefix`."""
        first = bisect_left(self._strings, prefix)
        return first, bisect_left(self._strings, Letters(prefix + _AFTER_ALL), first)

    def longest(self, text: Letters) -> Letters | None:
        """The letters of the longest token that `text` starts with; None if there is none."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if self._vocabulary.ids_of(Letters(text[:length])):
                return Letters(text[:length])
        return None

    def extensions(self, letters: Letters) -> tuple[Letters, ...]:
        """The longer tokens that start with `letters` and with no shorter such token, in order."""
        found: list[Letters] = []
        place, end = self.span(letters)
        while place < end:
            string = self._strings[place]
            if string == letters:
                place += 1
            else:
                found.append(string)
                place = self.span(string)[1]
        return tuple(found)

    def extends(self, letters: Letters) -> bool:
        """Whether a longer token starts with `letters`."""
        first, end = self.span(letters)
        return first < end and self._strings[end - 1] != letters
