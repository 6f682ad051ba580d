"""Connections that send too much, too slowly or nothing, and too many of them."""

import asyncio
import json
import resource
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from crossdraft.config.api import ConnectionOptions
from crossdraft.rpc.security import FrontFiles
from crossdraft.rpc.server import Listening
from crossdraft.serving.http import make_app
from crossdraft.serving.http.connections import Connection, Connections
from crossdraft.serving.http.server import HttpServer
from tests.rpc.certificates import Cluster
from tests.serving.fakes import FakeBackend

HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "Say", "stream": True}).encode()
SHORT = 0.05  # seconds
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Limited:
    """A server whose connections have limits."""

    address: str
    connections: Connections
    opened: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self, sent: bytes = b"", tls: ssl.SSLContext | None = None) -> Streams:
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        self.opened.append(writer)
        writer.write(sent)
        return reader, writer

    async def late(self, holds: Callable[[Connection], bool]) -> None:
        """The time is over of the connection that this holds of, once it does."""
        async with asyncio.timeout(60):
            while not (found := [one for one in self.connections._all if holds(one)]):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert found[0]._timer is not None
        found[0]._late()


@asynccontextmanager
async def limited(
    outputs: FakeBackend | None = None, tls: FrontFiles | None = None, **limits: float
) -> AsyncIterator[Limited]:
    given = ConnectionOptions(**limits)  # type: ignore[arg-type]
    listening = Listening(grace_seconds=0, tls=tls)
    async with HttpServer(make_app(outputs or FakeBackend()), listening, limits=given) as server:
        running = Limited(server.address, server._server._connections)
        yield running
        for writer in running.opened:
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
    async with limited(max_header_kib=1) as server:
        found = await rest(await server.connect(sent))
        assert b"may have 1024 bytes" in found or (found == b"reset" and len(sent) > 2**20)  # it was not all read
        assert await answered(await server.connect(HEALTH)) == b"HTTP/1.1 200 OK\r\n"


async def test_thousands_of_requests_before_a_reply() -> None:
    async with limited() as server:
        streams = await server.connect(HEALTH * 1000 + HEALTH.replace(b"host: a", b"connection: close"))
        assert await rest(streams) in (b"", b"reset")
        assert await answered(await server.connect(HEALTH * 20)) == b"HTTP/1.1 200 OK\r\n"


def busy(one: Connection) -> bool:
    return one.cycle is not None and not one.cycle.response_complete


@pytest.mark.parametrize(
    ("sent", "came", "text"),
    [
        (b"", lambda _: True, b""),
        (b"GET /hea", lambda one: one._pending, b"408 Request Timeout"),
        (HEALTH + b"GET /hea", lambda one: one.cycle and not busy(one) and one._pending, b"408 Request Timeout"),
        (POST + b"content-length: 9\r\n\r\n{", busy, b"408 Request Timeout"),
    ],
)
async def test_requests_that_do_not_come(sent: bytes, came: Callable[[Connection], bool], text: bytes) -> None:
    async with limited() as server:
        streams = await server.connect(sent)
        await server.late(came)
        found = await rest(streams)
        assert text in found
        assert bool(found) is bool(text)


async def test_the_time_of_a_request_is_limited() -> None:
    async with limited(header_seconds=SHORT, body_seconds=SHORT) as server:
        for sent in (b"", b"GET ", POST, POST + b"content-length: 9\r\n\r\n{"):
            assert not (await rest(await server.connect(sent))).startswith(b"HTTP/1.1 200")


async def test_a_tls_handshake_that_does_not_come(tmp_path: Path) -> None:
    made = Cluster(tmp_path / "ours").files("front", ("127.0.0.1",))
    async with limited(tls=FrontFiles(made.certificate, made.key), header_seconds=SHORT) as server:
        assert await rest(await server.connect()) in (b"", b"reset")


async def test_a_reply_may_take_longer_than_a_request() -> None:
    """Bytes after a request begin another one; its time is not over while the server itself is at work."""
    outputs = FakeBackend(waits_after=1)
    async with limited(outputs) as server:
        streams = await server.connect(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY + b"\r\nGET ")
        assert await answered(streams) == b"HTTP/1.1 200 OK\r\n"
        await server.late(busy)
        outputs.go_on.set()
        assert b"[DONE]" in await streams[0].readuntil(b"[DONE]")
        await server.late(lambda one: not busy(one))
        assert b"408 Request Timeout" in await rest(streams)


async def test_of_too_many_connections_the_longest_silent_is_closed() -> None:
    async with limited(max_connections_per_address=3) as server:
        kept = await server.connect(HEALTH)
        assert await answered(kept)
        silent = await server.connect()
        half = await server.connect(POST + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n")
        assert await answered(half) == b"HTTP/1.1 100 Continue\r\n"
        kept[1].write(HEALTH)  # so that it is the latest
        assert b"date" in await kept[0].readuntil(b"date: ")
        assert await answered(await server.connect(HEALTH)) == b"HTTP/1.1 200 OK\r\n"
        assert await rest(silent) in (b"", b"reset")
        assert await answered(await server.connect(HEALTH)) == b"HTTP/1.1 200 OK\r\n"
        assert await rest(half) in (b"\r\n", b"reset")


async def test_where_all_are_at_work_a_new_connection_is_closed() -> None:
    outputs = FakeBackend(waits_after=0)
    async with limited(outputs, max_connections_per_address=2) as server:
        for _ in range(2):
            await server.connect(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        await outputs.wait_running(2)
        assert await rest(await server.connect(HEALTH)) in (b"", b"reset")
        outputs.go_on.set()
        await outputs.wait_running(0)


@pytest.mark.parametrize("secured", [False, True])
async def test_silent_connections_leave_file_handles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secured: bool):
    made = Cluster(tmp_path / "ours").files("front", ("127.0.0.1",))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))  # 6 connections
    tls = FrontFiles(made.certificate, made.key) if secured else None
    async with limited(tls=tls, header_seconds=3600) as server:
        first, *_ = [await server.connect() for _ in range(10)]
        assert await rest(first) in (b"", b"reset")
        trusted = ssl.create_default_context(cafile=made.ca) if secured else None
        assert await answered(await server.connect(HEALTH, trusted)) == b"HTTP/1.1 200 OK\r\n"
