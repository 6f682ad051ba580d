"""Dynamic token warping, `tokentiming` (Xiao et al., TokenTiming, Algorithms 1 and 2, section 4, appendices A and H).

The draft's text is written in target tokens t1…tm, the proxies. Its own tokens d1…dk are aligned with these by
dynamic time warping: the path from (1, 1) to (k, m), each step in one sequence or both, whose pairs have the
smallest sum of edit distances. tj is given the probability that the drafter drew *the last* draft token aligned
with it with: of several that make up one proxy the last counts, not their product; one that makes up several
proxies gives each of them its own. tj is accepted with min(1, p(tj)/q(tj)); after a refusal, and after the last
proxy, the next token is drawn from p.

This is not exact above temperature 0, contrary to the paper: the refused token is replaced by a draw from p,
not from (p - q)+, and q(tj) is not the distribution that tj was drawn from. With one vocabulary on both sides the
second is no fault, and the first is one. Two tokens of the toy pairs of the tests have a total variation of 0.07 to
0.36 from the target's distribution. At temperature 0 p is 0 or 1, so whatever q is the text is the target's.

Where the paper is silent or at odds with itself:

- Algorithm 1 never assigns the (i', j') that it finds, and Algorithm 2 hands the probabilities of T to the mapping,
  where appendix A and figure 2 have the drafter's probabilities of D. Here: as there.
- Of steps that cost the same, Algorithm 1 does not say which is taken. Here: the diagonal first, so that equal
  sequences are aligned one to one, then the step in the draft.
- The band is |i - j| <= w in Algorithm 1 and < w in the text. Here: the former, with w = 8 unless
  the request says otherwise. Where the lengths differ by more than w no path ends within the band; it is then as wide
  as they differ.
- What the target's tokenizer cannot write is not in the proxies, nor are the draft tokens from there on.
- Edit distances are of letters, so that they are defined for tokens that are no whole characters.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from crossdraft.text.letters import Letters
from crossdraft.text.tokenization import encode_beginning
from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Kind
from crossdraft.verification.walk import (
    Emit,
    Ground,
    Walk,
    draft_token_letters,
    draw_residual,
    next_draft_token,
    replaced,
    row_of,
    target_row,
    undrafted,
)

UNREACHED = 2**62  # above every cost
Places = list[tuple[int, int]]


def align(ones: Sequence[str], others: Sequence[str], band: int = 8) -> Places:
    """The index pairs of a cheapest path, in order (Algorithm 1); none if a sequence is empty."""
    if not ones or not others:
        return []
    band = max(band, abs(len(ones) - len(others)))
    costs = [[0] + [UNREACHED] * len(others)]
    for i, one in enumerate(ones, 1):
        above, row = costs[-1], [UNREACHED] * (1 + len(others))
        for j in range(max(1, i - band), min(len(others), i + band) + 1):
            row[j] = min(above[j - 1], above[j], row[j - 1]) + edit_distance(one, others[j - 1])
        costs.append(row)
    return _path(costs)


def _path(costs: list[list[int]]) -> Places:
    """Backtracks from the last pair; of equal costs the first in the order below is taken."""
    i, j = len(costs) - 1, len(costs[0]) - 1
    path: Places = []
    while i:
        path.append((i - 1, j - 1))
        i, j = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda place: costs[place[0]][place[1]])
    path.reverse()
    return path


def edit_distance(one: str, other: str) -> int:
    """Levenshtein's distance: the fewest insertions, deletions and substitutions of letters.

    Goes through the columns of the table of distances, each as two words of bits: in which rows the distance is one
    more than in the row above, and in which one less (Myers 1999, Hyyrö 2003).
    """
    if not one:
        return len(other)
    masks: dict[str, int] = {}  # for each letter the positions in `one` that have it, as bits
    for place, letter in enumerate(one):
        masks[letter] = masks.get(letter, 0) | 1 << place
    full, last, distance = (1 << len(one)) - 1, 1 << (len(one) - 1), len(one)
    rises, falls = full, 0
    for letter in other:
        equal = masks.get(letter, 0)
        steep = equal | falls
        diagonal = (((equal & rises) + rises) ^ rises) | equal
        up, down = falls | ~(diagonal | rises), rises & diagonal
        distance += bool(up & last) - bool(down & last)
        up, down = up << 1 | 1, down << 1
        rises, falls = (down | ~(steep | up)) & full, up & steep & full
    return distance


def walk(ground: Ground) -> Walk:
    """Accept proxy after proxy; the first one refused is replaced by a draw from p and ends the epoch."""
    draft_tokens: list[DraftToken] = []
    while (draft_token := (yield from next_draft_token())) is not None:
        draft_tokens.append(draft_token)
    offset = ground.offset
    for token, chance in _proxies(ground, draft_tokens):
        row = yield from target_row(listed=np.array([token]), judging=True)
        if not ground.chooser.bernoulli(row.probability(token) / chance):  # min(1, p(tj)/q(tj))
            token = yield from draw_residual(ground.chooser, row, None)
            yield from replaced(ground.chooser, token, offset)
            return
        yield Emit(token, Kind.ACCEPTED)
        offset += len(ground.pair.target.letters[token])
    yield from undrafted(ground.chooser)


def _proxies(ground: Ground, draft_tokens: Sequence[DraftToken]) -> list[tuple[int, float]]:
    """The draft's text in target tokens, each with its q."""
    tokens = [draft_token_letters(ground.pair, draft_token) for draft_token in draft_tokens]
    proxies = encode_beginning(ground.encode, Letters("".join(tokens)))
    letters = [ground.pair.target.letters[token] for token in proxies]
    chances = [row_of(draft_token).probability(draft_token.token) for draft_token in draft_tokens]
    size, starts = sum(map(len, letters)), accumulate(map(len, tokens), initial=0)
    begun = [token for token, start in zip(tokens, starts, strict=False) if start < size]  # within these
    aligned = align(begun, letters, ground.band)
    q = {there: chances[here] for here, there in aligned}  # of several draft tokens the last counts
    return [(token, q[place]) for place, token in enumerate(proxies)]
