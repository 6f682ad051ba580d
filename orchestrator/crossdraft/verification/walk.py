"""The protocol of all verification methods: a walk, a generator without I/O that stands at the frontier.

The frontier is the end of the committed tokens. A walk yields what it needs or decided, and is sent the answer:

    NeedDraftToken -> the epoch's next DraftToken, or None to settle: none will come in time
                      (after a path: or None, the block ends)
    NeedRow        -> the target's Row at the frontier, or after a path from it
                      (if `known`: or None, no pass has brought it)
    NeedSample     -> the target's own draw at the frontier, a token id
    NeedPrefix     -> float64 (n,): the drafter's probabilities that its text starts with each string
    Emit           -> None; the token is committed, and the frontier is after it
    Refused        -> None; the draft is wrong from this letter on: epoch and walk end

The release rule: a draft token is revealed when the walk asks for it, and nothing else that decides the output may
depend on a token that is drawn but not yet revealed. Otherwise the output does not have the target's distribution.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np

from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.text.pairs import Pair
from crossdraft.types import quick_dataclass
from crossdraft.types.rows import NO_IDS, DraftToken, Ids, Probabilities, Row, Whose
from crossdraft.types.statistics import Kind
from crossdraft.types.trees import Path
from crossdraft.verification.chooser import Chooser

T = TypeVar("T")


@quick_dataclass(frozen=True)
class NeedDraftToken:
    """Requests the next draft token of the epoch.

    A method that decides draft tokens in blocks gives a path: the block's draft tokens so far, which are revealed and
    not decided yet. It is sent the next one if there is one and a pass has brought the target's row after the path, by
    which it is judged; else None: the block ends here.
    """

    path: Path = ()  # target ids, from the frontier on


@quick_dataclass(frozen=True, eq=False)
class NeedRow:
    """Requests the target's row at the end of a path from the frontier."""

    whole: bool = False  # the row must not have a tail
    listed: Ids = field(default_factory=lambda: NO_IDS)  # shape (n,), ids that it must list
    judging: bool = False  # it judges a revealed draft token: the epoch must not end before the answer
    path: Path = ()  # target ids, from the frontier on; judging, if not empty
    known: bool = False  # only if a pass of a tree has brought it


@quick_dataclass(frozen=True)
class NeedSample:
    """Requests the target's own keyed draw at the frontier."""

    judging: bool = False


@quick_dataclass(frozen=True)
class NeedPrefix:
    """Requests the probability that the text of the epoch's draft starts with each of these strings.

    It always judges a revealed draft token: the epoch must not end before the answer.
    """

    strings: tuple[Letters, ...]  # none empty
    tokens: int  # the text is that of the draft's first so many tokens


@quick_dataclass(frozen=True)
class Emit:
    """A token to commit."""

    token: int  # target id
    kind: Kind


@quick_dataclass(frozen=True)
class Refused:
    """The draft is wrong from this letter on."""

    offset: int  # letters since the start of the output


NEXT, SAMPLE = NeedDraftToken(), NeedSample()
WalkStep = NeedDraftToken | NeedRow | NeedSample | NeedPrefix | Emit | Refused
Answer = DraftToken | Row | int | Probabilities | None
Steps = Generator[WalkStep, Answer, T]  # of a walk, or of a part of it that ends with a result
Walk = Steps[None]


@quick_dataclass(frozen=True)
class Ground:
    """What a walk begins with: the two vocabularies, the random choices, and where its epoch begins."""

    pair: Pair
    chooser: Chooser
    offset: int = 0  # of the frontier, in letters since the start of the output
    ahead: Letters = NOTHING  # the last of these, which the draft has not reached; only if the target draws by itself
    encode: Callable[[Letters], tuple[int, ...]] = lambda letters: ()  # the target's tokenizer, for text in mid-output
    band: int = 8  # of an alignment
    drafted: int = 0  # draft tokens of this epoch, for methods that need the number fixed before the first is revealed


class Guess(Enum):
    """A guess at the tokens that the walk will emit; it makes one path of a pass's tree."""

    OWN = "own"  # the draft's own tokens, up to the first that is no target token
    CANONICAL = "canonical"  # the draft's text as the target's tokenizer writes it
    LONGEST = "longest"  # the draft's text cut greedily into longest target tokens


@dataclass(frozen=True)
class Method:
    """One verification method."""

    name: str
    walk: Callable[[Ground], Walk]
    guesses: tuple[Guess, ...]  # paths of a pass, the likeliest first
    exact: bool = True  # the output has the target's distribution
    # The target replies with its own draws, not with rows: the output is a function of these, so that with a seed it is
    # the same whatever the timing and the drafter, which need not be trusted.
    samples: bool = False
    keyed: bool = False  # the drafter draws with the target's noise
    same_vocabulary: bool = False  # refused if the vocabularies differ
    shared_only: bool = False  # the drafter draws tokens of T∩D only
    redistributed: bool = False  # ... and of these target tokens, through its affinity matrix
    whole_draft: bool = False  # the number of draft tokens is fixed before the first is revealed: lock-step only

    @property
    def drafter_rows(self) -> bool:
        """Every draft token carries its row, and the output is exact only if it was drawn from that."""
        return not self.samples


class Unreached:
    """Compares committed and revealed letters where one side is longer. Offsets count letters of the output.

    `ahead` are committed letters that the draft has not reached, `over` revealed letters that are not committed; at
    most one of the two is not empty.
    """

    def __init__(self, offset: int, ahead: Letters = NOTHING) -> None:
        self.frontier = offset
        self.ahead = ahead
        self.over = NOTHING

    def commit(self, letters: Letters) -> int | None:
        """Commits a target token's letters; returns the first offset where the draft differs, or None."""
        if not self.over:
            self.frontier += len(letters)
            self.ahead = Letters(self.ahead + letters)
            return None
        disagreement = _disagreement(letters, self.over, self.frontier)
        self.frontier += len(letters)
        left = max(0, len(letters) - len(self.over))
        self.ahead = Letters(self.ahead + letters[len(letters) - left :])
        self.over = Letters(self.over[len(letters) :])
        return disagreement

    def reveal(self, letters: Letters) -> int | None:
        """Reveals a draft token's letters; returns the first offset where they differ from the output, or None."""
        if letters == self.ahead:
            self.ahead = NOTHING
            return None
        reached = self.frontier - len(self.ahead)
        disagreement = _disagreement(letters, self.ahead, reached)
        self.over = Letters(self.over + letters[len(self.ahead) :])
        self.ahead = Letters(self.ahead[len(letters) :])
        return disagreement


def _disagreement(left: Letters, right: Letters, offset: int) -> int | None:
    if left.startswith(right) or right.startswith(left):
        return None
    return offset + common_length(left, right)


def next_draft_token(path: Path = ()) -> Steps[DraftToken | None]:
    """The next draft token; None: settle, or the block of the draft tokens on `path` ends."""
    answer = yield NeedDraftToken(path) if path else NEXT
    if answer is not None and not isinstance(answer, DraftToken):
        raise TypeError(f"NeedDraftToken was answered with {answer!r}")
    return answer


def target_row(listed: Ids = NO_IDS, whole: bool = False, judging: bool = False, path: Path = ()) -> Steps[Row]:
    """The target's row after `path`, which lists at least `listed`, or everything if `whole`."""
    row = yield NeedRow(whole, listed, judging, path)
    if not isinstance(row, Row) or (whole and not row.whole):
        raise TypeError(f"NeedRow was answered with {row!r}")
    return row


def prefix_probabilities(strings: tuple[Letters, ...], tokens: int) -> Steps[Probabilities]:
    """The probabilities that the text of the draft's first `tokens` tokens starts with each string."""
    answer = yield NeedPrefix(strings, tokens)
    if not isinstance(answer, np.ndarray) or answer.shape != (len(strings),):
        raise TypeError(f"NeedPrefix was answered with {answer!r}")
    return answer


def draft_token_letters(pair: Pair, draft_token: DraftToken) -> Letters:
    """The letters of a draft token."""
    vocabulary = pair.target if draft_token.whose is Whose.TARGET else pair.drafter
    return vocabulary.letters[draft_token.token]


def letters_of(pair: Pair, draft_tokens: Iterable[DraftToken]) -> list[Letters]:
    """The letters of each."""
    target, drafter = pair.target.letters, pair.drafter.letters
    return [(target if one.whose is Whose.TARGET else drafter)[one.token] for one in draft_tokens]


def row_of(draft_token: DraftToken) -> Row:
    """The row that a draft token was drawn from. Raises ValueError: it came without one, though the method needs it."""
    if draft_token.row is None:
        raise ValueError("this method needs the row that each draft token was drawn from")
    return draft_token.row


def target_support(pair: Pair, draft_token: DraftToken) -> Ids:
    """The target ids that a draft token's row can stand for, shape (n,): those with the letters of one of its ids.

    Of several target ids with the same letters the first; it repeats if several drafter ids have its letters.
    """
    if draft_token.row is None:
        return NO_IDS
    if draft_token.whose is Whose.TARGET:
        return draft_token.row.ids
    ids = pair.to_target_ids(draft_token.row.ids)
    return ids[ids >= 0]


def undrafted(chooser: Chooser, known: bool = False) -> Walk:
    """No draft token is left: draw from p, token after token; if `known`, as far as a pass has brought rows."""
    while (row := (yield NeedRow(known=known))) is not None:
        if not isinstance(row, Row):
            raise TypeError(f"NeedRow was answered with {row!r}")
        yield Emit((yield from draw_residual(chooser, row, None)), Kind.BONUS)


def replaced(chooser: Chooser, token: int, offset: int) -> Walk:
    """A draft token is refused, and replaced by `token`: the draft is wrong from letter `offset` of the output on.

    Where the planner guessed that token (`planning`) the pass has looked beyond it: then a draft has several tokens at
    a node. Which rows are at hand may depend on anything, for a token is drawn from p now or later, and nothing more of
    the draft is judged.
    """
    yield Emit(token, Kind.CORRECTED)
    yield from undrafted(chooser, known=True)
    yield Refused(offset)


def draw_residual(chooser: Chooser, row: Row, drafted: Row | None) -> Steps[int]:
    """Draw from (p - q)+, or from p without q; their masses need not be one.

    If p has a tail, which q does not reach, "in the tail" is one more event; if it happens, the whole row is fetched.
    Raises KeyError: q lists an id that the row does not list, though it was asked to.
    """
    weights = residual(row, drafted)
    if not weights.any():
        weights = residual(row, None)  # p and q differ by rounding only; any draw from p is as good
    place = chooser.categorical(weights)
    return int(row.ids[place]) if place < len(row.ids) else (yield from draw_unlisted(chooser, row))


def residual(row: Row, drafted: Row | None) -> Probabilities:
    """(p - q)+, or p without q, of each id that the row of p lists and of all others together, shape (n + 1,).

    Raises KeyError: q lists an id that the row does not list, though it was asked to.
    """
    weights = row.probabilities if drafted is None else np.maximum(row.probabilities - row.aligned(drafted), 0.0)
    return np.append(weights, row.tail)


def draw_unlisted(chooser: Chooser, row: Row) -> Steps[int]:
    """Fetch the whole row and draw among the ids that `row` does not list."""
    whole = yield from target_row(whole=True, judging=True)
    weights = np.where(row.places(whole.ids) < 0, whole.probabilities, 0.0)
    if not weights.any():
        weights = whole.probabilities  # the tail was rounding only
    return int(whole.ids[chooser.categorical(weights)])
