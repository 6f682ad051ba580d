"""Sends requests by clients that wait for their answers, and keeps the moments of each.

All moments are seconds of one clock.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from crossdraft.loadtest.requests import Request
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
    """A client yields it for a piece of the output that has a token."""

    at: float  # arrival, seconds of the monotonic clock
    made: float | None = None  # seconds from when the server had read the request until it was made


@dataclass(frozen=True)
class End:
    """A client yields it last."""

    at: float  # arrival, seconds of the monotonic clock
    figures: Costs


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


@dataclass(frozen=True, eq=False)
class Runner:
    """Sends requests by one client."""

    client: LoadClient
    timeout_seconds: float  # after which a request is cancelled
    on_end: Callable[[RequestTimeline, str], None] = lambda timeline, text: None  # with the text of its error
    now: Callable[[], float] = time.monotonic  # seconds of the clock that the client's moments are of

    async def run(self, at_once: int, requests: Sequence[Request]) -> list[RequestTimeline]:
        """All requests, so many of them under way at once; their timelines in the order of their numbers."""
        left = iter(requests)
        timelines: list[RequestTimeline] = []

        async def client() -> None:
            for request in left:  # the clients share it
                timelines.append(await self._send(request))

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(client())
        return sorted(timelines, key=lambda one: one.number)

    async def _send(self, request: Request) -> RequestTimeline:
        sent, error, text = self.now(), "", ""
        chunks: list[Chunk] = []
        end: End | None = None
        try:
            async with asyncio.timeout(self.timeout_seconds), aclosing(self.client.stream(request)) as stream:
                async for one in stream:
                    if isinstance(one, Chunk):
                        chunks.append(one)
                    else:
                        end = one
        except TimeoutError:
            error, text = TIMED_OUT, f"no end after {self.timeout_seconds:g} s"
        except RequestFailedError as failure:
            error, text = failure.kind, str(failure)
        timeline = RequestTimeline(
            number=request.number,
            category=request.prompt.category,
            sent=sent,
            chunks=tuple(one.at for one in chunks),
            ended=self.now() if end is None else end.at,
            made=tuple(one.made for one in chunks if one.made is not None),
            error=error,
            figures=None if end is None else end.figures,
        )
        self.on_end(timeline, text)
        return timeline
