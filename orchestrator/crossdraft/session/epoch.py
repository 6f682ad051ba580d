"""One epoch: its draft as far as it has arrived, and the walk that verifies it.

The walk sees draft tokens only when it asks for them. Decisions made outside of it, such as which rows to fetch, may
use all of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from crossdraft.speculation.choice import Choice
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.text.pairs import Pair
from crossdraft.types.rows import DraftToken
from crossdraft.verification.walk import Answer, Refused, Walk, WalkStep, letters_of


class Verdict(NamedTuple):
    """How far a draft held, counted in draft tokens from its first one on."""

    accepted: int = 0  # wholly in the output
    refused: bool = False  # the next one is not in the output, and never will be


UNJUDGED = Verdict()


class Epoch:
    """A draft that begins at letter `start` of the output.

    `number`: counts the session's epochs from 1. `start`: letters of output before the draft. `frontier`: letters of
    output when the epoch began; at most `start`. `tokens`: of output, then.
    """

    def __init__(self, number: int, choice: Choice, pair: Pair, start: int, frontier: int, tokens: int = 0) -> None:
        self.number = number
        self.choice = choice
        self.start = start
        self.began = frontier
        self.draft_tokens: list[DraftToken] = []
        self.drafted = NOTHING  # their letters
        self.promised: tuple[DraftToken, ...] = ()  # an adopted branch whose rows have not come: from its first one on
        self.revealed = 0  # draft tokens that the walk has asked for
        self.missed = 0  # times since the latest that the walk went on without one
        self.draws = False  # the walk needs the target's own draws, not rows
        self.reviewed = tokens  # of output when its choice was made
        self.reach = 0  # letters of output that passes of this epoch have covered with guesses
        self._pair = pair
        self._ends: list[int] = []  # of each draft token, in letters since `start`
        self._agreed = 0  # letters of `drafted` that are in the output
        self._released = 0  # draft tokens whose rows are dropped
        self.waits_for: WalkStep | None = None  # what the walk asked for, or decided; None: it has not begun
        self._send: Callable[[Answer], WalkStep]  # of the walk

    def begin(self, walk: Walk, draws: bool = False) -> None:
        """Start the walk; `draws`: on the target's own draws instead of rows."""
        self._send, self.waits_for, self.draws = walk.send, next(walk), draws

    def review(self, choice: Choice, tokens: int) -> None:
        """Go on by another choice, made after so many tokens of output."""
        self.choice, self.reviewed = choice, tokens

    @property
    def judging(self) -> bool:
        """Whether the walk needs the target's answer to judge a revealed draft token."""
        return getattr(self.waits_for, "judging", False)

    def answer(self, answer: Answer) -> None:
        """Give the walk what it waits for."""
        self.waits_for = self._send(answer)

    def reveal(self) -> None:
        """Give the walk, which waits for it, the next draft token."""
        draft_token = self.draft_tokens[self.revealed]
        self.revealed, self.missed = self.revealed + 1, 0
        self.waits_for = self._send(draft_token)

    def settle(self) -> None:
        """Let the walk go on without a draft token: none has come in time."""
        self.missed += 1
        self.answer(None)

    def promise(self, draft_tokens: tuple[DraftToken, ...]) -> None:
        """The draft begins with these, whose rows are still to come."""
        self.promised = draft_tokens

    def cover(self, reach: int) -> None:
        """A pass has covered guesses up to this letter of output."""
        self.reach = max(self.reach, reach)

    def extend(self, draft_tokens: Sequence[DraftToken]) -> None:
        """More of the draft has arrived."""
        letters = letters_of(self._pair, draft_tokens)
        self._ends += [*accumulate(map(len, letters), initial=len(self.drafted))][1:]
        self.draft_tokens += draft_tokens
        self.drafted = Letters(self.drafted + "".join(letters))

    @property
    def outrun(self) -> bool:
        """Whether the output is past all draft tokens that the drafter was asked for."""
        return self.missed > self.choice.max_draft_tokens

    @property
    def exhausted(self) -> bool:
        """Whether every draft token that has arrived is revealed."""
        return self.revealed == len(self.draft_tokens)

    def guessed(self, first: int) -> list[DraftToken]:
        """The draft as known from place `first` on, for planning: draft tokens, then those that a branch promises."""
        return [*self.draft_tokens[first:], *self.promised[max(first, len(self.draft_tokens)) :]]

    def passed(self, frontier: int) -> int:
        """Draft tokens that end at or before the frontier (letters of output)."""
        return bisect_right(self._ends, frontier - self.start) if frontier > self.start else 0

    def beyond(self, frontier: int) -> int:
        """Draft tokens known that end beyond the frontier (letters of output)."""
        known = max(len(self.draft_tokens), len(self.promised))
        return known and known - self.passed(frontier)

    def release(self, frontier: int) -> None:
        """Drop the rows of draft tokens that the output has passed: they are needed neither to fetch nor to judge.

        An epoch in which everything is accepted has as many draft tokens as the output has tokens.
        """
        over = min(self.revealed, self.passed(frontier))
        for place in range(self._released, over):
            if self.draft_tokens[place].row is not None:
                self.draft_tokens[place] = replace(self.draft_tokens[place], row=None)
        self._released = max(self._released, over)

    def letters_before(self, place: int) -> int:
        """Letters of the draft before the draft token at this place, or before the next one to come."""
        return self._ends[place - 1] if place else 0

    def contradicts(self, text: Letters) -> bool:
        """Whether draft and output differ. Only where the target draws by itself may that end an epoch."""
        place, drafted, written = self._agreed, len(self.drafted), len(text) - self.start
        if place == drafted or place >= written:
            return False
        self._agreed = place = place + common_length(self.drafted[place:], text[self.start + place :])
        return place < drafted and place < written

    def verdict(self, text: Letters) -> Verdict:
        """How far the draft held.

        Counted in letters, so that it means the same for every method. A token that replaces a refused draft token may
        begin with that draft token's letters; what the walk said about where the draft is wrong takes precedence.
        """
        if not self.draft_tokens or (len(text) <= self.start and not isinstance(self.waits_for, Refused)):
            return UNJUDGED
        refused = self.contradicts(text)
        agreed = self._agreed
        if isinstance(self.waits_for, Refused):
            agreed, refused = min(agreed, self.waits_for.offset - self.start), True
        return Verdict(bisect_right(self._ends, agreed), refused)
