"""What the driver measures of a session by lane: seconds, round trips and bytes.

Times are seconds of the monotonic clock.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence

from crossdraft.rpc.clients import LinkSession
from crossdraft.session.events import Reply
from crossdraft.types.messages import Drafted, PassDone, RowFetched
from crossdraft.types.statistics import BOUNDS, LaneFigures, Times, Trips

ROLES = ("target", "drafter")
BLAMED = "blamed"  # why a lane was lost: its service sent a wrong reply


class LaneWatch:
    """The stop-watch of one lane."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.address = ""  # where its session is, once that is decided
        self.lost = ""  # why it was lost, as in `LaneFigures`
        self.session: LinkSession | None = None  # once it is open
        self._opened = 0.0
        self._closed: float | None = None
        self._counts = [0] * (len(BOUNDS) + 1)
        self._trip_seconds = self._queued = self._model_seconds = 0.0

    def found(self, address: str) -> None:
        self.address = address

    def failed(self, why: str) -> None:
        """Only the first reason counts."""
        self.lost = self.lost or why

    def opened(self, session: LinkSession, now: float) -> None:
        self.session, self._opened = session, now

    def closed(self, now: float) -> None:
        self._closed = now

    def answered(self, reply: Reply, now: float) -> None:
        """A reply came. Of a request's first one, time outside the model is wire, codecs and queues: a round trip."""
        assert self.session is not None
        seconds = 0.0 if isinstance(reply, RowFetched) else reply.seconds
        self._model_seconds += seconds
        asked = self.session.ledger.answered
        if asked is not None and asked.replies == 1:
            took = max(0.0, now - asked.at - seconds)
            self._counts[bisect_left(BOUNDS, took)] += 1
            self._trip_seconds += took
            self._queued += reply.queued if isinstance(reply, PassDone | Drafted) else 0.0

    def figures(self, now: float) -> LaneFigures:
        trips = Trips(tuple(self._counts), self._trip_seconds, self._queued)
        if self.session is None:
            return LaneFigures(self.role, self.address, 0, 0, trips, self.lost)
        end = now if self._closed is None else self._closed
        traffic, seconds = self.session.traffic, end - self._opened
        return LaneFigures(
            role=self.role,
            address=self.address,
            bytes_sent=round(traffic.bytes_sent),
            bytes_received=round(traffic.bytes_received),
            trips=trips,
            lost=self.lost,
            model_seconds=self._model_seconds,
            codec_seconds=traffic.codec_seconds,
            open_seconds=seconds,
            idle_seconds=max(0.0, seconds - self.session.ledger.busy(end)),
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
        known = [lane.session.traffic for lane in lanes if lane.session is not None]
        sent, received = round(sum(one.bytes_sent for one in known)), round(sum(one.bytes_received for one in known))
        return Times(
            seconds=now - self._began,
            first_token_seconds=max(0.0, self._first_token - self._began),
            wire_seconds=sum(one.trips.seconds for one in figures),
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
