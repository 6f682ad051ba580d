"""Which processes there are, and where. Pure: it is told the time.

Processes announce themselves again and again, so that a directory that is lost and comes back knows them all soon, and
a node that is lost is forgotten without anybody's saying so. It decides only where sessions are opened: a session
notices the end of its service by itself, and sooner.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import RayError

from crossdraft.cluster.config import DIRECTORY, NAMESPACE
from crossdraft.cluster.installed import installed

ANNOUNCED_EVERY = 1.0  # seconds
FORGOTTEN_AFTER = 8.0  # seconds since a process was heard of
SETTLED_AFTER = 3.0  # seconds after which a new directory has heard of every process that is there


class Role(StrEnum):
    """What a process does."""

    TARGET = "target"
    DRAFTER = "drafter"
    ORCHESTRATOR = "orchestrator"
    HTTP = "http"  # the ingress behind Serve's proxies
    GRPC = "grpc"  # the front for gRPC clients


@dataclass(frozen=True)
class Entry:
    """A process that answers."""

    id: str  # of its actor; it stays when the process is started again
    role: Role
    model: str  # name of the served model; empty for fronts
    name: str  # of a drafter, else empty
    address: str  # host:port of its gRPC server; empty where it has none
    metrics: str  # host:port where Prometheus reads
    node: str  # the node's address
    process: int  # its id on the node

    @property
    def what(self) -> str:
        """For people."""
        return f"{self.role} {self.name}" if self.name else str(self.role)


class Directory:
    """The processes of a cluster.

    Args:
        began: when, in seconds of a clock that never goes back.
        version: counts changes from here on; two directories must not count the same.
    """

    def __init__(self, began: float = 0.0, version: int = 0) -> None:
        self.version = version
        self._settled_at = began + SETTLED_AFTER
        self._heard: dict[str, tuple[Entry, float]] = {}  # by id, with the time of the latest announcement

    def unsettled(self, now: float) -> float:
        """Seconds until it can be asked: before, it may lack what is there."""
        return max(0.0, self._settled_at - now)

    def announce(self, entry: Entry, now: float) -> None:
        """It is there."""
        known = self._heard.get(entry.id)
        self._heard[entry.id] = (entry, now)
        self.version += known is None or known[0] != entry

    def withdraw(self, id: str) -> None:
        """Nothing is to be begun there any more."""
        self.version += self._heard.pop(id, None) is not None

    def forget(self, now: float) -> None:
        """Those that have not been heard of for too long are not there."""
        silent = [id for id, (_, at) in self._heard.items() if now - at > FORGOTTEN_AFTER]
        for id in silent:
            self.withdraw(id)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, in an order of their own."""
        found = [entry for entry, _ in self._heard.values()]
        return tuple(sorted(found, key=lambda one: (one.model, one.role, one.name, one.node, one.process)))


# The directory as an actor, and how others speak with it.

log = logging.getLogger(__name__)
LONGEST_WAIT = 30.0  # seconds that one question may wait for a change
LATE = 5.0  # seconds after which an answer is not waited for any more


class DirectoryGoneError(Exception):
    """It does not answer now; Ray starts it again."""


class DirectoryActor:
    """One for a cluster. It holds nothing that processes would not tell it again."""

    def __init__(self) -> None:
        self._directory = Directory(time.monotonic(), secrets.randbits(60))
        self._installed = installed()
        self._changed = asyncio.Condition()
        self._forgetting = asyncio.get_running_loop().create_task(self._forget())

    async def installed(self) -> str:
        """The crossdraft that it runs."""
        return self._installed

    async def announce(self, entry: Entry) -> None:
        """A process is there, and says so again before it is forgotten."""
        async with self._watched():
            self._directory.announce(entry, time.monotonic())

    async def withdraw(self, id: str) -> None:
        """A process takes nothing new."""
        async with self._watched():
            self._directory.withdraw(id)

    async def entries(self, known: int = -1, seconds: float = 0.0) -> tuple[int, tuple[Entry, ...]]:
        """Version and processes: once it is settled, and the version is not the known one or this time has passed."""
        await asyncio.sleep(self._directory.unsettled(time.monotonic()))
        try:
            async with asyncio.timeout(min(seconds, LONGEST_WAIT)), self._changed:
                await self._changed.wait_for(lambda: self._directory.version != known)
        except TimeoutError:
            pass
        return self._directory.version, self._directory.entries

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Tells those who wait if the version has changed in a block."""
        async with self._changed:
            before = self._directory.version
            yield
            if self._directory.version != before:
                self._changed.notify_all()

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCED_EVERY)
            async with self._watched():
                self._directory.forget(time.monotonic())


class FarDirectory:
    """The cluster's directory, from another process. All methods raise DirectoryGoneError."""

    def __init__(self) -> None:
        self._actor: Any = None  # its handle

    async def announce(self, entry: Entry) -> None:
        """As DirectoryActor.announce."""
        await self._answer((await self._found()).announce.remote(entry), LATE)

    async def withdraw(self, id: str) -> None:
        """As DirectoryActor.withdraw."""
        await self._answer((await self._found()).withdraw.remote(id), LATE)

    async def entries(self, known: int = -1, seconds: float = 0.0) -> tuple[int, tuple[Entry, ...]]:
        """As DirectoryActor.entries."""
        found: tuple[int, tuple[Entry, ...]]
        found = await self._answer((await self._found()).entries.remote(known, seconds), seconds + LATE)
        return found

    async def _found(self) -> Any:
        if self._actor is None:
            try:  # in a thread: it asks the head node, and waits
                self._actor = await asyncio.to_thread(ray.get_actor, DIRECTORY, NAMESPACE)
            except (RayError, ValueError) as error:
                raise DirectoryGoneError(f"there is no directory: {error}") from error
        return self._actor

    async def _answer(self, asked: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await asked
        except (RayError, TimeoutError) as error:
            self._actor = None
            raise DirectoryGoneError(f"the directory does not answer: {error}") from error


@asynccontextmanager
async def announced(entry: Entry) -> AsyncIterator[None]:
    """The directory knows the process during the block, also when it is lost and comes back."""
    directory = FarDirectory()
    heard = await _announced(directory, entry)
    announcing = asyncio.create_task(_announce(directory, entry, heard))
    try:
        yield
    finally:
        announcing.cancel()
        await asyncio.wait([announcing])
        try:
            await directory.withdraw(entry.id)
        except DirectoryGoneError as error:  # it will be forgotten
            log.warning("%s", error)


async def _announce(directory: FarDirectory, entry: Entry, heard: bool) -> None:
    while True:
        await asyncio.sleep(ANNOUNCED_EVERY)
        heard = await _announced(directory, entry, logging.WARNING if heard else logging.DEBUG)


async def _announced(directory: FarDirectory, entry: Entry, level: int = logging.WARNING) -> bool:
    """Whether the directory has heard of it."""
    try:
        await directory.announce(entry)
    except DirectoryGoneError as error:
        log.log(level, "%s", error)
        return False
    return True
