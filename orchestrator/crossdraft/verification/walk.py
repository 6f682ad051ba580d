"""The one protocol of all methods: a walk without I/O that stands at the frontier.

A walk is a generator. It yields what it needs or what it decided, and is sent the answer:

    NeedDraftToken       -> the epoch's next Draft token, or None: settle, no draft token will come in time
    NeedRow            -> the target's Row at the frontier (`whole`: without a tail)
    NeedSample         -> the target's own draw at the frontier, a token id
    NeedPrefix         -> float64 (n,): the drafter's probabilities that its text continues with each string
    Emit               -> nothing; the token is committed and the frontier moves
    Refused            -> nothing; the draft is wrong from this letter on: the epoch and the walk end

What a draft token hides is known to the walk only once it has asked for it, so whatever decides the
output (and is not the walk itself) cannot look ahead.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np

from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.text.pairs import Pair
from crossdraft.types.rows import NO_IDS, DraftToken, Ids, Probabilities, Row, Whose
from crossdraft.types.statistics import Kind
from crossdraft.verification.chooser import Chooser


@dataclass(frozen=True)
class NeedDraftToken:
    """Asks for the next draft token of the epoch."""


@dataclass(frozen=True, eq=False)
class NeedRow:
    """Asks for the target's row at the frontier."""

    whole: bool = False  # a head is not enough
    listed: Ids = field(default_factory=lambda: NO_IDS)  # shape (n,), ids whose probability must be in it
    judging: bool = False  # a revealed draft token waits for it: the epoch must not end here


@dataclass(frozen=True)
class NeedSample:
    """Asks for one keyed draw of the target's at the frontier."""

    judging: bool = False


@dataclass(frozen=True)
class NeedPrefix:
    """Asks for the probability that the draft's text, from its beginning on, starts with each of these strings.

    Always judges a revealed draft token: the epoch must not end here.
    """

    strings: tuple[Letters, ...]  # none empty
    tokens: int  # of the draft: what counts is the text of its first `tokens` draft tokens


@dataclass(frozen=True)
class Emit:
    """A token to commit."""

    token: int  # target id
    kind: Kind


@dataclass(frozen=True)
class Refused:
    """The draft is wrong from this letter on."""

    offset: int  # letters since the start of the output


Step = NeedDraftToken | NeedRow | NeedSample | NeedPrefix | Emit | Refused
Answer = DraftToken | Row | int | Probabilities | None
Walk = Generator[Step, Answer, None]


@dataclass(frozen=True)
class Ground:
    """What a walk stands on: the two vocabularies, the random choices, where its epoch begins."""

    pair: Pair
    chooser: Chooser
    offset: int = 0  # of the frontier, in letters since the start of the output
    ahead: Letters = NOTHING  # the last of them, which the draft has not reached; only where the target draws by itself
    encode: Callable[[Letters], tuple[int, ...]] = lambda letters: ()  # continuation tokenizing, the target's
    drafted: int = 0  # draft tokens of this epoch, for methods that need it fixed before the first is revealed


class Unreached:
    """Committed letters that the draft has not reached yet ("ahead"), and drafted ones not committed.

    At most one of the two is not empty. Offsets count letters since the start of the output.
    """

    def __init__(self, offset: int, ahead: Letters = NOTHING) -> None:
        self.frontier = offset
        self.ahead = ahead  # committed, not yet drafted
        self.over = NOTHING  # drafted and revealed, not yet committed

    def commit(self, letters: Letters) -> int | None:
        """The target's token is committed; returns the first offset where the draft disagrees, if any."""
        disagreement = _disagreement(letters, self.over, self.frontier)
        self.frontier += len(letters)
        left = max(0, len(letters) - len(self.over))
        self.ahead = Letters(self.ahead + letters[len(letters) - left :])
        self.over = Letters(self.over[len(letters) :])
        return disagreement

    def reveal(self, letters: Letters) -> int | None:
        """A draft token's letters are revealed; returns the first offset where they disagree, if any."""
        reached = self.frontier - len(self.ahead)
        disagreement = _disagreement(letters, self.ahead, reached)
        self.over = Letters(self.over + letters[len(self.ahead) :])
        self.ahead = Letters(self.ahead[len(letters) :])
        return disagreement


def _disagreement(left: Letters, right: Letters, offset: int) -> int | None:
    same = common_length(left, right)
    return None if same == min(len(left), len(right)) else offset + same


def next_draft_token() -> Generator[Step, Answer, DraftToken | None]:
    """Ask for the next draft token; None means settle."""
    answer = yield NeedDraftToken()
    if answer is not None and not isinstance(answer, DraftToken):
        raise TypeError(f"NeedDraftToken was answered with {answer!r}")
    return answer


def target_row(listed: Ids = NO_IDS, whole: bool = False, judging: bool = False) -> Generator[Step, Answer, Row]:
    """Ask for the target's row at the frontier. Whoever answers sees to it that it lists what it must."""
    row = yield NeedRow(whole, listed, judging)
    if not isinstance(row, Row) or (whole and not row.whole):
        raise TypeError(f"NeedRow was answered with {row!r}")
    return row


def target_sample() -> Generator[Step, Answer, int]:
    """Ask for the target's own draw at the frontier."""
    token = yield NeedSample()
    if not isinstance(token, int):
        raise TypeError(f"NeedSample was answered with {token!r}")
    return token


def prefix_probabilities(strings: tuple[Letters, ...], tokens: int) -> Generator[Step, Answer, Probabilities]:
    """Ask for the probability that the text of the draft's first `tokens` draft tokens starts with each string."""
    answer = yield NeedPrefix(strings, tokens)
    if not isinstance(answer, np.ndarray) or answer.shape != (len(strings),):
        raise TypeError(f"NeedPrefix was answered with {answer!r}")
    return answer


def draft_token_letters(pair: Pair, draft_token: DraftToken) -> Letters:
    """The letters of a draft token."""
    vocabulary = pair.target if draft_token.whose is Whose.TARGET else pair.drafter
    return vocabulary.letters[draft_token.token]


def target_support(pair: Pair, draft_token: DraftToken) -> Ids:
    """The target ids that a draft token's row can give: of several with the same letters the first, of others none.

    Drafter ids of the same letters give it more than once.
    """
    if draft_token.row is None:
        return NO_IDS
    if draft_token.whose is Whose.TARGET:
        return draft_token.row.ids
    ids = pair.to_target_ids(draft_token.row.ids)
    return ids[ids >= 0]
