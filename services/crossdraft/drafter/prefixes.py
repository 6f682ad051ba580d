"""The law of a draft's text, from the laws of its tokens: how probable it is that the text begins with a string.

A text of at most n tokens begins with x if its first tokens' letters u are a proper prefix of x and the next token's
letters begin with the rest of x. So G(x) = Σ_u P(u) Σ_d q(d | u), over all sequences u of fewer than n tokens whose
letters are a proper prefix of x, and all tokens d whose letters begin with the rest of x after u.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crossdraft.text.letters import AFTER_ALL, NOTHING, Letters, common_length
from crossdraft.text.tries import Trie
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.rows import Ids, Probabilities
from crossdraft.verification.trees import Path


class Index:
    """A vocabulary in the order of its letters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.places: Ids = np.empty(vocabulary.size, dtype=np.int64)  # shape (V,), place of each id in that order
        self._trie = Trie(vocabulary)
        self.places[self._trie.order] = np.arange(vocabulary.size)

    def span(self, prefix: Letters) -> tuple[int, int]:
        """The places, first and behind the last, of the tokens that begin with `prefix`."""
        return self._trie.span(prefix)


@dataclass(frozen=True, eq=False)
class Masses:
    """A law over next tokens, in the order of their letters."""

    places: Ids  # shape (n,), ascending, of the ids that are possible
    weights: Probabilities  # shape (n,)

    @staticmethod
    def of(ids: Ids, probabilities: Probabilities, index: Index) -> "Masses":
        """A law as it is drawn from."""
        places = index.places[ids]
        order = np.argsort(places)
        return Masses(places[order], probabilities[order])

    def within(self, spans: Sequence[tuple[int, int]]) -> Probabilities:
        """The mass of each span of places, shape (len(spans),); exactly 0 where nothing is possible."""
        sums = np.concatenate([np.zeros(1), np.cumsum(self.weights)])
        first, end = np.searchsorted(self.places, np.array(spans, dtype=np.int64).reshape(-1, 2).T)
        masses: Probabilities = sums[end] - sums[first]
        return masses

    def weight(self, place: int) -> float:
        """The probability of the id at a place."""
        at = int(np.searchsorted(self.places, place))
        return float(self.weights[at]) if at < len(self.places) and self.places[at] == place else 0.0


@dataclass(frozen=True)
class Node:
    """A sequence of tokens that some string goes on after."""

    path: Path = ()
    letters: Letters = NOTHING  # of the path
    probability: float = 1.0


class Question:
    """Strings whose probabilities are summed up node by node."""

    def __init__(self, strings: Sequence[Letters], index: Index) -> None:
        self._index = index
        self._asked = strings
        self._strings = sorted(set(strings))
        # What a string has in common with the one before it has been looked at there; a whole one is no proper prefix.
        pairs = zip(self._strings, self._strings[1:], strict=False)
        self._common = [0, *(min(common_length(one, other), len(one) - 1) for one, other in pairs)]
        self._totals = np.zeros(len(self._strings))

    @property
    def answer(self) -> Probabilities:
        """The probabilities of the strings, as they were asked for, shape (n,)."""
        places = {string: place for place, string in enumerate(self._strings)}
        totals: Probabilities = np.minimum(self._totals, 1.0)  # rounding may sum to a little more
        return totals[[places[string] for string in self._asked]]

    def add(self, node: Node, masses: Masses, last: bool) -> list[Node]:
        """Counts the tokens that cover a string after a node; the nodes that follow, unless it was the last one."""
        start, longest = len(node.letters), self._index.vocabulary.longest
        due = [place for place in self._beyond(node.letters) if len(self._strings[place]) - start <= longest]
        if due:
            spans = [self._index.span(Letters(self._strings[place][start:])) for place in due]
            self._totals[due] += node.probability * masses.within(spans)
        return [] if last else list(self._children(node, masses))

    def _children(self, node: Node, masses: Masses) -> Iterator[Node]:
        start, longest = len(node.letters), self._index.vocabulary.longest
        known = start
        for place in self._beyond(node.letters):
            string = self._strings[place]
            for end in range(max(known, start) + 1, min(len(string) - 1, start + longest) + 1):
                yield from self._nodes(node, Letters(string[:end]), masses)
            known = self._common[place + 1] if place + 1 < len(self._common) else 0

    def _nodes(self, node: Node, letters: Letters, masses: Masses) -> Iterator[Node]:
        for token in self._index.vocabulary.ids_of(Letters(letters[len(node.letters) :])):
            weight = masses.weight(int(self._index.places[token]))
            if weight > 0:
                yield Node((*node.path, token), letters, node.probability * weight)

    def _beyond(self, letters: Letters) -> range:
        """Places of the strings that begin with these letters and are longer."""
        first = bisect_left(self._strings, letters)
        if first < len(self._strings) and self._strings[first] == letters:
            first += 1
        return range(first, bisect_left(self._strings, letters + AFTER_ALL, first))
