"""The directory as an actor: services announce themselves, orchestrators wait for changes."""

import asyncio
import time
from typing import Any

import ray

from crossdraft.serving.cluster.directory import ANNOUNCED_EVERY, Directory, Entry
from crossdraft.serving.cluster.naming import DIRECTORY, NAMESPACE

LONGEST_WAIT = 30.0  # seconds that one question may wait for a change


def directory() -> Any:
    """A handle of the cluster's directory, whose methods are those of DirectoryActor with `.remote`.

    Raises:
        ValueError: nothing is deployed.
    """
    return ray.get_actor(DIRECTORY, NAMESPACE)


class DirectoryActor:
    """One for a cluster. It holds nothing that services would not tell it again."""

    def __init__(self) -> None:
        self._directory = Directory()
        self._changed = asyncio.Condition()
        self._forgetting = asyncio.get_running_loop().create_task(self._forget())

    async def announce(self, entry: Entry) -> None:
        """A service is there, and says so again before it is forgotten."""
        async with self._watched():
            self._directory.announce(entry, time.monotonic())

    async def withdraw(self, address: str) -> None:
        """A service takes no new session."""
        async with self._watched():
            self._directory.withdraw(address)

    async def entries(self, known: int = -1, seconds: float = 0.0) -> tuple[int, tuple[Entry, ...]]:
        """Version and services: once the version is not the known one, or this time has passed."""
        try:
            async with asyncio.timeout(min(seconds, LONGEST_WAIT)), self._changed:
                await self._changed.wait_for(lambda: self._directory.version != known)
        except TimeoutError:
            pass
        return self._directory.version, self._directory.entries

    def _watched(self) -> "_Watched":
        return _Watched(self._directory, self._changed)

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCED_EVERY)
            async with self._watched():
                self._directory.forget(time.monotonic())


class _Watched:
    """Tells those who wait if the directory's version has changed in a block."""

    def __init__(self, directory: Directory, changed: asyncio.Condition) -> None:
        self._directory, self._changed = directory, changed
        self._before = 0

    async def __aenter__(self) -> None:
        await self._changed.acquire()
        self._before = self._directory.version

    async def __aexit__(self, *_: object) -> None:
        if self._directory.version != self._before:
            self._changed.notify_all()
        self._changed.release()
