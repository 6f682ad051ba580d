"""Actors that run a gRPC server in their event loop, announced to the directory.

Actors instead of Serve deployments: sessions are gRPC streams straight from an orchestrator to the server's address,
of which Serve knows nothing, so it would end a replica while its sessions are open.
"""

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import ray

from crossdraft.cluster.config import Resources
from crossdraft.cluster.directory import Entry, Role, announced, entry_of, node_address
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.server import freeze_heap
from crossdraft.serving.logs import LogFormat, logged

log = logging.getLogger(__name__)
PORT_SECONDS = 5.0  # how long a fixed port may still be in use by the actor's predecessor
PORT_INTERVAL = 0.25  # seconds between attempts to listen
RESTART_SECONDS = 2.0  # before a restarted process that could not serve ends, to be started again


class ActorServer(Protocol):
    """A server that an actor runs."""

    @property
    def address(self) -> str:
        """host:port, once it serves."""
        ...

    @property
    def metrics(self) -> str:
        """host:port of its Prometheus metrics; empty: none."""
        ...

    async def start(self) -> str:
        """Starts serving; returns the address; raises CannotListen, and may be called again then."""
        ...

    async def drain(self) -> None:
        """Accepts nothing new, lets what is open go on for the grace period, and ends."""
        ...


@dataclass(frozen=True)
class ServerConfig(ABC):
    """What an actor runs; can be pickled."""

    role: Role
    model: str  # name of the served model; empty for a front
    name: str  # of a drafter, else empty
    port: int  # 0: any free one
    resources: Resources
    log_format: LogFormat
    digest: str  # of everything that matters, file contents and the installed package included

    @abstractmethod
    async def server(self, host: str) -> ActorServer:
        """Makes the server, in the actor's process; `host` is the address of its node.

        Raises:
            ValueError: the options cannot be used.
        """


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
        """
        return await asyncio.shield(self._entry)

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
            entry = entry_of(config.role, config.model, config.name, server.address, server.metrics, node)
            async with announced(entry):
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
