"""Reading ahead takes in order, at once, within bounds, and passes faults on."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from crossdraft.rpc.handlers import MOST_UNREAD, read_ahead


async def numbers(count: int, given: list[int] | None = None) -> AsyncIterator[int]:
    for number in range(count):
        if given is not None:
            given.append(number)
        yield number


async def settled() -> None:
    """Returns when every task has gone as far as it can."""
    for _ in range(10 * MOST_UNREAD):
        await asyncio.sleep(0)


async def test_everything_is_taken_in_order_up_to_the_end():
    async with read_ahead(numbers(5 * MOST_UNREAD)) as items:
        assert [item async for item in items] == list(range(5 * MOST_UNREAD))


async def test_messages_are_read_before_anybody_takes_them_but_no_more_than_there_is_room_for():
    given: list[int] = []
    async with read_ahead(numbers(5 * MOST_UNREAD, given)) as items:
        await settled()
        assert len(given) == MOST_UNREAD + 1  # one is being put
        assert await anext(items) == 0
        await settled()
        assert len(given) == MOST_UNREAD + 2


async def test_a_fault_of_the_source_ends_the_block():
    async def faulty() -> AsyncIterator[int]:
        yield 1
        raise ValueError("bad")

    with pytest.raises(ExceptionGroup) as raised:
        async with read_ahead(faulty()):
            await asyncio.Event().wait()
    assert [str(error) for error in raised.value.exceptions] == ["bad"]


async def test_the_end_of_the_block_ends_the_source():
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            ended.set()

    async with read_ahead(endless()):
        await settled()
    assert ended.is_set()
