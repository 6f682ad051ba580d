"""A pipeline that could not be opened is tried again."""

import asyncio
from typing import Self

import pytest

from crossdraft.pipeline import Pipeline
from crossdraft.rpc.errors import Unreachable
from crossdraft.serving.connecting import Connection


class LatePipeline(Pipeline):
    """Its services are there once `there` is set."""

    def __init__(self, there: asyncio.Event) -> None:
        super().__init__("127.0.0.1:1")
        self.there = there

    async def __aenter__(self) -> Self:
        if not self.there.is_set():
            raise Unreachable("no target")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_an_attempt_that_nobody_waits_for_opens_it_once_the_target_is_there() -> None:
    there = asyncio.Event()
    connection = Connection(lambda: LatePipeline(there))
    with pytest.raises(Unreachable):
        await connection.open()
    connection.begin()
    for _ in range(3):
        await asyncio.sleep(0)
    assert connection.pipeline is None
    there.set()
    connection.begin()
    opened = await connection.open()  # the same attempt
    assert connection.pipeline is opened
    await connection.close()
