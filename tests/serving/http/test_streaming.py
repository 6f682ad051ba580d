"""How long an event stream waits for its client, and for its events."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from crossdraft.serving.http.streaming import EventStream

STALLED = 0.01  # seconds
SCOPE: dict[str, Any] = {"type": "http", "path": "/"}


async def never() -> Message:
    """The client neither sends more nor leaves."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_client_that_does_not_read_is_given_up() -> None:
    sent, closed = list[bytes](), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            for number in b"123":
                yield bytes([number])
        finally:
            closed.set()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))
        if sent[-1] == b"2":
            await never()

    await EventStream(events(), lambda _: b"", STALLED)(SCOPE, never, send)
    assert sent == [b"head", b"1", b"2"]
    assert closed.is_set()


async def test_events_may_be_as_late_as_they_like() -> None:
    sent = list[bytes]()

    async def events() -> AsyncGenerator[bytes, None]:
        for number in b"12":
            passed = asyncio.Event()
            asyncio.get_running_loop().call_later(5 * STALLED, passed.set)
            await passed.wait()
            yield bytes([number])

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))

    await EventStream(events(), lambda _: b"", STALLED)(SCOPE, never, send)
    assert sent == [b"head", b"1", b"2", b""]
