"""A recorded session as spans of time: which model worked when, which messages were under way, what the session did.

All times are seconds since the session was started.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

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
from crossdraft.trace.recording import Recording, Step
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    OpenTarget,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    RunTo,
    Score,
    Scored,
)
from crossdraft.types.statistics import Kind


class ServiceRole(Enum):
    """Target or drafter."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True)
class Track:
    """The track of a timeline for one of the services of a role that are used side by side, or for its successors."""

    role: ServiceRole
    place: int = 0  # among the tracks of the role


class Task(Enum):
    """What a model worked on."""

    DRAFT = "draft"
    BRANCHES = "draft with branches"
    SCORES = "scores"
    PASS = "pass"
    MISS = "pass for a row miss"


@dataclass(frozen=True)
class Work:
    """A model's forwards for one reply.

    Only their duration is recorded, not when they took place. The rest of a pass's round trip is split evenly before
    and after them. A drafter's messages are assumed to take half of its quickest round trip of the session.
    """

    track: Track
    begin: float
    end: float
    task: Task
    epoch: int
    size: int  # draft tokens drafted, strings scored, or nodes of the pass
    branches: int = 0  # prepared continuations that came with the reply
    tokens: int = 0  # of a pass: emitted after it, before the next one returned
    late: bool = False  # its epoch had ended when the reply came, so that it was dropped

    @property
    def counted(self) -> str:
        drafted = self.task in (Task.DRAFT, Task.BRANCHES)
        return f"{self.size} {'draft tokens' if drafted else 'strings' if self.task is Task.SCORES else 'nodes'}"


@dataclass(frozen=True)
class TimelineMessage:
    """A message on its way between the session and a service."""

    track: Track
    begin: float
    end: float
    outward: bool  # to the service
    name: str
    epoch: int


@dataclass(frozen=True)
class SessionCall:
    """The session handling one event: verification, planning, bookkeeping."""

    begin: float
    end: float
    event: str
    epoch: int
    tokens: tuple[Emitted, ...]


class MarkKind(Enum):
    """What a mark shows."""

    REFUSED = "a draft token was refused"
    HIT = "a prepared continuation was adopted"
    STALLED = "the wait for draft tokens timed out"
    LOST = "a service was lost"
    OPENED = "a service was opened"


@dataclass(frozen=True)
class Mark:
    """An event at one moment."""

    at: float
    what: MarkKind
    text: str
    track: Track | None = None  # None: the session itself


@dataclass(frozen=True)
class Wait:
    """The target was idle, waiting for draft tokens."""

    begin: float
    end: float


@dataclass(frozen=True)
class EpochSpan:
    """An epoch from its beginning to the next one's."""

    epoch: int
    begin: float
    end: float


@dataclass(frozen=True)
class SessionFigures:
    """The session in numbers."""

    seconds: float  # from the first pass to the last token
    tokens: int
    passes: int
    row_misses: int
    refused: int
    hits: int
    stalls: int
    model_share: float  # share of that time in which a target's model worked; mean over targets
    idle_share: float  # share of that time in which a target had no pass in flight; mean over targets
    drafter_share: float  # share of that time in which drafters' models worked
    bytes: int  # of messages, both ways; 0: not recorded

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Timeline:
    """A whole session; sequences are ordered by their beginnings, tracks by role, drafters first."""

    tracks: tuple[Track, ...]
    works: tuple[Work, ...]
    messages: tuple[TimelineMessage, ...]
    handled: tuple[SessionCall, ...]
    marks: tuple[Mark, ...]
    waits: tuple[Wait, ...]
    epochs: tuple[EpochSpan, ...]
    passes: tuple[float, ...]  # when each pass was sent: the beginnings of rounds
    end: float
    figures: SessionFigures


def spans_of(recording: Recording) -> Timeline:
    """The timeline of a recording, which may be incomplete."""
    tracer = Tracer()
    for step in recording.steps:
        tracer.read(step)
    ways = {track: way_of(answers) for track, answers in tracer.answers.items()}
    drafted = [work for track, answers in tracer.answers.items() for work in drafted_in(answers, ways[track])]
    passes = _with_tokens([passed_in(flight) for flight in tracer.flights], tracer)
    messages = [*tracer.small, *outward(tracer.asked, tracer.flights, ways), *inward(tracer, ways)]
    epochs = [replace(era, end=tracer.now) if era is tracer.epochs[-1] else era for era in tracer.epochs]
    return Timeline(
        tracks=tuple(Track(role, place) for role in ServiceRole for place in range(tracer.used[role])),
        works=tuple(sorted([*drafted, *passes], key=lambda work: work.begin)),
        messages=tuple(sorted(messages, key=lambda message: message.begin)),
        handled=tuple(tracer.handled),
        marks=tuple(tracer.marks),
        waits=tuple(tracer.waits),
        epochs=tuple(epochs),
        passes=tuple(asked.at for asked in tracer.asked if isinstance(asked.request, Pass)),
        end=tracer.now,
        figures=_figures(tracer, drafted, passes),
    )


@dataclass(frozen=True)
class SentRequest:
    """A request that was sent."""

    track: Track
    at: float
    request: Request
    epoch: int
    miss: bool = False  # a pass for a row miss


@dataclass(frozen=True)
class ReturnedPass:
    """A pass that returned, or tokens of a run; of later ones `asked.at` is the time of the reply before."""

    asked: SentRequest
    at: float  # when it was back
    seconds: float  # in the model
    forwards: int = 1


def passed_in(flight: ReturnedPass) -> Work:
    """The model's work on a pass, in the middle of its round trip."""
    asked = flight.asked
    assert isinstance(asked.request, Pass)
    way = _way_of_pass(flight)
    task = Task.MISS if asked.miss else Task.PASS
    return Work(asked.track, asked.at + way, flight.at - way, task, asked.epoch, len(asked.request.tree))


def _way_of_pass(flight: ReturnedPass) -> float:
    return max(0.0, flight.at - flight.asked.at - flight.seconds) / 2


@dataclass(frozen=True)
class DrafterReply:
    """A drafter's reply; its model worked some time between `asked.at` and `at`."""

    asked: SentRequest
    at: float
    reply: Drafted | Scored
    late: bool


def way_of(answers: Sequence[DrafterReply], before: Sequence[float] = ()) -> float:
    """Seconds of one way: half of the quickest round trip without the model's time, those found `before` included."""
    first = [one for one in answers if not one.late and not (isinstance(one.reply, Drafted) and one.reply.first)]
    found = (max(0.0, one.at - one.asked.at - one.reply.seconds) / 2 for one in first)
    return min((*before, *found), default=0.0)


def drafted_in(answers: Sequence[DrafterReply], way: float, since: float = 0.0) -> list[Work]:
    """The works of a drafter's model, one after another, none before `since`, each done before its reply leaves."""
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
            task, size, branches = Task.SCORES, len(reply.probabilities), 0
        works.append(Work(answer.asked.track, begin, end, task, reply.epoch, size, branches, late=answer.late))
    return works[::-1]


class Tracer:
    """Reads steps one after another and collects what a timeline is made of."""

    def __init__(self) -> None:
        self.now = 0.0  # the end of the latest step
        self.misses = 0
        self.bytes = 0
        self.used: dict[ServiceRole, int] = defaultdict(int)  # tracks
        self.asked: list[SentRequest] = []  # all requests, in order
        self.answers: dict[Track, list[DrafterReply]] = defaultdict(list)  # of drafters
        self.flights: list[ReturnedPass] = []
        self.small: list[TimelineMessage] = []  # messages that cost no model any time
        self.handled: list[SessionCall] = []
        self.marks: list[Mark] = []
        self.waits: list[Wait] = []
        self.epochs: list[EpochSpan] = []
        self._began: float | None = None
        self._epoch = 0
        self._tracks: dict[Lane, Track] = {}
        self._free: dict[ServiceRole, list[Track]] = defaultdict(list)  # tracks whose lane is over
        self._flying: dict[tuple[Lane, int], SentRequest] = {}  # passes
        self._running: dict[tuple[Lane, int], SentRequest] = {}  # runs that have had an answer
        self._latest: dict[Lane, SentRequest] = {}  # Draft or Score
        self._waiting: float | None = None  # since when the target stands idle for draft tokens
        self._stall = 0  # number of the latest timer of that

    def read(self, step: Step) -> None:
        if self._began is None:
            self._began = step.now
        begin = step.now - self._began  # when the event happened; it may have had to wait
        handled, self.now = max(begin, self.now), max(begin, self.now) + step.seconds
        misses, self.misses = step.row_misses - self.misses, step.row_misses
        self.bytes = step.sent + step.received
        event = step.event
        match event:
            case Ready(lane):
                self._mark(MarkKind.OPENED, f"{named(self._tracks[lane])} is open", self._tracks[lane], begin)
            case Lost(lane, error):
                self._lost(lane, str(error), begin)
            case Replied(lane, reply):
                self._replied(lane, reply, begin)
            case Expired(Timer.STALL, number) if self._waiting is not None and number == self._stall:
                self._mark(MarkKind.STALLED, MarkKind.STALLED.value, None, begin)
        self._commands(step, misses)
        tokens = tuple(one for one in step.commands if isinstance(one, Emitted))
        self.handled.append(SessionCall(handled, self.now, name_of(event), self._epoch, tokens))

    @property
    def flying(self) -> list[SentRequest]:
        """Passes that have not returned."""
        return list(self._flying.values())

    def forget(self) -> None:
        """Drops everything but what later steps need: passes in flight, and epochs."""
        self.asked = self.flying
        self.answers, self.flights, self.small = defaultdict(list), [], []
        self.handled, self.marks, self.waits = [], [], []

    def _commands(self, step: Step, misses: int) -> None:
        for command in step.commands:
            match command:
                case Open(lane, request):
                    self._open(lane, ServiceRole.TARGET if isinstance(request, OpenTarget) else ServiceRole.DRAFTER)
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
            self._mark(MarkKind.REFUSED, f"refused; {emitted.letters!r} takes its place", None, self.now)

    def _open(self, lane: Lane, role: ServiceRole) -> None:
        if self._free[role]:
            self._tracks[lane] = self._free[role].pop()
        else:
            self._tracks[lane] = Track(role, self.used[role])
            self.used[role] += 1

    def _lost(self, lane: Lane, why: str, at: float) -> None:
        track = self._tracks.get(lane)
        if track is not None and track not in self._free[track.role]:
            self._free[track.role].append(track)
            self._mark(MarkKind.LOST, f"{named(track)}: {why}", track, at)
            for passes in (self._flying, self._running):
                for key in [key for key in passes if key[0] == lane]:
                    del passes[key]

    def _send(self, lane: Lane, request: Request, miss: bool) -> None:
        asked = SentRequest(self._tracks[lane], self.now, request, self._epoch, miss)
        match request:
            case Pass(number):
                self._flying[lane, number] = asked
                self._end_wait()
            case Draft(epoch):
                self._begin_epoch(epoch)
                asked = self._latest[lane] = replace(asked, epoch=epoch)
                if request.adopt:
                    self._mark(MarkKind.HIT, f"branch {request.adopt} was adopted", None, self.now)
            case Score():
                self._latest[lane] = asked
        self.asked.append(asked)

    def _replied(self, lane: Lane, reply: Reply, at: float) -> None:
        track = self._tracks[lane]
        if isinstance(reply, PassDone):
            key = lane, reply.number
            asked = self._flying.pop(key, None) or self._running.pop(key, None)
            if asked is not None:
                self.flights.append(ReturnedPass(asked, at, reply.seconds, reply.forwards))
                if reply.more:
                    self._running[key] = replace(asked, at=at)
        elif isinstance(reply, RowFetched | PromptScored):
            self.small.append(TimelineMessage(track, at, at, False, name_of(reply), self._epoch))
        elif lane in self._latest:
            known = self._latest[lane]
            late = reply.epoch != known.epoch
            self.answers[track].append(DrafterReply(replace(known, epoch=reply.epoch), at, reply, late))

    def _begin_epoch(self, epoch: int) -> None:
        if self.epochs and epoch <= self._epoch:
            return
        if self.epochs:
            self.epochs[-1] = replace(self.epochs[-1], end=self.now)
        self._epoch = epoch
        self.epochs.append(EpochSpan(epoch, self.now, self.now))

    def _end_wait(self) -> None:
        if self._waiting is not None and self.now > self._waiting:
            self.waits.append(Wait(self._waiting, self.now))
        self._waiting = None

    def _mark(self, what: MarkKind, text: str, track: Track | None, at: float) -> None:
        self.marks.append(Mark(at, what, text, track))


def _with_tokens(passes: list[Work], tracer: Tracer) -> list[Work]:
    """Each pass with the number of tokens emitted from its return to the next one's."""
    returned = [flight.at for flight in tracer.flights]
    tokens = [0] * len(passes)
    for handled in tracer.handled:
        if handled.tokens and passes:
            tokens[max(0, bisect_right(returned, handled.begin) - 1)] += len(handled.tokens)
    return [replace(work, tokens=count) for work, count in zip(passes, tokens, strict=True)]


def outward(
    asked: Iterable[SentRequest], flights: Iterable[ReturnedPass], ways: Mapping[Track, float]
) -> Iterable[TimelineMessage]:
    """Messages to services; the way of a pass is 0 until it has returned."""
    of_passes = {id(flight.asked): _way_of_pass(flight) for flight in flights}
    for one in asked:
        way = of_passes.get(id(one), 0.0) if isinstance(one.request, Pass) else ways.get(one.track, 0.0)
        yield TimelineMessage(one.track, one.at, one.at + way, True, name_of(one.request), one.epoch)


def inward(tracer: Tracer, ways: Mapping[Track, float]) -> Iterable[TimelineMessage]:
    """Replies of services, but for those that took their models no time."""
    for flight in tracer.flights:
        asked = flight.asked
        assert isinstance(asked.request, Pass)
        text = f"rows of pass {asked.request.number}"
        yield TimelineMessage(asked.track, flight.at - _way_of_pass(flight), flight.at, False, text, asked.epoch)
    for track, answers in tracer.answers.items():
        for answer in answers:
            text = name_of(answer.reply)
            yield TimelineMessage(track, answer.at - ways[track], answer.at, False, text, answer.asked.epoch)


def _figures(tracer: Tracer, drafted: Sequence[Work], passes: Sequence[Work]) -> SessionFigures:
    sent = [asked.at for asked in tracer.asked if isinstance(asked.request, Pass)]
    begin = sent[0] if sent else 0.0
    emitting = [handled for handled in tracer.handled if handled.tokens]
    seconds = emitting[-1].end - begin if emitting else 0.0
    whole = seconds * max(1, tracer.used[ServiceRole.TARGET]) or 1.0
    flying = sum(_covered([(one.asked.at, one.at) for one in flights]) for flights in _by_track(tracer.flights))
    happened = [mark.what for mark in tracer.marks]
    return SessionFigures(
        seconds=seconds,
        tokens=sum(len(handled.tokens) for handled in emitting),
        passes=len(sent) + _further(tracer),
        row_misses=tracer.misses,
        refused=happened.count(MarkKind.REFUSED),
        hits=happened.count(MarkKind.HIT),
        stalls=happened.count(MarkKind.STALLED),
        model_share=_share(sum(work.end - work.begin for work in passes), whole),
        idle_share=_share(whole - flying, whole),
        drafter_share=_share(sum(work.end - work.begin for work in drafted), seconds or 1.0),
        bytes=tracer.bytes,
    )


def _further(tracer: Tracer) -> int:
    """Forwards of runs after their first ones."""
    asked = {id(one) for one in tracer.asked}
    return sum(flight.forwards - (id(flight.asked) in asked) for flight in tracer.flights)


def _by_track(flights: Sequence[ReturnedPass]) -> list[list[ReturnedPass]]:
    tracks = {flight.asked.track for flight in flights}
    return [[flight for flight in flights if flight.asked.track == track] for track in tracks]


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that the spans cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def name_of(value: Event | Request | Reply | None) -> str:
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
            return f"go on to {count} draft tokens" if count else "draft no more"
        case Pass(number):
            what = f"{len(value.tree)} nodes" if value.run == 1 else f"up to {value.run} tokens"
            return f"pass {number}, {what}"
        case PassDone(number):
            return f"rows of pass {number}" if value.forwards == 1 else f"{value.forwards} tokens of pass {number}"
        case RunTo(number, tokens):
            return f"pass {number} goes on to {tokens} tokens" if tokens else f"end the run of pass {number}"
    return type(value).__name__.lower()


def named(track: Track) -> str:
    return track.role.value + (f" {track.place + 1}" if track.place else "")
