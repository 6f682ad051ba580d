"""`coupled`: rejection sampling on text.

Target and draft reveal themselves event by event: first whether they are the same token, then letter by letter, END
being the event that the token is over. With P and Q the laws of the next event given all that is revealed, the draft
shows its event e and the two agree with min(1, P(e)/Q(e)); otherwise the target's event has the law (P - Q)+, and the
draft's had (Q - P)+, both renormalized. Each event of the target thus has its law given the past, so the output has
the target's, for any two vocabularies. At temperature 0 all laws are certain, and it is a comparison of texts.

Rows are truncated: a target row lists its head, and the ids that the proposal's row can give if that begins at the
same letter. The tail is one more event of the target. No draft shows it, so it is decided before any letter.
"""

from collections.abc import Generator
from dataclasses import dataclass

from crossdraft.text.pairing import Pair
from crossdraft.text.spelling import END
from crossdraft.verification.identity import Identity
from crossdraft.verification.laws import PartlyRevealed, StringLaw, surplus, without
from crossdraft.verification.rejection import draw_residual, draw_unlisted
from crossdraft.verification.rows import Probabilities, Proposal, Row, Whose
from crossdraft.verification.walk import (
    Answer,
    Emit,
    Ground,
    Kind,
    Refused,
    Step,
    Walk,
    next_proposal,
    target_row,
    target_support,
)


@dataclass(frozen=True, eq=False)
class Place:
    """How far both sides are revealed. Laws are those given all that is."""

    offset: int  # letters since the start of the output: how far the draft is
    target: StringLaw | None = None  # of the token that the target is in; None: at a token start
    draft: PartlyRevealed | None = None  # the proposal that the draft is in; None: at a token start
    ahead: tuple[int, ...] = ()  # codes of committed letters that the draft has not reached; if any, both laws are None


Move = Generator[Step, Answer, Place | None]  # None: the draft was refused


def walk(ground: Ground) -> Walk:
    """One step after the other until the draft is refused."""
    place: Place | None = Place(ground.offset)
    while place is not None:
        place = yield from _step(ground, place)


def _step(ground: Ground, place: Place) -> Move:
    if place.draft is None:
        return _next_proposal(ground, place)
    if place.target is None:
        return _next_token(ground, place)
    return _next_event(ground, place, place.target, place.draft)


def _next_proposal(ground: Ground, place: Place) -> Move:
    """The draft is at a token start."""
    proposal = yield from next_proposal()
    if proposal is None:
        return (yield from _settle(ground, place))
    if place.ahead:
        return (yield from _catch_up(place, _begun(ground.pair, proposal)))
    if place.target is None:
        return (yield from _identity(ground, place, proposal))
    return Place(place.offset, place.target, _begun(ground.pair, proposal))


def _settle(ground: Ground, place: Place) -> Move:
    """No proposal will come in time: the target's token is drawn from its law as it is."""
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
    inside = None if ends else draft.reshaped(without(END, draft.law.events()))
    return Place(place.offset + len(place.ahead), draft=inside)


def _identity(ground: Ground, place: Place, proposal: Proposal) -> Move:
    """Both at a token start: accept the proposed token as it is, or go on with what that leaves of both laws."""
    row = yield from target_row(listed=target_support(ground.pair, proposal), judging=True)
    same = Identity(ground.pair, row, proposal)
    if ground.chooser.bernoulli(same.acceptance):
        token = same.draw(ground.chooser)
        yield Emit(token, Kind.ACCEPTED)
        return Place(place.offset + len(ground.pair.target.letters[token]))
    p, q = same.residuals()
    return (yield from _listed(ground, Place(place.offset, draft=_begun(ground.pair, proposal, q)), row, p))


def _next_token(ground: Ground, place: Place) -> Move:
    """The target begins a token while the draft is in one. Only the row's head counts, as no proposal begins here."""
    row = yield from target_row(judging=True)
    return (yield from _listed(ground, place, row, row.probabilities))


def _listed(ground: Ground, place: Place, row: Row, weights: Probabilities) -> Move:
    """Decide whether the target's token is one that the row lists; these have the given weights."""
    if row.tail and ground.chooser.bernoulli(row.tail / (row.tail + weights.sum())):
        token = yield from draw_unlisted(ground.chooser, row)
        yield Emit(token, Kind.CORRECTED)
        yield Refused(place.offset)
        return None
    return Place(place.offset, StringLaw.of(ground.pair.target_trie.spelling, row.ids, weights), place.draft)


def _next_event(ground: Ground, place: Place, target: StringLaw, draft: PartlyRevealed) -> Move:
    """Both are in a token: the draft shows its next letter or its end."""
    p, q = target.events(), draft.law.events()
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


def _begun(pair: Pair, proposal: Proposal, weights: Probabilities | None = None) -> PartlyRevealed:
    """A proposal of which no letter is revealed; its law is its row, or has these weights at the row's ids."""
    if proposal.row is None:
        raise ValueError("this method needs the row that each proposal was drawn from")
    spelling = (pair.target_trie if proposal.whose is Whose.TARGET else pair.drafter_trie).spelling
    law = StringLaw.of(spelling, proposal.row.ids, proposal.row.probabilities if weights is None else weights)
    return PartlyRevealed(law, int(spelling.starts[proposal.token]))
