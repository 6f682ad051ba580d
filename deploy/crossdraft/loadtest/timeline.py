"""The moments of one request, and what its server says that it cost.

All moments are seconds of one clock. Latencies count from when a request was due, not from when it was sent: where
a client falls behind its schedule, the time that requests waited before they were sent counts (coordinated omission).
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Protocol

from crossdraft.loadtest.requests import Request
from crossdraft.types.statistics import LaneFigures, Statistics, Trips


@dataclass(frozen=True)
class OutputFigures:
    """The part of an output's `Statistics` that a load test uses, under the same names; HTTP servers send no more."""

    tokens: int
    passes: int = 0  # of the target
    accepted: int = 0  # draft tokens
    corrected: int = 0  # tokens in the place of a refused draft token
    judged_at: tuple[int, ...] = ()  # by position in a round: draft tokens that were accepted or refused
    accepted_at: tuple[int, ...] = ()  # by position in a round: draft tokens that were accepted
    lanes: tuple[LaneFigures, ...] = ()  # sessions with services


Costs = OutputFigures | Statistics
FIGURES = frozenset(one.name for one in fields(OutputFigures)) - {"lanes"}
LANE_FIGURES = frozenset(one.name for one in fields(LaneFigures)) - {"address", "trips"}


def figures_of(given: Mapping[str, Any]) -> OutputFigures:
    """From figures by name, as HTTP servers send them; unknown ones are ignored.

    Raises:
        TypeError, AttributeError: there is no count of tokens, or lanes are of a wrong kind.
    """
    known: dict[str, Any] = {name: given[name] for name in given.keys() & FIGURES}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return OutputFigures(**known | lists | {"lanes": tuple(map(_lane, given.get("lanes", ())))})


def _lane(given: Mapping[str, Any]) -> LaneFigures:
    counts = tuple(given.get("trip_counts", ()))
    trips = Trips(counts, given.get("trip_seconds", 0.0), given.get("queued_seconds", 0.0))
    known = {"bytes_sent": 0, "bytes_received": 0} | {name: given[name] for name in given.keys() & LANE_FIGURES}
    return LaneFigures(address="", trips=trips, **known)


@dataclass(frozen=True)
class RequestTimeline:
    """What happened to one request."""

    number: int  # from 0, in the order in which they are due
    category: str  # of its prompt
    due: float  # when it was to be sent
    sent: float
    chunks: tuple[float, ...]  # arrival of each piece of the output that has a token
    ended: float  # arrival of its end, or of its error
    tokens: int  # of the output
    prompt_tokens: int = 0  # 0: the server does not say
    made: tuple[float, ...] = ()  # for each chunk: seconds the server took until it was made; empty: not said
    error: str = ""  # kind of the error that ended it; empty: none
    figures: Costs | None = None  # None: the server does not say

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.chunks)

    @property
    def late(self) -> float:
        return self.sent - self.due

    @property
    def first_token(self) -> float:
        """Seconds until its first token came; it must be ok."""
        return self.chunks[0] - self.due

    @property
    def end_to_end(self) -> float:
        return self.ended - self.due

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first; None: there is none."""
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.ok and self.tokens > 1 else None

    @property
    def between_chunks(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in pairwise(self.chunks))

    @property
    def front(self) -> tuple[float, ...]:
        """For each chunk: seconds from sending the request to its arrival, less what the server took to make it."""
        return tuple(came - self.sent - made for came, made in zip(self.chunks, self.made, strict=False))


def under_way(timelines: Iterable[RequestTimeline], moment: float) -> int:
    return sum(one.due <= moment < one.ended for one in timelines)


@dataclass(frozen=True)
class Chunk:
    """A client yields it for a piece of the output that has a token."""

    at: float  # arrival, seconds of the monotonic clock
    made: float | None = None  # seconds from when the server had read the request until it was made


@dataclass(frozen=True)
class End:
    """A client yields it last."""

    at: float  # arrival, seconds of the monotonic clock
    tokens: int | None = None  # of the output; None: one for each chunk
    figures: Costs | None = None  # None: the server does not say
    prompt_tokens: int = 0  # 0: the server does not say


class RequestFailedError(Exception):
    """A request failed or was refused.

    Args:
        kind: a few words, out of a small set, to count errors by.
        text: the server's message, or what happened.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class LoadClient(Protocol):
    """A way to have outputs made."""

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template: else chats are sent to it as texts."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[Chunk | End, None]:
        """One output: its chunks as they come, then its end. Closing the generator early cancels the request.

        Raises:
            RequestFailedError: it failed or was refused.
        """
        ...
