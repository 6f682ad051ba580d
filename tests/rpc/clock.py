"""The event loop's time, which passes only when a test says so: on no slow machine does a limit end by itself."""

import asyncio
import time
from collections.abc import Callable

import pytest

from crossdraft.rpc import links

HANGS = 120.0  # seconds of the machine after which something never comes


class Clock:
    """Of the running loop, stopped. What waits for a time of the loop's waits for `move`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        monkeypatch.setattr(links, "now", lambda: self.now)

    def move(self, seconds: float) -> None:
        """So many seconds pass."""
        self.now += seconds

    async def still(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds, and no time passes."""
        late = time.monotonic() + HANGS
        while not holds():
            assert time.monotonic() < late, "it has not come to pass"
            await asyncio.sleep(0)

    async def run(self, task: "asyncio.Task[object]") -> float:
        """Lets second after second pass until a task is done; returns how many."""
        return await self.until(task.done)

    async def until(self, holds: Callable[[], bool]) -> float:
        """The same until something holds."""
        began, late = self.now, time.monotonic() + HANGS
        while not holds():
            assert time.monotonic() < late, "it has not come to pass"
            self.move(1.0)
            await asyncio.sleep(0)
        return self.now - began


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
