"""Matching of text: `slem` (arXiv 2502.05202, Algorithm 2) and `seeded` (the same with common noise).

The target draws each token t from p by itself. t is accepted if the letters of the draft go on with those of t, or with
a beginning of t that the draft has reached so far; the first that differs ends the epoch. The output is a function of
the target's draws alone: exact for any drafter, and the draft decides only how many draws a pass yields.
"""

from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Kind
from crossdraft.verification.walk import NEXT, SAMPLE, Emit, Ground, Refused, Unreached, Walk, draft_token_letters


def walk(ground: Ground) -> Walk:
    """Draw, compare with the draft's letters, emit; until they differ."""
    text = Unreached(ground.offset, ground.ahead)
    while True:
        token = yield SAMPLE
        assert isinstance(token, int)
        wrong = text.commit(ground.pair.target.letters[token])
        kind = Kind.ACCEPTED
        while wrong is None and text.ahead:
            draft_token = yield NEXT
            if not isinstance(draft_token, DraftToken):
                kind = Kind.BONUS
                break
            wrong = text.reveal(draft_token_letters(ground.pair, draft_token))
        yield Emit(token, kind if wrong is None else Kind.CORRECTED)
        if wrong is not None:
            yield Refused(wrong)
            return


def drawn() -> Walk:
    """Emit what the target draws; nothing is drafted."""
    while isinstance(token := (yield SAMPLE), int):
        yield Emit(token, Kind.BONUS)
