"""`coupled`: rejection sampling on text.

Target and draft reveal themselves event by event: first whether they are the same token, then letter by letter, END
being the event that the token is over. With P and Q the distributions of the next event given all that is revealed, the
draft shows its event e and the two agree with min(1, P(e)/Q(e)); otherwise the target's event has the distribution (P -
Q)+, and the draft's had (Q - P)+, both renormalized. Each event of the target thus has its distribution given the past,
so the output has the target's, for any two vocabularies. At temperature 0 all distributions are certain, and it is a
comparison of texts.

Rows are truncated: a target row lists its head, and the ids that the draft token's row can give if that begins at the
same letter. The tail is one more event of the target. No draft shows it, so it is decided before any letter.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import END, EVENTS, Codes, Spelling
from crossdraft.text.pairs import Pair
from crossdraft.types.rows import DraftToken, Ids, Probabilities, Row, Whose, masses_of
from crossdraft.types.statistics import Kind
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.rejection import draw_residual, draw_unlisted
from crossdraft.verification.walk import (
    Answer,
    Emit,
    Ground,
    Refused,
    Step,
    Walk,
    next_draft_token,
    target_row,
    target_support,
)

# A distribution over the tokens of one vocabulary that is revealed letter by letter.

Events = NDArray[np.float64]  # shape (EVENTS,): what lies in each letter that can come next, and in END


@dataclass(frozen=True, eq=False)
class StringDistribution:
    """The tokens that begin with the letters revealed so far, by weight; only proportions count."""

    spelling: Spelling  # of the vocabulary
    ids: Ids  # shape (n,)
    weights: Probabilities  # shape (n,), above 0
    cursor: Ids  # shape (n,), where in the spelling each token's next letter is

    @staticmethod
    def of(spelling: Spelling, ids: Ids, weights: Probabilities) -> "StringDistribution":
        """The distribution of a token of which nothing is revealed; weights are not negative, not all zero."""
        possible = weights > 0
        return StringDistribution(spelling, ids[possible], weights[possible], spelling.starts[ids[possible]])

    @cached_property
    def _next(self) -> Codes:
        return self.spelling.codes[self.cursor]

    @cached_property
    def _masses(self) -> Events:
        return masses_of(self._next, self.weights, EVENTS)

    def events(self) -> Events:
        """The probability of each event."""
        return self._masses / float(self.weights.sum())

    def after(self, event: int) -> "StringDistribution":
        """The distribution once this event is revealed; after END it is that of the ids with exactly these letters."""
        same = self._next == event
        return StringDistribution(self.spelling, self.ids[same], self.weights[same], self.cursor[same] + (event != END))

    def reshaped(self, masses: Events) -> "StringDistribution":
        """The distribution whose events have these weights, not all zero, and which is as before once one is
        revealed.
        """
        factors = np.divide(masses, self._masses, out=np.zeros(EVENTS), where=self._masses > 0)[self._next]
        kept = factors > 0
        return StringDistribution(self.spelling, self.ids[kept], (self.weights * factors)[kept], self.cursor[kept])

    def draw(self, chooser: Chooser) -> tuple[int, Codes]:
        """A token, and the codes of its letters that are not revealed yet."""
        place = chooser.categorical(self.weights) if len(self.ids) > 1 else 0
        token = int(self.ids[place])
        return token, self.spelling.rest(token, int(self.cursor[place]))


@dataclass(frozen=True, eq=False)
class PartlyRevealed:
    """A draft token of which some letters are revealed, and its distribution given all that is."""

    distribution: StringDistribution
    cursor: int  # where in the spelling its next letter is

    @property
    def event(self) -> int:
        """What comes next; whoever asks has revealed it."""
        return int(self.distribution.spelling.codes[self.cursor])

    def after(self, event: int) -> "PartlyRevealed":
        """Its own next letter is revealed."""
        return PartlyRevealed(self.distribution.after(event), self.cursor + 1)

    def reshaped(self, masses: Events) -> "PartlyRevealed":
        """Something else is revealed, which gives its events these weights."""
        return PartlyRevealed(self.distribution.reshaped(masses), self.cursor)


@dataclass(frozen=True, eq=False)
class Place:
    """How far both sides are revealed. Distributions are those given all that is."""

    offset: int  # letters since the start of the output: how far the draft is
    target: StringDistribution | None = None  # of the token that the target is in; None: at a token start
    draft: PartlyRevealed | None = None  # the draft token that the draft is in; None: at a token start
    ahead: tuple[
        int, ...
    ] = ()  # codes of committed letters that the draft has not reached; if any, both distributions are None


Move = Generator[Step, Answer, Place | None]  # None: the draft was refused


def walk(ground: Ground) -> Walk:
    """One step after the other until the draft is refused."""
    place: Place | None = Place(ground.offset)
    while place is not None:
        place = yield from _step(ground, place)


def _step(ground: Ground, place: Place) -> Move:
    if place.draft is None:
        return _next_draft_token(ground, place)
    if place.target is None:
        return _next_token(ground, place)
    return _next_event(ground, place, place.target, place.draft)


def _next_draft_token(ground: Ground, place: Place) -> Move:
    """The draft is at a token start."""
    draft_token = yield from next_draft_token()
    if draft_token is None:
        return (yield from _settle(ground, place))
    if place.ahead:
        return (yield from _catch_up(place, _begun(ground.pair, draft_token)))
    if place.target is None:
        return (yield from _identity(ground, place, draft_token))
    return Place(place.offset, place.target, _begun(ground.pair, draft_token))


def _settle(ground: Ground, place: Place) -> Move:
    """No draft token will come in time: the target's token is drawn from its distribution as it is."""
    if place.target is None:
        row = yield from target_row()
        token = yield from draw_residual(ground.chooser, row, None)
        spelling = ground.pair.target_trie.spelling
        rest = spelling.rest(token, int(spelling.starts[token]))
    else:
        token, rest = place.target.draw(ground.chooser)
    yield Emit(token, Kind.BONUS)
    return Place(place.offset, ahead=(*place.ahead, *rest.tolist()))


def _catch_up(place: Place, draft: PartlyRevealed) -> Move:
    """Reveal the draft against what is committed; at the frontier reveal whether its token ends there."""
    for passed, letter in enumerate(place.ahead):
        event = draft.event
        if event == END:
            return Place(place.offset + passed, ahead=place.ahead[passed:])
        if event != letter:
            yield Refused(place.offset + passed)
            return None
        draft = draft.after(event)
    ends = draft.event == END
    inside = None if ends else draft.reshaped(without(END, draft.distribution.events()))
    return Place(place.offset + len(place.ahead), draft=inside)


def _identity(ground: Ground, place: Place, draft_token: DraftToken) -> Move:
    """Both at a token start: accept the proposed token as it is, or go on with what that leaves of both
    distributions.
    """
    row = yield from target_row(listed=target_support(ground.pair, draft_token), judging=True)
    same = Identity(ground.pair, row, draft_token)
    if ground.chooser.bernoulli(same.acceptance):
        token = same.draw(ground.chooser)
        yield Emit(token, Kind.ACCEPTED)
        return Place(place.offset + len(ground.pair.target.letters[token]))
    p, q = same.residuals()
    return (yield from _listed(ground, Place(place.offset, draft=_begun(ground.pair, draft_token, q)), row, p))


def _next_token(ground: Ground, place: Place) -> Move:
    """The target begins a token while the draft is in one. Only the row's head counts, as no draft token begins
    here.
    """
    row = yield from target_row(judging=True)
    return (yield from _listed(ground, place, row, row.probabilities))


def _listed(ground: Ground, place: Place, row: Row, weights: Probabilities) -> Move:
    """Decide whether the target's token is one that the row lists; these have the given weights."""
    if row.tail and ground.chooser.bernoulli(row.tail / (row.tail + weights.sum())):
        token = yield from draw_unlisted(ground.chooser, row)
        yield Emit(token, Kind.CORRECTED)
        yield Refused(place.offset)
        return None
    return Place(place.offset, StringDistribution.of(ground.pair.target_trie.spelling, row.ids, weights), place.draft)


def _next_event(ground: Ground, place: Place, target: StringDistribution, draft: PartlyRevealed) -> Move:
    """Both are in a token: the draft shows its next letter or its end."""
    p, q = target.events(), draft.distribution.events()
    event = draft.event
    agree = ground.chooser.bernoulli(p[event] / q[event])
    if agree and event != END:
        return Place(place.offset + 1, target.after(event), draft.after(event))
    left = surplus(p, q)
    if event == END and not agree:
        return Place(place.offset, target.reshaped(left))
    if agree or ground.chooser.bernoulli(left[END] / left.sum()):
        token, _ = target.after(END).draw(ground.chooser)
        yield Emit(token, Kind.ACCEPTED)
        return Place(place.offset, draft=None if agree else draft.reshaped(without(END, surplus(q, p))))
    token, _ = target.reshaped(without(END, left)).draw(ground.chooser)
    yield Emit(token, Kind.CORRECTED)
    yield Refused(place.offset)
    return None


def _begun(pair: Pair, draft_token: DraftToken, weights: Probabilities | None = None) -> PartlyRevealed:
    """A draft token of which no letter is revealed; its distribution is its row, or has these weights at the
    row's ids.
    """
    if draft_token.row is None:
        raise ValueError("this method needs the row that each draft token was drawn from")
    spelling = (pair.target_trie if draft_token.whose is Whose.TARGET else pair.drafter_trie).spelling
    distribution = StringDistribution.of(
        spelling, draft_token.row.ids, draft_token.row.probabilities if weights is None else weights
    )
    return PartlyRevealed(distribution, int(spelling.starts[draft_token.token]))


# The first event of `coupled`: whether the target's token and the draft token are the same token.


class Identity:
    """A target row p against the row q of a draft token; ids of the same letters count as one token on both sides."""

    def __init__(self, pair: Pair, row: Row, draft_token: DraftToken) -> None:
        """The row lists all target ids that the draft token's row can give.

        Raises:
            ValueError: the draft token has no row: its drafter was opened wrongly.
        """
        if draft_token.row is None:
            raise ValueError("this method needs the row that each draft token was drawn from")
        drafted = draft_token.whose is Whose.DRAFTER
        token = pair.target_id(draft_token.token) if drafted else int(pair.names(np.array([draft_token.token]))[0])
        self._row, self._draft_row = row, draft_token.row
        self._names: Ids = pair.names(row.ids)  # what each listed id counts as
        self._drafted: Ids = pair.to_target_ids(draft_token.row.ids) if drafted else pair.names(draft_token.row.ids)
        self._same = self._names == (-1 if token is None else token)
        self._q = float(draft_token.row.probabilities[self._drafted == token].sum())

    @property
    def acceptance(self) -> float:
        """p/q of the proposed token; the coin is min(1, p/q). 0 if the target has no such token."""
        p = float(self._row.probabilities[self._same].sum())
        return p / self._q if self._q else 0.0

    def draw(self, chooser: Chooser) -> int:
        """A target id that is the proposed token: of several each by its weight."""
        ids, weights = self._row.ids[self._same], self._row.probabilities[self._same]
        return int(ids[chooser.categorical(weights) if len(ids) > 1 else 0])

    def residuals(self) -> tuple[Probabilities, Probabilities]:
        """What a refusal leaves: (p - q)+ at each id of the target's row, (q - p)+ at each of the draft token's.

        Ids that count as one token share what is left of it in proportion; what only one side has stays.

        Raises:
            KeyError: the draft token's row reaches into the tail: the target's does not list what it was asked for.
        """
        p, q = self._row.probabilities, self._draft_row.probabilities
        tokens, of_p = self._tokens()
        of_q = tokens.places(self._drafted)  # -1: a token that the target lacks, or never says
        if not self._row.whole and ((of_q < 0) & (self._drafted >= 0)).any():
            raise KeyError(int(self._drafted[(of_q < 0) & (self._drafted >= 0)][0]))
        masses_p = tokens.probabilities
        masses_q = masses_of(of_q + 1, q, len(masses_p) + 1)[1:]
        left_p = p * _share_left(masses_p, masses_q)[of_p]
        if not self._row.tail and not left_p.any():
            left_p = p  # p and q differ by rounding only; a refusal then says nothing
        return left_p, q * np.append(_share_left(masses_q, masses_p), 1.0)[of_q]

    def _tokens(self) -> tuple[Row, Ids | slice]:
        """The target's row over what its ids count as, and the place of each id in it."""
        if self._names is self._row.ids:
            return self._row, slice(None)
        names, places = np.unique(self._names, return_inverse=True)
        return Row(names, masses_of(places, self._row.probabilities, len(names)), self._row.tail), places


def _share_left(mine: Probabilities, other: Probabilities) -> Probabilities:
    return np.divide(np.maximum(mine - other, 0.0), mine, out=np.zeros(len(mine)), where=mine > 0)


def surplus(mine: Events, other: Events) -> Events:
    """(mine - other)+. Where rounding alone leaves nothing, `mine`: the two are then equal, and it is as good."""
    excess = np.maximum(mine - other, 0.0)
    return excess if excess.any() else mine


def without(event: int, masses: Events) -> Events:
    """The weights of all other events."""
    kept = masses.copy()
    kept[event] = 0.0
    return kept
