"""Jobs that wait for a model thread together."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from crossdraft.engine.model_thread import Job, ModelThread


def nothing() -> Job[None]:
    """A job without a request; what was submitted before it has been taken in when it is over."""
    yield from ()


class Gate:
    """A job that stands still in the model thread until it is let go, so that others gather behind it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def job(self) -> Job[None]:
        self.entered.set()
        self.let_go.wait(timeout=120)
        yield from ()


@asynccontextmanager
async def standing(worker: ModelThread) -> AsyncIterator[None]:
    """The thread stands still until all that the block asks of it waits."""
    gate = Gate()
    held = worker.submit(gate.job())
    assert await asyncio.to_thread(gate.entered.wait, 120)
    try:
        yield
    finally:
        gate.let_go.set()
    await held


async def gathered(worker: ModelThread, *jobs: Job[Any]) -> list[Any]:
    """Submits all jobs while the thread stands still, then lets it go; their results or errors."""
    async with standing(worker):
        tasks = [worker.submit(job) for job in jobs]
    return await asyncio.gather(*tasks, return_exceptions=True)
