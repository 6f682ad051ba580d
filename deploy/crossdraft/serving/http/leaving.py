"""Clients that leave: what is made for them ends at once."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """Nobody waits for the reply."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns or raises. It is cancelled, and has ended, when the client leaves.

    Args:
        receive: of a request whose body was read.
        work: what is done for it.

    Raises:
        ClientGoneError: the client has left.
    """
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
    """Server-sent events, until they end, the client leaves, or it has not read for too long."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stalled_seconds: float) -> None:
        self._events = events
        self._stalled_seconds = stalled_seconds
        # Proxies must neither keep events back nor keep them for others.
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

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            async with asyncio.timeout(self._stalled_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
