"""Several processes that serve one port: `--workers` of `crossdraft serve http` and `serve grpc`.

Each worker runs the same command line. They listen on the port together (SO_REUSEPORT), as gRPC cannot be handed a
socket. This process serves no API, but runs the models of --target-model and --drafter-model: Python's work for models
and that for outputs then take no turns. Workers are new processes, as neither gRPC nor torch survives a fork; this one
replaces those that die, and drains all when it is told to stop. They end with their standard input.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from crossdraft.cli.processes import ended, launched
from crossdraft.cli.running import CommandFailed
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.server import Listening, Serving

log = logging.getLogger(__name__)
RESTART_SECONDS = 1.0  # before another one is started where a new worker did not become ready
PIECE = 1 << 16  # bytes that are read at once
SPARE_SECONDS = 30.0  # after the grace period, before a worker that does not end is killed


@dataclass(eq=False)
class Worker:
    """A process, perhaps not ready yet."""

    process: Process
    ready: dict[str, Any] = field(default_factory=dict)  # its ready line
    draining: asyncio.Task[None] | None = None  # of what it prints after that


@dataclass(eq=False)
class Workers(Serving):
    """All of them, running. Use it with `async with`."""

    count: int  # at least 1
    host: str
    ports: Mapping[str, int]  # by option; 0: any that is free
    grace_seconds: float  # of each worker, after SIGTERM
    options: Sequence[str]  # further ones of each
    environment: Mapping[str, str]  # of each, besides this process's own
    ended: Callable[[int], None]  # called with the id of a process that has died
    marks: dict[str, str] = field(default_factory=dict)  # further fields of the ready line

    def __post_init__(self) -> None:
        self._reserved: list[socket.socket] = []
        self._options = [*self.options]
        self._workers: list[Worker] = []
        self._keeping: list[asyncio.Task[NoReturn]] = []

    def ready(self) -> dict[str, object]:
        """The first worker's, and the ids of all their processes."""
        return self._workers[0].ready | self.marks | {"workers": [one.process.pid for one in self._workers]}

    async def start(self) -> None:
        """Starts all. Raises CannotListen; CommandFailed: a worker ended before it was ready."""
        for option, port in self.ports.items():
            self._reserved.append(reserved(self.host, port))
            self._options += [option, str(self._reserved[-1].getsockname()[1])]
        self._workers = [await self._begun() for _ in range(self.count)]
        statuses = await asyncio.gather(*(self._readiness(worker) for worker in self._workers))
        if failed := [status for status in statuses if status is not None]:
            await self._end()
            raise CommandFailed(f"a worker ended with status {failed[0]} before it was ready; it has said why above")
        self._keeping = [asyncio.create_task(self._keep(place)) for place in range(self.count)]

    async def drain(self) -> None:
        """Drains all; raises CommandFailed if one of them does not end well."""
        for task in self._keeping:
            task.cancel()
        try:
            await asyncio.wait(self._keeping)
        finally:
            failed = await self._end()
        if failed:
            raise CommandFailed(f"workers ended badly: {', '.join(failed)}")

    async def _keep(self, place: int) -> NoReturn:
        while True:
            dead = self._workers[place].process
            status = await dead.wait()
            self.ended(dead.pid)
            log.error("worker %d died with status %d; another one is started", dead.pid, status)
            if not self._workers[place].ready:
                await asyncio.sleep(RESTART_SECONDS)
            try:
                self._workers[place] = worker = await self._begun()
                if await self._readiness(worker) is None:
                    log.warning("worker %d serves in the place of %d", worker.process.pid, dead.pid)
            except (OSError, ValueError) as error:  # no memory for a process, or a line that is none of a worker's
                log.error("no worker could be started in the place of %d: %s", dead.pid, error)
                await asyncio.sleep(RESTART_SECONDS)

    async def _begun(self) -> Worker:
        command = [sys.executable, "-m", "crossdraft", *sys.argv[1:]]
        own = ["--worker-of", str(self.count), "--until-stdin-ends", *self._options]
        return Worker(await launched([*command, *own], env=os.environ | self.environment))

    async def _readiness(self, worker: Worker) -> int | None:
        """None once it is ready; the status of its process if it ended before."""
        output = worker.process.stdout
        assert output is not None
        while line := await output.readline():
            if line.startswith(b"{"):  # else a library has printed it
                worker.ready = json.loads(line)
                worker.draining = asyncio.create_task(drain(output))
                return None
        return await worker.process.wait()

    async def _end(self) -> list[str]:
        """Ends all; returns those that were ready and whose status is not 0."""
        seconds = self.grace_seconds + SPARE_SECONDS
        ends = [asyncio.create_task(ended(worker.process, seconds)) for worker in self._workers]
        try:
            await asyncio.wait(ends)
        except asyncio.CancelledError:  # a second signal is one for workers, too
            for worker in self._workers:
                with suppress(ProcessLookupError):
                    worker.process.terminate()
            await asyncio.wait(ends)
            raise
        statuses = [one.result() for one in ends]
        for one in self._reserved:
            one.close()
        pairs = zip(self._workers, statuses, strict=True)
        return [f"{worker.process.pid} with status {status}" for worker, status in pairs if status and worker.ready]


async def drain(output: asyncio.StreamReader) -> None:
    """Reads up to the end: whoever writes to a pipe that nobody reads stops once it is full."""
    while await output.read(PIECE):
        pass


def reserved(host: str, port: int) -> socket.socket:
    """A port, 0: any free one, which from now on only sockets with SO_REUSEPORT can have. Raises CannotListen."""
    bare = host.strip("[]")
    Listening(host, port).check_free()  # fails where others share it
    holder = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((bare, port))
    except OSError as error:
        raise CannotListen.at(f"{host}:{port}", error) from error
    return holder
