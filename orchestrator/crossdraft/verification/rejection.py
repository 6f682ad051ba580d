"""Rejection sampling on target ids, block by block: `standard`, `union`, `tli`, `rdk`.

Block verification (Sun et al., Block Verification Accelerates Speculative Decoding, arXiv 2403.10444). A block is the
draft tokens d_1 ... d_n whose rows are at hand. With p_i the target's row after the first i of them and q_i the row
that d_{i+1} was drawn from, both over T ∪ D, let

    w_0 = 1,   w_{i+1} = min(1, w_i p_i(d_{i+1}) / q_i(d_{i+1})),   s_i = sum (w_i p_i - q_i)+.

The number of accepted draft tokens is the largest i for which an event of probability h_i happens, each independent of
the others: h_n = w_n, h_i = s_i / (s_i + 1 - w_i), h_0 = 1. So P(at least i are accepted | d_1 ... d_i) = w_i: it holds
for n, and if it holds for i + 1, at least i + 1 are accepted, given the first i, with probability

    a = sum q_i min(1, w_i p_i / q_i) = sum min(w_i p_i, q_i) = w_i - s_i,

and at least i with a + (1 - a) h_i = w_i. If i < n are accepted, the next token is drawn from (w_i p_i - q_i)+,
renormalized. Let Q be the probability of drafting d_1 ... d_i. Where at least i are accepted, Q w_i of all, the next
token is t in

    Q q_i(t) min(1, w_i p_i(t) / q_i(t)) + Q s_i (w_i p_i - q_i)+(t) / s_i = Q w_i p_i(t)

of all, so it has the target's distribution. One draft token is accepted with min(1, p / q), as in rejection sampling
token by token. That accepts at least i with the product of min(1, p_j / q_j), which is w_i at most, so that a block
never accepts fewer.

Whether d_{i+1} belongs to the block may depend on d_1 ... d_i, not on d_{i+1} or what follows: each step of the
induction is an expectation over d_{i+1} given those before.

The methods differ in q alone:

- `standard`: one vocabulary (Leviathan et al. 2023; Chen et al. 2023; arXiv 2502.05202, Algorithm 5);
- `union`: any vocabularies. Outside T p is 0, so that such a d is always refused; q is not renormalized (Algorithm 1);
- `tli`: the drafter draws from T ∩ D only (Algorithm 4);
- `rdk`: the drafter draws target ids from q = Mᵀq' (Timor et al., Algorithm 1).
"""

from dataclasses import dataclass, field

import numpy as np

from crossdraft.text.pairs import Pair
from crossdraft.types.rows import NO_IDS, DraftToken, Row, Whose, masses_of
from crossdraft.types.statistics import Kind
from crossdraft.types.trees import Path
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.walk import (
    Emit,
    Ground,
    Refused,
    Steps,
    Unreached,
    Walk,
    draft_token_letters,
    draw_residual,
    next_draft_token,
    replaced,
    residual,
    row_of,
    target_row,
)


def walk(ground: Ground) -> Walk:
    """Accept draft tokens block by block; the first refused one is replaced and ends the epoch."""
    text = Unreached(ground.offset)
    letters = ground.pair.target.letters
    while True:
        draft_token = yield from next_draft_token()
        if draft_token is None:
            token = yield from draw_residual(ground.chooser, (yield from target_row()), None)
            yield Emit(token, Kind.BONUS)
            text.commit(letters[token])
            continue
        if text.ahead:
            wrong = text.reveal(draft_token_letters(ground.pair, draft_token))
            if wrong is not None or text.over:
                # The draft differs, or is in mid-token at the frontier, where no target token begins: a new epoch.
                yield Refused(text.frontier if wrong is None else wrong)
                return
            continue
        block = yield from _revealed(ground.pair, draft_token)
        accepted = yield from block.accepted(ground.chooser)
        for token in block.path[:accepted]:
            yield Emit(token, Kind.ACCEPTED)
            text.commit(letters[token])
            text.reveal(letters[token])
        if accepted < len(block.rows):
            token = yield from draw_residual(ground.chooser, *block.rows[accepted])
            yield from replaced(ground.chooser, token, text.frontier)
            return


@dataclass
class Block:
    """Draft tokens that are revealed and not decided yet."""

    path: Path = ()  # their target ids; without the last one if it lies outside T
    rows: list[tuple[Row, Row]] = field(default_factory=list)  # p_i (w_i p_i once i + 1 is refused) and q_i
    weights: list[float] = field(default_factory=lambda: [1.0])  # w_0 ... w_n

    def add(self, token: int | None, p: Row, q: Row) -> None:
        """The next draft token's target id, None outside T, with the target's row and its own."""
        self.rows.append((p, q))
        weighed = 0.0 if token is None else self.weights[-1] * p.probability(token)
        self.weights.append(0.0 if token is None else min(1.0, weighed / q.probability(token)))
        self.path = self.path if token is None else (*self.path, token)

    def accepted(self, chooser: Chooser) -> Steps[int]:
        """How many draft tokens are accepted: the events h_n ... h_1, up to the first that happens.

        Only now are rows needed that list all that q does: an accepted block asks for no more of them.
        """
        if chooser.bernoulli(self.weights[-1]):
            return len(self.rows)
        place = len(self.rows)
        while True:
            place -= 1
            q, weight = self.rows[place][1], self.weights[place]
            p = yield from target_row(q.ids, judging=True, path=self.path[:place])
            weighed = Row(p.ids, weight * p.probabilities, weight * p.tail)
            self.rows[place] = weighed, q
            left = float(residual(weighed, q).sum())
            if not place or weight == 1.0 or chooser.bernoulli(left / (left + 1.0 - weight)):
                return place


def _revealed(pair: Pair, draft_token: DraftToken | None) -> Steps[Block]:
    """The block that begins with this draft token. It ends where rows or draft tokens do, and where w is 0."""
    block = Block()
    while draft_token is not None:
        token, q = in_target_ids(pair, draft_token)
        listed = NO_IDS if token is None else np.array([token], dtype=np.int64)
        p = yield from target_row(listed, judging=True, path=block.path)
        block.add(token, p, q)
        draft_token = (yield from next_draft_token(block.path)) if block.weights[-1] else None
    return block


def in_target_ids(pair: Pair, draft_token: DraftToken) -> tuple[int | None, Row]:
    """A draft token and q in target ids; drafter ids of the same letters are summed up.

    The mass outside T is the row's tail; a draft token outside T is None. Raises ValueError: the draft token has no
    row.
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
