"""What a session did, as spans of time: which model worked when, which messages were under way, what came of it, and
what its walks judged.

`Watch` is told the steps of a session, and takes spans of them while it runs. All times of spans are seconds since the
session was started.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any

from crossdraft.session import events
from crossdraft.session.assignment import Assignment
from crossdraft.session.ledger import Asked, Ledger
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.types import quick_dataclass
from crossdraft.types.messages import Advance, Draft, Drafted, OpenTarget, Pass, PassDone, RunTo, Scored
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.statistics import Kind
from crossdraft.verification import rejection, walk
from crossdraft.verification.methods import METHODS


@quick_dataclass(frozen=True, eq=False)
class Step:
    """One call of the session's state machine."""

    now: float  # seconds of the monotonic clock
    event: events.Event | None  # None: the start
    commands: tuple[events.Command, ...]
    seconds: float = 0.0  # duration of the call
    row_misses: int = 0  # so far


@dataclass(eq=False)
class Judged:
    """A draft token that a walk has asked for, and what came of it."""

    letters: Letters
    start: int  # letters of the draft before it
    token: int | None  # its target id; None: the target has no such token
    q: float | None  # with which it was drafted; None: the method needs no row
    before: float | None  # chance that those before it in its block are accepted; None: it is judged by its text
    p: float | None = None  # the target's; None: the method does not ask for it
    verdict: str = ""

    @property
    def chance(self) -> float | None:
        """That it is accepted as a whole token."""
        known = self.q and self.p is not None and self.before is not None
        return min(1.0, self.before * self.p / self.q) if known else None  # type: ignore[operator]

    def __str__(self) -> str:
        numbers = {"q": self.q, "p": self.p, "chance": self.chance}
        shown = [f"{name} {value:.3f}" for name, value in numbers.items() if value is not None]
        return f"{_shown(self.letters)}: {', '.join([*shown, self.verdict])}"


def watched(method: walk.Method, judged: list[Judged]) -> walk.Method:
    """The method, whose walks add each draft token to a list once it is known what became of it."""

    def walked(ground: walk.Ground) -> walk.Walk:
        notes, steps = _Notes(ground, judged, method), method.walk(ground)
        answer: walk.Answer = None
        with suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = yield step
                notes.add(step, answer)

    return replace(method, walk=walked)


class _Notes:
    """What one walk asked for and decided."""

    def __init__(self, ground: walk.Ground, judged: list[Judged], method: walk.Method) -> None:
        self._pair, self._judged, self._whole_draft = ground.pair, judged, method.whole_draft
        # Not by texts; also where it is watched.
        self._by_tokens = METHODS.get(method.name, method).walk is rejection.walk
        self._text, self._due, self._drafted = str(ground.ahead), list[Judged](), 0  # output since the draft began

    def add(self, step: walk.WalkStep, answer: walk.Answer) -> None:
        match step, answer:
            case walk.NeedDraftToken(path), DraftToken(token, row, whose) as drafted:
                before = self._due[-1].chance if path and self._due else 1.0
                own = token if whose is Whose.TARGET else self._pair.target_id(token)
                letters = walk.draft_token_letters(self._pair, drafted)
                q = None if row is None else row.probability(token)
                self._due.append(Judged(letters, self._drafted, own, q, before if self._by_tokens else None))
                self._drafted += len(letters)
                self._decide("")
            case walk.NeedRow(path=path), Row() as p if self._due and not self._whole_draft:
                judged, path_letters = self._due[-1], sum(len(self._pair.target.letters[token]) for token in path)
                if judged.start == len(self._text) + path_letters:
                    with suppress(KeyError):  # the row need not list it
                        judged.p = 0.0 if judged.token is None else p.probability(judged.token)
            case walk.Emit(token, kind), _:
                self._text += self._pair.target.letters[token]
                wrong = kind is Kind.CORRECTED and self._by_tokens  # though its text may begin so
                self._decide(_shown(self._pair.target.letters[token]), wrong)

    def _decide(self, emitted: str, wrong: bool = False) -> None:
        """Of those at the beginning of what is due that the output has reached; `wrong`: the first is refused."""
        agrees = True
        while agrees and self._due:
            judged = self._due[0]
            there = self._text[judged.start :][: len(judged.letters)]
            agrees = judged.letters.startswith(there) and not wrong
            if agrees and len(there) < len(judged.letters):
                return
            judged.verdict = "accepted" if agrees else f"refused: {emitted or 'other text'} takes its place"
            self._judged.append(self._due.pop(0))


def _shown(letters: str) -> str:
    return repr(to_bytes(Letters(letters)).decode("utf-8", "replace"))


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
    JUDGED = "judged"  # a draft token that the walk has judged, with p, q, chance and verdict: a moment
    BONUS = "bonus"
    EPOCH = "epoch"  # an epoch begins; this and what follows are moments
    REFUSED = "refused"
    HIT = "hit"  # a prepared continuation was adopted
    STALLED = "stalled"  # the wait for draft tokens timed out
    LOST = "lost"
    OPENED = "opened"


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


def trace_events(spans: Iterable[Span]) -> dict[str, Any]:
    """Trace events of spans in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing draw."""
    placed = sorted(spans, key=lambda span: span.begin)
    rows = {lane: row for row, lane in enumerate(sorted({span.lane for span in placed}))}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": lane}} for lane, row in rows.items()
    ]
    drawn = (event for number, span in enumerate(placed) for event in _events(span, rows[span.lane], number))
    return {"traceEvents": [*names, *drawn], "displayTimeUnit": "ms"}


def _events(span: Span, row: int, number: int) -> Iterator[dict[str, Any]]:
    """Those of one span. Messages may overlap in a lane, so that they are asynchronous: a begin and an end."""
    event = {"name": span.label or span.what, "cat": span.what, "pid": 0, "tid": row, "ts": 1e6 * span.begin}
    event["args"] = {"epoch": span.epoch, "count": span.count}
    if span.what in (What.SENT, What.RECEIVED):
        yield event | {"ph": "b", "id": number}
        yield event | {"ph": "e", "id": number, "ts": 1e6 * span.end}
    elif span.end > span.begin:
        yield event | {"ph": "X", "dur": 1e6 * (span.end - span.begin)}
    else:
        yield event | {"ph": "i", "s": "t"}


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
        for at, since, reply in self.replies:
            if since is not None and not (isinstance(reply, Drafted) and reply.first):  # none of the epoch before it
                self.way = min(self.way, max(0.0, at - since - reply.seconds) / 2)
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
    """What is told every step of a session. When a model worked is estimated from what has happened until the spans are
    taken."""

    def __init__(self) -> None:
        self._judged: list[Judged] = []
        self.now = 0.0  # the end of the latest step
        self._misses = 0
        self._used: dict[str, int] = defaultdict(int)  # lanes of services, by role
        self._spans: list[Span] = []  # all but what `Service` has
        self._began: float | None = None
        self._epoch = 0
        self._services: dict[events.Lane, Service] = {}
        self._over: list[Service] = []  # whose sessions have ended
        self._asked: dict[tuple[events.Lane, int], tuple[float, int, bool]] = {}  # see `_passed`
        self._waiting: float | None = None  # since when the target stands idle for draft tokens
        self._stall = 0  # number of the latest timer of that

    def judging(self, assignment: Assignment) -> Assignment:
        """The assignment of a session that also tells what its walks judge."""
        return replace(assignment, method=watched(assignment.method, self._judged))

    def take(self) -> tuple[Span, ...]:
        """The spans that became known since the last call, in no order."""
        services = (*self._over, *self._services.values())
        found = (*self._spans, *(span for service in services for span in service.take()))
        self._spans = []
        return found

    def record(self, step: Step) -> None:
        """Called after each step; does not block and does not raise."""
        if self._began is None:
            self._began = step.now
        begin = step.now - self._began  # when the event happened; it may have had to wait
        handled, self.now = max(begin, self.now), max(begin, self.now) + step.seconds
        misses, self._misses = step.row_misses - self._misses, step.row_misses
        match step.event:
            case events.Ready(lane):
                track = self._services[lane].track
                self._mark(What.OPENED, f"{track} is open", begin, track)
            case events.Lost(lane, error):
                self._lost(lane, str(error), begin)
            case events.Replied(lane, reply):
                self._replied(lane, reply, begin)
            case events.Expired(events.Timer.STALL, number) if self._waiting is not None and number == self._stall:
                self._mark(What.STALLED, "the wait for draft tokens timed out", begin)
        while self._judged:
            self._mark(What.JUDGED, str(self._judged.pop(0)), self.now)
        self._commands(step, misses > 0)
        tokens = [command for command in step.commands if isinstance(command, events.Emitted)]
        self._add(VERIFICATION, handled, self.now, What.SESSION, name_of(step.event), len(tokens))
        for token in tokens:
            text = to_bytes(token.letters).decode("utf-8", "replace")
            self._mark(What(token.kind.value), text, self.now, OUTPUT)

    def _commands(self, step: Step, miss: bool) -> None:
        for command in step.commands:
            match command:
                case events.Open(lane, request):
                    self._open(lane, TARGET if isinstance(request, OpenTarget) else DRAFTER)
                case events.Close(lane):
                    self._lost(lane, command.blame or "it is not needed any more", self.now)
                case events.Send(lane, request):
                    self._send(lane, request, miss)
                case events.SetTimer(events.Timer.STALL, number):
                    self._stall = number
                    self._waiting = self.now if self._waiting is None else self._waiting
                case events.Emitted():
                    self._begin_epoch(command.epoch)
                    if command.kind is Kind.CORRECTED:
                        self._mark(What.REFUSED, f"refused; {command.letters!r} takes its place", self.now)

    def _open(self, lane: events.Lane, role: str) -> None:
        live = {service.track for service in self._services.values()}
        free = [service.track for service in self._over if service.track.startswith(role) and service.track not in live]
        if not free:
            self._used[role] += 1
            free = [role if self._used[role] == 1 else f"{role} {self._used[role]}"]
        self._services[lane] = Service(free[-1])

    def _lost(self, lane: events.Lane, why: str, at: float) -> None:
        service = self._services.pop(lane, None)
        if service is not None:
            self._over.append(service)
            self._mark(What.LOST, f"{service.track}: {why}", at, service.track)

    def _send(self, lane: events.Lane, request: events.Request, miss: bool) -> None:
        service = self._services[lane]
        if isinstance(request, Draft):
            self._begin_epoch(request.epoch)
            if request.adopt:
                self._mark(What.HIT, f"branch {request.adopt} was adopted", self.now)
        service.ledger.sent(request, self.now)
        if isinstance(request, Pass):
            self._asked[lane, request.number] = self.now, self._epoch, miss
            if self._waiting is not None and self.now > self._waiting:
                self._add(TARGET, self._waiting, self.now, What.WAIT, "waits for draft tokens")
            self._waiting = None
        else:
            service.asked.append((self.now, name_of(request), self._epoch))

    def _replied(self, lane: events.Lane, reply: events.Reply, at: float) -> None:
        service = self._services[lane]
        asked = service.ledger.take(reply, at)
        if isinstance(reply, PassDone) and asked is not None:
            self._passed(service.track, lane, asked, reply, at)
        elif isinstance(reply, Drafted | Scored):
            service.replies.append((at, None if asked is None else asked.at, reply))
        elif not isinstance(reply, PassDone):  # takes a model no time
            self._mark(What.RECEIVED, name_of(reply), at, service.track)

    def _passed(self, track: str, lane: events.Lane, asked: Asked, reply: PassDone, at: float) -> None:
        """The model's work on a pass, or on tokens of a run, in the middle of its round trip; and its messages."""
        since, epoch, miss = self._asked[lane, reply.number]
        self._asked[lane, reply.number] = at, epoch, miss
        way = max(0.0, at - since - reply.seconds) / 2
        what, text = (What.MISS, "pass for a row miss") if miss else (What.PASS, "pass")
        nodes = len(asked.request.tree)
        self._spans.append(Span(track, since + way, at - way, what, f"{text}, {nodes} nodes", epoch, nodes))
        if asked.replies == 1:
            self._spans.append(Span(track, since, since + way, What.SENT, name_of(asked.request), epoch))
        self._spans.append(Span(track, at - way, at, What.RECEIVED, f"rows of pass {reply.number}", epoch))

    def _begin_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._mark(What.EPOCH, f"epoch {epoch}", self.now)

    def _mark(self, what: What, text: str, at: float, lane: str = VERIFICATION) -> None:
        self._add(lane, at, at, what, text)

    def _add(self, lane: str, begin: float, end: float, what: What, label: str, count: int = 0) -> None:
        self._spans.append(Span(lane, begin, end, what, label, self._epoch, count))


def name_of(value: events.Event | events.Request | events.Reply | None) -> str:
    match value:
        case None:
            return "start"
        case events.Replied(_, reply):
            return name_of(reply)
        case events.Expired(timer):
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
