"""Sends requests, and keeps the moments of each.

All moments are seconds of one clock.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from crossdraft.lab.loadtest.requests import Request
from crossdraft.types.statistics import LaneFigures, Statistics

TIMED_OUT = "timed out"  # kind of an error


@dataclass(frozen=True)
class OutputFigures:
    """The part of an output's `Statistics` that a load test uses, under the same names; HTTP servers send no more."""

    tokens: int
    passes: int  # of the target
    accepted: int  # draft tokens
    corrected: int  # tokens in the place of a refused draft token
    judged_at: tuple[int, ...]  # by position in a round: draft tokens that were accepted or refused
    accepted_at: tuple[int, ...]  # by position in a round: draft tokens that were accepted
    lanes: tuple[LaneFigures, ...]  # sessions with services


Costs = OutputFigures | Statistics


@dataclass(frozen=True)
class Chunk:
    """A piece of the output that has a token."""

    made: float | None = None  # seconds from when the server had read the request until it was made; None: not said


class RequestFailedError(Exception):
    """A request failed or was refused.

    Args:
        kind: a few words, out of a small set, to count errors by.
        text: the server's message, or what happened.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


Pieces = AsyncGenerator[Chunk | Costs, None]


class LoadClient(Protocol):
    """A way to have outputs made."""

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template: else chats are sent to it as texts."""
        ...

    def stream(self, request: Request) -> Pieces:
        """One output: its chunks as they come, then what it cost. Closing the generator early cancels the request.

        Raises:
            RequestFailedError: it failed or was refused.
        """
        ...


@dataclass(frozen=True)
class RequestTimeline:
    """What happened to one request."""

    number: int  # from 0
    category: str  # of its prompt
    sent: float
    chunks: tuple[float, ...]  # arrival of each piece of the output that has a token
    ended: float  # arrival of its end, or of its error
    made: tuple[float, ...] = ()  # for each chunk: seconds the server took until it was made; empty: not said
    error: str = ""  # kind of the error that ended it; empty: none
    fault: str = ""  # its text
    figures: Costs | None = None  # None: it had no end

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.chunks)

    @property
    def tokens(self) -> int:
        """Of the output, as far as it came."""
        return len(self.chunks) if self.figures is None else self.figures.tokens

    @property
    def first_token(self) -> float:
        """Seconds until its first token came; it must be ok."""
        return self.chunks[0] - self.sent

    @property
    def end_to_end(self) -> float:
        return self.ended - self.sent

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


Values = Callable[[RequestTimeline], Sequence[float]]
LATENCIES: Mapping[str, Values] = {  # seconds of an answered request, by their names in a summary
    "first_token_ms": lambda one: [one.first_token],
    "between_chunks_ms": lambda one: one.between_chunks,
    "per_token_ms": lambda one: [] if one.per_token is None else [one.per_token],
    "end_to_end_ms": lambda one: [one.end_to_end],
    "front_ms": lambda one: one.front,
}


async def send(
    client: LoadClient, request: Request, timeout_seconds: float, now: Callable[[], float] = time.monotonic
) -> RequestTimeline:
    """Sends a request and waits for its end, so long at most."""
    sent, error, fault = now(), "", ""
    chunks: list[float] = []
    made: list[float] = []
    figures: Costs | None = None
    try:
        async with asyncio.timeout(timeout_seconds), aclosing(client.stream(request)) as stream:
            async for one in stream:
                if isinstance(one, Chunk):
                    chunks.append(now())
                    made += [] if one.made is None else [one.made]
                else:
                    figures = one
    except TimeoutError:
        error, fault = TIMED_OUT, f"no end after {timeout_seconds:g} s"
    except RequestFailedError as failure:
        error, fault = failure.kind, str(failure)
    return RequestTimeline(
        request.number, request.category, sent, tuple(chunks), now(), tuple(made), error, fault, figures
    )
