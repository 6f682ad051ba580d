"""The spans of a session while it runs: what `timeline` finds in a recording, as it becomes known."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from crossdraft.pipeline.recording import Step
from crossdraft.pipeline.spans import Happening, Role, Row, Task, Work
from crossdraft.pipeline.timeline import drafted_in, inward, outward, passed_in, way_of
from crossdraft.pipeline.tracing import Tracer, named
from crossdraft.text.letters import to_bytes

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
    WAIT = "wait"  # the target stands idle for proposals
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
    count: int = 0  # proposals of a draft, nodes of a pass, tokens that an event's handling emitted


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
            yield Span(Role.TARGET.value, wait.begin, wait.end, What.WAIT, "waits for proposals", epoch)


def _worked(work: Work) -> Span:
    what = What.LATE if work.late else OF_TASKS[work.task]
    label = f"{work.task.value}, {work.size} {COUNTED.get(work.task, 'proposals')}"
    if work.branches:
        label += f", {work.branches} prepared continuations"
    return Span(named(work.row), work.begin, work.end, what, label, work.epoch, work.size)
