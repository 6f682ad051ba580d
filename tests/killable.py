"""A service that can be killed, and comes back on its port."""

import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from crossdraft.cli.processes import Running, Wanted, running
from tests.serving.ports import free_port


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
