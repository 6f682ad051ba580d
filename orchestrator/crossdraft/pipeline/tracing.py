"""Reads a recording step by step and keeps what a timeline is made of."""

from collections import defaultdict
from dataclasses import dataclass, replace

from crossdraft.pipeline.events import (
    Close,
    Emitted,
    Event,
    Expired,
    Lane,
    Lost,
    Open,
    Ready,
    Replied,
    Reply,
    Request,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.pipeline.recording import Step
from crossdraft.pipeline.spans import Era, Handled, Happening, Mark, Message, Role, Row, Token, Wait
from crossdraft.verification.exchange import (
    Advance,
    Draft,
    Drafted,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Score,
    Scored,
)
from crossdraft.verification.walk import Kind


@dataclass(frozen=True)
class Asked:
    """A request that was sent."""

    row: Row
    at: float
    request: Request
    epoch: int
    miss: bool = False  # a pass for a row miss


@dataclass(frozen=True)
class Flight:
    """A pass that returned, or tokens of a run: `asked` is then when the answer before came."""

    asked: Asked
    at: float  # when it was back
    seconds: float  # in the model
    forwards: int = 1


@dataclass(frozen=True)
class Answer:
    """A reply that came: its model's time lies somewhere between `asked.at` and `at`."""

    asked: Asked
    at: float
    reply: Drafted | Scored
    late: bool


class Tracer:
    """Takes in the steps one after another. Times are seconds since the first."""

    def __init__(self) -> None:
        self.now = 0.0  # the end of the latest step
        self.misses = 0
        self.bytes = 0
        self.used: dict[Role, int] = defaultdict(int)  # rows
        self.asked: list[Asked] = []  # all requests, in order
        self.answers: dict[Row, list[Answer]] = defaultdict(list)  # of drafters
        self.flights: list[Flight] = []
        self.small: list[Message] = []  # messages that cost no model any time
        self.handled: list[Handled] = []
        self.marks: list[Mark] = []
        self.waits: list[Wait] = []
        self.eras: list[Era] = []
        self._began: float | None = None
        self._epoch = 0
        self._rows: dict[Lane, Row] = {}
        self._free: dict[Role, list[Row]] = defaultdict(list)  # rows whose lane is over
        self._flying: dict[tuple[Lane, int], Asked] = {}  # passes
        self._running: dict[tuple[Lane, int], Asked] = {}  # runs that have had an answer
        self._latest: dict[Lane, Asked] = {}  # Draft or Score
        self._waiting: float | None = None  # since when the target stands idle for proposals
        self._stall = 0  # number of the latest timer of that

    def read(self, step: Step) -> None:
        """One call of the session."""
        if self._began is None:
            self._began = step.now
        begin = step.now - self._began  # when the event happened; it may have had to wait
        handled, self.now = max(begin, self.now), max(begin, self.now) + step.seconds
        misses, self.misses = step.row_misses - self.misses, step.row_misses
        self.bytes = step.sent + step.received
        event = step.event
        match event:
            case Ready(lane):
                self._mark(Happening.OPENED, f"{named(self._rows[lane])} is open", self._rows[lane], begin)
            case Lost(lane, error):
                self._lost(lane, str(error), begin)
            case Replied(lane, reply):
                self._replied(lane, reply, begin)
            case Expired(Timer.STALL, number) if self._waiting is not None and number == self._stall:
                self._mark(Happening.STALLED, Happening.STALLED.value, None, begin)
        self._commands(step, misses)
        tokens = tuple(Token(one.letters, one.kind) for one in step.commands if isinstance(one, Emitted))
        self.handled.append(Handled(handled, self.now, name_of(event), self._epoch, tokens))

    @property
    def flying(self) -> list[Asked]:
        """Passes that are not back."""
        return list(self._flying.values())

    def forget(self) -> None:
        """Keeps no more of the past than what is read later needs: passes in flight, and epochs."""
        self.asked = self.flying
        self.answers, self.flights, self.small = defaultdict(list), [], []
        self.handled, self.marks, self.waits = [], [], []

    def _commands(self, step: Step, misses: int) -> None:
        for command in step.commands:
            match command:
                case Open(lane, request):
                    self._open(lane, Role.TARGET if isinstance(request, OpenTarget) else Role.DRAFTER)
                case Close(lane):
                    self._lost(lane, command.blame or "it is not needed any more", self.now)
                case Send(lane, request):
                    self._send(lane, request, misses > 0)
                case SetTimer(Timer.STALL, number):
                    self._stall = number
                    self._waiting = self.now if self._waiting is None else self._waiting
                case Emitted():
                    self._emitted(command)

    def _emitted(self, emitted: Emitted) -> None:
        self._begin_epoch(emitted.epoch)
        if emitted.kind is Kind.CORRECTED:
            self._mark(Happening.REFUSED, f"refused; {emitted.letters!r} takes its place", None, self.now)

    def _open(self, lane: Lane, role: Role) -> None:
        if self._free[role]:
            self._rows[lane] = self._free[role].pop()
        else:
            self._rows[lane] = Row(role, self.used[role])
            self.used[role] += 1

    def _lost(self, lane: Lane, why: str, at: float) -> None:
        row = self._rows.get(lane)
        if row is not None and row not in self._free[row.role]:
            self._free[row.role].append(row)
            self._mark(Happening.LOST, f"{named(row)}: {why}", row, at)
            for passes in (self._flying, self._running):
                for key in [key for key in passes if key[0] == lane]:
                    del passes[key]

    def _send(self, lane: Lane, request: Request, miss: bool) -> None:
        asked = Asked(self._rows[lane], self.now, request, self._epoch, miss)
        match request:
            case Pass(number):
                self._flying[lane, number] = asked
                self._end_wait()
            case Draft(epoch):
                self._begin_epoch(epoch)
                asked = self._latest[lane] = replace(asked, epoch=epoch)
                if request.adopt:
                    self._mark(Happening.HIT, f"branch {request.adopt} was adopted", None, self.now)
            case Score():
                self._latest[lane] = asked
        self.asked.append(asked)

    def _replied(self, lane: Lane, reply: Reply, at: float) -> None:
        row = self._rows[lane]
        if isinstance(reply, PassDone):
            key = lane, reply.number
            asked = self._flying.pop(key, None) or self._running.pop(key, None)
            if asked is not None:
                self.flights.append(Flight(asked, at, reply.seconds, reply.forwards))
                if reply.more:
                    self._running[key] = replace(asked, at=at)
        elif isinstance(reply, RowFetched):
            self.small.append(Message(row, at, at, False, name_of(reply), self._epoch))
        elif lane in self._latest:
            known = self._latest[lane]
            late = reply.epoch != known.epoch
            self.answers[row].append(Answer(replace(known, epoch=reply.epoch), at, reply, late))

    def _begin_epoch(self, epoch: int) -> None:
        if self.eras and epoch <= self._epoch:
            return
        if self.eras:
            self.eras[-1] = replace(self.eras[-1], end=self.now)
        self._epoch = epoch
        self.eras.append(Era(epoch, self.now, self.now))

    def _end_wait(self) -> None:
        if self._waiting is not None and self.now > self._waiting:
            self.waits.append(Wait(self._waiting, self.now))
        self._waiting = None

    def _mark(self, what: Happening, text: str, row: Row | None, at: float) -> None:
        self.marks.append(Mark(at, what, text, row))


def name_of(value: Event | Request | Reply | None) -> str:
    """For people."""
    match value:
        case None:
            return "start"
        case Replied(_, reply):
            return name_of(reply)
        case Expired(timer):
            return f"a timer ran out: {timer.value}"
        case Draft(epoch):
            return f"draft, epoch {epoch}" + (f", from branch {value.adopt}" if value.adopt else "")
        case Drafted():
            more = f", {len(value.branches)} branches" if value.branches else ""
            return f"{len(value.proposals)} proposals of epoch {value.epoch}{more}"
        case Advance(_, count):
            return f"go on to {count} proposals"
        case Pass(number):
            what = f"{len(value.tree)} nodes" if value.run == 1 else f"up to {value.run} tokens"
            return f"pass {number}, {what}"
        case PassDone(number):
            return f"rows of pass {number}" if value.forwards == 1 else f"{value.forwards} tokens of pass {number}"
        case RunTo(number, tokens):
            return f"pass {number} goes on to {tokens} tokens" if tokens else f"end the run of pass {number}"
    return type(value).__name__.lower()


def named(row: Row) -> str:
    """For people."""
    return row.role.value + (f" {row.place + 1}" if row.place else "")
