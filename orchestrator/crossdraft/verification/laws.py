"""A law over the tokens of one vocabulary that is revealed letter by letter."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.spelling import END, EVENTS, Codes, Spelling
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.rows import Ids, Probabilities, masses_of

Events = NDArray[np.float64]  # shape (EVENTS,): what lies in each letter that can come next, and in END


@dataclass(frozen=True, eq=False)
class StringLaw:
    """The tokens that begin with the letters revealed so far, by weight; only proportions count."""

    spelling: Spelling  # of the vocabulary
    ids: Ids  # shape (n,)
    weights: Probabilities  # shape (n,), above 0
    cursor: Ids  # shape (n,), where in the spelling each token's next letter is

    @staticmethod
    def of(spelling: Spelling, ids: Ids, weights: Probabilities) -> "StringLaw":
        """The law of a token of which nothing is revealed; weights are not negative, not all zero."""
        possible = weights > 0
        return StringLaw(spelling, ids[possible], weights[possible], spelling.starts[ids[possible]])

    @cached_property
    def _next(self) -> Codes:
        return self.spelling.codes[self.cursor]

    @cached_property
    def _masses(self) -> Events:
        return masses_of(self._next, self.weights, EVENTS)

    def events(self) -> Events:
        """The probability of each event."""
        return self._masses / float(self.weights.sum())

    def after(self, event: int) -> "StringLaw":
        """The law once this event is revealed; after END it is that of the ids with exactly these letters."""
        same = self._next == event
        return StringLaw(self.spelling, self.ids[same], self.weights[same], self.cursor[same] + (event != END))

    def reshaped(self, masses: Events) -> "StringLaw":
        """The law whose events have these weights, not all zero, and which is as before once one is revealed."""
        factors = np.divide(masses, self._masses, out=np.zeros(EVENTS), where=self._masses > 0)[self._next]
        kept = factors > 0
        return StringLaw(self.spelling, self.ids[kept], (self.weights * factors)[kept], self.cursor[kept])

    def draw(self, chooser: Chooser) -> tuple[int, Codes]:
        """A token, and the codes of its letters that are not revealed yet."""
        place = chooser.categorical(self.weights) if len(self.ids) > 1 else 0
        token = int(self.ids[place])
        return token, self.spelling.rest(token, int(self.cursor[place]))


@dataclass(frozen=True, eq=False)
class PartlyRevealed:
    """A proposal of which some letters are revealed, and its law given all that is."""

    law: StringLaw
    cursor: int  # where in the spelling its next letter is

    @property
    def event(self) -> int:
        """What comes next; whoever asks has revealed it."""
        return int(self.law.spelling.codes[self.cursor])

    def after(self, event: int) -> "PartlyRevealed":
        """Its own next letter is revealed."""
        return PartlyRevealed(self.law.after(event), self.cursor + 1)

    def reshaped(self, masses: Events) -> "PartlyRevealed":
        """Something else is revealed, which gives its events these weights."""
        return PartlyRevealed(self.law.reshaped(masses), self.cursor)


def surplus(mine: Events, other: Events) -> Events:
    """(mine - other)+. Where rounding alone leaves nothing, `mine`: the two are then equal, and it is as good."""
    excess = np.maximum(mine - other, 0.0)
    return excess if excess.any() else mine


def without(event: int, masses: Events) -> Events:
    """The weights of all other events."""
    kept = masses.copy()
    kept[event] = 0.0
    return kept
