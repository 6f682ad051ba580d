"""A small HTTP/1.1 client for streams: it notes when bytes come before anything is made of them.

Connections are kept, as clients do, and each has one request at a time.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import httptools

from crossdraft.loadtest.hearing import Failure
from crossdraft.loadtest.origin import Origin

NO_CONNECTION = "no connection"
BROKEN_OFF = "broken off"


@dataclass(frozen=True)
class Head:
    """The beginning of a reply."""

    status: int


@dataclass(frozen=True)
class Piece:
    """Bytes of a reply's body."""

    at: float  # seconds of the monotonic clock
    data: bytes


@dataclass(frozen=True)
class End:
    """The whole reply is there."""

    reusable: bool  # the connection may be used again


Part = Head | Piece | End


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
