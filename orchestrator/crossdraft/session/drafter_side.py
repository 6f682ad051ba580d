"""The drafter side of a session: its lane, how long it is waited for, and its faults."""

from collections.abc import Iterator

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.drafts import Drafts
from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Close, Command, Lane, Open, Reply, Send, SetTimer, Timer
from crossdraft.session.rules import DrafterState
from crossdraft.speculation.choice import Choice, DraftSeen
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Branch, Drafted, HiddenStates, Score, Scored
from crossdraft.verification.walk import NeedPrefix

ROUNDING = 1e-6  # that a probability which is a sum of float32 products may exceed one by
LONGEST_BACKOFF = 8.0  # seconds


class DrafterSide:
    """One drafter at a time. A lost one is opened again, at any address, with growing pauses."""

    def __init__(self, assignment: Assignment, lanes: Iterator[Lane]) -> None:
        self.lane: Lane | None = None  # open, or being opened
        self.ready = False
        self.fault = assignment.no_drafter  # why there is none, if there is none
        self.drafts = Drafts(assignment.pair)
        self.branches = self.drafts.branches
        self._given = assignment
        self._lanes = lanes
        self._failures = 0  # since it last answered
        self._timer = 0  # number of the latest
        self._armed = False  # that timer runs

    @property
    def epoch(self) -> int:
        """Number of the latest one that it was told of."""
        return self.drafts.ledger.epoch

    @property
    def asked(self) -> int:
        """Draft tokens of that epoch that it was asked for."""
        return self.drafts.ledger.wanted

    @property
    def received(self) -> int:
        """... and that have come."""
        return self.drafts.ledger.received

    @property
    def due(self) -> bool:
        """Whether more draft tokens of the running epoch will come."""
        return self.ready and self.drafts.ledger.drafting

    @property
    def told_epoch(self) -> bool:
        """Whether it was told of the running epoch; a drafter opened since then was not."""
        return self.ready and self.asked > 0

    @property
    def hoped_for(self) -> bool:
        """Whether the first lane is being opened and no attempt has failed yet."""
        return self.lane is not None and not self.ready and not self._failures

    @property
    def unopened(self) -> bool:
        """Whether the session can use a drafter, and has tried to open none yet."""
        return self.lane is None and not self._failures and self._given.open_drafter is not None

    def open(self) -> list[Command]:
        """Open a lane, if the session can use a drafter."""
        if self._given.open_drafter is None:
            return []
        self.lane = next(self._lanes)
        pause = 0.0 if not self._failures else min(LONGEST_BACKOFF, 0.125 * 2.0 ** min(self._failures, 10))
        return [Open(self.lane, self._given.open_drafter, pause)]

    def opened(self) -> None:
        """The lane is open: the drafter knows the prompt, and nothing of the output."""
        self.ready = True
        self.drafts.start_over()

    def lost(self, why: str, again: bool) -> list[Command]:
        """What it owes will not come; another lane is opened if `again`."""
        self.fault = f"the drafter was lost: {why}" if self.ready else f"no drafter: {why}"
        self.lane, self.ready = None, False
        self.drafts.start_over()
        self._failures += 1
        return self.open() if again else []

    def give_up(self, why: str) -> list[Command]:
        """Close the lane for a fault; this session does not use its service again."""
        assert self.lane is not None
        return [Close(self.lane, why), *self.lost(why, again=True)]

    def stop(self, now: float) -> list[Command]:
        """No epoch is to be drafted for now."""
        told = self.drafts.stop(now)
        return [Send(self.lane, one) for one in told if self.lane is not None]

    def begin(
        self, epoch: Epoch, text: Letters, branch: Branch | None, now: float, hidden: HiddenStates
    ) -> list[Command]:
        """Rewind the drafter to the output, or to the end of an adopted branch, for a new epoch.

        `hidden` are the target's states that it has not been told.
        """
        assert self.lane is not None
        choice = epoch.choice
        draft = self.drafts.begin(
            epoch,
            text,
            branch,
            choice.max_draft_tokens,
            choice.first,
            now,
            chunk=choice.chunk,
            branch_depth=choice.branch_depth,
            branch_width=choice.branch_width,
            tree_nodes=choice.tree_nodes if self._given.method.samples else 0,
            least_likely=choice.least_likely,
            hidden=hidden,
        )
        return [Send(self.lane, draft), *self._arm(now)]

    def advance(self, count: int, chunk: int, now: float) -> list[Command]:
        """Ask for more of the running epoch, as `Drafts.advance`."""
        if not self.ready:
            return []
        assert self.lane is not None
        owed, more = self.due, self.drafts.advance(count, chunk, now)
        return [*(Send(self.lane, one) for one in more), *(self._arm(now) if more and not owed else ())]

    def score(self, need: NeedPrefix, start: int, now: float) -> list[Command]:
        """Ask once for the probabilities of prefixes of the draft that began at offset `start`."""
        assert self.lane is not None
        if self.drafts.ledger.score is not None:
            return []
        request = Score(self.epoch, start, need.strings, need.tokens)
        self.drafts.ledger.sent(request, now)
        return [Send(self.lane, request), *self._arm(now)]

    @property
    def state(self) -> DrafterState:
        """Of its lane, as in `rules`."""
        if not self.ready:
            return DrafterState.OPENING
        if self.drafts.ledger.score is not None:
            return DrafterState.SCORING
        return DrafterState.DRAFTING if self.asked else DrafterState.IDLE

    def outdated(self, reply: Reply) -> bool:
        """Whether it is of an epoch that is over."""
        return isinstance(reply, Drafted | Scored) and reply.epoch < self.epoch + (not self.asked)

    def expects(self, reply: Drafted | Scored) -> bool:
        """Whether a reply is due: draft tokens in order, or the scores that were asked for."""
        if isinstance(reply, Scored):
            asked = self.drafts.ledger.score
            return asked is not None and reply.epoch == asked.epoch
        came = reply.first + len(reply.draft_tokens)
        return reply.epoch == self.epoch and (reply.first == self.received or came <= self.received)

    def fault_of(self, drafted: Drafted, choice: Choice) -> str:
        """What is wrong with a reply that was due; empty if it can be used."""
        depth, most = choice.branch_depth, choice.branch_width * self.asked
        if choice.tree_nodes and self._given.method.samples:
            depth, most = self.asked, choice.tree_nodes
        fault = self._given.fault_of(drafted, self.drafts.end, self.asked - self.received)
        return fault or self.drafts.fault_of(drafted, depth, most)

    def take(self, drafted: Drafted, epoch: Epoch, now: float) -> DraftSeen:
        """Add draft tokens that were due and have no fault to the epoch's draft."""
        self._failures = 0
        return self.drafts.take(drafted, epoch, now)

    def scored(self, scored: Scored, now: float) -> str:
        """What is wrong with scores that were due; empty if they can be used."""
        asked, values = self.drafts.ledger.take(scored, now), scored.probabilities
        assert asked is not None
        self._failures = 0
        if values.shape != (len(asked.request.strings),):
            return f"it scored {values.size} prefixes, asked for {len(asked.request.strings)}"
        if not bool(np.all((values >= 0) & (values <= 1 + ROUNDING))):  # false for NaN as well
            return "it sent a score that is not between 0 and 1"
        return ""

    def expired(self, number: int, now: float) -> tuple[bool, list[Command]]:
        """Whether an answer is overdue; if not, the timer is set for the time that is left."""
        self._armed = self._armed and number != self._timer
        if number != self._timer or not (self.due or self.drafts.ledger.score is not None):
            return False, []
        return (False, self._arm(now)) if self._left(now) > 0 else (True, [])

    def _left(self, now: float) -> float:
        """Seconds until its answer is overdue."""
        since = self.drafts.ledger.since
        return self._given.draft_seconds - (0.0 if since is None else now - since)

    def _arm(self, now: float) -> list[Command]:
        """One timer for all deadlines, checked when it expires: most answers come long before."""
        if self._armed:
            return []
        self._armed = True
        self._timer += 1
        return [SetTimer(Timer.DRAFTER, self._timer, max(0.0, self._left(now)))]
