"""Rejection sampling on target ids: `standard`, `union`, `tli`, `rdk`.

With p the target's row and q the distribution that draft token d was drawn from, both over T ∪ D: accept d with
probability min(1, p(d)/q(d)); otherwise draw the token from (p - q)+, renormalized. Then

    P(t) = min(p, q)(t) + (1 - sum min(p, q)) (p - q)+(t) / sum (p - q)+ = p(t).

The methods differ in q alone:

- `standard`: one vocabulary (Leviathan et al. 2023; Chen et al. 2023; arXiv 2502.05202, Algorithm 5);
- `union`: any vocabularies. Outside T p is 0, so that such a d is always refused; q is not renormalized (Algorithm 1);
- `tli`: the drafter draws from T ∩ D only (Algorithm 4);
- `rdk`: the drafter draws target ids from q = Mᵀq' (Timor et al., Algorithm 1).
"""

from collections.abc import Generator

import numpy as np

from crossdraft.text.pairs import Pair
from crossdraft.types.rows import DraftToken, Row, Whose, masses_of
from crossdraft.types.statistics import Kind
from crossdraft.verification.walk import (
    Answer,
    Emit,
    Ground,
    Refused,
    Step,
    Unreached,
    Walk,
    draft_token_letters,
    draw_residual,
    next_draft_token,
    row_of,
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
                # The draft differs, or is in mid-token at the frontier, where no target token begins: a new epoch.
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


def _verdict(ground: Ground, draft_token: DraftToken | None) -> Generator[Step, Answer, tuple[int, Kind]]:
    """The target's next token; both sides are at a token start."""
    if draft_token is None:
        row = yield from target_row()
        return (yield from draw_residual(ground.chooser, row, None)), Kind.BONUS
    token = _target_token(ground.pair, draft_token)
    if token is not None:  # else p(d) = 0: refused
        row = yield from target_row(listed=np.array([token]), judging=True)
        if ground.chooser.bernoulli(row.probability(token) / _drafted_probability(ground.pair, draft_token)):
            return token, Kind.ACCEPTED
    _, drafted = in_target_ids(ground.pair, draft_token)
    row = yield from target_row(listed=drafted.ids, judging=True)
    return (yield from draw_residual(ground.chooser, row, drafted)), Kind.CORRECTED


def in_target_ids(pair: Pair, draft_token: DraftToken) -> tuple[int | None, Row]:
    """A draft token and q in target ids; drafter ids of the same letters are summed up.

    The mass outside T is the row's tail; a draft token outside T is None.

    Raises:
        ValueError: the draft token has no row.
    """
    row = row_of(draft_token)
    if draft_token.whose is Whose.TARGET:
        return draft_token.token, row
    ids, weights = pair.to_target_ids(row.ids), row.probabilities
    outside = 0.0
    if ids.min() < 0:
        shared = ids >= 0
        outside = float(weights[~shared].sum())
        ids, weights = ids[shared], weights[shared]
    if not pair.one_to_one:
        ids, places = np.unique(ids, return_inverse=True)
        weights = masses_of(places, weights, len(ids))
    return pair.target_id(draft_token.token), Row(ids, weights, outside)


def _target_token(pair: Pair, draft_token: DraftToken) -> int | None:
    """The draft token's target id; None: it lies outside T."""
    return draft_token.token if draft_token.whose is Whose.TARGET else pair.target_id(draft_token.token)


def _drafted_probability(pair: Pair, draft_token: DraftToken) -> float:
    """q(d) of a draft token in T; the whole row is converted only where several drafter ids are one target id."""
    if draft_token.whose is Whose.TARGET or pair.one_to_one:
        return row_of(draft_token).probability(draft_token.token)
    token, drafted = in_target_ids(pair, draft_token)
    return 0.0 if token is None else drafted.probability(token)
