"""Rejection sampling on target ids: `standard`, `union`, `tli`, `rdk`.

With p the target's row and q the distribution that the draft token d was drawn from, both over T ∪ D: accept d with
min(1, p(d)/q(d)); otherwise emit t drawn from (p - q)+, renormalized. P(emit t) =
min(p, q)(t) + (1 - sum min(p, q)) (p - q)+(t) / sum (p - q)+ = p(t).

The four differ in q alone. One vocabulary: Leviathan et al. 2023, Chen et al. 2023 (arXiv 2502.05202, Algorithm 5).
Any vocabularies: p is 0 outside T, so that such a d is always refused, and q is not renormalized (Algorithm 1). The
drafter keeps to T ∩ D: Algorithm 4. The drafter draws target tokens from Mᵀq': q is Mᵀq'.
"""

from collections.abc import Generator

import numpy as np

from crossdraft.text.pairs import Pair
from crossdraft.types.rows import DraftToken, Row, Whose, masses_of
from crossdraft.types.statistics import Kind
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.walk import (
    Answer,
    Emit,
    Ground,
    Refused,
    Step,
    Unreached,
    Walk,
    draft_token_letters,
    next_draft_token,
    target_row,
)


def walk(ground: Ground) -> Walk:
    """Accept draft tokens one by one; the first refused one is replaced and ends the epoch."""
    text = Unreached(ground.offset)
    letters = ground.pair.target.letters
    while True:
        draft_token = yield from next_draft_token()
        if draft_token is not None and text.ahead:
            wrong = text.reveal(draft_token_letters(ground.pair, draft_token))
            if wrong is not None or text.over:
                # Beyond the frontier lies the rest of a token that no target token starts: a new epoch.
                yield Refused(text.frontier if wrong is None else wrong)
                return
            continue
        token, kind = yield from _verdict(ground, draft_token)
        yield Emit(token, kind)
        refused_at = text.frontier
        text.commit(letters[token])
        if kind is Kind.CORRECTED:
            yield Refused(refused_at)
            return
        if kind is Kind.ACCEPTED:
            text.reveal(letters[token])


def undrafted(ground: Ground) -> Walk:
    """No draft token is left: draw from p, token after token."""
    while True:
        row = yield from target_row()
        token = yield from draw_residual(ground.chooser, row, None)
        yield Emit(token, Kind.BONUS)


def _verdict(ground: Ground, draft_token: DraftToken | None) -> Generator[Step, Answer, tuple[int, Kind]]:
    """One token at a token start of both sides, and how it came about."""
    if draft_token is None:
        row = yield from target_row()
        return (yield from draw_residual(ground.chooser, row, None)), Kind.BONUS
    token = target_token(ground.pair, draft_token)
    if token is not None:  # its own probabilities are enough to judge it
        row = yield from target_row(listed=np.array([token]), judging=True)
        if ground.chooser.bernoulli(row.probability(token) / drafted_probability(ground.pair, draft_token)):
            return token, Kind.ACCEPTED
    _, drafted = in_target_ids(ground.pair, draft_token)
    row = yield from target_row(listed=drafted.ids, judging=True)
    return (yield from draw_residual(ground.chooser, row, drafted)), Kind.CORRECTED


def draw_residual(chooser: Chooser, row: Row, drafted: Row | None) -> Generator[Step, Answer, int]:
    """Draw from (p - q)+. Where p has a tail (which q does not reach), that is one more event;
    if it happens, the whole row is fetched and its unlisted ids are drawn from.

    Raises:
        KeyError: q reaches into the tail: the row does not list what it was asked for.
    """
    weights = row.probabilities
    if drafted is not None:
        weights = np.maximum(weights - row.aligned(drafted), 0.0)
    if not row.tail and not weights.any():
        weights = row.probabilities  # p and q differ by rounding only; a refusal then says nothing
    place = chooser.categorical(np.append(weights, row.tail))
    return int(row.ids[place]) if place < len(row.ids) else (yield from draw_unlisted(chooser, row))


def draw_unlisted(chooser: Chooser, row: Row) -> Generator[Step, Answer, int]:
    """Fetch the whole row and draw among the ids that `row` does not list."""
    whole = yield from target_row(whole=True, judging=True)
    weights = np.where(row.places(whole.ids) < 0, whole.probabilities, 0.0)
    if not weights.any():
        weights = whole.probabilities  # the tail was rounding only
    return int(whole.ids[chooser.categorical(weights)])


def target_token(pair: Pair, draft_token: DraftToken) -> int | None:
    """The target id of a draft token; None: it lies outside T, where p is 0."""
    return draft_token.token if draft_token.whose is Whose.TARGET else pair.target_id(draft_token.token)


def drafted_probability(pair: Pair, draft_token: DraftToken) -> float:
    """q of a draft token in T, over target ids."""
    if draft_token.row is not None and (draft_token.whose is Whose.TARGET or pair.one_to_one):
        return draft_token.row.probability(draft_token.token)
    token, drafted = in_target_ids(pair, draft_token)
    return 0.0 if token is None else drafted.probability(token)


def in_target_ids(pair: Pair, draft_token: DraftToken) -> tuple[int | None, Row]:
    """A draft token and its row in target ids; drafter ids of the same letters are added up.

    What lies outside T is the row's tail, and such a draft token is None: its p is 0 (arXiv 2502.05202, Algorithm 1).

    Raises:
        ValueError: the draft token has no row: its drafter was opened wrongly.
    """
    if draft_token.row is None:
        raise ValueError("this method needs the row that each draft token was drawn from")
    if draft_token.whose is Whose.TARGET:
        return draft_token.token, draft_token.row
    ids, weights = pair.to_target_ids(draft_token.row.ids), draft_token.row.probabilities
    outside = 0.0
    if ids.min() < 0:
        shared = ids >= 0
        outside = float(weights[~shared].sum())
        ids, weights = ids[shared], weights[shared]
    if not pair.one_to_one:
        ids, places = np.unique(ids, return_inverse=True)
        weights = masses_of(places, weights, len(ids))
    return pair.target_id(draft_token.token), Row(ids, weights, outside)
