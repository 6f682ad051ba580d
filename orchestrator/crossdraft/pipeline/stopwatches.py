"""What the driver measures of a session: seconds and bytes, by lane."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from crossdraft.pipeline.events import Reply
from crossdraft.pipeline.trips import LaneFigures, Owing, TripWatch, model_seconds
from crossdraft.verification.exchange import Advance, Pass, PassDone, RunTo


class TrafficCount(Protocol):
    """What a stream counts."""

    bytes_sent: int
    bytes_received: int
    codec_seconds: float


class LaneWatch:
    """The stop-watch of one lane; it is told the time, in seconds of the monotonic clock."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.address = ""  # where its session is, once that is decided
        self.lost = ""  # how its service failed, in a word: as in `LaneFigures`
        self.traffic: TrafficCount | None = None  # of its stream, once it is open
        self.wire_seconds = 0.0
        self._asked: float | None = None  # when what has no answer yet was asked last
        self._opened = 0.0
        self._closed: float | None = None
        self._flown = 0.0  # seconds with a pass in flight, of passes that are back
        self._flying = 0  # passes in flight
        self._took_off = 0.0
        self._trips = TripWatch()
        self._model_seconds = 0.0
        self._owing = Owing()
        self._owed = 0.0  # seconds in which anything was, until it was not
        self._owed_since: float | None = None

    def opened(self, traffic: TrafficCount, now: float) -> None:
        """Its session is open."""
        self.traffic, self._opened = traffic, now

    def closed(self, now: float) -> None:
        """Its session has ended."""
        self._land(now, self._flying)
        self._closed = now

    def asked(self, request: object, now: float) -> None:
        """A request leaves. `Advance` and `RunTo` ask for no answer of their own."""
        self._trips.asked(request, now)
        self._owing.asked(request)
        self._note_owing(now)
        if not isinstance(request, Advance | RunTo):
            self._asked = now
        if isinstance(request, Pass):
            self._took_off = self._took_off if self._flying else now
            self._flying += 1

    def answered(self, reply: Reply, now: float) -> None:
        """The first answer since the last question: what the model did not take was wire, codecs and queues."""
        self._trips.answered(reply, now)
        self._owing.answered(reply)
        self._note_owing(now)
        self._model_seconds += model_seconds(reply)
        if self._asked is not None:
            self.wire_seconds += max(0.0, now - self._asked - model_seconds(reply))
            self._asked = None
        if isinstance(reply, PassDone) and not reply.more:
            self._land(now, 1)

    def _land(self, now: float, passes: int) -> None:
        if self._flying and self._flying <= passes:
            self._flown += now - self._took_off
        self._flying = max(0, self._flying - passes)

    def _note_owing(self, now: float) -> None:
        if self._owing.owes:
            self._owed_since = now if self._owed_since is None else self._owed_since
        elif self._owed_since is not None:
            self._owed, self._owed_since = self._owed + now - self._owed_since, None

    def figures(self, now: float) -> LaneFigures:
        """What it cost so far."""
        if self.traffic is None:
            return LaneFigures(self.role, self.address, 0, 0, self._trips.trips, self.lost)
        end = now if self._closed is None else self._closed
        owed = self._owed + (0.0 if self._owed_since is None else max(0.0, end - self._owed_since))
        return LaneFigures(
            role=self.role,
            address=self.address,
            bytes_sent=self.traffic.bytes_sent,
            bytes_received=self.traffic.bytes_received,
            trips=self._trips.trips,
            lost=self.lost,
            model_seconds=self._model_seconds,
            codec_seconds=self.traffic.codec_seconds,
            open_seconds=end - self._opened,
            idle_seconds=max(0.0, end - self._opened - owed),
        )

    def idle(self, now: float) -> tuple[float, float]:
        """Seconds without a pass in flight, and seconds that it has been open."""
        if self.traffic is None:
            return 0.0, 0.0
        open_seconds = (now if self._closed is None else self._closed) - self._opened
        flying = now - self._took_off if self._flying else 0.0
        return max(0.0, open_seconds - self._flown - flying), open_seconds


@dataclass(frozen=True)
class Times:
    """What the driver measured, in seconds, and bytes on the wire."""

    seconds: float
    first_token_seconds: float
    wire_seconds: float
    verification_seconds: float
    bytes_sent: int
    bytes_received: int
    events: int = 0  # that the state machine handled
    target_bytes: int = 0  # of those sent and received, with targets
    drafter_bytes: int = 0  # ... with drafters
    idle_seconds: float = 0.0  # of targets: sessions open, and no pass in flight
    target_lane_seconds: float = 0.0  # of targets: sessions open
    lanes: tuple[LaneFigures, ...] = ()  # in the order of their opening


class Clock:
    """Stop-watches of one session; seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._began = 0.0
        self._ended = 0.0
        self._first_token = 0.0
        self._verification = 0.0
        self._events = 0
        self.latest = 0.0  # seconds that the latest event took

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._ended = time.monotonic()

    def token(self) -> None:
        self._first_token = self._first_token or time.monotonic()

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Counts the block as an event's handling: CPU time of this thread, whoever else wants the core."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.latest = time.thread_time() - began
            self._verification += self.latest
            self._events += 1

    def times(self, lanes: Sequence[LaneWatch]) -> Times:
        """What was measured, on all lanes that there were."""
        now = self._ended or time.monotonic()
        idle = [lane.idle(now) for lane in lanes if lane.role == "target"]
        sent, received = traffic(lanes)
        return Times(
            seconds=now - self._began,
            first_token_seconds=max(0.0, self._first_token - self._began),
            wire_seconds=sum(lane.wire_seconds for lane in lanes),
            verification_seconds=self._verification,
            bytes_sent=sum(sent.values()),
            bytes_received=sum(received.values()),
            events=self._events,
            target_bytes=sent["target"] + received["target"],
            drafter_bytes=sent["drafter"] + received["drafter"],
            idle_seconds=sum(seconds for seconds, _ in idle),
            target_lane_seconds=sum(seconds for _, seconds in idle),
            lanes=tuple(lane.figures(now) for lane in lanes),
        )


def traffic(lanes: Sequence[LaneWatch]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes sent and bytes received, each by role."""
    sent, received = ({"target": 0, "drafter": 0} for _ in range(2))
    for lane in lanes:
        if lane.traffic is not None:
            sent[lane.role] += lane.traffic.bytes_sent
            received[lane.role] += lane.traffic.bytes_received
    return sent, received
