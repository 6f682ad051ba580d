"""How long messages are on their way, by lane: for figures that say where the time between two services goes."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from crossdraft.pipeline.events import Reply
from crossdraft.verification.exchange import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    Pass,
    PassDone,
    RowFetched,
    Score,
    Scored,
)

BLAMED = "blamed"  # a service whose answers were at fault

# Upper bounds of the counts in `Trips`, in seconds; what is above the last one is counted after it.
BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Trips:
    """Round trips of one lane: from a question to its first answer, less what the model took for that answer."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)  # by BOUNDS, those above the last one included
    seconds: float = 0.0  # of all together


class TripWatch:
    """Measures them. It is told the time, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._due: deque[tuple[object, float]] = deque()  # questions without an answer, and when they left
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def asked(self, request: object, now: float) -> None:
        """A question leaves; `Advance` is none of its own."""
        if not isinstance(request, Advance):
            self._due.append((request, now))

    def answered(self, reply: Reply, now: float) -> None:
        """An answer came. A draft comes in several; an epoch that was over before its first one has none."""
        place = next((place for place, (request, _) in enumerate(self._due) if _answers(reply, request)), None)
        if place is None:
            return
        for _ in range(place):
            self._due.popleft()
        _, left = self._due.popleft()
        in_model = 0.0 if isinstance(reply, RowFetched) else reply.seconds
        took = max(0.0, now - left - in_model)
        self._counts[bisect_left(BOUNDS, took)] += 1
        self._seconds += took

    @property
    def trips(self) -> Trips:
        """What was measured so far."""
        return Trips(tuple(self._counts), self._seconds)


def _answers(reply: Reply, request: object) -> bool:
    match reply:
        case PassDone():
            return isinstance(request, Pass) and request.number == reply.number
        case RowFetched():
            return isinstance(request, FetchRow) and request.number == reply.number and request.node == reply.node
        case Drafted():
            return isinstance(request, Draft) and request.epoch == reply.epoch
        case Scored():
            return isinstance(request, Score) and request.epoch == reply.epoch


@dataclass(frozen=True)
class LaneFigures:
    """What one session with a service cost."""

    role: str  # "target" or "drafter"
    address: str  # of the service; empty if none was found
    bytes_sent: int  # serialized
    bytes_received: int
    trips: Trips
    lost: str = ""  # how the service failed: `rpc.errors.name_of`, or BLAMED
