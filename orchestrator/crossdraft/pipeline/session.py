"""The session's state machine: events in, commands out, no I/O.

Whatever happens, three things are done then: the walk goes on with what is at hand, a free target gets a pass if the
walk lacks a row, and the drafter's window moves on. A lock-step round is the choice that drafts K, waits for all of
them, and begins another epoch when they are used up.
"""

from itertools import count

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.decoding import Decoding
from crossdraft.pipeline.drafting import Drafting
from crossdraft.pipeline.events import (
    Cancelled,
    Command,
    Counts,
    Event,
    Expired,
    Lane,
    Lost,
    Ready,
    Reason,
    Replied,
    Reply,
    Timer,
)
from crossdraft.pipeline.governing import DrafterSeen, Told
from crossdraft.pipeline.reporting import pass_seen
from crossdraft.pipeline.rules import IllegalEventError, State, fault_of, outdated
from crossdraft.pipeline.targets import Targets
from crossdraft.verification.exchange import Drafted, PassDone, RowFetched, Scored


class Session:
    """One request: from the prompt to its last token."""

    def __init__(self, assignment: Assignment) -> None:
        self.state = State.NEW
        self._given = assignment
        lanes = count(1)
        self._targets = Targets(assignment, lanes)
        self._drafting = Drafting(assignment, lanes)
        self._decoding = Decoding(assignment, self._targets, self._drafting)
        self._error: BaseException | None = None  # why the last target was lost

    @property
    def counts(self) -> Counts:
        """What has been done so far."""
        return self._decoding.counts

    def start(self, now: float) -> list[Command]:
        """Begin; `now` in seconds of a clock that never goes back. An output that had ended before ends at once.

        Raises:
            IllegalEventError: it has begun already.
        """
        if self.state is not State.NEW:
            raise IllegalEventError("the session has begun already")
        ended = self._decoding.output.ended
        if ended is not None:
            self.state = State.DONE
            return [self._decoding.end(ended.reason)]
        self.state = State.OPENING
        return [*self._targets.open(), *self._drafting.open(), *self._targets.set_timer()]

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event, which happened at `now`; returns what is to be done, in order.

        Raises:
            IllegalEventError: the rules do not allow it; nothing has changed.
        """
        if outdated(event, self.state, self._targets, self._drafting):
            return []
        fault = fault_of(event, self.state, self._targets, self._drafting)
        if fault:
            raise IllegalEventError(fault)
        commands = self._take(event, now)
        if self.state is State.OPENING and self._may_begin():
            self.state = State.RUNNING
            commands += self._decoding.next_epoch(now)
        if self.state is State.RUNNING and self._decoding.finished is None:
            commands += self._decoding.go_on(now)
        if self._decoding.finished is not None:
            self.state = State.DONE
        return commands

    def _may_begin(self) -> bool:
        """Whether the first pass can leave: a drafter is waited for only where rounds are to be compared."""
        drafter = self._drafting.ready or not self._drafting.hoped_for or not self._given.governor.waits_for_drafter
        return self._targets.ready and drafter

    def _take(self, event: Event, now: float) -> list[Command]:
        match event:
            case Ready(lane):
                return self._opened(lane, now)
            case Replied(lane, reply):
                return self._replied(lane, reply, now)
            case Lost(lane, error, elsewhere):
                return self._lost(lane, error, elsewhere, now)
            case Expired(timer, number):
                return self._expired(timer, number, now)
            case Told():
                self._given.governor.observe(event, now)
                return []
            case Cancelled():
                return [self._decoding.end(Reason.CANCELLED)]

    def _opened(self, lane: Lane, now: float) -> list[Command]:
        if lane in self._targets.lanes:
            self._targets.opened(lane, now)
            return []
        self._drafting.opened()
        self._given.governor.observe(DrafterSeen(True), now)
        if self.state is State.RUNNING and self._decoding.interruptible:
            return self._decoding.next_epoch(now)
        return self._decoding.reconsider(now)

    def _replied(self, lane: Lane, reply: Reply, now: float) -> list[Command]:
        match reply:
            case PassDone():
                self._passed(lane, reply, now)
            case RowFetched(_, node, row):
                latest = self._targets.lanes[lane].latest
                assert latest is not None
                self._decoding.fetched.complete(latest, node, row)
                self._targets.fetched(lane, node)
            case Drafted():
                return self._drafted(reply, now)
            case Scored():
                fault = self._drafting.scored(reply, now)
                if fault:
                    return self._drafter_lost(fault, self._drafting.give_up(fault), now)
                self.counts.drafter_seconds += reply.seconds
                self.counts.scores += len(reply.probabilities)
                self._decoding.epoch.answer(reply.probabilities)
        return []

    def _passed(self, lane: Lane, done: PassDone, now: float) -> None:
        flight = self._targets.returned(lane, done, now)
        self._decoding.fetched.add(flight, done.nodes)
        self.counts.target_seconds += done.seconds
        if flight.sent.run > 1:
            self.counts.passes += len(done.nodes) - (not flight.drawn)  # the first was counted when it was asked for
        if flight.sent.number > 1 or flight.drawn:  # a lane's first forward reads the prompt as well
            self._given.governor.observe(pass_seen(flight, done, now), now)

    def _drafted(self, drafted: Drafted, now: float) -> list[Command]:
        drafting, decoding, counts = self._drafting, self._decoding, self.counts
        first = drafting.received
        if drafted.first != first:  # it came twice, which says nothing new
            return []
        fault = drafting.fault_of(drafted, decoding.epoch.choice)
        if fault:
            return self._drafter_lost(fault, drafting.give_up(fault), now)
        seen = drafting.take(drafted, decoding.epoch, now)
        self._given.governor.observe(seen, now)
        decoding.heard()
        counts.drafter_seconds += drafted.seconds
        counts.proposals += len(drafted.proposals)
        counts.audited += len(drafted.proposals) if self._given.audit else 0
        counts.stood_aside += bool(drafted.reason)
        counts.branches += len(drafted.branches)
        counts.branch_tokens += seen.branch_tokens
        return decoding.listed_late(first)

    def _lost(self, lane: Lane, error: BaseException, elsewhere: bool, now: float) -> list[Command]:
        if lane not in self._targets.lanes:
            if self._drafting.ready:
                return self._drafter_lost(str(error), self._drafting.lost(again=elsewhere), now)
            return self._drafter_missing(str(error), self._drafting.lost(again=elsewhere), now)
        self.counts.targets_lost += 1
        self._error = error
        commands = self._targets.lost(lane, now) if elsewhere else self._targets.drop(lane)
        return [self._decoding.end(Reason.FAILED, error)] if commands is None else commands

    def _drafter_lost(self, reason: str, commands: list[Command], now: float) -> list[Command]:
        """The session goes on without it: what it proposed so far counts, what it owes does not."""
        self.counts.drafter_lost = reason
        self.counts.drafters_lost += 1
        self._given.governor.observe(DrafterSeen(False), now)
        return commands

    def _drafter_missing(self, reason: str, commands: list[Command], now: float) -> list[Command]:
        """None could be opened: nothing was lost by that."""
        if not self.counts.drafters_lost:
            self.counts.drafter_lost = f"no drafter: {reason}"
        self._given.governor.observe(DrafterSeen(False), now)
        return commands

    def _expired(self, timer: Timer, number: int, now: float) -> list[Command]:
        match timer:
            case Timer.STALL:
                self._decoding.expired(number, now)
            case Timer.DRAFTER:
                over, commands = self._drafting.expired(number, now)
                if not over:
                    return commands
                reason = f"no answer within {self._given.draft_seconds:g} s"
                return self._drafter_lost(reason, self._drafting.give_up(reason), now)
            case Timer.TARGET:
                if self._targets.expired(number):
                    error = self._error or TimeoutError(f"no target within {self._given.target_seconds:g} s")
                    return [self._decoding.end(Reason.FAILED, error)]
        return []
