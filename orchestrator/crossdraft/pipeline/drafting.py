"""A session's dealings with its drafter: its lane, epochs, the window, what it was told and still owes."""

from collections.abc import Iterator

import numpy as np

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.branches import Branches
from crossdraft.pipeline.epoch import Epoch
from crossdraft.pipeline.events import Close, Command, Lane, Open, Send, SetTimer, Timer
from crossdraft.pipeline.governing import Choice, DraftSeen
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.verification.exchange import Advance, Branch, Draft, Drafted, Score, Scored
from crossdraft.verification.rows import Proposal
from crossdraft.verification.walk import NeedPrefix

EXCESS = 1e-6  # that a probability which is a sum of float32 products may have over one
LONGEST_BACKOFF = 8.0  # seconds


class Drafting:
    """One drafter at a time; a lost one is opened again, somewhere, later and later."""

    def __init__(self, assignment: Assignment, lanes: Iterator[Lane]) -> None:
        self.lane: Lane | None = None  # open, or being opened
        self.ready = False
        self.branches = Branches(assignment.pair)
        self.epoch = 0  # number of the latest one that it was told of
        self.asked = 0  # proposals of it that were asked for
        self.received = 0  # ... that came
        self.scoring: Score | None = None  # what it has not scored yet
        self._given = assignment
        self._lanes = lanes
        self._failures = 0  # since it last answered
        self._aside = False  # it stands aside for the rest of the epoch
        self._told = (0, NOTHING)  # its text: the output up to an offset, then its own letters
        self._asked_at = 0.0
        self._heard_at = 0.0
        self._timer = 0  # number of the latest
        self._armed = False

    @property
    def due(self) -> bool:
        """Whether more proposals of the running epoch will come."""
        return self.ready and not self._aside and self.received < self.asked

    @property
    def told_epoch(self) -> bool:
        """Whether it was told of the running epoch's draft: one that has opened since was not."""
        return self.ready and self.asked > 0

    @property
    def hoped_for(self) -> bool:
        """Whether a first lane is being opened, and none has failed yet."""
        return self.lane is not None and not self.ready and not self._failures

    def open(self) -> list[Command]:
        """A lane, if the session has a use for a drafter."""
        if self._given.open_drafter is None:
            return []
        self.lane = next(self._lanes)
        wait = 0.0 if not self._failures else min(LONGEST_BACKOFF, 0.125 * 2.0 ** min(self._failures, 10))
        return [Open(self.lane, self._given.open_drafter, wait)]

    def opened(self) -> None:
        """It knows the prompt, and nothing of the output."""
        self.ready = True
        self._told = (0, NOTHING)
        self.branches.start_over()

    def lost(self, again: bool) -> list[Command]:
        """Whatever it owes will not come; another one is opened if `again`."""
        self.lane, self.ready, self.scoring = None, False, None
        self.end_epoch()
        self._failures += 1
        return self.open() if again else []

    def give_up(self, why: str) -> list[Command]:
        """It is not to be used any more in this session."""
        assert self.lane is not None
        return [Close(self.lane, why), *self.lost(again=True)]

    def end_epoch(self) -> None:
        """What it still sends of the epoch is not wanted."""
        self.asked = self.received = 0
        self.branches.clear()

    def begin(self, epoch: Epoch, text: Letters, branch: Branch | None, now: float) -> list[Command]:
        """A new epoch: rewinds the drafter to the output, or to where a branch goes on from it."""
        assert self.lane is not None
        choice = epoch.choice
        start, drafted = self._told
        same = common_length(drafted, text[start : epoch.start])
        count = choice.window if branch is None else max(choice.window, len(branch.tokens))
        draft = Draft(
            epoch.number,
            start + same,
            Letters(text[start + same : epoch.start]),
            count,
            choice.chunk,
            choice.branch_depth,
            choice.branch_width,
            0 if branch is None else branch.number,
            choice.first if branch is None else max(choice.first, len(branch.tokens)),
        )
        self.end_epoch()
        self.epoch, self.asked, self._aside = epoch.number, count, False
        self._told = (epoch.start, epoch.drafted)
        self.received = len(epoch.proposals)  # those of a branch, where no rows are needed
        self._asked_at = now
        return [Send(self.lane, draft), *self._arm(now)]

    def advance(self, count: int, chunk: int, now: float) -> list[Command]:
        """More proposals of the running epoch are wanted: `count` from its first one on.

        Said at once to a drafter that owes nothing. To another only when it may go on by a whole reply, which it
        hears early enough: a window is larger than that.
        """
        least = chunk if self.due else 1
        if not self.ready or self._aside or count < self.asked + least:
            return []
        assert self.lane is not None
        owed, self.asked = self.due, count
        return [Send(self.lane, Advance(self.epoch, count)), *([] if owed else self._arm(now))]

    def score(self, need: NeedPrefix, start: int, now: float) -> list[Command]:
        """Asks for probabilities of prefixes of the draft that began at the offset `start`, once."""
        assert self.lane is not None
        if self.scoring is not None:
            return []
        self.scoring = Score(self.epoch, start, need.strings, need.tokens)
        return [Send(self.lane, self.scoring), *self._arm(now)]

    def expects(self, reply: Drafted | Scored) -> bool:
        """Whether a reply is due: proposals in order, scores of what was asked."""
        if isinstance(reply, Scored):
            return self.scoring is not None and reply.epoch == self.scoring.epoch
        came = reply.first + len(reply.proposals)
        return reply.epoch == self.epoch and (reply.first == self.received or came <= self.received)

    def fault_of(self, drafted: Drafted, choice: Choice) -> str:
        """What is wrong with a reply that was due; empty if it can be used.

        An empty one is a fault: it would put off the time when the drafter is given up.
        """
        if not (drafted.proposals or drafted.branches or drafted.reason):
            return "it sent a reply without anything in it"
        start, letters = self._told
        fault = self._given.fault_of(drafted, start + len(letters), self.asked - self.received)
        return fault or self.branches.fault_of(drafted.branches, choice.branch_depth, choice.branch_width * self.asked)

    def take(self, drafted: Drafted, epoch: Epoch, now: float) -> DraftSeen:
        """Proposals that were due and have no fault join the epoch's draft."""
        first = self.received == 0
        seen = DraftSeen(
            len(drafted.proposals),
            drafted.first,
            now - self._asked_at if first else None,
            None if first else now - self._heard_at,
            drafted.seconds,
            sum(len(branch.tokens) for branch in drafted.branches),
        )
        epoch.extend(drafted.proposals)
        self.received += len(drafted.proposals)
        self.branches.add(drafted.branches)
        self._told = (epoch.start, epoch.drafted)
        self._aside = self._aside or bool(drafted.reason)
        self._heard(now)
        return seen

    def scored(self, scored: Scored, now: float) -> str:
        """What is wrong with scores that were due, as a text; empty if they can be used."""
        asked, self.scoring = self.scoring, None
        assert asked is not None
        self._heard(now)
        return _fault_of_scores(scored, len(asked.strings))

    def expired(self, number: int, now: float) -> tuple[bool, list[Command]]:
        """Whether it owes an answer for too long; if not, the timer runs on for the rest."""
        self._armed = self._armed and number != self._timer
        if number != self._timer or not (self.due or self.scoring is not None):
            return False, []
        left = max(self._asked_at, self._heard_at) + self._given.draft_seconds - now
        return (False, self._arm(now, left)) if left > 0 else (True, [])

    def _heard(self, now: float) -> None:
        self._heard_at = now
        self._failures = 0

    def _arm(self, now: float, seconds: float | None = None) -> list[Command]:
        """One timer, which is looked at when it expires: most answers come long before."""
        self._asked_at = now if seconds is None else self._asked_at
        if self._armed:
            return []
        self._armed = True
        self._timer += 1
        return [SetTimer(Timer.DRAFTER, self._timer, self._given.draft_seconds if seconds is None else seconds)]


def of_branch(branch: Branch) -> tuple[Proposal, ...]:
    """A branch's proposals, without the rows that they were drawn from."""
    return tuple(Proposal(token) for token in branch.tokens)


def _fault_of_scores(answer: Scored, strings: int) -> str:
    values = answer.probabilities
    if values.shape != (strings,):
        return f"it scored {values.size} prefixes, asked for {strings}"
    if not bool(np.all((values >= 0) & (values <= 1 + EXCESS))):  # false for NaN as well
        return "it sent a score that is not between 0 and 1"
    return ""
