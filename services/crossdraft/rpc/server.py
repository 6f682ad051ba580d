"""A service's lifetime: listening, health, reflection, and an end that lets sessions finish."""

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, Generic, Self, TextIO

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from crossdraft.config.service import SessionOptions
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.event_loop import LoopLag, until_signalled
from crossdraft.rpc.frames import Answer, Ask, Opening, RoleCodec
from crossdraft.rpc.handlers import Handlers, Service
from crossdraft.rpc.memory import MemoryEndpoint
from crossdraft.rpc.metrics import Exporter, ServiceMetrics
from crossdraft.rpc.security import FrontFiles, TlsFiles, server_credentials
from crossdraft.rpc.transport import SERVER_OPTIONS, ChannelOptions, MessageLimit
from crossdraft.types.statistics import ModelStatistics

log = logging.getLogger(__name__)


class Serving(ABC):
    """What serves while an `async with` block runs."""

    @abstractmethod
    def ready(self) -> dict[str, object]:
        """For the ready line: what is served, and where."""

    @abstractmethod
    async def start(self) -> object:
        """Begins to serve."""

    @abstractmethod
    async def drain(self) -> None:
        """Lets what is under way go on for the grace period, and ends; if it is cancelled, at once."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and its limits. Raises ValueError: the host is empty, or a number is out of its range."""

    host: str = "127.0.0.1"
    port: int | None = 0  # 0: any that is free; None: a service is for clients in its own process only
    limit: MessageLimit = field(default_factory=MessageLimit)
    grace_seconds: float = 10.0  # how long open sessions may go on after the order to stop
    tls: TlsFiles | FrontFiles | None = None  # None: plaintext, for whoever can reach the port
    sessions: SessionOptions = field(default_factory=SessionOptions)
    metrics_port: int | None = None  # where Prometheus reads metrics over HTTP, 0: any that is free; None: nowhere
    shared: bool = False  # other processes listen on the same port

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must not be empty; 0.0.0.0 listens on all interfaces")
        if ":" in self.host:
            object.__setattr__(self, "host", f"[{self.host.strip('[]')}]")  # as in an address
        if not all(0 <= (port or 0) <= 65535 for port in (self.port, self.metrics_port)):
            raise ValueError(f"ports must be 0 (any that is free) to 65535, got {self.port} and {self.metrics_port}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ValueError(f"grace_seconds must be 0 or more, got {self.grace_seconds}")

    def check_free(self, option: str = "") -> None:
        """Raises CannotListen, with the option that sets the port, if that cannot be had now, before a model is loaded,
        or if nothing has the host's name."""
        try:
            found = socket.getaddrinfo(self.host.strip("[]"), self.port or 0, type=socket.SOCK_STREAM)
            family, *_, address = min(found)  # IPv4, if there is both
            with socket.socket(family) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                if self.shared:
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                tried.bind(address)
        except OSError as error:
            raise CannotListen.at(f"{self.host}:{self.port or 0}", error, option) from error

    @property
    def local(self) -> bool:
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:  # a name
            return self.host == "localhost"


def warn_if_open(listening: Listening, address: str) -> None:
    """Logs a warning if others can reach an address without TLS: they could read and use it."""
    if not listening.local:
        log.warning(
            "%s is open to whoever can reach it, unencrypted: give it a certificate (see its --help; "
            "`crossdraft certs` makes them), or listen on 127.0.0.1",
            address,
        )


def _is_fault(record: logging.LogRecord) -> bool:
    """Whether gRPC logs more than that a client left while it was being written to."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The tasks that answer a server's calls: `grpc.aio.Server.stop` cancels these, but does not wait for them."""

    MAX_SECONDS = 5.0  # that they may take to end

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        """Called within a call's own task, before its handler is."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await continuation(details)

    async def ended(self) -> None:
        """Returns once all are, or after MAX_SECONDS."""
        if self._tasks and (await asyncio.wait(self._tasks, timeout=self.MAX_SECONDS))[1]:
            log.warning("%d calls did not end in %g s; they are left", len(self._tasks), self.MAX_SECONDS)


class Endpoint:
    """One port with services on it, standard health and reflection among them. Must be made in a running event loop."""

    def __init__(
        self,
        listening: Listening,
        services: "Mapping[str, grpc.GenericRpcHandler[bytes, bytes]]",
        options: ChannelOptions = SERVER_OPTIONS,
    ) -> None:
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_fault)
        self._listening = listening
        self._names = tuple(services)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        # Two servers on one port would share its calls at random: unless that is meant, a taken port is an error.
        sharing = (("grpc.so_reuseport", int(listening.shared)),)
        self._calls = Calls()
        self._server = grpc.aio.server(
            interceptors=(self._calls,), options=options + listening.limit.options() + sharing
        )
        self._server.add_generic_rpc_handlers(tuple(services.values()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = ""  # host:port, once it listens

    async def start(self, serving: bool = True) -> str:
        """Begins to listen; returns the address. `serving` is what the health service reports first.

        Raises CannotListen: the port is taken, or not for this user, or the host is not of this machine; TlsError:
        certificate or key cannot be used.
        """
        wanted, tls = f"{self._listening.host}:{self._listening.port}", self._listening.tls
        try:
            if tls is None:
                port = self._server.add_insecure_port(wanted)
            else:
                port = self._server.add_secure_port(wanted, server_credentials(tls))
        except RuntimeError as error:
            raise CannotListen.at(wanted) from error
        await self._server.start()
        await self.report(serving)
        self.address = f"{self._listening.host}:{port}"
        if tls is None:
            warn_if_open(self._listening, self.address)
        return self.address

    async def report(self, serving: bool) -> None:
        """What the health service says of the services. Of the process, which has no name there, it says SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def drain(self) -> None:
        """Reports NOT_SERVING, takes no new call, lets open ones go on for the grace period, and ends."""
        await self._health.enter_graceful_shutdown()
        try:
            await self._server.stop(self._listening.grace_seconds)
        except asyncio.CancelledError:
            await self._server.stop(None)
            raise
        finally:
            await self._calls.ended()


class Server(Serving, Generic[Opening, Ask, Answer]):
    """A server of one service: over gRPC, and for clients in its own process. Must be made in a running event loop."""

    def __init__(
        self,
        role: RoleCodec[Opening, Ask, Answer],
        service: Service[Opening, Ask, Answer],
        listening: Listening,
        marks: Mapping[str, str | float] = MappingProxyType({}),  # further fields of the ready line
        statistics: Callable[[], ModelStatistics] | None = None,  # of its model, for metrics; None: it has none
    ) -> None:
        self._marks = dict(marks)
        self._role = role
        self.service = service
        self._listening = listening
        handlers = self._handlers = Handlers(role, service, listening.sessions, listening.limit)
        self.activity = handlers.activity
        self._endpoint = None
        if listening.port is not None:
            self._endpoint = Endpoint(listening, {role.service: handlers.registered()})
        self._here = MemoryEndpoint(handlers)
        self.here = self._here.address  # for clients in its own process
        self.registry = CollectorRegistry()
        self.own_metrics = ServiceMetrics(role.name, service.description.model, handlers.activity, statistics)
        self.registry.register(self.own_metrics)
        self._lag = LoopLag(self.registry, role.name)
        self._exporter = Exporter(self.registry)
        self._statistics = statistics
        self.metrics = ""  # host:port where Prometheus reads, once it listens; empty: nowhere

    @property
    def work(self) -> tuple[int, float]:
        """Sessions that are open, and the seconds that its model has computed so far."""
        return self.activity.open, 0.0 if self._statistics is None else self._statistics().seconds

    def statistics(self) -> ModelStatistics:
        """Of its model, which must have some."""
        assert self._statistics is not None
        return self._statistics()

    @property
    def address(self) -> str:
        """For everybody; where it listens nowhere, that for its own process."""
        return self.here if self._endpoint is None else self._endpoint.address

    async def start(self) -> str:
        """Begins to listen; returns the address. Raises CannotListen as `Endpoint.start`."""
        listening = self._listening
        self._lag.start()
        if listening.metrics_port is not None:
            self.metrics = self._exporter.start(listening.host, listening.metrics_port)
            self._marks["metrics"] = self.metrics
        self._here.start()
        try:
            return self.address if self._endpoint is None else await self._endpoint.start()
        except BaseException:
            await self._exporter.stop()
            raise

    async def drain(self) -> None:
        """Reports NOT_SERVING, takes no new session, lets open ones go on for the grace period, and ends."""
        self._handlers.drain()
        ends = [self._here.drain(self._listening.grace_seconds)]
        try:
            await asyncio.gather(*ends, *([] if self._endpoint is None else [self._endpoint.drain()]))
        finally:
            await self._exporter.stop()
            await self.service.close()
            self._lag.stop()

    def ready(self) -> dict[str, object]:
        about = self.service.description
        told = {"address": self.address, "model": about.model, "fingerprint": about.fingerprint}
        return {"role": self._role.name, **told, **self._marks}


async def serve(server: Serving, output: TextIO = sys.stdout) -> None:
    """Serves until SIGTERM, SIGINT or, unless nohup has it ignored, SIGHUP; then drains, which a second one ends.
    Prints a ready line. Raises CannotListen."""

    async def serving() -> None:
        async with server:
            freeze_heap()
            print(json.dumps({"ready": True, **server.ready()}), file=output, flush=True)
            await asyncio.Event().wait()

    await until_signalled(serving(), always=(signal.SIGINT, signal.SIGTERM))  # a shell's background ignores SIGINT


@contextmanager
def without_collections() -> Iterator[None]:
    """Garbage is not collected during the block. For what imports torch and transformers, which takes 3.7 s of a
    processor then, and else 4.8 s: what imports make stays, and each collection would go through all of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_heap() -> None:
    """Makes the garbage collector ignore all objects of now, and run seldom. For a process that has loaded its model.

    A full collection goes through every object. With a model, its libraries and a vocabulary there are a million of
    them, and each collection would pause everything for 240 ms. By default it runs several times within a frame of many
    outputs, after which what that made is gone: ended sessions leave no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
