"""One epoch: its draft as far as it has arrived, and the walk over it."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossdraft.pipeline.governing import Choice
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.text.pairing import Pair
from crossdraft.verification.rows import Proposal
from crossdraft.verification.walk import Answer, Refused, Step, Walk, proposal_letters


@dataclass(frozen=True)
class Verdict:
    """How far a draft held, counted in proposals from its first one on."""

    accepted: int = 0  # wholly in the output
    refused: bool = False  # the next one is not, and never will be


class Epoch:
    """A draft from the letter `start` of the output on, and the walk that verifies it.

    The walk sees proposals only when it asks for them. What is decided without it, which rows to fetch, may
    look at all of them.
    """

    def __init__(self, number: int, choice: Choice, pair: Pair, start: int, frontier: int) -> None:
        self.number = number
        self.choice = choice
        self.start = start  # letters of output before the draft
        self.began = frontier  # letters of output when the epoch began; less than `start` never
        self.proposals: list[Proposal] = []
        self.drafted = NOTHING  # their letters
        self.promised: tuple[Proposal, ...] = ()  # an adopted branch whose rows have not come: from its first one on
        self.revealed = 0  # proposals that the walk has asked for
        self.settled = False  # the target has gone on by itself, and the draft has not caught up yet
        self.draws = False  # the walk needs the target's own draws, not rows
        self.reach = 0  # letters of output up to which passes of this epoch have guessed
        self._pair = pair
        self._ends: list[int] = []  # of each proposal, in letters since `start`
        self._agreed = 0  # letters of `drafted` that are in the output
        self._released = 0  # proposals whose rows are given back
        self._walk: Walk | None = None
        self._step: Step | None = None

    def begin(self, walk: Walk, draws: bool = False) -> None:
        """The walk sets out, on rows or on the target's own draws."""
        self._walk, self._step, self.draws = walk, next(walk), draws

    @property
    def begun(self) -> bool:
        """Whether the walk has set out."""
        return self._walk is not None

    @property
    def step(self) -> Step:
        """What the walk waits for."""
        assert self._step is not None
        return self._step

    def answer(self, answer: Answer) -> None:
        """Give the walk what it asked for; `step` becomes the next thing that it asks."""
        assert self._walk is not None
        self._step = self._walk.send(answer)

    def extend(self, proposals: Sequence[Proposal]) -> None:
        """More of the draft has arrived."""
        for proposal in proposals:
            self.proposals.append(proposal)
            self.drafted = Letters(self.drafted + proposal_letters(self._pair, proposal))
            self._ends.append(len(self.drafted))

    def take(self) -> Proposal:
        """Reveal the next proposal."""
        self.revealed += 1
        return self.proposals[self.revealed - 1]

    @property
    def alone(self) -> bool:
        """Whether the target draws by itself and there is nothing to compare with."""
        return self.draws and not self.choice.drafts and not self.proposals

    @property
    def exhausted(self) -> bool:
        """Whether every proposal that has arrived is revealed."""
        return self.revealed == len(self.proposals)

    def guessed(self, first: int) -> list[Proposal]:
        """The draft as far as it is known from place `first` on, for planning: proposals, and what a branch promises
        after them."""
        return [*self.proposals[first:], *self.promised[max(first, len(self.proposals)) :]]

    def passed(self, frontier: int) -> int:
        """Proposals that end at or before the frontier (letters of output)."""
        return bisect_right(self._ends, frontier - self.start)

    def beyond(self, frontier: int) -> int:
        """Proposals known that end beyond the frontier (letters of output)."""
        return max(len(self.proposals), len(self.promised)) - self.passed(frontier)

    def release(self, frontier: int) -> None:
        """The output has passed these proposals: no row is fetched and nothing is judged by theirs any more.

        An epoch in which all is accepted has as many proposals as the output has tokens.
        """
        over = min(self.revealed, self.passed(frontier))
        for place in range(self._released, over):
            self.proposals[place] = replace(self.proposals[place], row=None)
        self._released = max(self._released, over)

    def begin_of(self, place: int) -> int:
        """Letters of the draft before a proposal, or before the next one."""
        return self._ends[place - 1] if place else 0

    def contradicts(self, text: Letters) -> bool:
        """Whether the draft as it has arrived and the output differ: only where that may end an epoch (samples)."""
        self._follow(text)
        return self._agreed < min(len(self.drafted), len(text) - self.start)

    def verdict(self, text: Letters) -> Verdict:
        """How far the draft held.

        In letters, so that it means the same for every method. A token that replaces a refused proposal may begin
        with that proposal's letters: where the walk says what is wrong, that counts.
        """
        self._follow(text)
        agreed, refused = self._agreed, self._agreed < min(len(self.drafted), len(text) - self.start)
        if isinstance(self._step, Refused):
            agreed, refused = min(agreed, self._step.offset - self.start), True
        return Verdict(bisect_right(self._ends, agreed), refused)

    def _follow(self, text: Letters) -> None:
        place = self._agreed
        self._agreed += common_length(self.drafted[place:], text[self.start + place :])
