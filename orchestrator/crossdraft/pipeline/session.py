"""The session's state machine: events in, commands out, no I/O.

Lock-step: draft K, one pass, walk over what was drafted, repeat. An event that the state does not
allow raises IllegalEventError and changes nothing; answers of older epochs and old timers are dropped.
"""

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.drafting import Drafting
from crossdraft.pipeline.epoch import Epoch, count_round
from crossdraft.pipeline.events import (
    Cancelled,
    Command,
    Counts,
    DrafterLost,
    DrafterOpened,
    Emitted,
    Event,
    Expired,
    Finished,
    Reason,
    TargetLost,
    TargetOpened,
)
from crossdraft.pipeline.fetched import Fetched, answers
from crossdraft.pipeline.output import Output
from crossdraft.pipeline.rules import ALLOWED, IllegalEventError, State
from crossdraft.verification.exchange import Drafted, FetchRow, Pass, PassDone, RowFetched, Sample, Scored
from crossdraft.verification.planning import Planner
from crossdraft.verification.rows import Proposal
from crossdraft.verification.walk import Emit, Ground, Kind, NeedPrefix, NeedProposal, NeedRow, NeedSample, Refused


class Session:
    """One request: from the prompt to its last token."""

    def __init__(self, assignment: Assignment) -> None:
        self.state = State.NEW
        self.counts = Counts()
        self._given = assignment
        self._planner = Planner(assignment.pair, assignment.method, assignment.encode, assignment.tree_budget)
        self._drafting = Drafting(assignment)
        self._output = Output(assignment)
        self._opening: set[type] = set()  # what OPENING still waits for
        self._fetched = Fetched()
        self._sent: Pass | None = None
        self._epoch: Epoch | None = None

    def start(self) -> list[Command]:
        """Begin; raises IllegalEventError if begun already."""
        if self.state is not State.NEW:
            raise IllegalEventError("the session has begun already")
        self.state = State.OPENING
        self._opening = {TargetOpened}
        commands: list[Command] = [self._given.open_target]
        if self._given.open_drafter is not None:
            self._opening.add(DrafterOpened)
            commands.append(self._given.open_drafter)
        return commands

    def handle(self, event: Event) -> list[Command]:
        """Take one event; returns what is to be done, in order.

        Raises:
            IllegalEventError: the state does not allow it; nothing has changed.
        """
        if self._outdated(event):
            return []
        self._check(event)
        match event:
            case TargetOpened() | DrafterOpened():
                return self._opened(type(event))
            case Drafted():
                return self._drafted(event)
            case Scored():
                return self._scored(event)
            case PassDone():
                return self._passed(event)
            case RowFetched():
                self._fetched.replace(event)
                return self._advance()
            case Expired():
                return self._without_drafter(f"no answer within {self._given.draft_seconds} s")
            case DrafterLost(reason):
                return self._without_drafter(reason)
            case TargetLost(error):
                return [self._finish(Reason.FAILED, error)]
            case Cancelled():
                return [self._finish(Reason.CANCELLED)]

    def _outdated(self, event: Event) -> bool:
        """Whether it belongs to an epoch or a wait that is over."""
        return self.state is State.DONE or self._drafting.outdated(event)

    def _check(self, event: Event) -> None:
        if not isinstance(event, ALLOWED[self.state]):
            raise IllegalEventError(f"{type(event).__name__} while waiting for {self.state.value}")
        if not self._expected(event):
            raise IllegalEventError(f"unexpected {event}")

    def _expected(self, event: Event) -> bool:
        """Whether it is the answer to what was asked."""
        match event:
            case TargetOpened() | DrafterOpened():
                return type(event) in self._opening
            case Drafted() | Scored() | Expired():
                return self._drafting.owes(event)
            case PassDone():
                return self._sent is not None and answers(event, self._sent, self._given.method.samples)
            case RowFetched(number, node, row):
                return row.whole and (number, node) == (self._fetched.number, self._fetched.node)
        return True

    def _opened(self, what: type) -> list[Command]:
        self._opening.discard(what)
        return [] if self._opening else self._begin_round()

    def _without_drafter(self, reason: str) -> list[Command]:
        self._drafting.give_up()
        self.counts.drafter_lost = reason
        match self.state:
            case State.OPENING:
                return self._opened(DrafterOpened)
            case State.DRAFTING:
                return self._begin_epoch(())
            case State.SCORING:
                return self._begin_round()
        return []

    def _begin_round(self) -> list[Command]:
        """The next epoch: tell the drafter what was committed, ask for K proposals."""
        self._drafting.next_epoch()
        if not self._drafting.there or self._output.left <= 1:
            return self._begin_epoch(())
        self.state = State.DRAFTING
        return self._drafting.ask_proposals(self._output.text)

    def _drafted(self, event: Drafted) -> list[Command]:
        fault = self._drafting.take(event)
        if fault:
            return self._without_drafter(fault)
        self.counts.drafter_seconds += event.seconds
        self.counts.proposals += len(event.proposals)
        self.counts.audited += len(event.proposals) if self._given.audit else 0
        self.counts.stood_aside += len(event.proposals) < self._given.proposals
        return self._begin_epoch(event.proposals)

    def _begin_epoch(self, proposals: tuple[Proposal, ...]) -> list[Command]:
        """A walk over the draft, and the pass that fetches the rows that it will probably need.

        All proposals are there before the first is revealed, which `Method.whole_draft` asks for.
        """
        count_round(self._epoch, self._output.text, self.counts)
        given, offset = self._given, len(self._output.text)
        ground = Ground(given.pair, given.chooser, offset, given.encode, len(proposals))
        self._epoch = Epoch(self._drafting.epoch, ground, given.method.walk(ground), proposals)
        if proposals:
            self._drafting.drafted(offset, self._epoch.drafted)
        self.counts.epochs += 1
        return [self._pass()]

    def _pass(self) -> Pass:
        assert self._epoch is not None
        skip = len(self._output.text) - self._epoch.start
        plan = self._planner.plan(self._epoch.proposals, skip, self._output.room)
        self._sent = Pass(self._fetched.number + 1, tuple(self._fetched.since_root), plan.tree, plan.listed)
        self.state = State.PASSING
        self.counts.passes += 1
        return self._sent

    def _passed(self, event: PassDone) -> list[Command]:
        assert self._sent is not None
        self._fetched = Fetched.of(self._sent, event)
        self.counts.target_seconds += event.seconds
        return self._advance()

    def _advance(self) -> list[Command]:
        """Walk on with what is at hand; ends in a command that brings what is not."""
        commands: list[Command] = []
        while self.state is not State.DONE:
            assert self._epoch is not None
            match self._epoch.step:
                case NeedProposal():
                    self._epoch.answer(self._epoch.take())
                case Emit(token, kind):
                    commands += self._emit(token, kind)
                    self._epoch.answer(None)
                case Refused():
                    return commands + self._begin_round()
                case NeedPrefix() as need:
                    return commands + self._score(need)
                case NeedRow() | NeedSample() as need:
                    answer = self._fetched.answer(need)
                    if answer is None:
                        return commands + self._fetch(need)
                    self._epoch.answer(answer.token if isinstance(answer, Sample) else answer)
        return commands

    def _fetch(self, need: NeedRow | NeedSample) -> list[Command]:
        """What the walk needs is not at hand. A whole row is asked for. A path that was not guessed costs one
        more pass; only when nothing is left to judge does the round end instead (the look-ahead trap: an
        epoch that ended at a row miss would make the output depend on letters that are not revealed yet)."""
        assert self._epoch is not None
        if self._fetched.node is not None:
            self.state = State.FETCHING
            self.counts.rows_fetched += 1
            return [FetchRow(self._fetched.number, self._fetched.node)]
        if self._epoch.exhausted and not need.judging:
            return self._begin_round()
        self.counts.row_misses += 1
        return [self._pass()]

    def _score(self, need: NeedPrefix) -> list[Command]:
        """Only the drafter knows; without it the epoch ends."""
        assert self._epoch is not None
        if not self._drafting.there:
            return self._begin_round()
        self.state = State.SCORING
        return self._drafting.ask_scores(need, self._epoch.start)

    def _scored(self, event: Scored) -> list[Command]:
        fault = self._drafting.take(event)
        if fault:
            return self._without_drafter(fault)
        assert self._epoch is not None
        self.counts.drafter_seconds += event.seconds
        self.counts.scores += len(event.probabilities)
        self._epoch.answer(event.probabilities)
        return self._advance()

    def _emit(self, token: int, kind: Kind) -> list[Command]:
        sample = self._fetched.sample
        log_probability = sample.log_probability if sample else None
        offset = len(self._output.text)
        self._fetched.since_root.append(token)
        ending = self._output.commit(token)
        self.counts.tokens += 1
        self.counts.kinds[kind] += 1
        letters, kept = self._given.pair.target.letters[token], ending.kept if ending else None
        emitted = Emitted(token, letters, kind, offset, self._drafting.epoch, log_probability, kept)
        return [emitted] if ending is None else [emitted, self._finish(ending.reason)]

    def _finish(self, reason: Reason, error: BaseException | None = None) -> Finished:
        count_round(self._epoch, self._output.text, self.counts)
        self.state = State.DONE
        return Finished(reason, self.counts, error)
