"""A recording as spans of time: who worked when, what was on its way, what the session did with it."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from crossdraft.session.events import (
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
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.trace.recording import Recording, Step
from crossdraft.types.messages import (
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
from crossdraft.types.statistics import Kind

# What a recorded session looked like over time. All times are seconds since the session was started.


class Role(Enum):
    """What a service is for."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True)
class Row:
    """One of several services of a role that were used side by side; a lost one's successor takes its row."""

    role: Role
    place: int = 0  # among those of the role


class Task(Enum):
    """What a model worked on."""

    DRAFT = "draft"
    BRANCHES = "draft with branches"
    SCORE = "scores"
    PASS = "pass"
    MISS = "pass for a row miss"


@dataclass(frozen=True)
class Work:
    """A model's forwards for one reply.

    When they were is not recorded, only how long they took: wire and queue are halved around a pass, and
    before and after a draft the way is taken to be half of the session's quickest answer.
    """

    row: Row
    begin: float
    end: float
    task: Task
    epoch: int
    size: int  # draft tokens drafted, strings scored, or nodes of the pass
    branches: int = 0  # prepared continuations that came with the reply
    tokens: int = 0  # of a pass: emitted after it, before the next one returned
    late: bool = False  # its epoch was over when the reply came, so that it was dropped


@dataclass(frozen=True)
class Message:
    """On its way between the session and a service."""

    row: Row
    begin: float
    end: float
    outward: bool  # to the service
    name: str
    epoch: int


@dataclass(frozen=True)
class Token:
    """A committed token."""

    letters: Letters
    kind: Kind


@dataclass(frozen=True)
class Handled:
    """The session at work on one event: verification, planning, bookkeeping."""

    begin: float
    end: float
    event: str
    epoch: int
    tokens: tuple[Token, ...]  # emitted


class Happening(Enum):
    """What deserves a mark."""

    REFUSED = "a draft token was refused"
    HIT = "a prepared continuation was adopted"
    STALLED = "patience with the drafter ended"
    LOST = "a service was lost"
    OPENED = "a service was opened"


@dataclass(frozen=True)
class Mark:
    """Something at one moment."""

    at: float
    what: Happening
    text: str
    row: Row | None = None  # None: the session itself


@dataclass(frozen=True)
class Wait:
    """The target stood idle for draft tokens."""

    begin: float
    end: float


@dataclass(frozen=True)
class Era:
    """The time of an epoch."""

    epoch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Figures:
    """The whole in numbers."""

    seconds: float  # from the first pass to the last token
    tokens: int
    passes: int
    row_misses: int
    refused: int
    hits: int
    stalls: int
    model_share: float  # of that time, in which a target's model worked; the mean over targets
    idle_share: float  # of that time, in which a target had no pass in flight; the mean over targets
    drafter_share: float  # of that time, in which a drafter's model worked
    verification_seconds: float
    bytes: int  # of messages, both ways; 0: not recorded

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Timeline:
    """All of it; each sequence in the order of its beginnings, and `rows` drafters first."""

    rows: tuple[Row, ...]
    works: tuple[Work, ...]
    messages: tuple[Message, ...]
    handled: tuple[Handled, ...]
    marks: tuple[Mark, ...]
    waits: tuple[Wait, ...]
    eras: tuple[Era, ...]
    passes: tuple[float, ...]  # when each was sent: the beginnings of rounds
    end: float
    figures: Figures


def spans_of(recording: Recording) -> Timeline:
    """The timeline of a recording, which may be the beginning of one."""
    tracer = Tracer()
    for step in recording.steps:
        tracer.read(step)
    ways = {row: way_of(answers) for row, answers in tracer.answers.items()}
    drafted = [work for row, answers in tracer.answers.items() for work in drafted_in(answers, ways[row])]
    passes = _with_tokens([passed_in(flight) for flight in tracer.flights], tracer)
    messages = [*tracer.small, *outward(tracer.asked, tracer.flights, ways), *inward(tracer, ways)]
    eras = [replace(era, end=tracer.now) if era is tracer.eras[-1] else era for era in tracer.eras]
    return Timeline(
        rows=tuple(Row(role, place) for role in Role for place in range(tracer.used[role])),
        works=tuple(sorted([*drafted, *passes], key=lambda work: work.begin)),
        messages=tuple(sorted(messages, key=lambda message: message.begin)),
        handled=tuple(tracer.handled),
        marks=tuple(tracer.marks),
        waits=tuple(tracer.waits),
        eras=tuple(eras),
        passes=tuple(asked.at for asked in tracer.asked if isinstance(asked.request, Pass)),
        end=tracer.now,
        figures=_figures(tracer, drafted, passes),
    )


# Reads a recording step by step and keeps what a timeline is made of.


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


def passed_in(flight: Flight) -> Work:
    """When a target's model worked on a pass."""
    asked = flight.asked
    assert isinstance(asked.request, Pass)
    way = _way_of_pass(flight)
    task = Task.MISS if asked.miss else Task.PASS
    return Work(asked.row, asked.at + way, flight.at - way, task, asked.epoch, len(asked.request.tree))


def _way_of_pass(flight: Flight) -> float:
    return max(0.0, flight.at - flight.asked.at - flight.seconds) / 2


@dataclass(frozen=True)
class Answer:
    """A reply that came: its model's time lies somewhere between `asked.at` and `at`."""

    asked: Asked
    at: float
    reply: Drafted | Scored
    late: bool


def way_of(answers: Sequence[Answer], before: Sequence[float] = ()) -> float:
    """Half of the quickest answer to a new question, its model's time left out, or what was found `before`: seconds."""
    first = [one for one in answers if not one.late and not (isinstance(one.reply, Drafted) and one.reply.first)]
    found = (max(0.0, one.at - one.asked.at - one.reply.seconds) / 2 for one in first)
    return min((*before, *found), default=0.0)


def drafted_in(answers: Sequence[Answer], way: float, since: float = 0.0) -> list[Work]:
    """When a drafter's model worked, from its last reply back: it works on one thing at a time, not before `since`,
    and no reply leaves before its work is done."""
    works: list[Work] = []
    free = float("inf")
    for answer in reversed(answers):
        reply = answer.reply
        end = min(answer.at - way, free)
        earliest = since if answer.late else max(since, answer.asked.at)
        begin = free = max(end - reply.seconds, min(earliest, end))
        if isinstance(reply, Drafted):
            task = Task.BRANCHES if reply.branches else Task.DRAFT
            size, branches = len(reply.draft_tokens), len(reply.branches)
        else:
            task, size, branches = Task.SCORE, len(reply.probabilities), 0
        works.append(Work(answer.asked.row, begin, end, task, reply.epoch, size, branches, late=answer.late))
    return works[::-1]


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
        self._waiting: float | None = None  # since when the target stands idle for draft tokens
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


def _with_tokens(passes: list[Work], tracer: Tracer) -> list[Work]:
    """Each pass with the tokens that were emitted from its return to the next one's."""
    returned = [flight.at for flight in tracer.flights]
    tokens = [0] * len(passes)
    for handled in tracer.handled:
        if handled.tokens and passes:
            tokens[max(0, bisect_right(returned, handled.begin) - 1)] += len(handled.tokens)
    return [replace(work, tokens=count) for work, count in zip(passes, tokens, strict=True)]


def outward(asked: Iterable[Asked], flights: Iterable[Flight], ways: Mapping[Row, float]) -> Iterable[Message]:
    """What went to services; the way of a pass is known once it is back, and is 0 until then."""
    of_passes = {id(flight.asked): _way_of_pass(flight) for flight in flights}
    for one in asked:
        way = of_passes.get(id(one), 0.0) if isinstance(one.request, Pass) else ways.get(one.row, 0.0)
        yield Message(one.row, one.at, one.at + way, True, name_of(one.request), one.epoch)


def inward(tracer: Tracer, ways: Mapping[Row, float]) -> Iterable[Message]:
    """What services answered, but for what cost their models no time."""
    for flight in tracer.flights:
        asked = flight.asked
        assert isinstance(asked.request, Pass)
        text = f"rows of pass {asked.request.number}"
        yield Message(asked.row, flight.at - _way_of_pass(flight), flight.at, False, text, asked.epoch)
    for row, answers in tracer.answers.items():
        for answer in answers:
            text = name_of(answer.reply)
            yield Message(row, answer.at - ways[row], answer.at, False, text, answer.asked.epoch)


def _figures(tracer: Tracer, drafted: Sequence[Work], passes: Sequence[Work]) -> Figures:
    sent = [asked.at for asked in tracer.asked if isinstance(asked.request, Pass)]
    begin = sent[0] if sent else 0.0
    emitting = [handled for handled in tracer.handled if handled.tokens]
    seconds = emitting[-1].end - begin if emitting else 0.0
    whole = seconds * max(1, tracer.used[Role.TARGET]) or 1.0
    flying = sum(_covered([(one.asked.at, one.at) for one in flights]) for flights in _by_row(tracer.flights))
    happened = [mark.what for mark in tracer.marks]
    return Figures(
        seconds=seconds,
        tokens=sum(len(handled.tokens) for handled in emitting),
        passes=len(sent) + _further(tracer),
        row_misses=tracer.misses,
        refused=happened.count(Happening.REFUSED),
        hits=happened.count(Happening.HIT),
        stalls=happened.count(Happening.STALLED),
        model_share=_share(sum(work.end - work.begin for work in passes), whole),
        idle_share=_share(whole - flying, whole),
        drafter_share=_share(sum(work.end - work.begin for work in drafted), seconds or 1.0),
        verification_seconds=sum(handled.end - handled.begin for handled in tracer.handled),
        bytes=tracer.bytes,
    )


def _further(tracer: Tracer) -> int:
    """Forwards of runs after their first ones."""
    asked = {id(one) for one in tracer.asked}
    return sum(flight.forwards - (id(flight.asked) in asked) for flight in tracer.flights)


def _by_row(flights: Sequence[Flight]) -> list[list[Flight]]:
    rows = {flight.asked.row for flight in flights}
    return [[flight for flight in flights if flight.asked.row == row] for row in rows]


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """How much time the spans cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


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
            return f"{len(value.draft_tokens)} draft tokens of epoch {value.epoch}{more}"
        case Advance(_, count):
            return f"go on to {count} draft tokens"
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


# The spans of a session while it runs: what `timeline` finds in a recording, as it becomes known.

VERIFICATION = "verification"  # the lane of the session itself; those of services are named by `tracing.named`
OUTPUT = "output"  # the lane of committed tokens


class What(StrEnum):
    """What a span says. That of a token is its kind."""

    DRAFT = "draft"
    BRANCHES = "branches"  # a draft with prepared continuations
    SCORES = "scores"
    LATE = "late"  # drafted for an epoch that was over
    PASS = "pass"
    MISS = "miss"  # a pass for a row miss
    WAIT = "wait"  # the target stands idle for draft tokens
    SENT = "sent"  # a message's way to the service of the lane
    RECEIVED = "received"  # ... and from it
    SESSION = "session"  # verification, planning, bookkeeping
    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    BONUS = "bonus"
    EPOCH = "epoch"  # one begins: a moment, as are all that follow
    REFUSED = "refused"
    HIT = "hit"  # a prepared continuation was adopted
    STALLED = "stalled"  # patience with the drafter ended
    LOST = "lost"
    OPENED = "opened"


OF_TASKS = {
    Task.DRAFT: What.DRAFT,
    Task.BRANCHES: What.BRANCHES,
    Task.SCORE: What.SCORES,
    Task.PASS: What.PASS,
    Task.MISS: What.MISS,
}
COUNTED = {Task.SCORE: "strings", Task.PASS: "nodes", Task.MISS: "nodes"}
OF_HAPPENINGS = {
    Happening.REFUSED: What.REFUSED,
    Happening.HIT: What.HIT,
    Happening.STALLED: What.STALLED,
    Happening.LOST: What.LOST,
    Happening.OPENED: What.OPENED,
}


@dataclass(frozen=True)
class Span:
    """Something in one lane of the pipeline, from one moment to another or the same."""

    lane: str  # a service ("drafter", "target", "target 2", …), "verification" or "output"
    begin: float  # seconds since the session began
    end: float
    what: What
    label: str  # for people; of a token its text
    epoch: int
    count: int = 0  # draft tokens of a draft, nodes of a pass, tokens that an event's handling emitted


class Watch:
    """A recorder whose spans can be taken while the session runs.

    When a model worked is concluded as `spans.Work` says, from what has happened so far: a drafter's first works
    may be placed a little differently than in a timeline of the whole.
    """

    def __init__(self) -> None:
        self._tracer = Tracer()
        self._ways: dict[Row, float] = {}  # seconds to each drafter
        self._busy: dict[Row, float] = {}  # until when each drafter's model is known to have worked
        self._eras = 0  # epochs whose beginning was taken

    def record(self, step: Step) -> None:
        """As Recorder says."""
        self._tracer.read(step)

    def close(self) -> None:
        """As Recorder says."""

    def take(self) -> tuple[Span, ...]:
        """What became known since the last call, in no order."""
        found = (*self._works(), *self._messages(), *self._session(), *self._moments())
        self._eras = len(self._tracer.eras)
        self._tracer.forget()
        return found

    def _works(self) -> Iterator[Span]:
        for row, answers in self._tracer.answers.items():
            self._ways[row] = way_of(answers, [self._ways[row]] if row in self._ways else [])
            works = drafted_in(answers, self._ways[row], self._busy.get(row, 0.0))
            self._busy[row] = works[-1].end
            yield from map(_worked, works)
        yield from (_worked(passed_in(flight)) for flight in self._tracer.flights)

    def _messages(self) -> Iterator[Span]:
        tracer, ways = self._tracer, self._ways
        flying = set(map(id, tracer.flying))  # how long their way is, is known when they are back
        asked = [one for one in tracer.asked if id(one) not in flying]
        for one in (*tracer.small, *outward(asked, tracer.flights, ways), *inward(tracer, ways)):
            what = What.SENT if one.outward else What.RECEIVED
            yield Span(named(one.row), one.begin, one.end, what, one.name, one.epoch)

    def _session(self) -> Iterator[Span]:
        for one in self._tracer.handled:
            yield Span(VERIFICATION, one.begin, one.end, What.SESSION, one.event, one.epoch, len(one.tokens))
            for token in one.tokens:
                text = to_bytes(token.letters).decode("utf-8", "replace")
                yield Span(OUTPUT, one.end, one.end, What(token.kind.value), text, one.epoch)

    def _moments(self) -> Iterator[Span]:
        tracer = self._tracer
        epoch = tracer.eras[-1].epoch if tracer.eras else 0
        for era in tracer.eras[self._eras :]:
            yield Span(VERIFICATION, era.begin, era.begin, What.EPOCH, f"epoch {era.epoch}", era.epoch)
        for mark in tracer.marks:
            lane = VERIFICATION if mark.row is None else named(mark.row)
            yield Span(lane, mark.at, mark.at, OF_HAPPENINGS[mark.what], mark.text, epoch)
        for wait in tracer.waits:
            yield Span(Role.TARGET.value, wait.begin, wait.end, What.WAIT, "waits for draft tokens", epoch)


def _worked(work: Work) -> Span:
    what = What.LATE if work.late else OF_TASKS[work.task]
    label = f"{work.task.value}, {work.size} {COUNTED.get(work.task, 'draft_tokens')}"
    if work.branches:
        label += f", {work.branches} prepared continuations"
    return Span(named(work.row), work.begin, work.end, what, label, work.epoch, work.size)
