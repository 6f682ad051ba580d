"""What the driver measures of a session by lane: seconds, round trips and bytes.

Times are seconds of the monotonic clock.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from crossdraft.rpc.links import Owes, Traffic
from crossdraft.session.events import Reply
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    RunTo,
    Score,
    Scored,
    ScorePrompt,
)
from crossdraft.types.statistics import BOUNDS, LaneFigures, Times, Trips

ROLES = ("target", "drafter")
BLAMED = "blamed"  # why a lane was lost: its service sent a wrong reply


class TripWatch:
    """Measures the round trips of one lane: how long messages are on their way between two services."""

    def __init__(self) -> None:
        self._due: deque[tuple[object, float]] = deque()  # requests without a reply, and when they left
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0
        self._queued = 0.0

    def asked(self, request: object, now: float) -> None:
        """A request leaves; `Advance` and `RunTo` get no reply of their own."""
        if not isinstance(request, Advance | RunTo):
            self._due.append((request, now))

    def answered(self, reply: Reply, now: float) -> None:
        """A reply came. Only the first reply to a draft or a run counts; an epoch that ended before has none."""
        place = next((place for place, (request, _) in enumerate(self._due) if _answers(reply, request)), None)
        if place is None:
            return
        for _ in range(place):
            self._due.popleft()
        _, left = self._due.popleft()
        took = max(0.0, now - left - model_seconds(reply))
        self._counts[bisect_left(BOUNDS, took)] += 1
        self._seconds += took
        self._queued += reply.queued if isinstance(reply, PassDone | Drafted) else 0.0

    @property
    def trips(self) -> Trips:
        return Trips(tuple(self._counts), self._seconds, self._queued)


def model_seconds(reply: Reply) -> float:
    """Seconds in the model for a reply, as its service reports them."""
    return 0.0 if isinstance(reply, RowFetched) else reply.seconds


def _answers(reply: Reply, request: object) -> bool:
    match reply:
        case PassDone():
            return isinstance(request, Pass) and request.number == reply.number
        case RowFetched():
            return isinstance(request, FetchRow) and request.number == reply.number and request.node == reply.node
        case PromptScored():
            return isinstance(request, ScorePrompt)
        case Drafted():
            return isinstance(request, Draft) and request.epoch == reply.epoch
        case Scored():
            return isinstance(request, Score) and request.epoch == reply.epoch


class LaneWatch:
    """The stop-watch of one lane."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.address = ""  # where its session is, once that is decided
        self.lost = ""  # why it was lost, as in `LaneFigures`
        self.traffic: Traffic | None = None  # of its stream, once it is open
        self.wire_seconds = 0.0
        self._asked: float | None = None  # when the latest request without a reply left
        self._opened = 0.0
        self._closed: float | None = None
        self._trips = TripWatch()
        self._model_seconds = 0.0
        self._owes = Owes()
        self._owed = 0.0  # seconds in which the service owed anything, up to when it last owed nothing
        self._owed_since: float | None = None

    def found(self, address: str) -> None:
        self.address = address

    def failed(self, why: str) -> None:
        """Only the first reason counts."""
        self.lost = self.lost or why

    def opened(self, traffic: Traffic, now: float) -> None:
        self.traffic, self._opened = traffic, now

    def closed(self, now: float) -> None:
        self._closed = now

    def asked(self, request: object, now: float) -> None:
        """A request leaves; `Advance` and `RunTo` get no reply of their own."""
        self._trips.asked(request, now)
        self._owes.sent(request)
        self._note_owing(now)
        if not isinstance(request, Advance | RunTo):
            self._asked = now

    def answered(self, reply: Reply, now: float) -> None:
        """A reply came. Of the first one after a request, time outside the model is wire, codecs and queues."""
        self._trips.answered(reply, now)
        self._owes.received(reply)
        self._note_owing(now)
        self._model_seconds += model_seconds(reply)
        if self._asked is not None:
            self.wire_seconds += max(0.0, now - self._asked - model_seconds(reply))
            self._asked = None

    def _note_owing(self, now: float) -> None:
        if self._owes.works:
            self._owed_since = now if self._owed_since is None else self._owed_since
        elif self._owed_since is not None:
            self._owed, self._owed_since = self._owed + now - self._owed_since, None

    def figures(self, now: float) -> LaneFigures:
        if self.traffic is None:
            return LaneFigures(self.role, self.address, 0, 0, self._trips.trips, self.lost)
        end = now if self._closed is None else self._closed
        owed = self._owed + (0.0 if self._owed_since is None else max(0.0, end - self._owed_since))
        return LaneFigures(
            role=self.role,
            address=self.address,
            bytes_sent=round(self.traffic.bytes_sent),
            bytes_received=round(self.traffic.bytes_received),
            trips=self._trips.trips,
            lost=self.lost,
            model_seconds=self._model_seconds,
            codec_seconds=self.traffic.codec_seconds,
            open_seconds=end - self._opened,
            idle_seconds=max(0.0, end - self._opened - owed),
        )


class Stopwatches:
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

    def verified(self, seconds: float) -> None:
        """An event was handled."""
        self.latest = seconds
        self._verification += seconds
        self._events += 1

    def times(self, lanes: Sequence[LaneWatch]) -> Times:
        now = self._ended or time.monotonic()
        figures = tuple(lane.figures(now) for lane in lanes)
        size = {role: sum(one.bytes_sent + one.bytes_received for one in figures if one.role == role) for role in ROLES}
        sent, received = traffic(lanes)
        return Times(
            seconds=now - self._began,
            first_token_seconds=max(0.0, self._first_token - self._began),
            wire_seconds=sum(lane.wire_seconds for lane in lanes),
            verification_seconds=self._verification,
            bytes_sent=sent,
            bytes_received=received,
            events=self._events,
            target_bytes=size["target"],
            drafter_bytes=size["drafter"],
            idle_seconds=sum(one.idle_seconds for one in figures if one.role == "target"),
            target_lane_seconds=sum(one.open_seconds for one in figures if one.role == "target"),
            lanes=figures,
        )


def traffic(lanes: Sequence[LaneWatch]) -> tuple[int, int]:
    known = [lane.traffic for lane in lanes if lane.traffic is not None]
    return round(sum(one.bytes_sent for one in known)), round(sum(one.bytes_received for one in known))
