"""The session's state machine: events in, commands out, no I/O.

Lock-step: draft K, one pass, walk over what was drafted, repeat. An event that the state does not
allow raises IllegalEventError and changes nothing; answers of older epochs and old timers are dropped.
"""

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.epoch import Epoch
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
    SetTimer,
    TargetLost,
    TargetOpened,
)
from crossdraft.pipeline.fetched import Fetched, answers
from crossdraft.pipeline.proposals import fault_of
from crossdraft.pipeline.rules import ALLOWED, IllegalEventError, State
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.verification.exchange import Draft, Drafted, FetchRow, Pass, PassDone, RowFetched, Sample
from crossdraft.verification.planning import Planner
from crossdraft.verification.rows import Proposal
from crossdraft.verification.walk import Emit, Ground, Kind, NeedProposal, NeedRow, NeedSample, Refused


class Session:
    """One request: from the prompt to its last token."""

    def __init__(self, assignment: Assignment) -> None:
        self.state = State.NEW
        self.counts = Counts()
        self._given = assignment
        self._planner = Planner(assignment.pair, assignment.method, assignment.encode, assignment.tree_budget)
        self._drafter = assignment.open_drafter is not None
        self._opening: set[type] = set()  # what OPENING still waits for
        self._fetched = Fetched()
        self._sent: Pass | None = None
        self._epoch: Epoch | None = None
        self._number = 0  # of the epoch
        self._text = NOTHING  # the output
        self._told = (0, NOTHING)  # the drafter's text: the output up to an offset, then its own letters

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
            case PassDone():
                return self._passed(event)
            case RowFetched():
                self._fetched.replace(event)
                return self._advance()
            case Expired():
                return self._without_drafter(f"no proposals within {self._given.draft_seconds} s")
            case DrafterLost(reason):
                return self._without_drafter(reason)
            case TargetLost(error):
                return [self._finish(Reason.FAILED, error)]
            case Cancelled():
                return [self._finish(Reason.CANCELLED)]

    def _outdated(self, event: Event) -> bool:
        """Whether it belongs to an epoch or a wait that is over."""
        if self.state is State.DONE:
            return True
        if isinstance(event, Expired):
            return event.timer < self._number or (event.timer == self._number and self.state is not State.DRAFTING)
        if isinstance(event, Drafted):
            return event.epoch < self._number or not self._drafter
        return isinstance(event, DrafterLost) and not self._drafter

    def _check(self, event: Event) -> None:
        if not isinstance(event, ALLOWED[self.state]):
            raise IllegalEventError(f"{type(event).__name__} while waiting for {self.state.value}")
        expected = {
            TargetOpened: TargetOpened in self._opening,
            DrafterOpened: DrafterOpened in self._opening,
            Drafted: isinstance(event, Drafted) and event.epoch == self._number,
            Expired: isinstance(event, Expired) and event.timer == self._number,
            PassDone: isinstance(event, PassDone)
            and self._sent is not None
            and answers(event, self._sent, self._given.method.samples),
            RowFetched: isinstance(event, RowFetched)
            and (event.number, event.node) == (self._fetched.number, self._fetched.node)
            and event.row.whole,
        }
        if not expected.get(type(event), True):
            raise IllegalEventError(f"unexpected {event}")

    def _opened(self, what: type) -> list[Command]:
        self._opening.discard(what)
        return [] if self._opening else self._begin_round()

    def _without_drafter(self, reason: str) -> list[Command]:
        self._drafter = False
        self.counts.drafter_lost = reason
        if self.state is State.OPENING:
            return self._opened(DrafterOpened)
        return self._begin_epoch(()) if self.state is State.DRAFTING else []

    def _begin_round(self) -> list[Command]:
        """The next epoch: tell the drafter what was committed, ask for K proposals."""
        self._number += 1
        if not self._drafter or self._left() <= 1:
            return self._begin_epoch(())
        self.state = State.DRAFTING
        offset, letters = self._rewind()
        draft = Draft(self._number, offset, letters, self._given.proposals)
        self._told = (len(self._text), NOTHING)  # its text is the output then, even if it proposes nothing
        return [draft, SetTimer(self._number, self._given.draft_seconds)]

    def _rewind(self) -> tuple[int, Letters]:
        """Where the drafter's text leaves the committed text, and what is committed from there on."""
        start, drafted = self._told
        same = common_length(drafted, self._text[start:])
        return start + same, Letters(self._text[start + same :])

    def _drafted(self, event: Drafted) -> list[Command]:
        fault = fault_of(event.proposals, self._given.proposals, self._given.pair, self._given.method)
        if fault:
            return self._without_drafter(fault)
        self.counts.drafter_seconds += event.seconds
        self.counts.proposals += len(event.proposals)
        self.counts.stood_aside += len(event.proposals) < self._given.proposals
        return self._begin_epoch(event.proposals)

    def _begin_epoch(self, proposals: tuple[Proposal, ...]) -> list[Command]:
        """A walk over the draft, and the pass that fetches the rows that it will probably need."""
        ground = Ground(self._given.pair, self._given.chooser, len(self._text), self._given.encode)
        self._epoch = Epoch(self._number, ground, self._given.method.walk(ground), proposals)
        if proposals:
            self._told = (len(self._text), self._epoch.drafted)
        self.counts.epochs += 1
        return [self._pass()]

    def _pass(self) -> Pass:
        assert self._epoch is not None
        skip = len(self._text) - self._epoch.start
        room = self._given.context - len(self._given.open_target.prompt) - self.counts.tokens
        plan = self._planner.plan(self._epoch.proposals, skip, room)
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

    def _emit(self, token: int, kind: Kind) -> list[Command]:
        letters = self._given.pair.target.letters[token]
        sample = self._fetched.sample
        log_probability = sample.log_probability if sample else None
        offset = len(self._text)
        self._fetched.since_root.append(token)
        self._text = Letters(self._text + letters)
        self.counts.tokens += 1
        self.counts.kinds[kind] += 1
        reason, kept = self._ending(token, offset)
        emitted = Emitted(token, letters, kind, offset, self._number, log_probability, kept)
        return [emitted] if reason is None else [emitted, self._finish(reason)]

    def _left(self) -> int:
        """Tokens that may still be emitted."""
        room = self._given.context - len(self._given.open_target.prompt)
        return min(self._given.max_tokens, room) - self.counts.tokens

    def _ending(self, token: int, offset: int) -> tuple[Reason | None, int | None]:
        """Whether the token at `offset` ends the output, and the letters that then count."""
        longest = max(map(len, self._given.stop), default=0)
        begin = max(0, offset - longest)
        found = [place for text in self._given.stop if (place := self._text.find(text, begin)) >= 0]
        if found:
            return Reason.STOP, min(found)
        if token in self._given.pair.target.stops and not self._given.ignore_end:
            return Reason.STOP, len(self._text)
        return (Reason.LENGTH, len(self._text)) if self._left() <= 0 else (None, None)

    def _finish(self, reason: Reason, error: BaseException | None = None) -> Finished:
        self.state = State.DONE
        return Finished(reason, self.counts, error)
