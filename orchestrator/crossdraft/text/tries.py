"""A vocabulary as a trie: its strings in order, so that all tokens with a common prefix stand side by side."""

from bisect import bisect_left

import numpy as np

from crossdraft.text import trie_cache
from crossdraft.text.letters import AFTER_ALL, Letters
from crossdraft.text.spelling import Codes, Ids, Spelling, spelled
from crossdraft.text.vocabulary import Vocabulary

_WORTH_KEEPING = 16_384  # tokens; smaller tries are built in less time than a file takes


class Trie:
    """All tokens of one vocabulary by their letters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        letters = vocabulary.letters
        large = len(letters) >= _WORTH_KEEPING
        key = trie_cache.key_of(letters) if large else ""
        kept = trie_cache.load(key, len(letters)) if large else None
        order, codes = kept or _built(vocabulary)
        if large and kept is None:
            trie_cache.save(key, order, codes)
        order.flags.writeable = False
        self.order = order  # shape (V,), ids by letters
        self.spelling = Spelling.read(codes)
        self._strings = [letters[token] for token in order.tolist()]
        self._vocabulary = vocabulary

    def span(self, prefix: Letters) -> tuple[int, int]:
        """The places in `order`, first and behind the last, of the tokens that start with `prefix`."""
        first = bisect_left(self._strings, prefix)
        return first, bisect_left(self._strings, Letters(prefix + AFTER_ALL), first)

    def longest(self, text: Letters) -> Letters | None:
        """The letters of the longest token that `text` starts with; None if there is none."""
        for length in range(min(self._vocabulary.longest, len(text)), 0, -1):
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


def _built(vocabulary: Vocabulary) -> tuple[Ids, Codes]:
    letters = vocabulary.letters
    order = sorted(range(len(letters)), key=letters.__getitem__)
    return np.array(order, dtype=np.int64), spelled(letters)
