"""One epoch: its draft and the walk over it."""

from itertools import accumulate

from crossdraft.pipeline.events import Counts
from crossdraft.text.letters import Letters, common_length
from crossdraft.verification.rows import Proposal
from crossdraft.verification.walk import Answer, Ground, Refused, Step, Walk, proposal_letters


class Epoch:
    """A draft from `ground.offset` on and the walk that verifies it. The walk sees revealed proposals only."""

    def __init__(self, number: int, ground: Ground, walk: Walk, proposals: tuple[Proposal, ...]) -> None:
        self.number = number
        self.proposals = proposals
        letters = [proposal_letters(ground.pair, proposal) for proposal in proposals]
        self.drafted = Letters("".join(letters))
        self._ends = list(accumulate(map(len, letters)))  # of each proposal, in letters since `start`
        self.start = ground.offset
        self._walk = walk
        self._revealed = 0  # proposals that the walk has asked for
        self.step: Step = next(walk)  # what the walk waits for

    @property
    def exhausted(self) -> bool:
        """Whether every proposal is revealed."""
        return self._revealed == len(self.proposals)

    def answer(self, answer: Answer) -> None:
        """Give the walk what it asked for; `step` becomes the next thing that it asks."""
        self.step = self._walk.send(answer)

    def take(self) -> Proposal | None:
        """Reveal the next proposal; None if there is none."""
        if self.exhausted:
            return None
        self._revealed += 1
        return self.proposals[self._revealed - 1]

    def verdict(self, text: Letters) -> tuple[int, bool]:
        """How many proposals, from the first on, are wholly in the output, and whether the next one was refused.

        In letters, so that it means the same for every method. A token that replaces a refused proposal may begin
        with that proposal's letters: where the walk says what is wrong, that counts.
        """
        committed = text[self.start :]
        agreed = common_length(self.drafted, committed)
        refused = agreed < min(len(self.drafted), len(committed))
        if isinstance(self.step, Refused):
            agreed, refused = min(agreed, self.step.offset - self.start), True
        return sum(end <= agreed for end in self._ends), refused


def count_round(epoch: Epoch | None, text: Letters, counts: Counts) -> None:
    """The epoch, if there is one, is over: counts how far its draft held."""
    if epoch is not None:
        counts.round(len(epoch.proposals), *epoch.verdict(text))
