"""A session's dealings with its drafter: epochs, what the drafter has been told, what it still owes."""

import numpy as np

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.events import Command, DrafterLost, Event, Expired, SetTimer
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.verification.exchange import Draft, Drafted, Score, Scored
from crossdraft.verification.walk import NeedPrefix

EXCESS = 1e-6  # that a probability which is a sum of float32 products may have over one


class Drafting:
    """One question at a time: proposals for the next epoch, or scores of prefixes of this one's draft."""

    def __init__(self, assignment: Assignment) -> None:
        self.epoch = 0  # number of the current one
        self.there = assignment.open_drafter is not None
        self._given = assignment
        self._timer = 0  # number of the latest
        self._asked: Draft | Score | None = None  # what it has not answered
        self._told = (0, NOTHING)  # its text: the output up to an offset, then its own letters

    def next_epoch(self) -> None:
        """The draft of the current epoch is over."""
        self.epoch += 1
        self._asked = None

    def ask_proposals(self, text: Letters) -> list[Command]:
        """K proposals that go on with the output so far."""
        start, drafted = self._told
        same = common_length(drafted, text[start:])
        self._told = (len(text), NOTHING)  # its text is the output then, even if it proposes nothing
        return self._ask(Draft(self.epoch, start + same, Letters(text[start + same :]), self._given.proposals))

    def ask_scores(self, need: NeedPrefix, start: int) -> list[Command]:
        """Probabilities of prefixes of the draft that began at the offset `start`."""
        return self._ask(Score(self.epoch, start, need.strings, need.tokens))

    def _ask(self, question: Draft | Score) -> list[Command]:
        self._asked = question
        self._timer += 1
        return [question, SetTimer(self._timer, self._given.draft_seconds)]

    def outdated(self, event: Event) -> bool:
        """Whether it belongs to an epoch, a wait or a drafter that is over."""
        match event:
            case Drafted() | Scored():
                return event.epoch < self.epoch or not self.there
            case Expired(timer):
                return timer < self._timer or (timer == self._timer and self._asked is None)
            case DrafterLost():
                return not self.there
        return False

    def owes(self, event: Drafted | Scored | Expired) -> bool:
        """Whether it is the answer to what was asked, or the end of the wait for it."""
        if isinstance(event, Expired):
            return event.timer == self._timer
        kind = Draft if isinstance(event, Drafted) else Score
        return event.epoch == self.epoch and isinstance(self._asked, kind)

    def take(self, answer: Drafted | Scored) -> str:
        """What is wrong with the answer, as a text; empty if it can be used."""
        asked, self._asked = self._asked, None
        if isinstance(answer, Drafted):
            return self._given.fault_of(answer, self._told[0])
        assert isinstance(asked, Score)
        return _fault_of_scores(answer, len(asked.strings))

    def drafted(self, start: int, letters: Letters) -> None:
        """Its text goes on from the offset `start` with what it proposed."""
        self._told = (start, letters)

    def give_up(self) -> None:
        """It is not asked again."""
        self.there = False
        self._asked = None


def _fault_of_scores(answer: Scored, strings: int) -> str:
    values = answer.probabilities
    if values.shape != (strings,):
        return f"it scored {values.size} prefixes, asked for {strings}"
    if not bool(np.all((values >= 0) & (values <= 1 + EXCESS))):  # false for NaN as well
        return "it sent a score that is not between 0 and 1"
    return ""
