"""Services without models, and raw streams that say what no client of ours would."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import numpy as np

from crossdraft.rpc.errors import CannotListen, ContextTooLong
from crossdraft.rpc.handlers import TARGET
from crossdraft.rpc.server import Listening, Server
from crossdraft.types.messages import (
    Advance,
    Description,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    Score,
    Scored,
)
from crossdraft.types.rows import Row

SIZE = 100
DESCRIPTION = Description("toy", "{}", ((0, "END_OF_SEQUENCE"),), (0,), SIZE, 64, "f1")
FULL = 13  # a committed id that the toy target takes for a full context
FAULTY = 14  # one that makes it fail
FOREIGN = 16  # one that makes it answer with an id that it does not have
SLOW = 15  # one that makes it wait until the test lets it go on


@dataclass
class ToyTargetService:
    """Answers each pass with the same row; counts its sessions."""

    description: Description = DESCRIPTION
    opened: int = 0
    ended: bool = False
    closed: int = 0
    slow: asyncio.Event = field(default_factory=asyncio.Event)  # a session waits for the next one
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def open(self, request: OpenTarget) -> "ToyTargetSession":
        self.opened += 1
        return ToyTargetSession(self)

    async def close(self) -> None:
        self.ended = True

    async def wait_closed(self, count: int) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.closed == count)


@dataclass
class ToyTargetSession:
    service: ToyTargetService

    async def converse(self, requests: AsyncIterator[Pass | FetchRow]) -> AsyncGenerator[PassDone | RowFetched, None]:
        async for request in requests:
            yield await self.answer(request)

    async def answer(self, request: Pass | FetchRow) -> PassDone | RowFetched:
        row = Row(np.array([1, 2]), np.array([0.5, 0.25]), 0.25)
        if isinstance(request, FetchRow):
            return RowFetched(request.number, request.node, row)
        if FULL in request.committed:
            raise ContextTooLong("the context is full")
        if FAULTY in request.committed:
            raise ZeroDivisionError("a fault of the service")
        if SLOW in request.committed:
            self.service.slow.set()
            await self.service.go_on.wait()
        if FOREIGN in request.committed:
            row = Row.certain(SIZE)
        return PassDone(request.number, (row,) * len(request.answered), 0.001)

    async def close(self) -> None:
        async with self.service.changed:
            self.service.closed += 1
            self.service.changed.notify_all()


@dataclass
class ToyDrafterService:
    """Stands aside always."""

    description: Description = DESCRIPTION

    async def open(self, request: OpenDrafter) -> "ToyDrafterService":
        return self

    async def converse(self, requests: AsyncIterator[Draft]) -> AsyncGenerator[Drafted, None]:
        async for request in requests:
            yield Drafted(request.epoch, (), 0.0, f"cannot draft {request.count} after {request.letters!r}")

    async def close(self) -> None:
        pass


async def on_a_port_of_its_own(service: ToyTargetService) -> tuple[Server, int]:
    """A server that listens; nobody else is given its port while it is away."""
    ports = range(30_000, 32_000)  # below those that systems give out, above those of other tests
    for port in random.sample(ports, len(ports)):
        server = Server(TARGET, service, Listening(grace_seconds=0, port=port))
        with suppress(CannotListen):
            await server.start()
            return server, port
    raise AssertionError(f"all ports of {ports} are taken")


async def exchange(address: str, method: str, messages: Sequence[bytes]) -> tuple[list[bytes], grpc.StatusCode, str]:
    """Sends raw messages on one stream; the raw replies, the status and its text."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(method)(iter(messages), timeout=60)
        replies: list[bytes] = []
        try:
            async for reply in call:
                replies.append(reply)
        except grpc.aio.AioRpcError as error:
            return replies, error.code(), error.details() or ""
        return replies, await call.code(), await call.details()


@dataclass
class ScriptedDrafter:
    """A session whose requests and replies the test sees and makes; it reads while nothing is to be said."""

    description: Description = DESCRIPTION
    asked: "asyncio.Queue[Draft | Advance | Score]" = field(default_factory=asyncio.Queue)
    replies: "asyncio.Queue[Drafted | Scored | Exception | None]" = field(default_factory=asyncio.Queue)
    reading: bool = False
    conversing: bool = False
    closed: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, request: OpenDrafter) -> "ScriptedDrafter":
        return self

    async def converse(
        self, requests: AsyncIterator[Draft | Advance | Score]
    ) -> AsyncGenerator[Drafted | Scored, None]:
        self.conversing = True
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(requests))
                while (reply := await self.replies.get()) is not None:
                    if isinstance(reply, Exception):
                        raise reply
                    yield reply
                reading.cancel()
        finally:
            self.conversing = False

    async def _read(self, requests: AsyncIterator[Draft | Advance | Score]) -> None:
        self.reading = True
        try:
            async for request in requests:
                self.asked.put_nowait(request)
            self.replies.put_nowait(None)
        finally:
            self.reading = False

    async def close(self) -> None:
        self.closed += 1
        self.gone.set()
