"""Actors that run a gRPC server in their event loop, announced to the directory.

Actors instead of Serve deployments: sessions are gRPC streams straight from an orchestrator to the server's address,
of which Serve knows nothing, so it would end a replica while its sessions are open.
"""

import asyncio
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossdraft.cluster.capacity import CPUS, GPUS
from crossdraft.cluster.config import (
    ANY_PORT,
    Configuration,
    DrafterService,
    Resources,
    Service,
    contents,
    tls_of,
    tls_paths,
    version_of,
)
from crossdraft.cluster.directory import Entry, Load, Role, announced, entry_of, node_address
from crossdraft.config.engine import NGRAM, NgramOptions
from crossdraft.config.fields import part_of
from crossdraft.config.service import LogFormat, SessionOptions
from crossdraft.engine.names import source_of
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.security import TlsFiles
from crossdraft.rpc.server import Listening, Server, freeze_heap
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.logs import logged

if TYPE_CHECKING:
    from crossdraft.drafter.ngram import ServeNgram
    from crossdraft.engine.served_model import ModelOptions

log = logging.getLogger(__name__)
PORT_SECONDS = 5.0  # how long a fixed port may still be in use by the actor's predecessor
PORT_INTERVAL = 0.25  # seconds between attempts to listen
RESTART_SECONDS = 2.0  # before a restarted process that could not serve ends, to be started again


ActorServer = Server[Any, Any, Any] | GenerationServer
ALL_ADDRESSES = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True)
class ServerConfig(ABC):
    """What an actor runs; can be pickled."""

    role: Role
    model: str  # name of the served model; empty for a front
    name: str  # of a drafter, else empty
    port: int  # 0: any free one
    resources: Resources  # of each process
    ranks: int  # processes of a replica, of which the actor is the first
    log_format: LogFormat
    digest: str  # of everything that matters, file contents and the installed package included

    @property
    def host(self) -> str:
        """Where it listens, on the node where this is called."""
        return node_address()

    @abstractmethod
    def check_files(self) -> None:
        """Raises ValueError if the model or a file is not on this node, or cannot be used."""

    def check(self, held: int) -> None:
        """Whether a server could start on this node; loads nothing.

        Args:
            held: the port of the server that it replaces, which may be its own; 0: none.

        Raises:
            ValueError: as `check_files`.
            CannotListen: the port is taken.
        """
        self.check_files()
        if self.port not in (0, held):
            Listening(self.host, self.port).check_free()

    @abstractmethod
    async def server(self, host: str) -> ActorServer:
        """Makes the server, in the actor's process; `host` is the address of its node.

        Raises:
            ValueError: the options cannot be used.
        """


@dataclass(frozen=True)
class ModelServerConfig(ServerConfig):
    """One replica of a target or a drafter."""

    service: Service  # a DrafterService for a drafter
    tls: TlsFiles | None
    grace_seconds: float  # for open sessions, when it is stopped
    serve_metrics: bool

    @staticmethod
    def of(model: str, service: Service, configuration: Configuration) -> "ModelServerConfig":
        """That of a service of the served model with this name."""
        tls, grace, metrics = tls_of(configuration), configuration.grace_seconds, configuration.metrics
        alone = replace(service, replicas=1)  # their number replaces none of them
        drafter = service if isinstance(service, DrafterService) else None
        files = [*tls_paths(tls), *_files_of(service)]
        return ModelServerConfig(
            role=Role.TARGET if drafter is None else Role.DRAFTER,
            model=model,
            name="" if drafter is None else drafter.name,
            port=service.port,
            resources=service.resources.divided(service.tensor_parallel_size),
            ranks=service.tensor_parallel_size,
            log_format=configuration.log_format,
            digest=version_of(model, alone, tls, grace, metrics, configuration.log_format, contents(files)),
            service=service,
            tls=tls,
            grace_seconds=grace,
            serve_metrics=metrics,
        )

    def check_files(self) -> None:
        """As `ServerConfig.check_files`."""
        if self.service.model != NGRAM:
            source_of(self.service.model)
        if self.tls is not None:
            self.tls.load()
        missing = [path for path in _files_of(self.service) if not path.is_file()]
        if missing:
            raise ValueError(f"there is no file {missing[0]}: put it there, or correct its name")

    async def server(self, host: str) -> Server[Any, Any, Any]:
        """As `ServerConfig.server`; loads the model."""
        service = self.service
        listening = Listening(
            host,
            service.port,
            grace_seconds=self.grace_seconds,
            tls=self.tls,
            sessions=part_of(SessionOptions, service),
            metrics_port=ANY_PORT if self.serve_metrics else None,
        )
        return await (await asyncio.to_thread(_model_server, service, listening))


def _files_of(service: Service) -> list[Path]:
    drafter = service if isinstance(service, DrafterService) else None
    own = (service.chat_template, *((drafter.frequencies, drafter.affinity) if drafter else ()))
    return [path for path in own if path is not None]


def _model_server(service: Service, listening: Listening) -> Coroutine[Any, Any, Server[Any, Any, Any]]:
    """Imports torch, which those that deploy or ask what runs need not; in a thread, as that takes seconds."""
    if service.model == NGRAM:
        from crossdraft.drafter.ngram import ServeNgram, ngram_server

        return _made(ngram_server, ServeNgram(part_of(NgramOptions, service), listening))
    from crossdraft.drafter.service import ServeDrafter, drafter_server
    from crossdraft.engine.served_model import ModelOptions
    from crossdraft.engine.tensor_parallel import run_ranks
    from crossdraft.target.service import ServeTarget, target_server

    model = ModelOptions.of(service.model, service.settings, service.max_sessions)
    if isinstance(service, DrafterService):
        return drafter_server(ServeDrafter(model, listening, service.affinity))
    return target_server(ServeTarget(model, listening, partial(run_ranks, host=node_address(), start=_started)))


async def _made(make: Callable[["ServeNgram"], Server[Any, Any, Any]], served: "ServeNgram") -> Server[Any, Any, Any]:
    """In the event loop, as a server must be."""
    return make(served)


def _started(options: "ModelOptions", host: str, port: int) -> list[Connection]:
    """As `StartRanks`: tasks, each with one of the other places of this actor's placement group."""
    group, key = get_current_placement_group(), secrets.token_bytes()
    assert group is not None
    run: Any = ray.remote(max_calls=1, max_retries=0)(_followed)  # its process ends with it
    with Listener((host, ANY_PORT), authkey=key) as listener:
        ends = []
        for number, has in enumerate(group.bundle_specs[1:], 1):
            takes = {"num_cpus": has.pop(CPUS, 0), "num_gpus": has.pop(GPUS, 0), "resources": has}
            task = run.options(**takes, scheduling_strategy=PlacementGroupSchedulingStrategy(group, number))
            ends.append(task.remote(options, number, host, port, listener.address, key))
        Thread(target=_end_with, args=(ends,), name="rank tasks", daemon=True).start()
        return [listener.accept() for _ in ends]


def _end_with(ends: list[Any]) -> None:
    """Ends this process when one of the tasks is lost, also with its node, of which no connection tells."""
    from crossdraft.engine.tensor_parallel import OWN_SECONDS

    try:
        ray.get(ray.wait(ends)[0])
    except RayError as error:
        if isinstance(error, RayTaskError):  # this process may meet the same, and say so itself
            time.sleep(OWN_SECONDS)
        log.critical("a rank of the model is lost, all end: %s", error)
        os._exit(1)


def _followed(options: "ModelOptions", number: int, host: str, port: int, address: Any, key: bytes) -> None:
    """Runs in a task."""
    from crossdraft.engine.tensor_parallel import follow

    follow(options, number, host, port, Client(address, authkey=key))


class ServerActor:
    """One replica. Ray restarts it when its process or its node dies; it then announces its new address."""

    def __init__(self, config: ServerConfig) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(config.log_format))
        self._config = config
        self._entry: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._serving = asyncio.get_running_loop().create_task(self._serve())
        self._serving.add_done_callback(self._ended)

    async def ready(self) -> Entry:
        """Its entry of the directory, once it serves.

        Raises:
            ValueError: the options cannot be used.
            CannotListen: the port cannot be had.
            RuntimeError: it has been drained.
        """
        if self._stop.is_set():
            raise RuntimeError("it has ended")
        return await asyncio.shield(self._entry)

    async def config(self) -> ServerConfig:
        """What it runs, to start it again."""
        return self._config

    async def drain(self) -> None:
        """Accepts nothing new, lets what is open go on for the grace period, and ends."""
        self._stop.set()
        await asyncio.wait([self._serving])

    async def _serve(self) -> None:
        config, node = self._config, node_address()
        server = await config.server(node)
        await _start(server, config.port)
        freeze_heap()
        try:
            host, _, port = server.address.rpartition(":")
            address = f"{node if host in ALL_ADDRESSES else host}:{port}"  # the one that the cluster uses
            entry = entry_of(config.role, config.model, config.name, address, server.metrics, node)
            async with announced(entry, _meter(server)):
                self._entry.set_result(entry)
                await self._stop.wait()
        finally:
            await server.drain()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error of the first start goes to whoever waits for `ready`; later ones end the process, for a restart."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not (self._entry.done() or ray.get_runtime_context().was_current_actor_reconstructed):
            self._entry.set_exception(error)
            return
        log.critical("%s ended: %s", self._config.role, error, exc_info=error)
        asyncio.get_running_loop().call_later(RESTART_SECONDS, os._exit, 1)


def _meter(server: ActorServer) -> Callable[[], Load]:
    """Its load since it was asked for last."""
    before, computed = time.monotonic(), server.work[1]

    def load() -> Load:
        nonlocal before, computed
        sessions, seconds = server.work
        now = time.monotonic()
        busy = (seconds - computed) / max(now - before, 1e-3)
        before, computed = now, seconds
        return Load(sessions, busy)

    return load


async def _start(server: ActorServer, port: int) -> None:
    """Starts serving; tries for PORT_SECONDS to get a fixed port. Raises CannotListen."""
    until = time.monotonic() + (PORT_SECONDS if port else 0.0)
    while True:
        try:
            await server.start()
        except CannotListen:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(PORT_INTERVAL)
        else:
            return
