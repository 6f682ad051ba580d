"""The spans of a session while it runs: what `timeline` makes of a recording, taken piece by piece."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from crossdraft.text.letters import to_bytes
from crossdraft.trace.recording import Step
from crossdraft.trace.timeline import (
    ServiceRole,
    Tracer,
    Track,
    Work,
    drafted_in,
    inward,
    named,
    outward,
    passed_in,
    way_of,
)

VERIFICATION = "verification"  # the lane of the session itself; those of services are named by `timeline.named`
OUTPUT = "output"  # the lane of committed tokens


class What(StrEnum):
    """What a span shows: a `Task`, a `MarkKind` or a token's `Kind` of the same name, or another."""

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


@dataclass(frozen=True)
class Span:
    """Something in one lane of the pipeline, during a time or at a moment."""

    lane: str  # a service ("drafter", "target", "target 2", …), "verification" or "output"
    begin: float  # seconds since the session began
    end: float
    what: What
    label: str  # for people; of a token its text
    epoch: int
    count: int = 0  # draft tokens of a draft, nodes of a pass, tokens that an event's handling emitted


class Watch:
    """A recorder whose spans can be taken while the session runs.

    When a model worked is estimated as `timeline.Work` says, from what has happened so far: a drafter's first works may
    be placed a little differently than in a timeline of the whole recording.
    """

    def __init__(self) -> None:
        self._tracer = Tracer()
        self._ways: dict[Track, float] = {}  # seconds to each drafter
        self._busy: dict[Track, float] = {}  # until when each drafter's model is known to have worked
        self._epochs = 0  # epochs whose beginning was taken

    def record(self, step: Step) -> None:
        self._tracer.read(step)

    def close(self) -> None:
        """As Recorder says."""

    def take(self) -> tuple[Span, ...]:
        """The spans that became known since the last call, in no order."""
        found = (*self._works(), *self._messages(), *self._session(), *self._moments())
        self._epochs = len(self._tracer.epochs)
        self._tracer.forget()
        return found

    def _works(self) -> Iterator[Span]:
        for track, answers in self._tracer.answers.items():
            self._ways[track] = way_of(answers, [self._ways[track]] if track in self._ways else [])
            works = drafted_in(answers, self._ways[track], self._busy.get(track, 0.0))
            self._busy[track] = works[-1].end
            yield from map(_worked, works)
        yield from (_worked(passed_in(flight)) for flight in self._tracer.flights)

    def _messages(self) -> Iterator[Span]:
        tracer, ways = self._tracer, self._ways
        flying = set(map(id, tracer.flying))  # the duration of their way is not known before they are back
        asked = [one for one in tracer.asked if id(one) not in flying]
        for one in (*tracer.small, *outward(asked, tracer.flights, ways), *inward(tracer, ways)):
            what = What.SENT if one.outward else What.RECEIVED
            yield Span(named(one.track), one.begin, one.end, what, one.name, one.epoch)

    def _session(self) -> Iterator[Span]:
        for one in self._tracer.handled:
            yield Span(VERIFICATION, one.begin, one.end, What.SESSION, one.event, one.epoch, len(one.tokens))
            for token in one.tokens:
                text = to_bytes(token.letters).decode("utf-8", "replace")
                yield Span(OUTPUT, one.end, one.end, What(token.kind.value), text, one.epoch)

    def _moments(self) -> Iterator[Span]:
        tracer = self._tracer
        epoch = tracer.epochs[-1].epoch if tracer.epochs else 0
        for era in tracer.epochs[self._epochs :]:
            yield Span(VERIFICATION, era.begin, era.begin, What.EPOCH, f"epoch {era.epoch}", era.epoch)
        for mark in tracer.marks:
            lane = VERIFICATION if mark.track is None else named(mark.track)
            yield Span(lane, mark.at, mark.at, What[mark.what.name], mark.text, epoch)
        for wait in tracer.waits:
            yield Span(ServiceRole.TARGET.value, wait.begin, wait.end, What.WAIT, "waits for draft tokens", epoch)


def _worked(work: Work) -> Span:
    what = What.LATE if work.late else What[work.task.name]
    label = f"{work.task.value}, {work.counted}"
    if work.branches:
        label += f", {work.branches} prepared continuations"
    return Span(named(work.track), work.begin, work.end, what, label, work.epoch, work.size)
