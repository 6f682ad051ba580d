"""Several servers of one process, started and drained together."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Protocol, Self


class Front(Protocol):
    """A server for clients (HTTP or gRPC)."""

    @property
    def address(self) -> str:
        """host:port, once it listens."""
        ...

    async def start(self) -> str:
        """Starts listening; returns the address; raises CannotListen."""
        ...

    async def drain(self) -> None:
        """Accepts nothing new, lets open requests go on for the grace period, and ends."""
        ...

    def ready_line(self) -> str:
        """One line of JSON: role, address, model."""
        ...


class Together:
    """A server and others beside it.

    Args:
        first: its ready line is printed, with the addresses of the others in it.
        others: by the names of their addresses in the ready line.
    """

    def __init__(self, first: Front, others: Mapping[str, Front]) -> None:
        self._first = first
        self._others = others

    def ready_line(self) -> str:
        """One line of JSON."""
        return json.dumps(
            json.loads(self._first.ready_line()) | {name: one.address for name, one in self._others.items()}
        )

    async def __aenter__(self) -> Self:
        """Starts all; if one cannot listen, drains those that have started."""
        async with AsyncExitStack() as stack:
            for one in (*self._others.values(), self._first):
                await one.start()
                stack.push_async_callback(one.drain)
            stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.TaskGroup() as group:
            for one in (self._first, *self._others.values()):
                group.create_task(one.drain())
