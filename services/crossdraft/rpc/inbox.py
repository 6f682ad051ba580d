"""Takes messages as they arrive, whatever else is under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

Item = TypeVar("Item")

UNREAD = 64  # messages that wait to be taken; a source that has more is held back


@asynccontextmanager
async def inbox(source: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Reads a source while the block runs, and yields what it had, in order, up to its end.

    Raises:
        BaseExceptionGroup: of what the block raised, or of what the source did: that ends the block at once.
    """
    waiting: asyncio.Queue[Item | None] = asyncio.Queue(UNREAD)

    async def fill() -> None:
        async for item in source:
            await waiting.put(item)
        await waiting.put(None)

    async def taken() -> AsyncIterator[Item]:
        while (item := await waiting.get()) is not None:
            yield item

    async with asyncio.TaskGroup() as group:
        filling = group.create_task(fill())
        yield taken()
        filling.cancel()
