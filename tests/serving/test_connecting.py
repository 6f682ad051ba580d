"""A pipeline that could not be opened is tried again."""

import asyncio
from typing import Self

import pytest

from crossdraft.client import Pipeline
from crossdraft.rpc.errors import Unreachable
from crossdraft.serving.backend import Addresses, Connection


class LatePipeline(Pipeline):
    """Its services are there once `there` is set."""

    def __init__(self, there: asyncio.Event) -> None:
        super().__init__("127.0.0.1:1")
        self.there = there
        self.followed: list[tuple[object, object]] = []

    async def follow(self, target: object, drafter: object = None) -> None:
        self.followed.append((target, drafter))

    async def __aenter__(self) -> Self:
        if not self.there.is_set():
            raise Unreachable("no target")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_an_attempt_that_nobody_waits_for_opens_it_once_the_target_is_there() -> None:
    there = asyncio.Event()
    connection = Connection(lambda *_: LatePipeline(there), ("127.0.0.1:1",), ())
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


class SlowPipeline(LatePipeline):
    """It takes until `there` is set to open."""

    async def __aenter__(self) -> Self:
        await self.there.wait()
        return self


async def test_addresses_that_change_while_it_is_opened_are_followed() -> None:
    there, made = asyncio.Event(), asyncio.Event()
    used: list[tuple[Addresses, Addresses]] = []

    def make(targets: Addresses, drafters: Addresses) -> SlowPipeline:
        used.append((targets, drafters))
        made.set()
        return SlowPipeline(there)

    connection = Connection(make, ("a:1",), ())
    await connection.follow(("b:1",), ("c:1",))
    opening = asyncio.create_task(connection.open())
    await made.wait()
    await connection.follow(("d:1",), ())
    there.set()
    pipeline = await opening
    assert isinstance(pipeline, LatePipeline)
    await connection.follow(("e:1",), ("f:1",))
    assert used == [(("b:1",), ("c:1",))]
    assert pipeline.followed == [(("d:1",), ()), (("e:1",), ("f:1",))]
