"""Streams of events: which client is given up, by a clock that only the test moves, and that none is kept."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from crossdraft.serving.http.streaming import EventStream

STALLED = 10.0  # seconds
EVENTS = [b"a", b"b", b"c"]
Wait = Callable[[float], Awaitable[None]]


@pytest.fixture
async def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """So many seconds pass, and whatever is due then is done."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def passing(seconds: float) -> None:
        nonlocal now
        for _ in range(10):
            now += seconds / 10
            for _ in range(9):
                await asyncio.sleep(0)

    return passing


async def receive() -> dict[str, Any]:
    """The client stays."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def sent(wait: Wait, made_in: float, read_in: list[float]) -> list[bytes]:
    """The events that a client gets which are made, and of which each is read, in so many seconds."""
    got: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for event in EVENTS:
            await wait(made_in)
            yield event

    async def send(message: Any) -> None:
        if message.get("body"):
            await wait(read_in[len(got)])
            got.append(message["body"])

    await EventStream(events(), lambda _: b"fault", STALLED)({"type": "http", "path": "/v1"}, receive, send)
    return got


@pytest.mark.parametrize(
    ("made_in", "read_in", "got"),
    [
        (0, [0, 0, 0], EVENTS),
        (3.1 * STALLED, [0, 0, 0], EVENTS),  # it is the model that takes long
        (0.6 * STALLED, [0.9 * STALLED] * 3, EVENTS),
        (0, [0, 0, 1.1 * STALLED], EVENTS[:2]),
        (0.3 * STALLED, [0, 1.1 * STALLED, 0], EVENTS[:1]),
    ],
)
async def test_only_a_client_that_does_not_read_for_so_long_is_given_up(
    wait: Wait, made_in: float, read_in: list[float], got: list[bytes]
) -> None:
    assert await sent(wait, made_in, read_in) == got


async def test_a_stream_that_has_ended_is_not_kept_until_it_could_have_stalled() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"

    async def send(_: Any) -> None:
        pass

    stream = EventStream(events(), lambda _: b"fault", STALLED)
    await stream({"type": "http", "path": "/v1"}, receive, send)
    kept = weakref.ref(stream)
    del stream
    gc.collect()
    assert kept() is None
