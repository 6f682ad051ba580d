"""Pieces that are there at the same time travel together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from crossdraft.cluster.failover import Alive, Began, Reply
from crossdraft.cluster.orchestrators import batched
from crossdraft.rpc.errors import Unreachable

LONG = 60.0  # seconds that no test lasts


class Bursts:
    """Pieces that come when they are told to; afterwards an error, if there is one."""

    def __init__(self, *sizes: int, error: Exception | None = None) -> None:
        self.sizes, self.error = sizes, error
        self.next, self.came = asyncio.Event(), asyncio.Event()
        self.closed = False

    async def pieces(self) -> AsyncGenerator[Reply, None]:
        number = 0
        try:
            for size in self.sizes:
                await self.next.wait()
                self.next.clear()
                for _ in range(size):
                    yield Began(str(number), "")
                    number += 1
                self.came.set()
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def numbers(together: tuple[Reply, ...]) -> list[int]:
    return [int(piece.target) for piece in together if isinstance(piece, Began)]


async def test_what_comes_at_once_travels_together_in_order() -> None:
    bursts = Bursts(3, 1, 2)
    bursts.next.set()
    found = []
    async for together in batched(bursts.pieces(), LONG):
        found.append(numbers(together))
        bursts.next.set()
    assert found == [[0, 1, 2], [3], [4, 5]]
    assert bursts.closed


async def test_what_comes_while_the_reader_is_busy_is_with_the_next_ones() -> None:
    bursts = Bursts(1, 1, 1)
    bursts.next.set()
    async with aclosing(batched(bursts.pieces(), LONG)) as reading:
        assert numbers(await anext(reading)) == [0]
        bursts.came.clear()
        for _ in range(2):
            bursts.next.set()
            await bursts.came.wait()
            bursts.came.clear()
        assert numbers(await anext(reading)) == [1, 2]
        with pytest.raises(StopAsyncIteration):
            await anext(reading)


async def test_silence_is_broken_again_and_again() -> None:
    bursts = Bursts(1)
    async with aclosing(batched(bursts.pieces(), 0.001)) as reading:
        assert [await anext(reading), await anext(reading)] == [(Alive(),), (Alive(),)]
        bursts.next.set()
        later = [together async for together in reading if together != (Alive(),)]
    assert list(map(numbers, later)) == [[0]]


async def test_an_error_comes_after_what_was_there_before_it() -> None:
    bursts = Bursts(2, error=Unreachable("it is gone"))
    bursts.next.set()
    reading = batched(bursts.pieces(), LONG)
    assert numbers(await anext(reading)) == [0, 1]
    with pytest.raises(Unreachable, match="it is gone"):
        await anext(reading)


async def test_leaving_early_closes_the_source() -> None:
    bursts = Bursts(1, 1)
    bursts.next.set()
    async with aclosing(batched(bursts.pieces(), LONG)) as reading:
        await anext(reading)
    assert bursts.closed
