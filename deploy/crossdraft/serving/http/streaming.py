"""From the items of outputs to the body of a reply."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crossdraft.client import Token
from crossdraft.serving.http.errors import FOREIGN, refusal_of
from crossdraft.serving.http.requests import Asking
from crossdraft.serving.http.responses import Figures, Format, Trace, Usage, Written
from crossdraft.serving.outputs import Ended, Outputs, Traced
from crossdraft.trace.live_spans import Span

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
Item = tuple[int, Token | Traced | Ended]  # the choice's index, and what came of it


def items(outputs: Outputs, asking: Asking) -> AsyncGenerator[Item, None]:
    """Those of all choices, as they come."""
    return merged([outputs.stream(order) for order in asking.orders])


async def whole(outputs: Outputs, asking: Asking, format: Format) -> BaseModel:
    """The answer when everything has come.

    Raises:
        Exception: one of errors.FOREIGN.
    """
    written = [Written() for _ in asking.orders]
    async with aclosing(items(outputs, asking)) as coming:
        async for choice, item in coming:
            match item:
                case Token():
                    written[choice].add(item)
                case Ended():
                    written[choice].ended = item
    return format.whole(written, usage_of(asking, written))


class Chunks:
    """The chunks of a stream, each a server-sent event."""

    def __init__(self, asking: Asking, format: Format) -> None:
        self._asking = asking
        self._format = format
        self._written = [Written() for _ in asking.orders]
        self._spans: list[list[Span]] = [[] for _ in asking.orders]
        self._began = time.perf_counter()

    async def stream(self, first: Item, rest: AsyncGenerator[Item, None]) -> AsyncGenerator[bytes, None]:
        """All chunks, the last event included. What fails now is an event, too: the status was sent."""
        async with aclosing(rest):
            try:
                for event in self._events(first):
                    yield event
                async for item in rest:
                    for event in self._events(item):
                        yield event
            except FOREIGN as error:
                yield event_of(refusal_of(error, self._asking.id).reply)
            else:
                if self._asking.include_usage:
                    yield event_of(self._format.usage(usage_of(self._asking, self._written)))
            yield DONE

    def _events(self, item: Item) -> Sequence[bytes]:
        choice, what = item
        written = self._written[choice]
        match what:
            case Traced(spans):
                self._spans[choice] += spans
                return ()
            case Token():
                chunk = self._piece(choice, written, what)
                written.add(what)
            case Ended():
                chunk = self._format.end(choice, written, what, self._trace(choice, ended=what))
                written.ended = what
        if chunk is None:
            return ()
        written.begun = True
        return (event_of(chunk),)

    def _piece(self, choice: int, written: Written, token: Token) -> BaseModel | None:
        if not (token.text or self._asking.logprobs or self._asking.trace):
            return None  # its characters are not whole yet, or may be the beginning of a stop string
        return self._format.piece(choice, written, token, self._trace(choice, token=token))

    def _trace(self, choice: int, token: Token | None = None, ended: Ended | None = None) -> Trace | None:
        if not self._asking.trace:
            return None
        milliseconds = 1000 * (time.perf_counter() - self._began)
        found: dict[str, object] = {"milliseconds": milliseconds}
        if token is not None:
            found |= {"kind": token.kind, "bytes": list(token.raw)}
        if ended is not None:
            found["statistics"] = Figures.of(ended.statistics)
        if self._spans[choice]:
            found["spans"], self._spans[choice] = self._spans[choice], []
        return Trace.model_validate(found)


def usage_of(asking: Asking, written: Sequence[Written]) -> Usage:
    """Each prompt once, and all outputs."""
    figures = [one.ended.statistics for one in written if one.ended is not None]
    each = len(asking.orders) // asking.prompts
    return Usage.of(sum(one.prompt_tokens for one in figures[::each]), sum(one.tokens for one in figures))


def event_of(value: BaseModel) -> bytes:
    """A server-sent event."""
    return b"data: " + value.model_dump_json(exclude_unset=True).encode() + b"\n\n"


# Several outputs at once, as one stream.

ItemT = TypeVar("ItemT")


async def merged(streams: Sequence[AsyncGenerator[ItemT, None]]) -> AsyncGenerator[tuple[int, ItemT], None]:
    """The items of all streams as they come, each with its stream's place. The first error ends all.

    Closing it, or cancelling whoever waits for it, closes all streams before it returns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, ItemT] | None] = asyncio.Queue()

    async def feed(place: int, stream: AsyncGenerator[ItemT, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((place, item))
        finally:
            queue.put_nowait(None)  # look at the task

    tasks = [asyncio.create_task(feed(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if found is not None:
                yield found
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Clients that leave: what is made for them ends at once.

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
