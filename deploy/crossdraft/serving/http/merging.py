"""Several outputs at once, as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """The items of all streams as they come, each with its stream's place. The first error ends all.

    Closing it, or cancelling whoever waits for it, closes all streams before it returns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | None] = asyncio.Queue()

    async def feed(place: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((place, item))
        finally:
            queue.put_nowait(None)  # look at the task

    tasks = [asyncio.create_task(feed(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if found is not None:
                yield found
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
