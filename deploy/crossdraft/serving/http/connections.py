"""Connections of HTTP clients, bounded before anything that they send is looked at.

Uvicorn waits for ever, and takes connections until there are no file handles; httptools is quadratic in a header.
"""

import asyncio
import json
import logging
import os
import re
import resource
import socket
from contextlib import suppress
from functools import partial
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from crossdraft.config.api import ConnectionOptions
from crossdraft.serving.http.errors import INVALID, RefusedError

log = logging.getLogger(__name__)
LIMITS = "CROSSDRAFT_CONNECTION_LIMITS"  # in the environment of `limit_uvicorn`: a JSON object, or the defaults
MAX_PIPELINED = 64  # requests that a client may send before it has been answered
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)  # to HTTP/2, as Java's client asks: its body would be lost
KEPT = 32  # file handles for everything but connections, besides a quarter of the others


class Connections:
    """Those of a server. Where there are too many, the one that has kept the server waiting for longest is closed."""

    def __init__(self, limits: ConnectionOptions) -> None:
        self.limits = limits
        handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = 2**31 if handles == resource.RLIM_INFINITY else max(1, (handles - KEPT) * 3 // 4)
        self._all: dict[Connection, str] = {}  # their addresses, in the order of their latest replies

    def add(self, new: "Connection") -> None:
        """Takes one in. If all others are at work, and there is no room, it is itself closed."""
        address = self._all[new] = new.client[0] if new.client else ""
        mates = [one for one, its in self._all.items() if its == address]
        crowded = len(mates) > self.limits.max_connections_per_address
        if crowded or len(self._all) > self._most:
            among = mates if crowded else self._all
            next(one for one in among if one.waits).give_up("there are too many connections")

    def replied(self, to: "Connection") -> None:
        if to in self._all:
            self._all[to] = self._all.pop(to)

    def remove(self, gone: "Connection") -> None:
        self._all.pop(gone, None)


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol, with limits on what comes in, and on when."""

    def __init__(self, others: Connections, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._others = others
        self._limits = others.limits
        self._most = others.limits.max_header_kib * 1024
        self._pending = 0  # bytes since the request began, or since the latest piece of its body
        self._answered: RequestResponseCycle | None = None  # the request that is; `cycle` is the latest that has come
        self._socket: socket.socket | None = None  # until the TLS handshake is over
        self._timer: asyncio.TimerHandle | None = None  # while part of a request is missing

    @property
    def waits(self) -> bool:
        """Whether the client is to send something now: a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def hold(self, one: socket.socket, client: tuple[str, int]) -> None:
        """Counts before the TLS handshake, until which there is no transport."""
        self.client, self._socket = client[:2], one
        self._others.add(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = None
        self._expect(self._limits.header_seconds)
        self._others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._others.remove(self)
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn tells only the latest
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Gives up a request whose head, or what frames its body, is too long."""
        self._pending += len(data)
        super().data_received(UPGRADE.sub(b"\r\nx-grade:", data))  # no JSON has it; clients send a head at once
        if self._timer is None and self.waits:  # for what is between requests
            self._expect(self._limits.header_seconds)
        if self._pending > self._most:
            self._refuse(431, f"a request's headers may have {self._most} bytes; send less")

    def on_message_begin(self) -> None:
        """As uvicorn's; ends the parser where thousands of requests have come in one piece."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self.give_up("too many requests wait for replies")
            raise ConnectionAbortedError
        self._pending = max(1, self._pending)  # none is counted of what came with the end of another request
        self._expect(self._limits.header_seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """As uvicorn's; what has come in one piece is looked at here."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._most:
            self._refuse(431, f"a request's headers may have {self._most} bytes; send less")
            return
        self._expect(self._limits.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending = 0
        self._expect(None)
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._others.replied(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def give_up(self, why: str) -> None:
        log.info("%s: the connection is closed: %s", ":".join(map(str, self.client or ())), why)
        self._others.remove(self)
        if self._socket is None:
            self.transport.abort()
        else:
            with suppress(OSError):  # it has just ended
                self._socket.shutdown(socket.SHUT_RDWR)

    def _expect(self, seconds: float | None) -> None:
        """The rest of a request is to come within so many seconds; None: there is none."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.flow.read_paused or not self.waits:  # it is not the client that is waited for
            self._expect(self._limits.header_seconds)
        elif self._pending or (self.cycle is not None and not self.cycle.response_complete):
            self._refuse(408, "the request did not come in time; send it again")
        else:
            self.give_up("no request came")

    def _refuse(self, status: int, text: str) -> None:
        """Closes the connection, with a reply unless one has begun."""
        if self.transport.is_closing():
            return
        log.info("%s: %s", ":".join(map(str, self.client or ())), text)
        answered = self._answered
        if answered is None or answered.response_complete or not answered.response_started:
            body = RefusedError(status, text, INVALID, "request_timeout" if status == 408 else None).body
            raw = body.model_dump_json().encode()
            head = f"content-type: application/json\r\ncontent-length: {len(raw)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + raw)
        self.transport.close()


def limit_uvicorn() -> list[object]:
    """Makes servers that this process starts from now on, as a proxy of Ray Serve does, limit their connections."""
    limits = ConnectionOptions(**json.loads(os.environ.get(LIMITS, "{}")))
    HTTP_PROTOCOLS["auto"] = partial(Connection, Connections(limits))  # type: ignore[assignment]  # it need be no name
    return []  # middleware
