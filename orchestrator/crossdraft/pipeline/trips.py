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
    RunTo,
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
    queued_seconds: float = 0.0  # of these, waiting for the model


class TripWatch:
    """Measures them. It is told the time, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._due: deque[tuple[object, float]] = deque()  # questions without an answer, and when they left
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0
        self._queued = 0.0

    def asked(self, request: object, now: float) -> None:
        """A question leaves; `Advance` and `RunTo` are none of their own."""
        if not isinstance(request, Advance | RunTo):
            self._due.append((request, now))

    def answered(self, reply: Reply, now: float) -> None:
        """An answer came. A draft and a run come in several; an epoch that was over before its first one has none."""
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
        """What was measured so far."""
        return Trips(tuple(self._counts), self._seconds, self._queued)


def model_seconds(reply: Reply) -> float:
    """What the model took for an answer, as its service says."""
    return 0.0 if isinstance(reply, RowFetched) else reply.seconds


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


class Owing:
    """Whether a service has anything to do for a session: an answer, or proposals up to those wanted last."""

    def __init__(self) -> None:
        self._answers = 0  # passes, rows and scores
        self._epoch, self._wanted, self._drafted = 0, 0, 0

    @property
    def owes(self) -> bool:
        """Whether it has."""
        return self._answers > 0 or self._drafted < self._wanted

    def asked(self, request: object) -> None:
        """A question leaves. A new epoch ends all that was due for the one before."""
        match request:
            case Draft():
                self._epoch, self._wanted, self._drafted, self._answers = request.epoch, request.count, 0, 0
            case Advance():
                self._wanted = max(self._wanted, request.count) if self._wanted else 0
            case RunTo():
                pass
            case _:
                self._answers += 1

    def answered(self, reply: Reply) -> None:
        """An answer came; one of an older epoch counts for nothing."""
        match reply:
            case Drafted(epoch=self._epoch):
                self._drafted = max(self._drafted, reply.first + len(reply.proposals))
                if reply.reason:  # no more will come
                    self._wanted = 0
            case Drafted():
                pass
            case Scored() if reply.epoch != self._epoch:
                pass
            case PassDone(more=True):
                pass
            case _:
                self._answers = max(0, self._answers - 1)


@dataclass(frozen=True)
class LaneFigures:
    """What one session with a service cost."""

    role: str  # "target" or "drafter"
    address: str  # of the service; empty if none was found
    bytes_sent: int  # serialized
    bytes_received: int
    trips: Trips
    lost: str = ""  # how the service failed: `rpc.errors.name_of`, or BLAMED
    model_seconds: float = 0.0  # in the model, for all answers
    codec_seconds: float = 0.0  # in which messages were made and read, in this process
    open_seconds: float = 0.0
    idle_seconds: float = 0.0  # of these, without anything asked that is not answered: `Owing`
