"""Servers of one process that begin and end together."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Protocol, Self


class Front(Protocol):
    """A server before outputs."""

    @property
    def address(self) -> str:
        """host:port, once it listens."""
        ...

    async def start(self) -> str:
        """Begins to listen; returns the address; raises CannotListen."""
        ...

    async def drain(self) -> None:
        """Takes nothing new, lets what is open go on for its grace period, and ends."""
        ...

    def ready_line(self) -> str:
        """One line of JSON that says where what is served."""
        ...


class Together:
    """A server and others beside it. Its ready line says where the others are.

    Args:
        first: whose ready line it is.
        others: by the names of their addresses in it.
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
        """Begins; if one cannot listen, the others end again."""
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
