"""The layout of a timeline: shapes, positioned by seconds horizontally and pixels vertically.

`svg` draws these shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from crossdraft.text.letters import to_bytes
from crossdraft.trace.timeline import (
    Mark,
    MarkKind,
    ServiceRole,
    SessionCall,
    Task,
    Timeline,
    TimelineMessage,
    Track,
    Work,
)
from crossdraft.types.statistics import Kind

EPOCH_STYLES = 6  # colours, used in turn
EPOCHS, SERVICE, WIRE, SESSION, OUTPUT = 18.0, 38.0, 36.0, 30.0, 66.0  # heights of lanes, pixels; of OUTPUT at most
GAP = 4.0  # between lanes, pixels
STACKED = 10.0  # height of a token, pixels; less where many come at once
TOKEN_WIDTH = 11.0  # pixels
MARKS = {MarkKind.REFUSED: "✕", MarkKind.HIT: "◆", MarkKind.STALLED: "■", MarkKind.LOST: "!", MarkKind.OPENED: ""}


@dataclass(frozen=True)
class Band:
    """A band across the picture."""

    name: str
    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True)
class Box:
    """From one moment to another."""

    begin: float
    end: float
    top: float
    height: float
    style: str
    title: str = ""
    label: str = ""  # shown where there is room for it


@dataclass(frozen=True)
class Line:
    """From a place at one moment to a place at another."""

    begin: float
    top: float
    end: float
    bottom: float
    style: str
    title: str = ""


@dataclass(frozen=True)
class Stamp:
    """At one moment, of a width that does not depend on the scale: a small box, or a sign."""

    at: float
    top: float
    width: float
    height: float
    style: str
    title: str = ""
    sign: str = ""  # set: only this is drawn


Shape = Box | Line | Stamp


@dataclass(frozen=True)
class Scene:
    """All of it; later shapes cover earlier ones."""

    lanes: tuple[Band, ...]
    shapes: tuple[Shape, ...]
    height: float
    end: float  # seconds


def scene_of(timeline: Timeline) -> Scene:
    return _Stage(timeline).scene()


class _Stage:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._lanes: list[Band] = []
        self._of_track: dict[Track, Band] = {}
        self._epochs = self._lane("epoch", EPOCHS)
        self._services(ServiceRole.DRAFTER)
        self._above = (
            self._lane("wire", WIRE) if any(track.role is ServiceRole.DRAFTER for track in timeline.tracks) else None
        )
        self._session = self._lane("verification", SESSION)
        self._below = self._lane("wire", WIRE)
        self._services(ServiceRole.TARGET)
        most = max((len(handled.tokens) for handled in timeline.handled), default=0)
        self._token = min(STACKED, OUTPUT / max(1, most))  # height
        self._output = self._lane("tokens out", max(2, most) * self._token)

    def scene(self) -> Scene:
        shapes = (
            *self._epoch_spans(),
            *(line for message in self._timeline.messages for line in self._message(message)),
            *self._waits(),
            *map(self._work, self._timeline.works),
            *map(self._handled, self._timeline.handled),
            *(stamp for handled in self._timeline.handled for stamp in self._tokens(handled)),
            *(shape for mark in self._timeline.marks for shape in self._mark(mark)),
        )
        return Scene(tuple(self._lanes), shapes, self._lanes[-1].bottom, self._timeline.end)

    def _lane(self, name: str, height: float) -> Band:
        lane = Band(name, self._lanes[-1].bottom + GAP if self._lanes else 0.0, height)
        self._lanes.append(lane)
        return lane

    def _services(self, role: ServiceRole) -> None:
        tracks = [track for track in self._timeline.tracks if track.role is role]
        for track in tracks:
            name = role.value if len(tracks) == 1 else f"{role.value} {track.place + 1}"
            self._of_track[track] = self._lane(name, SERVICE)

    def _epoch_spans(self) -> Iterator[Shape]:
        for era in self._timeline.epochs:
            title = f"epoch {era.epoch}, {_ms(era.end - era.begin)}"
            lane = self._epochs
            yield Box(era.begin, era.end, lane.top, lane.height, epoch_style(era.epoch), title, str(era.epoch))
            yield Line(era.begin, lane.top, era.begin, self._lanes[-1].bottom, "border")

    def _message(self, message: TimelineMessage) -> Iterator[Shape]:
        wire = self._below if message.track.role is ServiceRole.TARGET else self._above
        if wire is None:
            return
        service = self._of_track[message.track]
        own, far = (wire.top, service.top) if wire is self._below else (wire.bottom, service.bottom)
        style = "small" if message.begin == message.end or message.name.startswith("go on") else "message"
        title = (
            f"{message.name}: {_ms(message.end - message.begin)} {'to' if message.outward else 'from'} {service.name}"
        )
        ends = (own, far) if message.outward else (far, own)
        yield Line(message.begin, ends[0], message.end, ends[1], f"{style} {epoch_style(message.epoch)}", title)

    def _waits(self) -> Iterator[Shape]:
        lane = self._of_track.get(Track(ServiceRole.TARGET))
        for wait in self._timeline.waits if lane else ():
            assert lane is not None
            title = f"the target waits for draft tokens: {_ms(wait.end - wait.begin)}"
            yield Box(wait.begin, wait.end, lane.top, lane.height, "wait", title, "waits")

    def _work(self, work: Work) -> Shape:
        lane = self._of_track[work.track]
        style = "late" if work.late else epoch_style(work.epoch)
        if work.task is Task.MISS:
            style += " miss"
        return Box(work.begin, work.end, lane.top, lane.height, style, _title(work, lane.name), _label(work))

    def _handled(self, handled: SessionCall) -> Shape:
        lane, inset = self._session, 5.0
        title = f"{handled.event}: {_ms(handled.end - handled.begin)} in the session"
        return Box(handled.begin, handled.end, lane.top + inset, lane.height - 2 * inset, "session", title)

    def _tokens(self, handled: SessionCall) -> Iterator[Shape]:
        for place, token in enumerate(handled.tokens):
            text = to_bytes(token.letters).decode("utf-8", "replace")
            top = self._output.top + place * self._token
            title = f"{text!r}, {token.kind.value}, at {_ms(handled.end)}"
            yield Stamp(handled.end, top, TOKEN_WIDTH, self._token - 1.5, token.kind.value, title)

    def _mark(self, mark: Mark) -> Iterator[Shape]:
        sign = MARKS[mark.what]
        lane = self._session if mark.track is None else self._of_track[mark.track]
        style = mark.what.name.lower()
        if not sign:
            return
        title = f"{mark.text}, at {_ms(mark.at)}"
        if mark.what is MarkKind.REFUSED:
            yield Line(mark.at, self._session.top, mark.at, self._session.bottom, style, title)
        side = lane.top if mark.what is not MarkKind.HIT else lane.bottom
        yield Stamp(mark.at, side - 7, 14.0, 14.0, style, title, sign)


def epoch_style(epoch: int) -> str:
    return f"epoch{epoch % EPOCH_STYLES}"


def _title(work: Work, lane: str) -> str:
    parts = [f"{lane}: {work.task.value}, epoch {work.epoch}", work.counted]
    if work.branches:
        parts.append(f"{work.branches} prepared continuations")
    if work.task in (Task.PASS, Task.MISS):
        parts.append(f"{work.tokens} tokens came of it")
    if work.late:
        parts.append("dropped: its epoch had ended")
    return ", ".join([*parts, f"{_ms(work.begin)} to {_ms(work.end)} ({_ms(work.end - work.begin)})"])


def _label(work: Work) -> str:
    if work.task is Task.MISS:
        return f"miss +{work.tokens}"
    return f"+{work.tokens}" if work.task is Task.PASS else str(work.size)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1 else f"{seconds * 1000:,.0f} ms"


NUMBERS = ("n: draft tokens in a draft", "+n: tokens that came of a pass")  # on boxes
LEGEND = (
    ("epoch0", "work for an epoch (colours in turn)"),
    ("late", "drafted for an epoch that had ended: dropped"),
    ("epoch1 miss", "pass for a row miss"),
    ("wait", "the target waits for draft tokens"),
    ("session", "the session at work"),
    (Kind.ACCEPTED.value, "token accepted: agrees with the draft"),
    (Kind.CORRECTED.value, "token corrected: replaces a refused draft token"),
    (Kind.BONUS.value, "token of the target's own, no draft token left"),
    ("refused", "✕ a draft token was refused"),
    ("hit", "◆ a prepared continuation was adopted"),
    ("stalled", "■ the wait for draft tokens timed out"),
    ("lost", "! a service was lost"),
)
