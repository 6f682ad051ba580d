"""What a session did, as spans of time: which model worked when, which messages were under way, what came of it.

`Watch` takes them piece by piece while the session runs, `spans_of` has those of a recording. All times are seconds
since the session was started.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

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
from crossdraft.text.letters import to_bytes
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
WORKS = (What.DRAFT, What.BRANCHES, What.SCORES, What.LATE, *PASSES)  # of models


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
    tracer = Tracer()
    for step in recording.steps:
        tracer.read(step)
    ways = {track: way_of(answers) for track, answers in tracer.answers.items()}
    drafted = [work for track, answers in tracer.answers.items() for work in drafted_in(answers, ways[track])]
    passes = [passed_in(flight) for flight in tracer.flights]
    spans = (*tracer.spans, *drafted, *_with_tokens(passes, tracer), *messages_of(tracer.asked, tracer, ways))
    sent = tuple(asked.at for asked in tracer.asked if isinstance(asked.request, Pass))
    figures = _figures(tracer, drafted, passes)
    return Timeline(tuple(sorted(spans, key=lambda span: span.begin)), sent, tracer.now, figures)


class Watch:
    """A recorder whose spans can be taken while the session runs.

    When a model worked is estimated from what has happened so far: a drafter's first works may be placed a little
    differently than in a timeline of the whole recording.
    """

    def __init__(self) -> None:
        self._tracer = Tracer()
        self._ways: dict[str, float] = {}  # seconds to each drafter
        self._busy: dict[str, float] = {}  # until when each drafter's model is known to have worked

    def record(self, step: Step) -> None:
        self._tracer.read(step)

    def close(self) -> None:
        """As Recorder says."""

    def take(self) -> tuple[Span, ...]:
        """The spans that became known since the last call, in no order."""
        tracer, works = self._tracer, list(self._drafted())
        works += map(passed_in, tracer.flights)
        flying = set(map(id, tracer.flying))  # the duration of their way is not known before they are back
        asked = [one for one in tracer.asked if id(one) not in flying]
        found = (*works, *messages_of(asked, tracer, self._ways), *tracer.spans)
        tracer.forget()
        return found

    def _drafted(self) -> Iterator[Span]:
        for track, answers in self._tracer.answers.items():
            self._ways[track] = way_of(answers, [self._ways[track]] if track in self._ways else [])
            works = drafted_in(answers, self._ways[track], self._busy.get(track, 0.0))
            self._busy[track] = works[-1].end
            yield from works


@dataclass(frozen=True)
class SentRequest:
    """A request that was sent."""

    track: str  # the lane of the service
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

    @property
    def way(self) -> float:
        """Seconds before and after the model's work."""
        return max(0.0, self.at - self.asked.at - self.seconds) / 2


def passed_in(flight: ReturnedPass) -> Span:
    """The model's work on a pass, in the middle of its round trip."""
    asked = flight.asked
    assert isinstance(asked.request, Pass)
    what, text = (What.MISS, "pass for a row miss") if asked.miss else (What.PASS, "pass")
    nodes = len(asked.request.tree)
    begin, end = asked.at + flight.way, flight.at - flight.way
    return Span(asked.track, begin, end, what, f"{text}, {nodes} nodes", asked.epoch, nodes)


@dataclass(frozen=True)
class DrafterReply:
    """A drafter's reply; its model worked some time between `asked.at` and `at`."""

    asked: SentRequest
    at: float
    reply: Drafted | Scored
    late: bool

    def work(self, begin: float, end: float) -> Span:
        """The span of its model's work."""
        reply = self.reply
        if isinstance(reply, Scored):
            what, size = What.SCORES, len(reply.probabilities)
            label = f"scores, {size} strings"
        else:
            what, size = What.BRANCHES if reply.branches else What.DRAFT, len(reply.draft_tokens)
            label = f"{'draft with branches' if reply.branches else 'draft'}, {size} draft tokens"
            label += f", {len(reply.branches)} prepared continuations" if reply.branches else ""
        return Span(self.asked.track, begin, end, What.LATE if self.late else what, label, reply.epoch, size)


def way_of(answers: Sequence[DrafterReply], before: Sequence[float] = ()) -> float:
    """Seconds of one way: half of the quickest round trip without the model's time, those found `before` included."""
    first = [one for one in answers if not one.late and not (isinstance(one.reply, Drafted) and one.reply.first)]
    found = (max(0.0, one.at - one.asked.at - one.reply.seconds) / 2 for one in first)
    return min((*before, *found), default=0.0)


def drafted_in(answers: Sequence[DrafterReply], way: float, since: float = 0.0) -> list[Span]:
    """The works of a drafter's model, one after another, none before `since`, each done before its reply leaves."""
    works: list[Span] = []
    free = float("inf")
    for answer in reversed(answers):
        end = min(answer.at - way, free)
        earliest = since if answer.late else max(since, answer.asked.at)
        begin = free = max(end - answer.reply.seconds, min(earliest, end))
        works.append(answer.work(begin, end))
    return works[::-1]


class Tracer:
    """Reads steps one after another and collects what spans are made of."""

    def __init__(self) -> None:
        self.now = 0.0  # the end of the latest step
        self.misses = 0
        self.bytes = 0
        self.used: dict[str, int] = defaultdict(int)  # lanes of services, by role
        self.asked: list[SentRequest] = []  # all requests, in order
        self.answers: dict[str, list[DrafterReply]] = defaultdict(list)  # of drafters, by lane
        self.flights: list[ReturnedPass] = []
        self.spans: list[Span] = []  # all but works of models and messages for these
        self._began: float | None = None
        self._epoch = 0
        self._tracks: dict[Lane, str] = {}
        self._free: dict[str, list[str]] = defaultdict(list)  # by role, lanes whose session is over
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
        match step.event:
            case Ready(lane):
                self._mark(What.OPENED, f"{self._tracks[lane]} is open", begin, self._tracks[lane])
            case Lost(lane, error):
                self._lost(lane, str(error), begin)
            case Replied(lane, reply):
                self._replied(lane, reply, begin)
            case Expired(Timer.STALL, number) if self._waiting is not None and number == self._stall:
                self._mark(What.STALLED, "the wait for draft tokens timed out", begin)
        self._commands(step, misses)
        tokens = [one for one in step.commands if isinstance(one, Emitted)]
        self._add(VERIFICATION, handled, self.now, What.SESSION, name_of(step.event), len(tokens))
        for token in tokens:
            text = to_bytes(token.letters).decode("utf-8", "replace")
            self._mark(What(token.kind.value), text, self.now, OUTPUT)

    @property
    def flying(self) -> list[SentRequest]:
        """Passes that have not returned."""
        return list(self._flying.values())

    def forget(self) -> None:
        """Drops everything but what later steps need: passes in flight."""
        self.asked = self.flying
        self.answers, self.flights, self.spans = defaultdict(list), [], []

    def _commands(self, step: Step, misses: int) -> None:
        for command in step.commands:
            match command:
                case Open(lane, request):
                    self._open(lane, TARGET if isinstance(request, OpenTarget) else DRAFTER)
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
            self._mark(What.REFUSED, f"refused; {emitted.letters!r} takes its place", self.now)

    def _open(self, lane: Lane, role: str) -> None:
        if self._free[role]:
            self._tracks[lane] = self._free[role].pop()
        else:
            self.used[role] += 1
            self._tracks[lane] = role if self.used[role] == 1 else f"{role} {self.used[role]}"

    def _lost(self, lane: Lane, why: str, at: float) -> None:
        track = self._tracks.get(lane)
        free = [] if track is None else self._free[track.partition(" ")[0]]
        if track is not None and track not in free:
            free.append(track)
            self._mark(What.LOST, f"{track}: {why}", at, track)
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
                    self._mark(What.HIT, f"branch {request.adopt} was adopted", self.now)
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
        elif isinstance(reply, RowFetched | PromptScored):  # takes a model no time
            self._mark(What.RECEIVED, name_of(reply), at, track)
        elif lane in self._latest:
            known = self._latest[lane]
            late = reply.epoch != known.epoch
            self.answers[track].append(DrafterReply(replace(known, epoch=reply.epoch), at, reply, late))

    def _begin_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._mark(What.EPOCH, f"epoch {epoch}", self.now)

    def _end_wait(self) -> None:
        if self._waiting is not None and self.now > self._waiting:
            self._add(TARGET, self._waiting, self.now, What.WAIT, "waits for draft tokens")
        self._waiting = None

    def _mark(self, what: What, text: str, at: float, lane: str = VERIFICATION) -> None:
        self._add(lane, at, at, what, text)

    def _add(self, lane: str, begin: float, end: float, what: What, label: str, count: int = 0) -> None:
        self.spans.append(Span(lane, begin, end, what, label, self._epoch, count))


def _with_tokens(passes: Sequence[Span], tracer: Tracer) -> Iterator[Span]:
    """Each pass with the number of tokens emitted from its return to the next one's."""
    returned = [flight.at for flight in tracer.flights]
    tokens = [0] * len(passes)
    for span in tracer.spans:
        if span.what is What.SESSION and passes:
            tokens[max(0, bisect_right(returned, span.begin) - 1)] += span.count
    for work, count in zip(passes, tokens, strict=True):
        yield replace(work, count=count, label=f"{work.label}, {count} tokens came of it")


def messages_of(asked: Iterable[SentRequest], tracer: Tracer, ways: Mapping[str, float]) -> Iterator[Span]:
    """Messages to services, and replies but for those that took a model no time.

    Args:
        asked: the requests; the way of a pass is 0 until it has returned.
        tracer: knows what has returned.
        ways: seconds to each drafter.
    """
    of_passes = {id(flight.asked): flight.way for flight in tracer.flights}
    for one in asked:
        way = of_passes.get(id(one), 0.0) if isinstance(one.request, Pass) else ways.get(one.track, 0.0)
        yield Span(one.track, one.at, one.at + way, What.SENT, name_of(one.request), one.epoch)
    for flight in tracer.flights:
        request, track, epoch = flight.asked.request, flight.asked.track, flight.asked.epoch
        assert isinstance(request, Pass)
        yield Span(track, flight.at - flight.way, flight.at, What.RECEIVED, f"rows of pass {request.number}", epoch)
    for track, answers in tracer.answers.items():
        for answer in answers:
            begin, epoch = answer.at - ways[track], answer.asked.epoch
            yield Span(track, begin, answer.at, What.RECEIVED, name_of(answer.reply), epoch)


def _figures(tracer: Tracer, drafted: Sequence[Span], passes: Sequence[Span]) -> SessionFigures:
    sent = [asked.at for asked in tracer.asked if isinstance(asked.request, Pass)]
    begin = sent[0] if sent else 0.0
    emitting = [span for span in tracer.spans if span.what is What.SESSION and span.count]
    seconds = emitting[-1].end - begin if emitting else 0.0
    whole = seconds * max(1, tracer.used[TARGET]) or 1.0
    flights: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for flight in tracer.flights:
        flights[flight.asked.track].append((flight.asked.at, flight.at))
    happened = [span.what for span in tracer.spans]
    return SessionFigures(
        seconds=seconds,
        tokens=sum(span.count for span in emitting),
        passes=len(sent) + _further(tracer),
        row_misses=tracer.misses,
        refused=happened.count(What.REFUSED),
        hits=happened.count(What.HIT),
        stalls=happened.count(What.STALLED),
        model_share=_share(sum(work.end - work.begin for work in passes), whole),
        idle_share=_share(whole - sum(map(_covered, flights.values())), whole),
        drafter_share=_share(sum(work.end - work.begin for work in drafted), seconds or 1.0),
        bytes=tracer.bytes,
    )


def _further(tracer: Tracer) -> int:
    """Forwards of runs after their first ones."""
    asked = {id(one) for one in tracer.asked}
    return sum(flight.forwards - (id(flight.asked) in asked) for flight in tracer.flights)


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
