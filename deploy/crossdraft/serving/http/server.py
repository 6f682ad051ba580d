"""The HTTP server: listening, TLS whose files may be replaced, a ready line, and draining."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil

import uvicorn
from fastapi import FastAPI

from crossdraft.config.api import ConnectionOptions
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.security import FrontFiles, Renewed
from crossdraft.rpc.server import Listening, Serving, warn_if_open
from crossdraft.serving.http.connections import Connection, Connections
from crossdraft.serving.http.errors import ENDS

log = logging.getLogger(__name__)
TLS_CLOSE_SECONDS = 2.0  # that a client has to end a connection that this side has ended
ACCEPT_PAUSE = 1.0  # seconds, where no connection can be taken
BACKLOG = 2048  # connections waiting to be accepted
LAST_SECONDS = 1.0  # for clients to read the last event of a stream
ENDING_SECONDS = 10  # for requests that are ended after the grace period to release what they hold


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signal handlers, with an event for when it listens, and with requests ended after the grace.

    They are cancelled, which gives streams a last event; uvicorn itself would log them as errors of the application.
    """

    def __init__(self, config: uvicorn.Config, grace_seconds: float, limits: ConnectionOptions) -> None:
        super().__init__(config)
        self._connections = Connections(limits)
        self.listens = asyncio.Event()
        self._grace_seconds = grace_seconds
        self.hurried = asyncio.Event()  # ends the grace period
        self._accepting: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then sets `listens`."""
        await super().startup([])
        loop = asyncio.get_running_loop()
        for listens in sockets or ():
            if self.config.ssl is None:
                self.servers.append(await loop.create_server(self._connection, sock=listens, backlog=BACKLOG))
            else:
                listens.setblocking(False)
                self._accepting.append(asyncio.create_task(self._accept(listens)))
        self.listens.set()

    def _connection(self) -> Connection:
        return Connection(self._connections, self.config, self.server_state, self.lifespan.state)

    async def _accept(self, listens: socket.socket) -> None:
        """Takes connections whose TLS handshake is to come; servers of asyncio hide them until it has."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as handshakes:
            while True:
                try:
                    connected, client = await loop.sock_accept(listens)
                except OSError as error:
                    log.warning("no connection can be taken: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE)
                else:
                    handshakes.create_task(self._shake_hands(connected, client))

    async def _shake_hands(self, connected: socket.socket, client: tuple[str, int]) -> None:
        made = self._connection()
        made.hold(connected, client)
        seconds = self._connections.limits.header_seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: made,
                connected,
                ssl=self.config.ssl,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=TLS_CLOSE_SECONDS,
            )
        except OSError as error:  # of TLS, too
            log.debug("%s: no TLS: %s", client, error)
            self._connections.remove(made)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; ends requests that are open at the end of the grace period."""
        if self.server_state.tasks and self._grace_seconds:
            text = "waiting up to %g s (--grace-seconds) for %d open requests to end"
            log.warning(text, self._grace_seconds, len(self.server_state.tasks))
        for accepting in self._accepting:
            accepting.cancel()
        closing = asyncio.create_task(self._close_after_grace())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_after_grace(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.hurried.wait(), self._grace_seconds)
        if self.server_state.tasks:
            over = f": the grace period of {self._grace_seconds:g} s is over (--grace-seconds)"
            why = "" if self.hurried.is_set() else over
            log.warning("%d open requests are ended%s", len(self.server_state.tasks), why)
        for task in list(self.server_state.tasks):
            task.cancel(ENDS.message)  # by which it is told from a client that has left
        await asyncio.sleep(LAST_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@dataclass(eq=False)
class HttpServer(Serving):
    """An HTTP server in this process's event loop. Use it with `async with`."""

    app: FastAPI
    listening: Listening  # of its fields host, port, tls (if FrontFiles) and grace_seconds
    marks: Mapping[str, str] = field(default_factory=dict)  # further fields of the ready line
    limits: ConnectionOptions = field(default_factory=ConnectionOptions)
    address: str = ""  # host:port, once it listens
    _server: _Uvicorn | None = None
    _task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Begins to listen; returns the address. Raises CannotListen: the port is taken, or not for this user, or the
        host is not of this machine; TlsError: certificate or key cannot be used."""
        tls = self.listening.tls
        secured = _renewed_context(tls) if isinstance(tls, FrontFiles) else None
        where = await asyncio.to_thread(_bound, self.listening)
        config = uvicorn.Config(
            self.app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_context_factory=None if secured is None else lambda *_: secured,
            timeout_graceful_shutdown=ceil(self.listening.grace_seconds) + ENDING_SECONDS,
        )
        self._server = _Uvicorn(config, self.listening.grace_seconds, self.limits)
        self._task = asyncio.create_task(self._server.serve([where]))
        self.address = f"{self.listening.host}:{where.getsockname()[1]}"
        await self._server.listens.wait()
        if secured is None:
            warn_if_open(self.listening, self.address)
        return self.address

    async def drain(self) -> None:
        """Accepts no new connection, lets requests go on for the grace period, and ends; at once if it is cancelled."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            try:
                await asyncio.shield(self._task)
            except asyncio.CancelledError:
                self._server.hurried.set()
                await self._task
                raise

    def ready(self) -> dict[str, object]:
        return {"role": "http", "address": self.address, **self.marks}


def _bound(listening: Listening) -> socket.socket:
    host = listening.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, listening.port), family=family, backlog=BACKLOG, reuse_port=listening.shared)
    except OSError as error:
        raise CannotListen.at(f"{listening.host}:{listening.port}", error) from error


def _renewed_context(files: FrontFiles) -> ssl.SSLContext:
    """What the server listens with; each handshake takes the certificate as it is then. Raises TlsError."""
    renewed = Renewed(files, lambda: _context(files))

    def renew(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Called in each handshake, whether the client names a host or not."""
        connection.context = renewed.now()

    context = renewed.now()
    context.sni_callback = renew
    return context


def _context(files: FrontFiles) -> ssl.SSLContext:
    files.load()  # its errors say more than those of ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["http/1.1"])
    return context
