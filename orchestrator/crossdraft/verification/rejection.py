"""Rejection sampling on target ids (Leviathan et al. 2023, Chen et al. 2023; arXiv 2502.05202, Algorithms 4 and 5).

With p the target's row and q the law that the proposal d was drawn from, both over target ids:
accept d with min(1, p(d)/q(d)); otherwise emit t drawn from (p - q)+, renormalized. P(emit t) =
min(p, q)(t) + (1 - sum min(p, q)) (p - q)+(t) / sum (p - q)+ = p(t).
"""

from collections.abc import Generator

import numpy as np

from crossdraft.text.pairing import Pair
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.rows import Proposal, Row, Whose
from crossdraft.verification.walk import (
    Answer,
    Emit,
    Ground,
    Kind,
    Refused,
    Step,
    Unreached,
    Walk,
    next_proposal,
    proposal_letters,
    target_row,
)


def walk(ground: Ground) -> Walk:
    """Accept proposals one by one; the first refused one is replaced and ends the epoch."""
    text = Unreached(ground.offset)
    letters = ground.pair.target.letters
    while True:
        proposal = yield from next_proposal()
        if proposal is not None and text.ahead:
            wrong = text.reveal(proposal_letters(ground.pair, proposal))
            if wrong is not None or text.over:
                # Beyond the frontier lies the rest of a token that no target token starts: a new epoch.
                yield Refused(text.frontier if wrong is None else wrong)
                return
            continue
        token, kind = yield from _verdict(ground, proposal)
        yield Emit(token, kind)
        refused_at = text.frontier
        text.commit(letters[token])
        if kind is Kind.CORRECTED:
            yield Refused(refused_at)
            return
        if kind is Kind.ACCEPTED:
            text.reveal(letters[token])


def _verdict(ground: Ground, proposal: Proposal | None) -> Generator[Step, Answer, tuple[int, Kind]]:
    """One token at a token start of both sides, and how it came about."""
    if proposal is None:
        row = yield from target_row()
        return (yield from draw_residual(ground.chooser, row, None)), Kind.BONUS
    token, draft_row = in_target_ids(ground.pair, proposal)
    row = yield from target_row(listed=draft_row.ids, judging=True)
    if ground.chooser.bernoulli(row.probability(token) / draft_row.probability(token)):
        return token, Kind.ACCEPTED
    return (yield from draw_residual(ground.chooser, row, draft_row)), Kind.CORRECTED


def draw_residual(chooser: Chooser, row: Row, draft_row: Row | None) -> Generator[Step, Answer, int]:
    """Draw from (p - q)+. Where p has a tail (which q does not reach), that is one more event;
    if it happens, the whole row is fetched and its unlisted ids are drawn from."""
    weights = row.probabilities
    if draft_row is not None:
        drafted = dict(zip(draft_row.ids.tolist(), draft_row.probabilities.tolist(), strict=True))
        weights = np.maximum(weights - [drafted.get(token, 0.0) for token in row.ids.tolist()], 0.0)
    if not row.tail and not np.any(weights > 0):
        weights = row.probabilities  # p and q differ by rounding only; a refusal then says nothing
    place = chooser.categorical([*weights, row.tail])
    if place < len(row.ids):
        return int(row.ids[place])
    whole = yield from target_row(whole=True, judging=True)
    unlisted = np.isin(whole.ids, row.ids, invert=True)
    return int(whole.ids[chooser.categorical(np.where(unlisted, whole.probabilities, 0.0))])


def in_target_ids(pair: Pair, proposal: Proposal) -> tuple[int, Row]:
    """A proposal from T∩D and its row, both in target ids; drafter ids of the same letters are added up.

    Raises:
        ValueError: the proposal has no row, or reaches outside T∩D: its drafter was opened wrongly.
    """
    if proposal.row is None:
        raise ValueError("this method needs the row that each proposal was drawn from")
    if proposal.whose is Whose.TARGET:
        return proposal.token, proposal.row
    token = pair.target_id(proposal.token)
    ids = pair.to_target_ids(proposal.row.ids)
    if token is None or bool(np.any(ids < 0)):
        raise ValueError("a proposal reaches outside the shared tokens")
    unique, places = np.unique(ids, return_inverse=True)
    summed = np.zeros(len(unique))
    np.add.at(summed, places, proposal.row.probabilities)
    return token, Row(unique, summed)
