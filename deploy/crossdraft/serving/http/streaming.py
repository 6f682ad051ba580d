"""Sends the reply to a request, whole or as server-sent events, for as long as the client stays."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crossdraft.serving.http.errors import ENDS, RefusedError

log = logging.getLogger(__name__)
T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's index. The first error ends all.

    Closing it, or cancelling whoever waits for it, closes all streams before it returns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def feed(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
        finally:
            queue.put_nowait(None)  # this task has ended

    tasks = [asyncio.create_task(feed(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            found = await queue.get()
            if found is not None:
                yield found
                continue
            running -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. When the client leaves, as `receive` says once the body was read, `work` has been
    cancelled and has ended on return; raises ClientGoneError."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, until they end, the client leaves, or it has not read for `stalled_seconds`. Where the server
    ends before, it cancels this, and `fault` makes the last event.

    Not sse-starlette: that ends streams when the server is told to stop, not after the grace period, and sends pings.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], fault: Callable[[RefusedError], bytes], stalled_seconds: float
    ) -> None:
        self._events, self._fault, self._open = events, fault, False
        self._stalled_seconds = stalled_seconds
        # Proxies must neither buffer events nor cache them.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await unless_gone(receive, self._send(send))
            except ClientGoneError:
                log.info("%s: the connection ended before the stream", scope["path"])
            except TimeoutError:
                log.warning("%s: the client has not read for %g s", scope["path"], self._stalled_seconds)
            except asyncio.CancelledError as ended:
                if not self._open or ended.args != (ENDS.message,):
                    raise
                await send({"type": "http.response.body", "body": self._fault(ENDS), "more_body": False})

    async def _send(self, send: Send) -> None:
        self._open = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            async with asyncio.timeout(self._stalled_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        self._open = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
