"""Next-token distributions that are revealed letter by letter, for `coupled`.

At each step the next event is a letter (a byte or a control symbol) or END: the token is over. Tokens are sequences of
event codes in `Spelling.codes`, so that numpy can sum the mass of each event over all tokens that are still possible.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import END, EVENTS, Codes, Spelling
from crossdraft.types.rows import Ids, Probabilities, masses_of
from crossdraft.verification.chooser import Chooser

Events = NDArray[np.float64]  # shape (EVENTS,): mass of each letter that can come next, and of END


@dataclass(frozen=True, eq=False)
class StringDistribution:
    """The tokens that begin with the letters revealed so far, with weights of any sum."""

    spelling: Spelling  # of the vocabulary
    ids: Ids  # shape (n,)
    weights: Probabilities  # shape (n,), above 0
    cursor: Ids  # shape (n,), index in `spelling.codes` of each token's next letter

    @staticmethod
    def of(spelling: Spelling, ids: Ids, weights: Probabilities) -> "StringDistribution":
        """Of a token of which nothing is revealed, from ids and weights, shape (n,); not all weights are zero."""
        possible = weights > 0
        return StringDistribution(spelling, ids[possible], weights[possible], spelling.starts[ids[possible]])

    @cached_property
    def _next(self) -> Codes:
        return self.spelling.codes[self.cursor]

    @cached_property
    def _masses(self) -> Events:
        return masses_of(self._next, self.weights, EVENTS)

    def events(self) -> Events:
        """The probability of each event, summing to one."""
        return self._masses / float(self.weights.sum())

    def after(self, event: int) -> "StringDistribution":
        """Given that this event was revealed; after END the ids with exactly the revealed letters are left."""
        same = self._next == event
        return StringDistribution(self.spelling, self.ids[same], self.weights[same], self.cursor[same] + (event != END))

    def reshaped(self, masses: Events) -> "StringDistribution":
        """With these weights of the next events, not all zero; given the event, the distribution is as before."""
        factors = np.divide(masses, self._masses, out=np.zeros(EVENTS), where=self._masses > 0)[self._next]
        kept = factors > 0
        return StringDistribution(self.spelling, self.ids[kept], (self.weights * factors)[kept], self.cursor[kept])

    def draw(self, chooser: Chooser) -> tuple[int, Codes]:
        """Draws a token; returns its id and the codes of its unrevealed letters."""
        place = chooser.categorical(self.weights) if len(self.ids) > 1 else 0
        token = int(self.ids[place])
        return token, self.spelling.rest(token, int(self.cursor[place]))


@dataclass(frozen=True, eq=False)
class PartlyRevealed:
    """A drawn token of which only some letters are revealed, and its distribution given what is revealed."""

    distribution: StringDistribution
    cursor: int  # index in `spelling.codes` of its next letter

    @property
    def event(self) -> int:
        """Its next letter or END; reading it reveals it."""
        return int(self.distribution.spelling.codes[self.cursor])

    def after(self, event: int) -> "PartlyRevealed":
        """After its next letter, `event`, was revealed."""
        return PartlyRevealed(self.distribution.after(event), self.cursor + 1)

    def reshaped(self, masses: Events) -> "PartlyRevealed":
        """After something else was revealed that gives its next events these weights."""
        return PartlyRevealed(self.distribution.reshaped(masses), self.cursor)


def surplus(mine: Events, other: Events) -> Events:
    """(mine - other)+; `mine` if that is zero everywhere, which rounding alone can cause: then the two are equal."""
    excess = np.maximum(mine - other, 0.0)
    return excess if excess.any() else mine


def without(event: int, masses: Events) -> Events:
    """The masses with that of one event set to zero."""
    kept = masses.copy()
    kept[event] = 0.0
    return kept
