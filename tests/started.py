"""Services that tests start: in a thread, or in a process that can be killed, and comes back on its port."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event, Thread

from crossdraft.cli.processes import Running, Wanted, running
from crossdraft.rpc.server import Serving
from tests.serving.ports import free_port


@contextmanager
def in_a_thread(*services: Callable[[], Awaitable[Serving]]) -> Iterator[list[str]]:
    """Addresses of services that run in a thread of this process for the time of the block."""
    ready: SimpleQueue[list[str]] = SimpleQueue()
    over = Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            ready.put([(await stack.enter_async_context(await service())).address for service in services])
            await asyncio.to_thread(over.wait)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield ready.get(timeout=300)
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Killable:
    """Started in a process of its own."""

    wanted: Wanted
    stack: AsyncExitStack
    running: Running

    @staticmethod
    async def started(wanted: Wanted, stack: AsyncExitStack) -> "Killable":
        wanted = replace(wanted, more=(*wanted.more, "--port", str(free_port())))
        (found,) = await stack.enter_async_context(running([wanted]))
        return Killable(wanted, stack, found)

    @property
    def address(self) -> str:
        return self.running.address

    def kill(self) -> None:
        os.kill(self.running.process_id, signal.SIGKILL)

    async def restarted(self) -> "Killable":
        (found,) = await self.stack.enter_async_context(running([self.wanted]))
        return replace(self, running=found)
