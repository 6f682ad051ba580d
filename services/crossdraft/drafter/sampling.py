"""What a session's draft tokens are: the drafter's own tokens, or the target's through an affinity matrix (`rdk`)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from crossdraft.drafter.context import Context
from crossdraft.engine.distributions import Columns, Logits, narrowed
from crossdraft.engine.sampler import Distribution, DistributionRequest, DrawRequest, Draws, SamplerSteps, TopRequest
from crossdraft.engine.served_model import RunningModel
from crossdraft.text.affinity import Affinity
from crossdraft.text.letters import AFTER_ALL, NOTHING, Letters, common_length
from crossdraft.text.tries import Trie
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import OpenDrafter
from crossdraft.types.rows import Ids, Probabilities, Whose
from crossdraft.types.trees import Path
from crossdraft.verification.noise import KeyedNoise

NOTHING_SHARED = "the two vocabularies share no token"


@dataclass(frozen=True, eq=False)
class Guess:
    """A token that was drawn."""

    token: int
    others: list[int]  # what was nearest to being drawn, or is likeliest besides, as far as it was asked for
    distribution: Distribution | None = None  # that it was drawn from, if it is known here


# The distribution of a draft's text, from the distributions of its tokens: how probable it is that the text begins with
# a string.
#
# A text of at most n tokens begins with x if its first tokens' letters u are a proper prefix of x and the next token's
# letters begin with the rest of x. So G(x) = Σ_u P(u) Σ_d q(d | u), over all sequences u of fewer than n tokens whose
# letters are a proper prefix of x, and all tokens d whose letters begin with the rest of x after u.


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
class Equipment:
    """What all sessions of a drafter service share."""

    running: RunningModel
    affinity: Affinity | None = None  # for `rdk`: to the tokens of one target

    @cached_property
    def index(self) -> Index:
        """The drafter's tokens by their letters."""
        return Index(self.running.tokenization.vocabulary)

    @cached_property
    def target_noise(self) -> KeyedNoise:
        """The noise of the target that the affinity matrix is for."""
        assert self.affinity is not None
        return KeyedNoise.of(self.affinity)


class Proposing(Protocol):
    """One kind of draft tokens."""

    @property
    def whose(self) -> Whose:
        """Whose ids they use."""
        ...

    @property
    def noise(self) -> KeyedNoise:
        """Of the vocabulary whose ids they use."""
        ...

    @property
    def obstacle(self) -> str:
        """Why there is no token to propose; empty if there are any."""
        ...

    def distributions(self, logits: Logits) -> SamplerSteps[list[Distribution]]:
        """The distributions that are drawn from, one of each row of logits (n, V), exactly as they travel."""
        ...

    def guesses(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> SamplerSteps[list[Guess]]:
        """A draw from the distribution of each row of logits (n, V).

        Args:
            logits: what the distributions are of.
            draws: where the draws come from.
            offsets: of each row, in letters since the start of the output.
            beside: ids besides the draw that are wanted of the first row, the best first; fewer where there are fewer.
        """
        ...

    def append(self, context: Context, token: int) -> None:
        """The text goes on with a token that was drawn; raises NotExpressible if the drafter cannot read it."""
        ...


class OwnTokens:
    """Draft tokens are tokens of the drafter's."""

    whose = Whose.DRAFTER

    def __init__(self, running: RunningModel, opening: OpenDrafter) -> None:
        self.noise = running.noise
        self.obstacle = _obstacle(running, opening.allowed)
        self._running = running
        self._opening = opening
        self._columns = _columns(running, opening.allowed)

    def distributions(self, logits: Logits) -> SamplerSteps[list[Distribution]]:
        """As in `Proposing`."""
        return _own_distributions(logits, self._running, self._columns, self._opening, self._opening.row_width)

    def guesses(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> SamplerSteps[list[Guess]]:
        """As in `Proposing`."""
        if self._opening.row_width == 0:  # no distribution travels: it stays where the logits are
            return self._ranked(logits, draws, offsets, beside)
        return self._drawn(logits, draws, offsets, beside)

    def _ranked(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> SamplerSteps[list[Guess]]:
        chances = [draws.chance(offset) for offset in offsets]
        asked = DrawRequest(logits, self._opening.options, self._running.clocks, chances, beside, self._columns)
        rows = yield from asked.result()
        return [Guess(drawn, others) for drawn, *others in map(self._ids, rows)]

    def _drawn(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> SamplerSteps[list[Guess]]:
        distributions = yield from self.distributions(logits)
        found = _guesses(distributions, draws, offsets, beside)
        if len(found[0].others) < beside:  # at temperature 0 a distribution has one id
            (best,) = yield from TopRequest(logits[:1], beside + 1, self._columns).result()
            found[0].others.extend(self._ids(best))
        return found

    def _ids(self, columns: list[int]) -> list[int]:
        found: list[int] = self._running.ids(np.array(columns, dtype=np.int64)).tolist()
        return found

    def append(self, context: Context, token: int) -> None:
        """As in `Proposing`."""
        context.append(token)


class TargetTokens:
    """Draft tokens are tokens of the target's, drawn from Mᵀq′ (RDK, Algorithm 1).

    q′ is the drafter's distribution over T∩D, with its temperature and truncations; Mᵀq′ is cut to the row's width and
    rounded.
    """

    whose = Whose.TARGET

    def __init__(self, equipment: Equipment, affinity: Affinity, opening: OpenDrafter) -> None:
        shared = affinity.drafter_ids
        allowed = shared if opening.allowed is None else np.intersect1d(shared, opening.allowed)
        self.noise = equipment.target_noise
        self.obstacle = _obstacle(equipment.running, allowed)
        self._running = equipment.running
        self._affinity = affinity
        self._opening = opening
        self._columns = _columns(equipment.running, allowed)

    def distributions(self, logits: Logits) -> SamplerSteps[list[Distribution]]:
        """As in `Proposing`."""
        own = yield from _own_distributions(logits, self._running, self._columns, self._opening, 0)
        return [narrowed(*self._affinity.redistribute(*distribution), self._opening.row_width) for distribution in own]

    def guesses(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> SamplerSteps[list[Guess]]:
        """As in `Proposing`."""
        distributions = yield from self.distributions(logits)
        return _guesses(distributions, draws, offsets, beside)

    def append(self, context: Context, token: int) -> None:
        """As in `Proposing`."""
        context.write(self._affinity.letters_of(token))


def _obstacle(running: RunningModel, allowed: Ids | None) -> str:
    columns = running.columns(allowed)
    if columns is None or len(columns):
        return ""
    return "none of the shared tokens is kept" if allowed is not None and len(allowed) else NOTHING_SHARED


def _columns(running: RunningModel, allowed: Ids | None) -> Columns | None:
    columns = running.columns(allowed)
    return None if columns is None else Columns.of(columns, running.thread.engine.device)


def _own_distributions(
    logits: Logits, running: RunningModel, columns: Columns | None, opening: OpenDrafter, row_width: int
) -> SamplerSteps[list[Distribution]]:
    distributions = yield from DistributionRequest(logits, opening.options, row_width, columns).result()
    return [(running.ids(found), weights) for found, weights in distributions]


def _guesses(distributions: Sequence[Distribution], draws: Draws, offsets: Sequence[int], beside: int) -> list[Guess]:
    """Draws from distributions that are known; only of the first more is wanted."""
    found: list[Guess] = []
    for distribution, offset in zip(distributions, offsets, strict=True):
        token, *others = draws.ranked(*distribution, offset, 0 if found else beside)
        found.append(Guess(token, others, distribution))
    return found


def proposing(equipment: Equipment, opening: OpenDrafter) -> Proposing:
    """What a session proposes; `affinity` must be there if the opening asks for it."""
    if opening.redistribute:
        assert equipment.affinity is not None
        return TargetTokens(equipment, equipment.affinity, opening)
    return OwnTokens(equipment.running, opening)


@dataclass(frozen=True, eq=False)
class Masses:
    """A distribution over next tokens, in the order of their letters."""

    places: Ids  # shape (n,), ascending, of the ids that are possible
    weights: Probabilities  # shape (n,)

    @staticmethod
    def of(ids: Ids, probabilities: Probabilities, index: Index) -> "Masses":
        """A distribution as it is drawn from."""
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
