"""The server: connections that are bounded, TLS, clients that leave, and its end."""

import asyncio
import json
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2 as httpx
import pytest
from openai import APIError

from crossdraft.client import Kind, Token
from crossdraft.config.api import ConnectionOptions, RateOptions
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.security import FrontFiles, TlsError
from crossdraft.rpc.server import Listening
from crossdraft.serving.http import HttpOptions, make_app
from crossdraft.serving.http.connections import Connection, Connections
from crossdraft.serving.http.server import HttpServer
from tests.rpc.certificates import Cluster
from tests.serving.fakes import FakeBackend
from tests.serving.http.conftest import Front, fault, front

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


def server_of(
    outputs: FakeBackend | None = None, tls: FrontFiles | None = None, host: str = "127.0.0.1", port: int = 0,
    **limits: float,
) -> HttpServer:  # fmt: skip
    listening = Listening(host, port, grace_seconds=0, tls=tls)
    given = ConnectionOptions(**limits)  # type: ignore[arg-type]
    return HttpServer(make_app(outputs or FakeBackend()), listening, limits=given)


@asynccontextmanager
async def limited(
    outputs: FakeBackend | None = None, tls: FrontFiles | None = None, **limits: float
) -> AsyncIterator[Limited]:
    async with server_of(outputs, tls, **limits) as server:
        running = Limited(server.address, server._server._connections)
        yield running
        for writer in running.opened:
            writer.close()


def files(cluster: Cluster, hosts: tuple[str, ...] = ("127.0.0.1",)) -> FrontFiles:
    made = cluster.files("front", hosts)
    return FrontFiles(made.certificate, made.key)


def trusting(cluster: Cluster) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cluster.folder / "ca.pem"))


def warned(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The only warning."""
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (said,) = [record for record in warnings if record.name != "asyncio"]  # others' come late
    return said


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


async def test_the_body_is_read_though_the_client_asks_for_http2_as_that_of_java_does() -> None:
    sent = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
    async with limited() as server:
        assert await answered(await server.connect(sent)) == b"HTTP/1.1 200 OK\r\n"


async def test_head_is_answered_as_get_without_the_body() -> None:
    async with limited() as server:
        asked = [HEALTH.replace(b"GET", b"HEAD"), HEALTH.replace(b"host: a", b"connection: close")]
        first, second, body = (await rest(await server.connect(b"".join(asked)))).split(b"\r\n\r\n")
        for head in (first, second):
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"content-length: %d\r\n" % len(body) in head
        assert json.loads(body) == {"status": "ok"}


async def test_what_is_no_http_is_refused_in_the_shape_of_all_errors() -> None:
    async with limited() as server:
        head, body = (await rest(await server.connect(b"hello\r\n\r\n"))).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_leaving_ends_an_output_also_where_another_request_waits_behind_it() -> None:
    outputs = FakeBackend(waits_after=1)
    async with limited(outputs) as server:
        streams = await server.connect(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY + HEALTH)
        assert await answered(streams) == b"HTTP/1.1 200 OK\r\n"
        streams[1].close()
        await outputs.wait_running(0)


@pytest.mark.parametrize("before", [b"", HEALTH], ids=["alone", "behind a request"])
async def test_a_stream_is_cut_and_has_no_other_reply_in_it_where_what_follows_is_no_request(before: bytes) -> None:
    outputs = FakeBackend(waits_after=1)
    async with limited(outputs) as server:
        streams = await server.connect(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert await answered(streams) == b"HTTP/1.1 200 OK\r\n"
        streams[1].write(before + b"hello\r\n\r\n")
        assert b"HTTP/1.1" not in await rest(streams)
        await outputs.wait_running(0)


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


async def test_a_tls_handshake_that_does_not_come(cluster: Cluster) -> None:
    async with limited(tls=files(cluster), header_seconds=SHORT) as server:
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
async def test_silent_connections_leave_file_handles(monkeypatch, cluster, secured):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))  # 6 connections
    async with limited(tls=files(cluster) if secured else None, header_seconds=3600) as server:
        first, *_ = [await server.connect() for _ in range(10)]
        assert await rest(first) in (b"", b"reset")
        again = await server.connect(HEALTH, trusting(cluster) if secured else None)
        assert await answered(again) == b"HTTP/1.1 200 OK\r\n"


LONG = (Token(1, "x" * 50_000, b"", Kind.BONUS, None),) * 1000  # 50 MB, more than sockets keep


@pytest.fixture
def outputs() -> FakeBackend:
    return FakeBackend(waits_after=1)


@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_a_stream_ends_its_outputs(served: Front, outputs: FakeBackend, n: int) -> None:
    stream = await served.complete(stream=True, n=n)
    assert (await anext(stream)).choices[0].text == "He"
    await outputs.wait_running(n)
    await stream.close()
    await outputs.wait_running(0)
    assert 1 <= outputs.yielded <= n


@pytest.mark.parametrize(("streamed", "n"), [(False, 1), (False, 3), (True, 3)])
async def test_leaving_before_the_answer_ends_all_choices(served: Front, outputs: FakeBackend, streamed: bool, n: int):
    outputs.waits_after = 0
    asking = asyncio.create_task(served.post("/v1/completions", prompt="Say", n=n, stream=streamed))
    await outputs.wait_running(n)
    asking.cancel()
    await asyncio.wait([asking])
    await outputs.wait_running(0)
    assert outputs.yielded == 0


async def test_a_client_that_does_not_read_is_given_up(outputs: FakeBackend) -> None:
    outputs.tokens, outputs.waits_after = LONG, None
    async with front(outputs, HttpOptions(rates=RateOptions(stalled_seconds=0.2))) as hasty:
        body = {"prompt": "Say", "stream": True}
        async with hasty.http.stream("POST", "/v1/completions", json=body) as response:
            assert (response.status_code, len(outputs.requests)) == (200, 1)
            await outputs.wait_running(0)
            assert outputs.yielded < len(LONG)


async def test_draining_lets_a_stream_end_takes_no_other_and_says_that_it_waits(outputs, caplog):
    async with front(outputs, grace_seconds=30) as served:
        stream = await served.complete(stream=True)
        first = await anext(stream)
        draining = asyncio.create_task(served.server.drain())
        await refused(served.server.address)
        assert not draining.done()
        outputs.go_on.set()
        texts = [first.choices[0].text, *[chunk.choices[0].text async for chunk in stream]]
        assert texts == ["He", "é", ""]
        await draining
    assert "waiting up to 30 s (--grace-seconds) for 1 open requests to end" in caplog.messages


async def test_the_grace_period_ends_what_goes_on_and_says_so_once(outputs, caplog):
    async with front(outputs, grace_seconds=0) as served:
        streams = [await served.complete(stream=True) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.create_task(served.post("/v1/completions", prompt="Say"))
        await outputs.wait_running(3)
        await served.server.drain()
        await outputs.wait_running(0)
        for stream in streams:
            with pytest.raises(APIError, match="the server ends; ask again later"):
                await anext(stream)
        assert fault(await waiting) == {
            "message": "the server ends; ask again later", "type": "server_error", "param": None,
            "code": "service_unavailable",
        }  # fmt: skip
        assert (await waiting).status_code == 503
    said = warned(caplog)
    assert said.getMessage() == "3 open requests are ended: the grace period of 0 s is over (--grace-seconds)"
    assert said.exc_info is None


async def test_a_drain_that_is_cancelled_ends_streams_at_once_and_with_an_event(outputs: FakeBackend) -> None:
    async with front(outputs, grace_seconds=300) as served:
        stream = await served.openai.responses.create(model="toy", input="Say", stream=True)
        while (await anext(stream)).type != "response.output_text.delta":
            pass
        draining = asyncio.create_task(served.server.drain())
        await refused(served.server.address)
        draining.cancel()
        events = [event async for event in stream]
        assert [(one.type, one.code) for one in events] == [("error", "service_unavailable")]
        with pytest.raises(asyncio.CancelledError):
            await draining
        await outputs.wait_running(0)


async def refused(address: str) -> None:
    """Returns once nobody listens there any more."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionResetError:
                continue  # it waited to be accepted
            except ConnectionRefusedError:
                return
            writer.close()


async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            await server_of(port=port).start()


def client(url: str, cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, verify=trusting(cluster), timeout=60)


async def asked(url: str, cluster: Cluster) -> int:
    async with client(url, cluster) as asking:
        return (await asking.get("/health")).status_code


async def test_a_renewed_certificate_is_served_to_new_connections_without_a_restart(cluster, caplog):
    shown, outputs = files(cluster), FakeBackend(waits_after=1)
    async with server_of(outputs, shown) as serving:
        url = f"https://{serving.address}"
        asking = {"prompt": "Say", "stream": True}
        async with client(url, cluster) as early, early.stream("POST", "/v1/completions", json=asking) as reply:
            files(cluster, ("10.1.2.3",))
            with pytest.raises(httpx.ConnectError, match="mismatch"):
                await asked(url, cluster)
            outputs.go_on.set()
            assert (await reply.aread()).endswith(b"data: [DONE]\n\n")  # what is open goes on
        shown.key.write_text("half written")
        with pytest.raises(httpx.ConnectError, match="mismatch"):
            await asked(url, cluster)
        files(cluster)
        assert await asked(url, cluster) == 200
        with pytest.raises(httpx.TransportError):
            await asked(url.replace("https", "http"), cluster)
        assert await asked(url, cluster) == 200
    assert warned(caplog).getMessage().startswith("the certificate was not renewed, the one before is used on: ")


async def test_it_does_not_start_with_files_that_it_cannot_use(cluster: Cluster) -> None:
    shown = files(cluster)
    shown.key.unlink()
    with pytest.raises(TlsError, match="there is no file"):
        await server_of(tls=shown).start()


@pytest.mark.parametrize("secured", [False, True])
async def test_a_port_that_is_open_to_others_in_plaintext_is_said(cluster, caplog, secured):
    async with server_of(None, files(cluster) if secured else None, "0.0.0.0"):
        pass
    assert ("is open to whoever can reach it" in caplog.text) is not secured
