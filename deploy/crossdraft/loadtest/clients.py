"""Outputs by OpenAI's HTTP API."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from crossdraft.client import Pipeline, RequestError, Statistics
from crossdraft.loadtest.prompts import Question
from crossdraft.loadtest.timeline import Chunk, Failure, Figures, LaneFigures, Over, figures_of
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.rpc.generation import Generated, GenerationClient, GenerationEnded

DONE = "[DONE]"
SECOND = 1000.0  # milliseconds


@dataclass
class Events:
    """Server-sent events of a body that comes in pieces. Pure."""

    rest: bytes = b""  # of an event that is not whole

    def feed(self, data: bytes) -> Iterator[str]:
        """The data of the events that are whole now."""
        *whole, self.rest = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.decode("utf-8", "replace").split("\n") if line[:5] == "data:"]
            if lines:
                yield "\n".join(lines)


# A small HTTP/1.1 client for streams: it notes when bytes come before anything is made of them.
#
# Connections are kept, as clients do, and each has one request at a time.


@dataclass(frozen=True)
class Piece:
    """Bytes of a reply's body."""

    at: float  # seconds of the monotonic clock
    data: bytes


@dataclass
class Reading:
    """What the events of one reply say. Pure."""

    tokens: int | None = None
    figures: Figures | None = None
    done: bool = False
    events: Events = field(default_factory=Events)

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """The chunks with a token that a piece of the body ends. Raises Failure."""
        for event in self.events.feed(piece.data):
            if event == DONE:
                self.done = True
                continue
            chunk = _object(event)
            if "error" in chunk:
                raise Failure("error in the stream", str(chunk["error"]))
            if usage := chunk.get("usage"):
                self.tokens = int(usage["completion_tokens"])
            trace = chunk.get("crossdraft") or {}
            if statistics := trace.get("statistics"):
                self.figures = _figures(statistics)
            if _has_token(chunk, trace):
                made = trace.get("milliseconds")
                yield Chunk(piece.at, None if made is None else made / SECOND)


@dataclass(frozen=True)
class Head:
    """The beginning of a reply."""

    status: int


class Exchange(asyncio.Protocol):
    """One connection, and the reply that is coming over it. The `on_` methods are the parser's."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[Part | None] = asyncio.Queue()  # None: the connection is lost
        self.transport: asyncio.Transport
        self.lost = False
        self._parser = httptools.HttpResponseParser(self)
        self._at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio.Protocol has it."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """As asyncio.Protocol has it."""
        self._at = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio.Protocol has it."""
        self.lost = True
        self.parts.put_nowait(None)

    def send(self, request: bytes) -> None:
        """One request; its reply's parts follow."""
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(request)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self.parts.put_nowait(Head(self._parser.get_status_code()))

    def on_body(self, body: bytes) -> None:
        """Bytes of the body."""
        self.parts.put_nowait(Piece(self._at, body))

    def on_message_complete(self) -> None:
        """The end."""
        self.parts.put_nowait(End(self._parser.should_keep_alive()))


# The URL of a server. Pure.


@dataclass(frozen=True)
class Origin:
    """Where an HTTP server is, and where its API begins."""

    host: str
    port: int
    encrypted: bool
    root: str  # path before /v1

    @property
    def name(self) -> str:
        """As the header Host has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @staticmethod
    def parsed(url: str) -> "Origin":
        """From http://HOST:PORT or https://, perhaps with a path; `/v1` at its end may be there or not.

        Raises:
            ValueError: this is no such URL.
        """
        complaint = f"--url must be such as http://127.0.0.1:8000, got {url}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(complaint) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(complaint)
        encrypted = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        return Origin(parts.hostname, port or (443 if encrypted else 80), encrypted, root)


class HttpStreams:
    """Requests to one server. Use it with `async with`.

    Args:
        origin: the server.
        key: of the API; empty: none.
    """

    def __init__(self, origin: Origin, key: str = "") -> None:
        self._origin = origin
        self._tls = ssl.create_default_context() if origin.encrypted else None
        headers = {"Host": origin.name, "Accept": "text/event-stream"}
        headers |= {"Content-Type": "application/json", "User-Agent": "crossdraft-loadtest"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._headers: Mapping[str, str] = headers
        self._idle: list[Exchange] = []

    async def __aenter__(self) -> "HttpStreams":
        return self

    async def __aexit__(self, *_: object) -> None:
        for exchange in self._idle:
            exchange.transport.abort()

    async def post(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Head | Piece, None]:
        """The head of the reply, then its body as it comes. Closing it early closes the connection.

        Raises:
            Failure: there is no connection, or it breaks off.
        """
        exchange = await self._exchange()
        reusable = False
        try:
            exchange.send(self._request(path, json.dumps(body).encode()))
            while not isinstance(part := await exchange.parts.get(), End):
                if part is None:
                    raise Failure(BROKEN_OFF, "the server closed the connection in the middle of its reply")
                yield part
            reusable = part.reusable and not exchange.lost
        finally:
            if reusable:
                self._idle.append(exchange)
            else:
                exchange.transport.abort()

    async def _exchange(self) -> Exchange:
        while self._idle:
            exchange = self._idle.pop()
            if not exchange.lost:
                return exchange
        loop, origin = asyncio.get_running_loop(), self._origin
        try:
            _, exchange = await loop.create_connection(Exchange, origin.host, origin.port, ssl=self._tls)
        except OSError as error:
            raise Failure(NO_CONNECTION, f"cannot connect to {origin.name}: {error}") from error
        return exchange

    def _request(self, path: str, body: bytes) -> bytes:
        lines = [
            f"POST {self._origin.root}{path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in self._headers.items()),
        ]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@dataclass(frozen=True, eq=False)
class OverHttp:
    """A server of OpenAI's API: this project's, or another one (`Wishes.trace` false)."""

    streams: HttpStreams

    async def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """As in `hearing.Way`."""
        reading, at, refused = Reading(), 0.0, b""
        status = 200
        async with aclosing(self.streams.post(question.path, question.body)) as parts:
            async for part in parts:
                match part:
                    case Head():
                        status = part.status
                    case Piece() if status != 200:
                        refused += part.data
                    case Piece():
                        at = part.at
                        for chunk in reading.read(part):
                            yield chunk
        if status != 200:
            raise Failure(f"HTTP {status}", refused[:1000].decode("utf-8", "replace"))
        if not reading.done:
            raise Failure(BROKEN_OFF, "the stream ended without its last event")
        yield Over(at, reading.tokens, reading.figures)


def _object(event: str) -> dict[str, Any]:
    try:
        found = json.loads(event)
    except ValueError as error:
        raise Failure("bad event", f"an event is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Failure("bad event", f"an event is no object: {event[:200]}")
    return found


def _figures(statistics: dict[str, Any]) -> Figures:
    try:
        return figures_of(statistics)
    except ValueError as error:
        raise Failure("bad event", str(error)) from error


def _has_token(chunk: dict[str, Any], trace: dict[str, Any]) -> bool:
    """With a trace each token has a chunk with its kind; else a chunk with any text counts."""
    if trace:
        return trace.get("kind") is not None
    choices = chunk.get("choices") or [{}]
    return bool(choices[0].get("text") or (choices[0].get("delta") or {}).get("content"))


NO_CONNECTION = "no connection"
BROKEN_OFF = "broken off"


@dataclass(frozen=True)
class End:
    """The whole reply is there."""

    reusable: bool  # the connection may be used again


Part = Head | Piece | End


# Outputs by crossdraft.v1.Generation.


@dataclass(frozen=True, eq=False)
class OverGrpc:
    """A server of Generation."""

    client: GenerationClient

    async def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """As in `hearing.Way`."""
        try:
            async with aclosing(self.client.generate(question.for_grpc)) as replies:
                async for reply in replies:
                    at = time.monotonic()
                    match reply:
                        case Generated():
                            yield Chunk(at, reply.milliseconds / SECOND)
                        case GenerationEnded():
                            figures = _over_grpc_figures(reply.statistics)
                            yield Over(at, figures.tokens, figures)
        except ServiceError as error:
            raise Failure(name_of(error).replace("_", " "), str(error)) from error


def _over_grpc_figures(statistics: Statistics) -> Figures:
    lanes = [
        {**vars(lane), "trip_counts": lane.trips.counts, "trip_seconds": lane.trips.seconds,
         "queued_seconds": lane.trips.queued_seconds}
        for lane in statistics.lanes
    ]  # fmt: skip
    return figures_of({**vars(statistics), "lanes": lanes})


# Outputs by a pipeline in this process: gRPC to the services, and no front.


@dataclass(frozen=True, eq=False)
class InProcess:
    """A connected pipeline with the default drafter, and one without, for requests that ask for plain decoding."""

    pipeline: Pipeline
    plain: Pipeline

    async def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """As in `hearing.Way`."""
        pipeline = self.plain if question.wishes.drafter == "" else self.pipeline
        try:
            async with pipeline.run(question.for_pipeline) as generation:
                async for _ in generation:
                    yield Chunk(time.monotonic())
                assert generation.statistics is not None
                yield Over(time.monotonic(), generation.statistics.tokens, figures_in(generation.statistics))
        except RequestError as error:
            raise Failure("bad request", str(error)) from error
        except ServiceError as error:
            raise Failure(name_of(error).replace("_", " "), str(error)) from error


def figures_in(statistics: Statistics) -> Figures:
    """What a test needs of an output's statistics."""
    return Figures(
        statistics.tokens,
        statistics.passes,
        statistics.accepted,
        statistics.corrected,
        statistics.judged_at,
        statistics.accepted_at,
        statistics.verification_seconds,
        tuple(
            LaneFigures(
                lane.role,
                lane.bytes_sent,
                lane.bytes_received,
                lane.trips.counts,
                lane.trips.seconds,
                lane.trips.queued_seconds,
                lane.model_seconds,
                lane.codec_seconds,
                lane.open_seconds,
                lane.idle_seconds,
                lane.lost,
            )
            for lane in statistics.lanes
        ),
    )
