"""An actor that hosts a gRPC server, in its event loop, and is announced to the directory."""

import asyncio
import logging
import os
import time
from contextlib import ExitStack

import ray

from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.heap import settle
from crossdraft.serving.cluster.directing import announced
from crossdraft.serving.cluster.directory import Entry, Role
from crossdraft.serving.cluster.hosted import Hosted, Hosting
from crossdraft.serving.logs import logged

log = logging.getLogger(__name__)

PORT_SECONDS = 5.0  # for which a port that is taken is waited for
PORT_EVERY = 0.25  # seconds
AGAIN_AFTER = 2.0  # seconds before a process ends that could not serve when it was started again


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
        settle()
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
