"""Scores: how probable it is that the text of a draft begins with a string (`slrs`).

A text of at most n tokens begins with x if its first tokens' letters u are a proper prefix of x and the next token's
letters begin with the rest of x. So G(x) = Σ_u P(u) Σ_d q(d | u), over all sequences u of fewer than n tokens whose
letters are a proper prefix of x, and all tokens d whose letters begin with the rest of x after u. The number of these
sequences grows exponentially with the tokens that x needs; leaving any out would bias the scores, so none is left out.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crossdraft.drafter.sampling import DrawSource
from crossdraft.engine.model_thread import ForwardResult, Job
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.sampler import Distribution
from crossdraft.engine.served_model import RunningModel
from crossdraft.text.letters import AFTER_ALL, NOTHING, Letters, common_length
from crossdraft.text.vocabulary import Trie
from crossdraft.types.rows import Ids, Probabilities
from crossdraft.types.trees import Path, TokenTree

STEP = 128  # nodes that are evaluated together
TREE_NODES = 512  # of one tree: attention and the mask grow with it
MOST_KEPT = 1 << 20  # ids of all distributions that are kept for the next score: 16 MiB
MOST_DRAWN = 1 << 12  # ids of a distribution that is worth keeping while it is drawn from


@dataclass(frozen=True, eq=False)
class SortedDistribution:
    """A distribution over next tokens, in the order of their letters."""

    places: Ids  # shape (n,), ascending, of the ids that are possible
    weights: Probabilities  # shape (n,)

    @staticmethod
    def of(ids: Ids, probabilities: Probabilities, trie: Trie) -> "SortedDistribution":
        """A distribution as it is drawn from; both shape (n,)."""
        places = trie.places[ids]
        order = np.argsort(places)
        return SortedDistribution(places[order], probabilities[order])

    def within(self, spans: Sequence[tuple[int, int]]) -> Probabilities:
        """The probability of each span of places, shape (len(spans),); exactly 0 where nothing is possible."""
        sums = np.concatenate([np.zeros(1), np.cumsum(self.weights)])
        first, end = np.searchsorted(self.places, np.array(spans, dtype=np.int64).reshape(-1, 2).T)
        masses: Probabilities = sums[end] - sums[first]
        return masses

    def weight(self, place: int) -> float:
        at = int(np.searchsorted(self.places, place))
        return float(self.weights[at]) if at < len(self.places) and self.places[at] == place else 0.0


@dataclass(frozen=True)
class Node:
    """A token sequence u that some string goes on after."""

    path: Path = ()
    letters: Letters = NOTHING  # of the path
    probability: float = 1.0  # P(u)


class PrefixSums:
    """The sums G(x) of several strings x, added up node by node."""

    def __init__(self, strings: Sequence[Letters], trie: Trie) -> None:
        self._trie = trie
        self._asked = strings
        self._strings = sorted(set(strings))
        # The nodes of what a string has in common with the one before it were made there. A whole string has no node.
        pairs = zip(self._strings, self._strings[1:], strict=False)
        self._common = [0, *(min(common_length(string, after), len(string) - 1) for string, after in pairs)]
        self._totals = np.zeros(len(self._strings))

    @property
    def probabilities(self) -> Probabilities:
        """Of the strings as they were asked for, shape (n,)."""
        places = {string: place for place, string in enumerate(self._strings)}
        totals: Probabilities = np.minimum(self._totals, 1.0)  # rounding may sum to a little more
        return totals[[places[string] for string in self._asked]]

    def add(self, node: Node, distribution: SortedDistribution, last: bool) -> list[Node]:
        """Adds the tokens that complete a string after a node; returns the nodes after it, none if it was the last."""
        start, longest = len(node.letters), self._trie.vocabulary.longest
        due = [place for place in self._beyond(node.letters) if len(self._strings[place]) - start <= longest]
        if due:
            spans = [self._trie.span(Letters(self._strings[place][start:])) for place in due]
            self._totals[due] += node.probability * distribution.within(spans)
        return [] if last else list(self._children(node, distribution))

    def _children(self, node: Node, distribution: SortedDistribution) -> Iterator[Node]:
        start, longest = len(node.letters), self._trie.vocabulary.longest
        known = start
        for place in self._beyond(node.letters):
            string = self._strings[place]
            for end in range(max(known, start) + 1, min(len(string) - 1, start + longest) + 1):
                yield from self._nodes(node, Letters(string[:end]), distribution)
            known = self._common[place + 1] if place + 1 < len(self._common) else 0

    def _nodes(self, node: Node, letters: Letters, distribution: SortedDistribution) -> Iterator[Node]:
        for token in self._trie.vocabulary.ids_of(Letters(letters[len(node.letters) :])):
            weight = distribution.weight(int(self._trie.places[token]))
            if weight > 0:
                yield Node((*node.path, token), letters, node.probability * weight)

    def _beyond(self, letters: Letters) -> range:
        """Places of the strings that begin with these letters and are longer."""
        first = bisect_left(self._strings, letters)
        if first < len(self._strings) and self._strings[first] == letters:
            first += 1
        return range(first, bisect_left(self._strings, letters + AFTER_ALL, first))


@dataclass(eq=False)
class Scoring:
    """The probabilities of strings as the beginning of one draft."""

    running: RunningModel
    source: DrawSource
    session: Hashable
    ids: Path  # what the model was fed when the draft began
    text: Letters = NOTHING  # what the output was then, for a grammar

    def __post_init__(self) -> None:
        self._drawn: dict[Path, Distribution] = {}
        self._distributions: dict[Path, SortedDistribution] = {}
        self._held = 0  # ids of those
        self._fed: dict[Path, None] = {}  # the paths that the model was fed, as nodes of a tree in this order
        self._room = min(TREE_NODES, self.running.description.context - len(self.ids))  # nodes

    def drawn(self, path: Path, distribution: Distribution) -> None:
        """The distribution that the draft itself used after its tokens `path`.

        It is used again for scores, so that what was drawn has a score above 0.
        """
        if len(distribution[0]) <= MOST_DRAWN:
            self._drawn[path] = distribution

    async def probabilities(self, strings: Sequence[Letters], tokens: int) -> tuple[Probabilities, float]:
        """For each string, that the text of the first `tokens` draft tokens begins with it, shape (len(strings),); and
        the seconds in the model.
        """
        vocabulary = self.running.tokenization.vocabulary  # whose trie is not made in the event loop
        sums = await asyncio.to_thread(lambda: PrefixSums(strings, vocabulary.trie))
        level, seconds = [Node()], 0.0
        for left in range(tokens - 1, -1, -1):
            deeper: list[Node] = []
            for at in range(0, len(level), STEP):
                nodes = level[at : at + STEP]
                distributions, spent = await self._evaluated([node.path for node in nodes])
                seconds += spent
                deeper += await asyncio.to_thread(self._add, sums, nodes, distributions, left == 0)
            level = deeper
        return sums.probabilities, seconds

    async def _evaluated(self, paths: Sequence[Path]) -> tuple[dict[Path, Distribution], float]:
        """The distributions after paths, where they are not sorted yet."""
        known = {path: self._drawn[path] for path in paths if path in self._drawn and path not in self._distributions}
        missing = [path for path in paths if path not in self._distributions and path not in known]
        if not missing:
            return known, 0.0
        found, seconds = await self.running.thread.submit(self._evaluate(missing))
        return known | found, seconds

    def _evaluate(self, paths: Sequence[Path]) -> Job[tuple[dict[Path, Distribution], float]]:
        """Runs in the model thread."""
        seconds = 0.0
        found: dict[Path, Distribution] = {}
        for group in self._grouped(paths):
            rows = {path: row for row, path in enumerate(((), *self._fed))}
            tree = TokenTree(tuple(path[-1] for path in self._fed), tuple(rows[path[:-1]] - 1 for path in self._fed))
            ordered = sorted(group, key=rows.__getitem__)
            masks = self.source.masks(self.text, map(self.running.tokenization.letters_of, ordered))
            wanted = tuple(map(rows.__getitem__, ordered))
            answer: ForwardResult = yield ForwardRequest(self.session, self.ids, tree, wanted)
            seconds += answer.seconds
            began = time.perf_counter()
            distributions = yield from self.source.distributions(self.source.masked(answer.logits, masks))
            found.update(zip(ordered, distributions, strict=True))
            seconds += time.perf_counter() - began
        return found, seconds

    def _grouped(self, paths: Sequence[Path]) -> Iterator[list[Path]]:
        """Paths that are fed in one tree, which grows, so that only what is new is computed, until it is full. A path
        alone always is."""
        group: list[Path] = []
        for path in paths:
            parts = [path[:length] for length in range(1, len(path) + 1)]
            if self._fed and len(self._fed) + sum(part not in self._fed for part in parts) > self._room:
                if group:
                    yield group
                group = []
                self._fed.clear()
            self._fed |= dict.fromkeys(parts)
            group.append(path)
        yield group

    def _add(
        self, sums: PrefixSums, nodes: Sequence[Node], distributions: dict[Path, Distribution], last: bool
    ) -> list[Node]:
        deeper, trie = list[Node](), self.running.tokenization.vocabulary.trie
        for node in nodes:
            distribution = self._distributions.get(node.path)
            if distribution is None:
                distribution = SortedDistribution.of(*distributions[node.path], trie)
                if self._held + len(distribution.places) <= MOST_KEPT:
                    self._held += len(distribution.places)
                    self._distributions[node.path] = distribution
            deeper += sums.add(node, distribution, last)
        return deeper
