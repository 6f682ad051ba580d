"""Connections that send too much, too slowly or nothing, and too many of them."""

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from crossdraft.rpc.server import Listening
from crossdraft.serving.http import make_app
from crossdraft.serving.http.server import HttpServer
from crossdraft.serving.limits import ConnectionLimits
from tests.serving.fakes import FakeBackend

HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "Say", "stream": True}).encode()
SHORT = 0.05  # seconds
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def limited(outputs: FakeBackend | None = None, **limits: float) -> AsyncIterator:
    """Opens connections to a server with these limits."""
    opened: list[asyncio.StreamWriter] = []
    listening = Listening(grace_seconds=0)
    given = ConnectionLimits(**limits)  # type: ignore[arg-type]
    async with HttpServer(make_app(outputs or FakeBackend()), listening, limits=given) as server:
        host, _, port = server.address.rpartition(":")

        async def connect(sent: bytes = b"") -> Streams:
            reader, writer = await asyncio.open_connection(host, int(port))
            opened.append(writer)
            writer.write(sent)
            return reader, writer

        yield connect
        for writer in opened:
            writer.close()


async def rest(streams: Streams) -> bytes:
    """All until the server closes the connection."""
    async with asyncio.timeout(60):
        try:
            return await streams[0].read()
        except ConnectionResetError:
            return b"reset"


async def answered(streams: Streams) -> bytes:
    """The beginning of one reply."""
    async with asyncio.timeout(60):
        return await streams[0].readuntil(b"\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nhost: a\r\nlong: " + b"x" * 3000,  # without an end
        b"GET /health HTTP/1.1\r\nhost: a\r\nlong: " + b"x" * 3000 + b"\r\n\r\n",
        b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 500,
        POST + b"transfer-encoding: chunked\r\n\r\n2;" + b"x" * 3000,
        POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nlong: " + b"x" * 2**20,  # more than is read at once
    ],
)
async def test_headers_that_are_too_long(sent: bytes) -> None:
    async with limited(max_header_kib=1) as connect:
        found = await rest(await connect(sent))
        assert b"may have 1024 bytes" in found or (found == b"reset" and len(sent) > 2**20)  # it was not all read
        assert await answered(await connect(HEALTH)) == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("sent", "limit", "text"),
    [
        (b"", "header_seconds", b""),
        (b"GET /hea", "header_seconds", b"408 Request Timeout"),
        (HEALTH + b"GET /hea", "header_seconds", b"408 Request Timeout"),
        (POST + b"content-length: 9\r\n\r\n{", "body_seconds", b"408 Request Timeout"),
    ],
)
async def test_requests_that_do_not_come(sent: bytes, limit: str, text: bytes) -> None:
    async with limited(**{limit: SHORT}) as connect:
        found = await rest(await connect(sent))
        assert text in found
        assert bool(found) is bool(text)


async def test_a_reply_may_take_longer_than_a_request() -> None:
    """Bytes after a request begin another one; its time is not over while the server itself is at work."""
    outputs = FakeBackend(waits_after=1)
    async with limited(outputs, header_seconds=SHORT, body_seconds=SHORT) as connect:
        streams = await connect(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY + b"\r\nGET ")
        assert await answered(streams) == b"HTTP/1.1 200 OK\r\n"
        while not outputs.yielded:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert b"408" in await rest(await connect(b"GET "))  # whose time began later, and is over
        outputs.go_on.set()
        assert b"[DONE]" in await rest(streams)


@contextmanager
def handles(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_of_too_many_connections_the_longest_silent_is_closed() -> None:
    async with limited(max_connections_per_address=3) as connect:
        kept = await connect(HEALTH)
        assert await answered(kept)
        silent = await connect()
        half = await connect(POST + b"content-length: 9\r\n\r\n{")
        kept[1].write(HEALTH)  # so that it is the latest
        assert b"date" in await kept[0].readuntil(b"date: ")
        assert await answered(await connect(HEALTH)) == b"HTTP/1.1 200 OK\r\n"
        assert await rest(silent) in (b"", b"reset")
        assert await answered(await connect(HEALTH)) == b"HTTP/1.1 200 OK\r\n"
        assert await rest(half) in (b"", b"reset")


async def test_where_all_are_at_work_a_new_connection_is_closed() -> None:
    outputs = FakeBackend(waits_after=0)
    async with limited(outputs, max_connections_per_address=2) as connect:
        for _ in range(2):
            await connect(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        await outputs.wait_running(2)
        assert await rest(await connect(HEALTH)) in (b"", b"reset")
        outputs.go_on.set()
        await outputs.wait_running(0)


async def test_silent_connections_leave_file_handles() -> None:
    with handles(40):  # 6 connections
        async with limited() as connect:
            first = await connect()
            with handles(4096):  # for this side of the connections
                for _ in range(9):
                    await connect()
            assert await rest(first) in (b"", b"reset")


@pytest.mark.parametrize("limit", ["max_header_kib", "header_seconds", "body_seconds", "max_connections_per_address"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_are_checked(limit: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{limit.replace('_', '-')} must be above 0"):
        ConnectionLimits(**{limit: value})  # type: ignore[arg-type]
