"""From the items of outputs to the body of a reply, whole or as server-sent events, for as long as the client stays."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crossdraft.rpc.errors import without_addresses
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.generation import Committed, OutputEnded, PromptTokens
from crossdraft.serving.backend import OutputItem, TraceSpans
from crossdraft.serving.http.errors import ENDS, FOREIGN, RefusedError, refusal_of
from crossdraft.serving.http.requests import GenerationBody
from crossdraft.serving.http.responses import JSON, Format, Json, PartialOutput, Shown, figures_of
from crossdraft.trace.timeline import Span, What

log = logging.getLogger(__name__)
BYTES = 8  # of a token in a reply, about
DONE = b"data: [DONE]\n\n"
IndexedItem = tuple[int, OutputItem]  # the choice's index, and an item of its output
AnyFormat = Format[Any]
T = TypeVar("T")


class Replies:
    """The reply to one request, whole, or as chunks, each of them a server-sent event."""

    def __init__(self, format: AnyFormat, request_id: str, beside: Beside) -> None:
        self._format = format
        self._body: GenerationBody = format.body
        self._request_id = request_id
        self._beside = beside
        self._outputs = [format.output() for _ in range(self._body.num_outputs)]
        self._spans: list[list[Span]] = [[] for _ in self._outputs]  # not sent yet
        self._began = time.perf_counter()

    async def whole(self, coming: AsyncGenerator[IndexedItem, None]) -> bytes:
        """The reply, as JSON, once everything has come; raises one of errors.FOREIGN."""
        async with aclosing(coming):
            async for index, item in coming:
                if not isinstance(item, TraceSpans):
                    self._outputs[index].hear(item)
                    self._outputs[index].take(item, self._body.echoes_tokens)
        values = sum(len(output.tokens) for output in self._outputs) * (1 + (self._body.num_logprobs or 0))
        return await self._beside.run(BYTES * values, lambda: JSON.dump_json(self._format.whole(self._outputs)))

    async def stream(self, first: IndexedItem, rest: AsyncGenerator[IndexedItem, None]) -> AsyncGenerator[bytes, None]:
        """All events, the last one included. An error is an event, too: the status was sent before."""
        async with aclosing(rest):
            try:
                if event := self._event(*first):
                    yield event
                async for index, item in rest:
                    if event := self._event(index, item):
                        yield event
            except FOREIGN as error:
                yield self.fault(refusal_of(error, self._request_id, self._body.field_of))
            else:
                usage = event_of(self._format.usage_chunk(self._outputs)) if self._body.include_usage else b""
                yield usage + DONE

    def fault(self, refusal: RefusedError) -> bytes:
        """The last events of a stream that an error ends."""
        return event_of(refusal.body) + DONE

    def _event(self, index: int, item: OutputItem) -> bytes:
        """Of one item; empty if it shows nothing."""
        if isinstance(item, TraceSpans):
            self._spans[index] += map(_without_address, item.spans)
            return b""
        output, chunk = self._outputs[index], b""
        output.hear(item)
        if self._shows(item, output):
            chunk = event_of(self._format.chunk(index, output, item, self._trace(index, item)))
            output.begun = True
        output.take(item, self._body.echoes_tokens)
        return chunk

    def _shows(self, item: Shown, output: PartialOutput) -> bool:
        """A token has no text while its characters are incomplete, or may be the beginning of a stop string or call."""
        if isinstance(item, OutputEnded):
            return True
        if output.new if output.answer is not None else any(token.text for token in item.tokens):
            return True
        return self._body.num_logprobs is not None or self._body.return_token_ids or self._body.speculative.trace

    def _trace(self, index: int, item: Shown) -> Json:
        if not self._body.speculative.trace or isinstance(item, PromptTokens):
            return {}
        fields: Json = {"milliseconds": 1000 * (time.perf_counter() - self._began)}
        if isinstance(item, Committed):
            (token,) = item.tokens  # with a trace each comes by itself
            fields |= {"kind": token.kind, "bytes": list(token.raw)}
        else:
            fields["statistics"] = figures_of(item.statistics)
        if self._spans[index]:
            fields["spans"], self._spans[index] = self._spans[index], []
        return {"crossdraft": fields}


def _without_address(span: Span) -> Span:
    return replace(span, label=without_addresses(span.label)) if span.what is What.LOST else span


def event_of(value: Json | BaseModel) -> bytes:
    return b"data: " + JSON.dump_json(value) + b"\n\n"


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

    Not sse-starlette: that ends streams as soon as the server is told to stop, instead of after the grace period, and
    inserts pings.
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
                if not self._open or ended.args != (ENDS.text,):
                    raise
                await send({"type": "http.response.body", "body": self._fault(ENDS.refusal()), "more_body": False})

    async def _send(self, send: Send) -> None:
        self._open = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            async with asyncio.timeout(self._stalled_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        self._open = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
