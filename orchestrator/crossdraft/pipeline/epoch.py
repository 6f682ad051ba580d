"""One epoch: its draft and the walk over it."""

from crossdraft.text.letters import Letters
from crossdraft.verification.rows import Proposal
from crossdraft.verification.walk import Answer, Ground, Step, Walk, proposal_letters


class Epoch:
    """A draft from `ground.offset` on and the walk that verifies it. The walk sees revealed proposals only."""

    def __init__(self, number: int, ground: Ground, walk: Walk, proposals: tuple[Proposal, ...]) -> None:
        self.number = number
        self.proposals = proposals
        self.drafted = Letters("".join(proposal_letters(ground.pair, proposal) for proposal in proposals))
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
