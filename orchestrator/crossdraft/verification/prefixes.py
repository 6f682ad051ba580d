"""String-level rejection sampling, `slrs` (arXiv 2502.05202, Algorithm 3 and Theorem 3.2).

Let S be the text of the draft's first N tokens, N fixed before any is revealed, and t1, t2, … its pieces: t1 the
longest target token that S starts with, t2 the longest that the rest starts with, and so on. With
G(x) = P(S starts with x), S has the pieces t1…tj if and only if it starts with t1…tj and with none of the strings
t1…t(i-1) y, i <= j, where y is a longer token that begins with ti. So with E those of these strings that begin with
t1…tj and with no other such string

    F(t1…tj) = G(t1…tj) - sum over e in E of G(e)        ψj(t) = F(t1…t(j-1) t) / F(t1…t(j-1)),

and ψj is the distribution of tj given the pieces before it. tj is accepted with probability min(1, p/ψj). After a
refusal, or where the rest of S has no piece, t is drawn from (p - ψj)+, so that

    P(t) = min(p, ψj)(t) + (1 - sum min(p, ψj)) (p - ψj)+(t) / sum (p - ψj)+ = p(t).

Differences from the paper, and why:

- In Theorem 3.2 the sum for ψ runs over draft tokens d1…di with a free i. Then a draft and its continuation both count,
  and ψ exceeds one. It has to run over complete drafts, here all of N tokens.
- The paper accepts one token per draft and leaves later ones open. They are exact too if the distribution of a piece is
  conditioned on the pieces before it not having come out longer (the exclusions of F). G(t1 x) / G(t1) is biased.
- The paper assumes that every text has a piece. If S is used up, or no target token begins its rest, the token must
  still be drawn from the residual, not from p: ψj lacks that share.
- The residual is never summed up: a token t drawn from p is kept with probability (1 - ψj(t)/p(t))+, else drawn again.
  So ψ of a few candidates is enough. They are drawn in blocks, with one request to the drafter for each.

The paper's stopping rule S_1, to draft until N tokens are there or the piece can no longer change, is `_next_piece`:
whether tj can change depends on S up to there alone, so the distribution of tj is the same. N is the k of the request.
Pieces of more than N draft tokens are never accepted; `look_ahead` in the report of a pair is n_max, above which a
larger N makes no first piece likelier, and `combinations` counts the token sequences that the drafter sums for one ψ.

p and ψ are taken of letters: ids with the same letters are one piece, of which one is drawn by its weight. If the
drafter is lost between a refusal and the answer that the residual needs, the session draws this one token from p. All
others are exact if the loss does not depend on what was drafted.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from crossdraft.text.letters import NOTHING, Letters
from crossdraft.text.pairs import Pair
from crossdraft.types.rows import Probabilities, Row
from crossdraft.types.statistics import Kind
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.walk import (
    Emit,
    Ground,
    Steps,
    Walk,
    draft_token_letters,
    next_draft_token,
    prefix_probabilities,
    replaced,
    target_row,
    undrafted,
)

FIRST_BLOCK = 8  # candidates for a residual whose ψ is requested at once
BLOCK_GROWTH = 4
MAX_ASKED = 1024  # strings of a request, whose size and duration must not decide whether it succeeds
TINY = float(np.finfo(np.float64).tiny)


class PieceDistribution:
    """ψ of the next piece of the draft's text, given the pieces that were accepted."""

    def __init__(self, pair: Pair, drafted: int) -> None:
        self._trie = pair.target.trie
        self._drafted = drafted
        self._reach = drafted * pair.drafter.longest  # max letters of a draft
        self._accepted = NOTHING  # t1…t(j-1)
        self._excluded: tuple[Letters, ...] = ()  # S starts with none of these, else its pieces were others
        self._mass = 1.0  # F(t1…t(j-1))
        self._known: dict[Letters, float] = {NOTHING: 1.0}  # G of the strings asked for so far

    @property
    def over(self) -> bool:
        """Whether no draft can be longer than the accepted pieces: ψ is zero."""
        return len(self._accepted) >= self._reach

    def of(self, pieces: Sequence[Letters]) -> Steps[Probabilities]:
        """ψ of each piece, float64 (len(pieces),); requests the values of G that are not known."""
        terms = [self._terms(piece) for piece in pieces]
        yield from self._learn({string for string, without in terms for string in (string, *without)})
        masses = np.array([self._sum(string, without) for string, without in terms], dtype=np.float64)
        return np.clip(masses / max(self._mass, TINY), 0.0, 1.0)

    def accept(self, piece: Letters) -> None:
        """S has this piece next; its ψ is known."""
        string, without = self._terms(piece)
        self._mass = self._sum(string, without)
        self._accepted, self._excluded = string, without

    def _terms(self, piece: Letters) -> tuple[Letters, tuple[Letters, ...]]:
        """t1…t(j-1) piece, and its E; if an excluded string begins it, F is zero, and E is the string itself."""
        string = Letters(self._accepted + piece)
        if any(string.startswith(excluded) for excluded in self._excluded):
            return string, (string,)
        own = [Letters(self._accepted + longer) for longer in self._trie.extensions(piece)]
        return string, _shortest([*own, *(excluded for excluded in self._excluded if excluded.startswith(string))])

    def _sum(self, string: Letters, without: tuple[Letters, ...]) -> float:
        return max(0.0, self._known[string] - sum(self._known[excluded] for excluded in without))

    def _learn(self, strings: set[Letters]) -> Steps[None]:
        missing = strings.difference(self._known)
        self._known.update(dict.fromkeys((string for string in missing if len(string) > self._reach), 0.0))
        asked = tuple(sorted(missing.difference(self._known)))
        for start in range(0, len(asked), MAX_ASKED):
            some = asked[start : start + MAX_ASKED]
            found = yield from prefix_probabilities(some, self._drafted)
            self._known.update(zip(some, found.tolist(), strict=True))


def _shortest(strings: Iterable[Letters]) -> tuple[Letters, ...]:
    """The strings that start with no other of them: disjoint events with the same union."""
    kept: list[Letters] = []
    for string in sorted(strings):
        if not kept or not string.startswith(kept[-1]):
            kept.append(string)
    return tuple(kept)


def walk(ground: Ground) -> Walk:
    """Accept piece after piece; the first refused one is replaced and ends the epoch.

    Once the draft has no further piece, one token is drawn from the residual and all later ones from p.
    """
    distribution = PieceDistribution(ground.pair, ground.drafted)
    trie = ground.pair.target.trie
    rest = NOTHING  # revealed, not accepted
    offset = ground.offset
    while not distribution.over:
        rest = yield from _next_piece(ground.pair, rest)
        piece = trie.longest(rest)
        token = None if piece is None else (yield from _accepted(ground, distribution, piece))
        if piece is None or token is None:
            token = yield from _residual(ground, distribution)
            if piece is not None or not trie.extends(rest):
                yield from replaced(ground.chooser, token, offset)
                return
            yield Emit(token, Kind.BONUS)
            break
        yield Emit(token, Kind.ACCEPTED)
        distribution.accept(piece)
        rest, offset = Letters(rest[len(piece) :]), offset + len(piece)
    yield from undrafted(ground.chooser)


def _next_piece(pair: Pair, rest: Letters) -> Steps[Letters]:
    """Reveal draft tokens until the next piece can no longer change, or none is left."""
    while pair.target.trie.extends(rest):
        draft_token = yield from next_draft_token()
        if draft_token is None:
            break
        rest = Letters(rest + draft_token_letters(pair, draft_token))
    return rest


def _accepted(ground: Ground, distribution: PieceDistribution, piece: Letters) -> Steps[int | None]:
    """The piece as a target id, or None if it is refused."""
    ids = np.array(ground.pair.target.ids_of(piece), dtype=np.int64)
    row = yield from target_row(listed=ids, judging=True)
    weights = row.probabilities_of(ids)
    if not weights.any():
        return None
    (psi,) = (yield from distribution.of([piece])).tolist()
    if not ground.chooser.bernoulli(float(weights.sum()) / max(psi, TINY)):  # min(1, p/ψ)
        return None
    return int(ids[ground.chooser.categorical(weights)])


def _residual(ground: Ground, distribution: PieceDistribution) -> Steps[int]:
    """Draw from (p - ψ)+: candidates from p, each kept with probability (1 - ψ/p)+, until one is.

    A candidate is kept at least as probably as the residual is needed at all, so more than a few blocks are rare. Once
    a block would be as large as the support of p, ψ is requested for all of it instead.
    """
    row = yield from target_row(whole=True, judging=True)
    possible = np.flatnonzero(row.probabilities)
    count = FIRST_BLOCK
    while True:
        places = ground.chooser.candidates(row.probabilities, count)
        keep = yield from _kept_shares(ground.pair, distribution, row, places)
        place = ground.chooser.kept(places, row.probabilities, keep)
        if place is not None:
            return int(row.ids[place])
        count *= BLOCK_GROWTH
        if count >= len(possible):
            return (yield from _whole_residual(ground.chooser, ground.pair, distribution, row))


def _whole_residual(chooser: Chooser, pair: Pair, distribution: PieceDistribution, row: Row) -> Steps[int]:
    """Draw from (p - ψ)+ with ψ of every token."""
    keep = yield from _kept_shares(pair, distribution, row, range(len(row.ids)))
    weights = row.probabilities * keep
    if not np.any(weights > 0):
        weights = row.probabilities  # p and ψ differ by rounding only; any draw from p is as good
    return int(row.ids[chooser.categorical(weights)])


def _kept_shares(pair: Pair, distribution: PieceDistribution, row: Row, places: Sequence[int]) -> Steps[Probabilities]:
    """(1 - ψ/p)+ of the tokens at these indices of a whole row, float64 (len(places),)."""
    letters = [pair.target.letters[token] for token in row.ids[list(places)].tolist()]
    pieces = sorted(set(letters))
    psi = yield from distribution.of(pieces)
    ids = [pair.target.ids_of(piece) for piece in pieces]
    first = np.cumsum([0, *map(len, ids[:-1])])
    p = np.add.reduceat(row.probabilities_of(np.concatenate(ids)), first)
    shares = dict(zip(pieces, np.maximum(0.0, 1.0 - psi / np.maximum(p, TINY)).tolist(), strict=True))
    return np.array([shares[piece] for piece in letters], dtype=np.float64)
