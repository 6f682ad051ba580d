"""One request over time. Pure.

All moments are seconds of one clock. Latencies count from when a request was due, not from when it was sent: where
a client falls behind its schedule, the wait that its requests had before they left is theirs (coordinated omission).
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Protocol

from crossdraft.loadtest.prompts import Question

# What a server says of one output it has made. Pure.


@dataclass(frozen=True)
class LaneFigures:
    """What one session of the orchestrator with a service cost, or several of one role together."""

    role: str  # target or drafter
    bytes_sent: int = 0  # serialized
    bytes_received: int = 0
    trip_counts: tuple[int, ...] = ()  # questions by the length of their round trip: `pipeline.trips.BOUNDS`
    trip_seconds: float = 0.0  # of these round trips, without the model's time
    queued_seconds: float = 0.0  # ... in which a question waited for the model, which was busy with others
    model_seconds: float = 0.0  # in the model, for all answers
    codec_seconds: float = 0.0  # in which the orchestrator made messages of values and values of messages
    open_seconds: float = 0.0
    idle_seconds: float = 0.0  # of these, in which nothing was asked of it that it had not answered
    lost: str = ""  # how the service failed

    @property
    def questions(self) -> int:
        """How many round trips there were."""
        return sum(self.trip_counts)


@dataclass(frozen=True)
class Figures:
    """Counts of one output."""

    tokens: int
    passes: int = 0  # of the target
    accepted: int = 0  # tokens as drafted
    corrected: int = 0  # tokens in the place of a refused draft token
    judged_at: tuple[int, ...] = ()  # by place in a round: draft tokens that were accepted or refused
    accepted_at: tuple[int, ...] = ()  # ... that were accepted
    verification_seconds: float = 0.0  # CPU time of the orchestrator's state machine
    lanes: tuple[LaneFigures, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """What happened to one request."""

    number: int  # from 0, in the order in which they are due
    category: str  # of its prompt
    due: float  # when it was to be sent
    sent: float
    chunks: tuple[float, ...]  # when each piece of the output with a token in it came
    ended: float  # when its end came, or its error
    tokens: int  # of the output
    made: tuple[float, ...] = ()  # for each chunk: seconds after which the server made it; none: it does not say
    error: str = ""  # what kind of error ended it; empty: none
    figures: Figures | None = None  # None: the server does not say

    @property
    def fine(self) -> bool:
        """Whether it has a whole answer, with any token."""
        return not self.error and bool(self.chunks)

    @property
    def late(self) -> float:
        """Seconds by which it was sent too late."""
        return self.sent - self.due

    @property
    def first_token(self) -> float:
        """Seconds until its first token came; it must be fine."""
        return self.chunks[0] - self.due

    @property
    def end_to_end(self) -> float:
        """Seconds until its end came."""
        return self.ended - self.due

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first; None: there is none."""
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.fine and self.tokens > 1 else None

    @property
    def between_chunks(self) -> tuple[float, ...]:
        """Seconds from each chunk to the next."""
        return tuple(after - before for before, after in pairwise(self.chunks))

    @property
    def front(self) -> tuple[float, ...]:
        """For each chunk the seconds that it and the request were on their way between client and server, together."""
        return tuple(came - self.sent - made for came, made in zip(self.chunks, self.made, strict=False))


def at_once(timelines: Iterable[Timeline], moment: float) -> int:
    """Requests that were due at a moment and had no end yet."""
    return sum(one.due <= moment < one.ended for one in timelines)


# What a client hears of an output while it is made.


@dataclass(frozen=True)
class Chunk:
    """A piece of the output with a token in it."""

    at: float  # seconds of the monotonic clock
    made: float | None = None  # seconds after which the server made it, since it had read the request


@dataclass(frozen=True)
class Over:
    """The end."""

    at: float  # seconds of the monotonic clock
    tokens: int | None = None  # of the output; None: one for each chunk
    figures: Figures | None = None  # None: the server does not say


class Failure(Exception):  # noqa: N818 - it says what happened
    """An output failed, or was refused.

    Args:
        kind: a few words, of which there are not many, to count by.
        text: what the server says, or what happened.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Way(Protocol):
    """A way to have outputs made."""

    def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """One output: its chunks as they come, then its end. Closing it early cancels it.

        Raises:
            Failure: it failed, or was refused.
        """
        ...


LANE_FIELDS = frozenset(one.name for one in fields(LaneFigures))
FIELDS = frozenset(one.name for one in fields(Figures))


def figures_of(given: Mapping[str, Any]) -> Figures:
    """From figures by name, as HTTP and gRPC have them; what is not known here is left out.

    Raises:
        ValueError: there is no count of tokens, or a figure is of a wrong kind.
    """
    try:
        kept = {name: _plain(value) for name, value in given.items() if name in FIELDS and name != "lanes"}
        return Figures(**kept, lanes=tuple(_lane(one) for one in given.get("lanes", ())))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the figures of an output mean nothing: {error}") from error


def _lane(given: Mapping[str, Any]) -> LaneFigures:
    return LaneFigures(**{name: _plain(value) for name, value in given.items() if name in LANE_FIELDS})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
