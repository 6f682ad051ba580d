"""A target or a drafter as an actor: a gRPC server in the actor's event loop, announced to the directory."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from crossdraft.drafter.servicer import ServeDrafter, drafter_server
from crossdraft.models.pruning import Pruning
from crossdraft.models.running import ModelOptions
from crossdraft.rpc.security import TlsFiles
from crossdraft.rpc.server import Listening, Server
from crossdraft.serving.cluster.directing import directory
from crossdraft.serving.cluster.directory import ANNOUNCED_EVERY, Entry
from crossdraft.serving.configuration import DrafterService, Service
from crossdraft.serving.logs import LogFormat, logged
from crossdraft.target.servicer import ServeTarget, target_server

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hosted:
    """What one replica serves."""

    model: str  # name of the served model
    service: Service  # a DrafterService for a drafter
    tls: TlsFiles | None
    grace_seconds: float  # for open sessions, when it is to stop
    log_format: LogFormat

    @property
    def drafter(self) -> str:
        """Its name; empty for a target."""
        return self.service.name if isinstance(self.service, DrafterService) else ""


class ServiceActor:
    """One replica. Ray starts it again when its process or its node dies; it then announces its new address."""

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
            ValueError: the model cannot be run with these options.
            CannotListen: the port cannot be had.
        """
        return await asyncio.shield(self._entry)

    async def drain(self) -> None:
        """Takes no new session, lets open ones go on for the grace period, and ends."""
        self._stop.set()
        await asyncio.wait([self._serving])

    async def _serve(self) -> None:
        hosted, context = self._hosted, ray.get_runtime_context()
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        async with await _server(hosted, host) as server:
            entry = Entry(hosted.model, hosted.drafter, server.address, context.get_node_id())
            self._entry.set_result(entry)
            while not self._stop.is_set():
                await _announced(entry)
                try:
                    await asyncio.wait_for(self._stop.wait(), ANNOUNCED_EVERY)
                except TimeoutError:
                    continue
            await _withdrawn(entry.address)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What fails before it answers is told to who asks; after that only a new process helps."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not self._entry.done():
            self._entry.set_exception(error)
            return
        log.critical("%s ended: %s", self._hosted.model, error, exc_info=error)
        os._exit(1)


async def _server(hosted: Hosted, host: str) -> Server[Any, Any, Any]:
    service = hosted.service
    listening = Listening(host, service.port, grace_seconds=hosted.grace_seconds, tls=hosted.tls)
    pruning = None
    if isinstance(service, DrafterService) and service.vocab_keep is not None and service.frequencies is not None:
        pruning = Pruning(service.vocab_keep, service.frequencies)
    model = ModelOptions(
        name=service.model,
        dtype=service.dtype,
        device=service.device,
        budget=service.cache_mib,
        max_length=service.max_model_len,
        trust_remote_code=service.trust_remote_code,
        threads=service.threads,
        pruning=pruning,
    )
    if isinstance(service, DrafterService):
        return await drafter_server(ServeDrafter(model, listening, service.affinity))
    return await target_server(ServeTarget(model, listening))


async def _announced(entry: Entry) -> None:
    """Says that it is there; a directory that is being started again hears it the next time."""
    with _tolerant():
        await directory().announce.remote(entry)


async def _withdrawn(address: str) -> None:
    """Says that no session is to be opened there; a directory that is not there forgets it by itself."""
    with _tolerant():
        await directory().withdraw.remote(address)


@contextmanager
def _tolerant() -> Iterator[None]:
    try:
        yield
    except (RayError, ValueError) as error:
        log.warning("the directory does not answer: %s", error)
