"""The event loop's time, which passes only when a test says so, or when nothing else is left to do: on no slow machine
does a limit end by itself."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TypeVar

import pytest

from crossdraft.rpc import links

T = TypeVar("T")
HANGS = 120.0  # seconds of the machine after which something never comes


async def until(holds: Callable[[], object]) -> None:
    """Returns once it holds, by what other tasks and threads do."""
    async with asyncio.timeout(HANGS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


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

    async def until(self, holds: Callable[[], bool]) -> float:
        """Lets second after second pass until something holds; returns how many."""
        began, late = self.now, time.monotonic() + HANGS
        while not holds():
            assert time.monotonic() < late, "it has not come to pass"
            self.move(1.0)
            await asyncio.sleep(0)
        return self.now - began


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Hurried(asyncio.SelectorEventLoop):
    """Nobody waits: its time is that of what is due next."""

    now = 0.0  # seconds

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def now() -> float:
    """Seconds, of the event loop."""
    return asyncio.get_running_loop().time()


def simulated(test: Callable[..., Coroutine[None, None, T]]) -> Callable[..., T]:
    """The test in simulated time. What it waits for must come from timers, not from other threads or sockets."""

    @wraps(test)
    def run(*given: object, **named: object) -> T:
        with asyncio.Runner(loop_factory=Hurried) as runner:
            return runner.run(test(*given, **named))

    return run
