"""Streams over HTTP, from a server that says what it is told to, and clients at once in simulated time."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from crossdraft.cli.processes import base_url
from crossdraft.cli.running import UsageError
from crossdraft.lab.harness import gathered
from crossdraft.lab.loadtest import clients
from crossdraft.lab.loadtest.clients import TIMED_OUT, Body, Pieces, RequestFailedError, Stream, http_stream, send
from crossdraft.lab.outputs import Output, OutputFigures
from crossdraft.types.statistics import LaneFigures, Trips
from tests.lab.loadtest import values
from tests.rpc.clock import now, simulated

REQUEST = {"prompt": "def f(", "max_tokens": 8}
REQUESTS = [{"prompt": one} for one in "abcdef"]


def event(value: object) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def token(text: str, milliseconds: float) -> bytes:
    trace = {"kind": "accepted", "milliseconds": milliseconds}
    return event({"choices": [{"text": text}], "crossdraft": trace})


LANE = {"role": "target", "bytes_sent": 3, "bytes_received": 4, "trip_counts": [1, 2], "trip_seconds": 0.5}
LANE |= {"queued_seconds": 0.25, "open_seconds": 2.0, "lost": "", "unknown": 1}
COUNTS = {"passes": 1, "accepted": 1, "corrected": 0, "judged_at": [1], "accepted_at": [1], "method": "slem"}
STATISTICS = {"tokens": 2, **COUNTS, "lanes": [LANE]}
TRIPS = Trips((1, 2), 0.5, 0.25)
FIGURES = OutputFigures(2, 1, 1, 0, (1,), (1,), (LaneFigures("target", "", 3, 4, TRIPS, open_seconds=2.0),))
END = event({"choices": [{"text": ""}], "crossdraft": {"milliseconds": 9.0, "statistics": STATISTICS}})
DONE = event("[DONE]")
STREAM = (token("a", 2.5), token("", 5.0), END, DONE)


class Server:
    """Answers each request with pieces, in chunks."""

    def __init__(self, *pieces: bytes, status: str = "200 OK", keep: bool = True, whole: bool = True) -> None:
        self.pieces, self.status, self.keep, self.whole = pieces, status, keep, whole
        self.heads: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.gone = asyncio.Event()  # a client has closed its connection

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await self._head(reader):
                self.heads.append(head)
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                connection = "keep-alive" if self.keep else "close"
                kind = "Content-Type: application/json\r\nTransfer-Encoding: chunked"
                writer.write(f"HTTP/1.1 {self.status}\r\n{kind}\r\nConnection: {connection}\r\n\r\n".encode())
                for piece in self.pieces:
                    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                    await writer.drain()
                if self.whole:
                    writer.write(b"0\r\n\r\n")
                elif self.keep:
                    await reader.read()  # until the client leaves
                if not (self.keep and self.whole):
                    break
        finally:
            self.gone.set()
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> str:
        try:
            return (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return ""


@asynccontextmanager
async def asking(server: Server, key: str = "") -> AsyncIterator[Stream]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1")
    port = listening.sockets[0].getsockname()[1]
    async with listening, http_stream(f"http://127.0.0.1:{port}", key) as client:
        yield client


async def heard(stream: Stream) -> list[float | OutputFigures]:
    return [one async for one in stream(REQUEST)]


async def test_a_stream_with_a_trace() -> None:
    server = Server(*STREAM)
    async with asking(server, "secret") as client:
        first, second, end = await heard(client)
    assert (first, second, end) == (0.0025, 0.005, FIGURES)
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret" in server.heads[0]
    assert server.bodies == [REQUEST]


async def test_events_may_be_cut_anywhere() -> None:
    whole = b": a comment\r\n\r\n" + b"".join(STREAM[:-1]).replace(b"\n", b"\r\n") + DONE + b"data"
    for size in (1, 7, 64):
        server = Server(*(whole[begin : begin + size] for begin in range(0, len(whole), size)))
        async with asking(server) as client:
            assert len(await heard(client)) == 3


async def test_a_line_that_is_too_long_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LONGEST_LINE", 2**10)
    async with asking(Server(event("x" * 2**12), DONE)) as client:
        with pytest.raises(RequestFailedError, match="an event has a line over") as raised:
            await heard(client)
    assert raised.value.kind == "bad event"


async def test_a_server_that_does_not_say_what_an_output_cost() -> None:
    async with asking(Server(event({"choices": [{"text": "Hi"}]}), DONE)) as client:
        with pytest.raises(RequestFailedError, match="is it crossdraft's") as raised:
            await heard(client)
    assert raised.value.kind == "bad event"


async def test_a_stream_that_is_left_early_is_closed() -> None:
    server = Server(*STREAM[:2], b"data: more", whole=False)
    async with asking(server) as client, aclosing(client(REQUEST)) as stream:
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(120):
            await server.gone.wait()


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Server(b'{"error": "no room"}', status="429 Too Many Requests"), "HTTP 429", "no room"),
        (lambda: Server(*STREAM[:2], keep=False, whole=False), "broken off", "closed the connection"),
        (lambda: Server(*STREAM[:2]), "broken off", "without its last event"),
        (lambda: Server(event({"error": {"message": "gone"}})), "error in the stream", "gone"),
        (lambda: Server(event("nonsense")), "bad event", "means nothing"),
        (lambda: Server(event([1])), "bad event", "means nothing"),
        (lambda: Server(event({"crossdraft": {"statistics": {"passes": 1}}})), "bad event", "means nothing"),
    ],
)
async def test_what_goes_wrong_has_a_kind(make: Callable[[], Server], kind: str, text: str) -> None:
    async with asking(make()) as client:
        with pytest.raises(RequestFailedError, match=text) as raised:
            await heard(client)
    assert raised.value.kind == kind


async def test_nobody_listens() -> None:
    with socket.socket() as taken:  # bound, and nobody listens: a connection is refused
        taken.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with http_stream(base) as client:
            with pytest.raises(RequestFailedError, match=f"cannot connect to {base}") as raised:
                await heard(client)
    assert raised.value.kind == "no connection"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a?b=c", "http://a:99999", "http://[", "http://me:x@a"]
)
def test_no_url(url: str) -> None:
    with pytest.raises(UsageError, match="--url must be such as"):
        base_url(url)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a:8000", "http://a:8000"),
        ("http://a/v1/", "http://a"),
        ("https://a/under/v1", "https://a/under"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert base_url(url) == base


@dataclass
class Timed:
    """Makes two tokens, each after `each` seconds."""

    each: float = 1.0
    under_way: int = 0
    most: int = 0
    seen: list[str] = field(default_factory=list)
    failing: dict[str, Exception] = field(default_factory=dict)
    ended: int = 0

    async def stream(self, asked: Body) -> Pieces:
        prompt = str(asked["prompt"])
        self.seen.append(prompt)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(2):
                await asyncio.sleep(self.each)
                if prompt in self.failing:
                    raise self.failing[prompt]
                yield 0.25
            yield replace(values.FIGURES, tokens=2)
        finally:
            self.under_way -= 1
            self.ended += 1


@simulated
async def run(server: Timed, at_once: int, seconds: float = 100.0) -> list[Output]:
    found = await gathered(lambda one: send(server.stream, one, seconds, now), REQUESTS, at_once)
    assert sorted(server.seen) == list("abcdef")
    assert server.ended == 6
    return found


def test_clients_ask_again_when_they_have_their_answer() -> None:
    server = Timed()
    found = run(server, 2)
    assert server.most == 2
    assert [one.asked for one in found] == [0, 0, 2, 2, 4, 4]
    assert [one.moments for one in found][2] == (3, 4)
    assert [one.per_token for one in found] == [1.0] * 6


def test_what_fails_is_written_down_and_the_others_go_on() -> None:
    server = Timed(failing={"b": RequestFailedError("HTTP 429", "no room")})
    found = run(server, 1)
    assert [(one.error, one.fault) for one in found] == [("", ""), ("HTTP 429", "no room"), *[("", "")] * 4]
    assert (found[1].moments, found[1].ended, found[1].ok) == ((), 3.0, False)


def test_a_request_without_an_end_is_given_up() -> None:
    found = run(Timed(each=8.0), 6, seconds=10.0)
    assert {(one.error, one.moments, one.ended) for one in found} == {(TIMED_OUT, (8.0,), 10.0)}


def test_a_fault_of_the_client_itself_ends_the_test() -> None:
    server = Timed(failing={"c": ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        run(server, 2)
    assert server.under_way == 0
