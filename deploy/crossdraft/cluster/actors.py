"""An actor that hosts a gRPC server, in its event loop, and is announced to the directory."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from crossdraft.cluster.config import (
    DrafterService,
    Fronted,
    Grpc,
    Resources,
    Service,
    contents,
    digest_of,
    tls_paths,
    version_of,
)
from crossdraft.cluster.directory import Entry, Role, announced
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.loader import Pruning
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.handlers import SessionLimits
from crossdraft.rpc.security import FrontFiles, TlsFiles
from crossdraft.rpc.server import Listening, Server, freeze_heap
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.grpc import GenerationOptions, GenerationServer, serve_generation
from crossdraft.serving.logs import LogFormat, logged
from crossdraft.target.service import ServeTarget, target_server

if TYPE_CHECKING:
    from crossdraft.cluster.application import Measuring

log = logging.getLogger(__name__)
PORT_SECONDS = 5.0  # for which a port that is taken is waited for
PORT_EVERY = 0.25  # seconds
AGAIN_AFTER = 2.0  # seconds before a process ends that could not serve when it was started again


# What an actor can host.


class Hosting(Protocol):
    """A server."""

    @property
    def address(self) -> str:
        """host:port, once it serves."""
        ...

    @property
    def metrics(self) -> str:
        """host:port where Prometheus reads; empty: nowhere."""
        ...

    async def start(self) -> str:
        """Begins to serve; returns the address; raises CannotListen, and may be called again then."""
        ...

    async def drain(self) -> None:
        """Takes nothing new, lets what is open go on for the grace period, and ends."""
        ...


class Hosted(Protocol):
    """What an actor serves; a value that can be pickled, and shown in full by `repr`."""

    @property
    def role(self) -> Role:
        """What it does."""
        ...

    @property
    def model(self) -> str:
        """Name of the served model; empty for a front."""
        ...

    @property
    def name(self) -> str:
        """Of a drafter, else empty."""
        ...

    @property
    def port(self) -> int:
        """Where it listens; 0: any free port."""
        ...

    @property
    def resources(self) -> Resources:
        """What it takes of its node."""
        ...

    @property
    def log_format(self) -> LogFormat:
        """Of its process."""
        ...

    @property
    def digest(self) -> str:
        """Differs when what it hosts does, contents of files and the installed package included."""
        ...

    async def server(self, host: str) -> Hosting:
        """Made in the process that serves; `host` is its node's address.

        Raises:
            ValueError: it cannot be served with these options.
        """
        ...


class HostActor:
    """One replica. Ray starts it again when its process or its node dies; it then announces where it is now."""

    def __init__(self, hosted: Hosted) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(hosted.log_format))
        self._hosted = hosted
        self._entry: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._serving = asyncio.get_running_loop().create_task(self._serve())
        self._serving.add_done_callback(self._ended)

    async def ready(self) -> Entry:
        """Where it answers, once it does.

        Raises:
            ValueError: it cannot be served with these options.
            CannotListen: the port cannot be had.
        """
        return await asyncio.shield(self._entry)

    async def drain(self) -> None:
        """Takes nothing new, lets what is open go on for the grace period, and ends."""
        self._stop.set()
        await asyncio.wait([self._serving])

    async def _serve(self) -> None:
        hosted = self._hosted
        node = node_address()
        server = await hosted.server(node)
        await _begun(server, hosted.port)
        freeze_heap()
        try:
            entry = entry_of(hosted.role, hosted.model, hosted.name, server.address, server.metrics, node)
            async with announced(entry):
                self._entry.set_result(entry)
                await self._stop.wait()
        finally:
            await server.drain()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What fails at the first start is told to who asks; after that only a new process helps."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        again = ray.get_runtime_context().was_current_actor_reconstructed
        if not (self._entry.done() or again):
            self._entry.set_exception(error)
            return
        log.critical("%s ended: %s", self._hosted.role, error, exc_info=error)
        asyncio.get_running_loop().call_later(AGAIN_AFTER, os._exit, 1)


async def _begun(server: Hosting, port: int) -> None:
    """It serves; a port that is wanted may still be that of the one before, for a moment. Raises CannotListen."""
    until = time.monotonic() + (PORT_SECONDS if port else 0.0)
    while True:
        try:
            await server.start()
        except CannotListen:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(PORT_EVERY)
        else:
            return


def node_address() -> str:
    """Of the node where this process runs."""
    return str(ray.util.get_node_ip_address())


def entry_of(role: Role, model: str, name: str, address: str, metrics: str, node: str) -> Entry:
    """What this process, an actor, says of itself."""
    id = ray.get_runtime_context().get_actor_id()
    assert id is not None  # only a driver has none
    return Entry(id, role, model, name, address, metrics, node, os.getpid())


# Targets and drafters, as what actors host.

ANY_PORT = 0


@dataclass(frozen=True)
class HostedService:
    """One replica of a target or a drafter."""

    model: str  # name of the served model
    service: Service  # a DrafterService for a drafter
    tls: TlsFiles | None
    grace_seconds: float  # for open sessions, when it is to stop
    metrics: bool  # it answers Prometheus
    log_format: LogFormat

    @property
    def name(self) -> str:
        """As Hosted.name."""
        return self.service.name if isinstance(self.service, DrafterService) else ""

    @property
    def role(self) -> Role:
        """As Hosted.role."""
        return Role.DRAFTER if self.name else Role.TARGET

    @property
    def port(self) -> int:
        """As Hosted.port."""
        return self.service.port

    @property
    def resources(self) -> Resources:
        """As Hosted.resources."""
        return self.service.resources

    @property
    def digest(self) -> str:
        """As Hosted.digest; how many there are makes no difference."""
        alone = self.service.model_copy(update={"replicas": 1})
        rest = (self.model, self.tls, self.grace_seconds, self.metrics, self.log_format)
        return version_of(alone, rest, contents((*self._files(), *tls_paths(self.tls))))

    def _files(self) -> Iterator[Path]:
        if isinstance(self.service, DrafterService):
            yield from (path for path in (self.service.frequencies, self.service.affinity) if path is not None)

    async def server(self, host: str) -> Server[Any, Any, Any]:
        """As Hosted.server; loads the model."""
        service, limits = self.service, self.service.sessions
        sessions = SessionLimits(limits.most, limits.per_peer, limits.idle_seconds)
        port = ANY_PORT if self.metrics else None
        listening = Listening(
            host, service.port, grace_seconds=self.grace_seconds, tls=self.tls, sessions=sessions, metrics_port=port
        )
        model = ModelOptions(
            name=service.model,
            dtype=service.dtype,
            device=service.device,
            budget=service.cache_mib,
            max_length=service.max_model_len,
            trust_remote_code=service.trust_remote_code,
            threads=service.threads,
            pruning=_pruning(service),
            reuse=service.enable_prefix_caching,
            eager=service.enforce_eager,
        )
        if isinstance(service, DrafterService):
            return await drafter_server(ServeDrafter(model, listening, service.affinity))
        return await target_server(ServeTarget(model, listening))


def _pruning(service: Service) -> Pruning | None:
    if isinstance(service, DrafterService) and service.vocab_keep is not None and service.frequencies is not None:
        return Pruning(service.vocab_keep, service.frequencies)
    return None


# The front for gRPC clients, as what an actor hosts.

ALL_ADDRESSES = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True)
class HostedGrpc:
    """The front for gRPC clients, as what an actor hosts."""

    told: Fronted
    grpc: Grpc
    grace_seconds: float  # for open outputs, when it is to stop

    role = Role.GRPC
    model = ""
    name = ""

    @property
    def port(self) -> int:
        """As Hosted.port."""
        return self.grpc.port

    @property
    def resources(self) -> Resources:
        """As Hosted.resources."""
        return self.grpc.resources

    @property
    def log_format(self) -> LogFormat:
        """As Hosted.log_format."""
        return self.told.log_format

    @property
    def digest(self) -> str:
        """As Hosted.digest."""
        alone = self.grpc.model_copy(update={"replicas": 1})
        files = [path for path in (self.grpc.certificate, self.grpc.key) if path is not None]
        return digest_of(self.told.digest, alone, self.grace_seconds, contents(files))

    async def server(self, host: str) -> "HostingGrpc":
        """As Hosted.server."""
        from crossdraft.cluster.application import (
            Measuring,
            rate_of,  # Ray Serve, where it runs only
        )

        grpc = self.grpc
        shown = None
        if grpc.certificate is not None and grpc.key is not None:
            shown = FrontFiles(grpc.certificate, grpc.key)
        limit = MessageLimit(grpc.max_request_mib)
        listening = Listening(grpc.host, grpc.port, limit, self.grace_seconds, shown)
        measuring = await asyncio.to_thread(Measuring, self.told)  # it asks Serve, and waits
        options = GenerationOptions(self.told.keys, rate_of(grpc), grpc.stalled_seconds)
        return HostingGrpc(serve_generation(measuring.outputs, listening, options), measuring, host, self.told.metrics)


class HostingGrpc:
    """The gRPC front's server, and its metrics beside it."""

    def __init__(self, server: GenerationServer, measuring: "Measuring", node: str, measured: bool) -> None:
        self._server = server
        self._exporter = measuring.exporter
        self._node = node
        self._measured = measured
        self.metrics = ""  # host:port, once it serves

    @property
    def address(self) -> str:
        """Where others find it: where it listens at all addresses of its node, at the one that the cluster knows."""
        host, _, port = self._server.address.rpartition(":")
        return f"{self._node if host in ALL_ADDRESSES else host}:{port}"

    async def start(self) -> str:
        """As Hosting.start."""
        await self._server.start()
        if self._measured:
            self.metrics = self._exporter.start(self._node, ANY_PORT)
        return self.address

    async def drain(self) -> None:
        """As Hosting.drain."""
        await self._server.drain()
        await self._exporter.stop()
