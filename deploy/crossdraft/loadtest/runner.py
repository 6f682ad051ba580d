"""Sends requests on their schedule and records a timeline of each."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass

import numpy as np

from crossdraft.loadtest.requests import Request
from crossdraft.loadtest.timeline import Chunk, End, LoadClient, RequestFailedError, RequestTimeline

TIMED_OUT = "timed out"


@dataclass(frozen=True)
class OpenLoop:
    """Requests at random moments (a Poisson process), however long the earlier ones take.

    Raises:
        ValueError: the rate is not above 0.
    """

    rate: float  # requests a second, on average
    most: int | None = None  # under way at once; further ones are sent late, which counts for their latencies

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"--rate must be above 0, got {self.rate:g}")


@dataclass(frozen=True)
class ClosedLoop:
    """A number of clients, each of which sends its next request when it has its answer."""

    clients: int  # at least 1


Load = OpenLoop | ClosedLoop


def poisson(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Seconds from the beginning to each of `count` arrivals of a Poisson process with `rate` a second."""
    gaps = np.random.default_rng([seed, count]).exponential(1 / rate, count)
    return tuple(np.cumsum(gaps).tolist())


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs requests of one client under a load."""

    client: LoadClient
    timeout_seconds: float  # after which a request is cancelled
    on_end: Callable[[RequestTimeline, str], None] = lambda timeline, text: None  # with the text of its error
    now: Callable[[], float] = time.monotonic  # seconds of the clock that the client's moments are of

    async def run(self, load: Load, requests: Sequence[Request], seed: int) -> list[RequestTimeline]:
        """All requests, each to its end; their timelines in the order of their numbers."""
        if isinstance(load, OpenLoop):
            return await self._open_loop(load, requests, poisson(load.rate, len(requests), seed))
        return await self._closed_loop(load.clients, requests)

    async def _open_loop(
        self, load: OpenLoop, requests: Sequence[Request], dues: Sequence[float]
    ) -> list[RequestTimeline]:
        room = nullcontext() if load.most is None else asyncio.Semaphore(load.most)
        begin = self.now()

        async def one(request: Request, due: float) -> RequestTimeline:
            async with room:
                return await self._send(request, due)

        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, offset in zip(requests, dues, strict=True):
                await asyncio.sleep(max(0.0, begin + offset - self.now()))
                tasks.append(group.create_task(one(request, begin + offset)))
        return [task.result() for task in tasks]

    async def _closed_loop(self, clients: int, requests: Sequence[Request]) -> list[RequestTimeline]:
        left = iter(requests)
        timelines: list[RequestTimeline] = []

        async def client() -> None:
            for request in left:  # the clients share it
                timelines.append(await self._send(request, self.now()))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return sorted(timelines, key=lambda one: one.number)

    async def _send(self, request: Request, due: float) -> RequestTimeline:
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
        made = tuple(one.made for one in chunks if one.made is not None)
        timeline = RequestTimeline(
            number=request.number,
            category=request.prompt.category,
            due=due,
            sent=sent,
            chunks=tuple(one.at for one in chunks),
            ended=self.now() if end is None else end.at,
            tokens=len(chunks) if end is None or end.tokens is None else end.tokens,
            prompt_tokens=0 if end is None else end.prompt_tokens,
            made=made if len(made) == len(chunks) else (),
            error=error,
            figures=None if end is None else end.figures,
        )
        self.on_end(timeline, text)
        return timeline
