"""Pieces that are there at the same time travel together, in simulated time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from crossdraft.cluster.failover import Began, Reply
from crossdraft.cluster.orchestrators import batched
from crossdraft.rpc.errors import Unreachable
from tests.cluster.scripted import now, simulated


class Bursts:
    """So many pieces at once, a second after the ones before; afterwards an error, if there is one."""

    def __init__(self, *sizes: int, error: Exception | None = None) -> None:
        self.sizes, self.error = sizes, error
        self.closed = False

    async def pieces(self) -> AsyncGenerator[Reply, None]:
        number = 0
        try:
            for size in self.sizes:
                await asyncio.sleep(1.0)
                for _ in range(size):
                    yield Began(str(number))
                    number += 1
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def numbers(together: tuple[Reply, ...]) -> list[int]:
    return [int(piece.orchestrator) for piece in together if isinstance(piece, Began)]


@simulated
async def test_what_comes_at_once_travels_together_in_order() -> None:
    bursts = Bursts(3, 1, 2)
    assert [numbers(one) async for one in batched(bursts.pieces())] == [[0, 1, 2], [3], [4, 5]]
    assert (bursts.closed, now()) == (True, 3.0)


@simulated
async def test_what_comes_while_the_reader_is_busy_is_with_the_next_ones() -> None:
    bursts = Bursts(1, 1, 1, 1)
    async with aclosing(batched(bursts.pieces())) as reading:
        assert numbers(await anext(reading)) == [0]
        await asyncio.sleep(2.5)
        assert numbers(await anext(reading)) == [1, 2]
    assert bursts.closed  # the reader has left early


@simulated
async def test_an_error_comes_after_what_was_there_before_it() -> None:
    reading = batched(Bursts(2, error=Unreachable("it is gone")).pieces())
    assert numbers(await anext(reading)) == [0, 1]
    with pytest.raises(Unreachable, match="it is gone"):
        await anext(reading)
