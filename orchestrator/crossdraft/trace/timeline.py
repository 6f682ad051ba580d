"""What a session did, as spans of time: which model worked when, which messages were under way, what came of it.

`Watch` takes them piece by piece while the session runs, `spans_of` has those of a recording. All times are seconds
since the session was started.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

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
from crossdraft.session.ledger import Asked, Ledger
from crossdraft.text.letters import to_bytes
from crossdraft.trace.recording import Recording, Step
from crossdraft.types.messages import Advance, Draft, Drafted, OpenTarget, Pass, PassDone, RunTo, Scored
from crossdraft.types.statistics import Kind

DRAFTER, TARGET = "drafter", "target"  # lanes of services; of those used side by side the second is "target 2"
VERIFICATION = "verification"  # the lane of the session itself
OUTPUT = "output"  # the lane of committed tokens


class What(StrEnum):
    """What a span shows."""

    DRAFT = "draft"
    BRANCHES = "branches"  # a draft with prepared continuations
    SCORES = "scores"
    LATE = "late"  # drafted for an epoch that had ended
    PASS = "pass"
    MISS = "miss"  # a pass for a row miss
    WAIT = "wait"  # the target is idle, waiting for draft tokens
    SENT = "sent"  # a message on its way to the service of the lane
    RECEIVED = "received"  # ... and from it
    SESSION = "session"  # verification, planning, bookkeeping
    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    BONUS = "bonus"
    EPOCH = "epoch"  # an epoch begins; this and what follows are moments
    REFUSED = "refused"
    HIT = "hit"  # a prepared continuation was adopted
    STALLED = "stalled"  # the wait for draft tokens timed out
    LOST = "lost"
    OPENED = "opened"


PASSES = (What.PASS, What.MISS)
DRAFTING = (What.DRAFT, What.BRANCHES, What.SCORES, What.LATE)
WORKS = (*DRAFTING, *PASSES)  # of models


@dataclass(frozen=True)
class Span:
    """Something in one lane of the pipeline, during a time or at a moment.

    Of a model's work only the duration is recorded, not when it took place. The rest of a pass's round trip is split
    evenly before and after it. A drafter's messages are assumed to take half of its quickest round trip so far.
    """

    lane: str  # a service ("drafter", "target", "target 2", …), "verification" or "output"
    begin: float  # seconds since the session began
    end: float
    what: What
    label: str  # for people; of a token its text
    epoch: int
    count: int = 0  # draft tokens of a draft, nodes of a pass, tokens that an event's handling emitted


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
    """A whole session."""

    spans: tuple[Span, ...]  # by their beginnings; the count of a pass is here that of the tokens that came of it
    passes: tuple[float, ...]  # when each pass was sent: the beginnings of rounds
    end: float
    figures: SessionFigures


def spans_of(recording: Recording) -> Timeline:
    """The timeline of a recording, which may be incomplete."""
    watch = Watch()
    for step in recording.steps:
        watch.record(step)
    flights = tuple(watch.flights)
    spans = sorted(watch.take(), key=lambda span: span.begin)
    returned, tokens = [at for _, at in flights], [0] * len(flights)
    for span in spans:
        if span.what is What.SESSION and flights:  # of the latest pass that has returned
            tokens[max(0, bisect_right(returned, span.begin) - 1)] += span.count
    came = {id(work): count for (work, _), count in zip(flights, tokens, strict=True)}
    counted = tuple(
        replace(one, count=came[id(one)], label=f"{one.label}, {came[id(one)]} tokens came of it")
        if id(one) in came
        else one
        for one in spans
    )
    return Timeline(counted, tuple(watch.sent), watch.now, _figures(watch, counted))


def _figures(watch: "Watch", spans: Sequence[Span]) -> SessionFigures:
    happened = Counter(one.what for one in spans)
    emitting = [one for one in spans if one.what is What.SESSION and one.count]
    begin = watch.sent[0] if watch.sent else 0.0
    seconds = max((one.end for one in emitting), default=begin) - begin
    whole = seconds * max(1, watch.used[TARGET]) or 1.0
    flying: dict[str, list[Span]] = defaultdict(list)
    for one in spans:
        if one.lane.startswith(TARGET) and one.what in (*PASSES, What.SENT, What.RECEIVED):
            flying[one.lane].append(one)
    return SessionFigures(
        seconds=seconds,
        tokens=sum(one.count for one in emitting),
        passes=len(watch.sent) + watch.further,
        row_misses=watch.misses,
        refused=happened[What.REFUSED],
        hits=happened[What.HIT],
        stalls=happened[What.STALLED],
        model_share=_share(sum(one.end - one.begin for one in spans if one.what in PASSES), whole),
        idle_share=_share(whole - sum(map(_covered, flying.values())), whole),
        drafter_share=_share(sum(one.end - one.begin for one in spans if one.what in DRAFTING), seconds or 1.0),
        bytes=watch.bytes,
    )


def _covered(spans: Sequence[Span]) -> float:
    """Seconds that the spans, by their beginnings, cover together."""
    covered, reached = 0.0, float("-inf")
    for span in spans:
        covered += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return covered


@dataclass(eq=False)
class Service:
    """One lane of a service: what it was asked, and what it has replied since spans were taken."""

    track: str
    ledger: Ledger = field(default_factory=Ledger)
    asked: list[tuple[float, str, int]] = field(default_factory=list)  # but for passes: when, what, and in which epoch
    replies: list[tuple[float, float | None, Drafted | Scored]] = field(default_factory=list)  # when, since; None: late
    way: float = inf  # seconds to a drafter
    free: float = 0.0  # until when a drafter's model is known to have worked

    def take(self) -> Iterator[Span]:
        """Messages; and works of a drafter, one after another, each done before its reply leaves."""
        trips = (
            at - since - reply.seconds for at, since, reply in self.replies if since is not None and not _more(reply)
        )
        self.way = min((self.way, *(max(0.0, trip) / 2 for trip in trips)))
        way = self.way if self.way < inf else 0.0
        for at, what, epoch in self.asked:
            yield Span(self.track, at, at + way, What.SENT, what, epoch)
        works: list[Span] = []
        free = inf
        for at, since, reply in reversed(self.replies):
            end = min(at - way, free)
            begin = free = max(end - reply.seconds, min(max(self.free, since or 0.0), end))
            works.append(_drafted(self.track, begin, end, reply, since is None))
            yield Span(self.track, at - way, at, What.RECEIVED, name_of(reply), reply.epoch)
        self.free = works[0].end if works else self.free
        yield from reversed(works)
        self.asked, self.replies = [], []


def _more(reply: Drafted | Scored) -> bool:
    """Whether draft tokens of the epoch came before it."""
    return isinstance(reply, Drafted) and reply.first > 0


def _drafted(track: str, begin: float, end: float, reply: Drafted | Scored, late: bool) -> Span:
    """The work of a drafter's model."""
    if isinstance(reply, Scored):
        what, size = What.SCORES, len(reply.probabilities)
        label = f"scores, {size} strings"
    else:
        what, size = What.BRANCHES if reply.branches else What.DRAFT, len(reply.draft_tokens)
        label = f"{'draft with branches' if reply.branches else 'draft'}, {size} draft tokens"
        label += f", {len(reply.branches)} prepared continuations" if reply.branches else ""
    return Span(track, begin, end, What.LATE if late else what, label, reply.epoch, size)


class Watch:
    """A recorder whose spans can be taken while the session runs.

    When a model worked is estimated from what has happened so far: a drafter's first works may be placed a little
    differently than in a timeline of the whole recording.
    """

    def __init__(self) -> None:
        self.now = 0.0  # the end of the latest step
        self.misses = 0
        self.bytes = 0
        self.sent: list[float] = []  # when each pass was
        self.further = 0  # forwards of runs after their first ones
        self.used: dict[str, int] = defaultdict(int)  # lanes of services, by role
        self.flights: list[tuple[Span, float]] = []  # works of passes since spans were taken, and when they were back
        self._spans: list[Span] = []  # all but these, what `Service` has, and messages
        self._began: float | None = None
        self._epoch = 0
        self._services: dict[Lane, Service] = {}
        self._over: list[Service] = []  # whose sessions have ended
        self._asked: dict[tuple[Lane, int], tuple[float, int, bool]] = {}  # see `_passed`
        self._waiting: float | None = None  # since when the target stands idle for draft tokens
        self._stall = 0  # number of the latest timer of that

    def close(self) -> None:
        """As Recorder says."""

    def take(self) -> tuple[Span, ...]:
        """The spans that became known since the last call, in no order."""
        services = (*self._over, *self._services.values())
        found = (*self._spans, *(work for work, _ in self.flights), *(span for one in services for span in one.take()))
        self._spans, self.flights = [], []
        return found

    def record(self, step: Step) -> None:
        if self._began is None:
            self._began = step.now
        begin = step.now - self._began  # when the event happened; it may have had to wait
        handled, self.now = max(begin, self.now), max(begin, self.now) + step.seconds
        misses, self.misses = step.row_misses - self.misses, step.row_misses
        self.bytes = step.sent + step.received
        match step.event:
            case Ready(lane):
                track = self._services[lane].track
                self._mark(What.OPENED, f"{track} is open", begin, track)
            case Lost(lane, error):
                self._lost(lane, str(error), begin)
            case Replied(lane, reply):
                self._replied(lane, reply, begin)
            case Expired(Timer.STALL, number) if self._waiting is not None and number == self._stall:
                self._mark(What.STALLED, "the wait for draft tokens timed out", begin)
        self._commands(step, misses > 0)
        tokens = [one for one in step.commands if isinstance(one, Emitted)]
        self._add(VERIFICATION, handled, self.now, What.SESSION, name_of(step.event), len(tokens))
        for token in tokens:
            text = to_bytes(token.letters).decode("utf-8", "replace")
            self._mark(What(token.kind.value), text, self.now, OUTPUT)

    def _commands(self, step: Step, miss: bool) -> None:
        for command in step.commands:
            match command:
                case Open(lane, request):
                    self._open(lane, TARGET if isinstance(request, OpenTarget) else DRAFTER)
                case Close(lane):
                    self._lost(lane, command.blame or "it is not needed any more", self.now)
                case Send(lane, request):
                    self._send(lane, request, miss)
                case SetTimer(Timer.STALL, number):
                    self._stall = number
                    self._waiting = self.now if self._waiting is None else self._waiting
                case Emitted():
                    self._begin_epoch(command.epoch)
                    if command.kind is Kind.CORRECTED:
                        self._mark(What.REFUSED, f"refused; {command.letters!r} takes its place", self.now)

    def _open(self, lane: Lane, role: str) -> None:
        live = {one.track for one in self._services.values()}
        free = [one.track for one in self._over if one.track.startswith(role) and one.track not in live]
        if not free:
            self.used[role] += 1
            free = [role if self.used[role] == 1 else f"{role} {self.used[role]}"]
        self._services[lane] = Service(free[-1])

    def _lost(self, lane: Lane, why: str, at: float) -> None:
        service = self._services.pop(lane, None)
        if service is not None:
            self._over.append(service)
            self._mark(What.LOST, f"{service.track}: {why}", at, service.track)

    def _send(self, lane: Lane, request: Request, miss: bool) -> None:
        service = self._services[lane]
        if isinstance(request, Draft):
            self._begin_epoch(request.epoch)
            if request.adopt:
                self._mark(What.HIT, f"branch {request.adopt} was adopted", self.now)
        service.ledger.sent(request, self.now)
        if isinstance(request, Pass):
            self._asked[lane, request.number] = self.now, self._epoch, miss
            self.sent.append(self.now)
            if self._waiting is not None and self.now > self._waiting:
                self._add(TARGET, self._waiting, self.now, What.WAIT, "waits for draft tokens")
            self._waiting = None
        else:
            service.asked.append((self.now, name_of(request), self._epoch))

    def _replied(self, lane: Lane, reply: Reply, at: float) -> None:
        service = self._services[lane]
        asked = service.ledger.take(reply, at)
        if isinstance(reply, PassDone):
            if asked is not None:
                self._passed(service.track, lane, asked, reply, at)
        elif isinstance(reply, Drafted | Scored):
            service.replies.append((at, None if asked is None else asked.at, reply))
        else:  # takes a model no time
            self._mark(What.RECEIVED, name_of(reply), at, service.track)

    def _passed(self, track: str, lane: Lane, asked: Asked, reply: PassDone, at: float) -> None:
        """The model's work on a pass, or on tokens of a run, in the middle of its round trip; and its messages."""
        since, epoch, miss = self._asked[lane, reply.number]
        self._asked[lane, reply.number] = at, epoch, miss
        way = max(0.0, at - since - reply.seconds) / 2
        what, text = (What.MISS, "pass for a row miss") if miss else (What.PASS, "pass")
        nodes = len(asked.request.tree)
        work = Span(track, since + way, at - way, what, f"{text}, {nodes} nodes", epoch, nodes)
        self.flights.append((work, at))
        if asked.replies == 1:
            self._spans.append(Span(track, since, since + way, What.SENT, name_of(asked.request), epoch))
        self.further += reply.forwards - (asked.replies == 1)
        self._spans.append(Span(track, at - way, at, What.RECEIVED, f"rows of pass {reply.number}", epoch))

    def _begin_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._mark(What.EPOCH, f"epoch {epoch}", self.now)

    def _mark(self, what: What, text: str, at: float, lane: str = VERIFICATION) -> None:
        self._add(lane, at, at, what, text)

    def _add(self, lane: str, begin: float, end: float, what: What, label: str, count: int = 0) -> None:
        self._spans.append(Span(lane, begin, end, what, label, self._epoch, count))


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
            return f"rows of pass {number}" if value.forwards == 1 else f"{len(value.nodes)} tokens of pass {number}"
        case RunTo(number, tokens):
            return f"pass {number} goes on to {tokens} tokens" if tokens else f"end the run of pass {number}"
    return type(value).__name__.lower()
