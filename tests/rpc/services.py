"""Services without models, and raw streams that say what no client of ours would."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from crossdraft.rpc.errors import CannotListen, ContextTooLong
from crossdraft.rpc.handlers import TARGET, Replies
from crossdraft.rpc.server import Listening, Server
from crossdraft.types.messages import (
    Description,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
)
from crossdraft.types.rows import Row
from tests.rpc.linked import DESCRIPTION, News

SIZE = 100
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
    news: News = field(default_factory=News)

    async def open(self, request: OpenTarget, replies: Replies[PassDone | RowFetched]) -> "ToyTargetSession":
        self.opened += 1
        return ToyTargetSession(self, replies)

    async def close(self) -> None:
        self.ended = True

    async def wait_closed(self, count: int) -> None:
        await self.news.until(lambda: self.closed == count)


class ToyTargetSession:
    """Answers one request after another."""

    def __init__(self, service: ToyTargetService, replies: Replies[PassDone | RowFetched]) -> None:
        self.service = service
        self._replies = replies
        self._requests: asyncio.Queue[Pass | FetchRow] = asyncio.Queue()
        self._answering = asyncio.create_task(self._answer_all())

    async def _answer_all(self) -> None:
        try:
            while True:
                self._replies.send(await self.answer(await self._requests.get()))
        except (ContextTooLong, ZeroDivisionError) as error:
            self._replies.fail(error)

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

    def receive(self, request: Pass | FetchRow) -> None:
        self._requests.put_nowait(request)

    def left(self, reply: PassDone | RowFetched) -> None:
        """It waits for nothing."""

    def close(self) -> None:
        self._answering.cancel()
        self.service.closed += 1
        self.service.news.changed()


@dataclass
class ToyDrafterService:
    """Stands aside always."""

    description: Description = DESCRIPTION

    async def open(self, request: OpenDrafter, replies: Replies[Drafted]) -> "ToyDrafterSession":
        return ToyDrafterSession(replies)

    async def close(self) -> None:
        """Nothing runs."""


@dataclass
class ToyDrafterSession:
    replies: Replies[Drafted]

    def receive(self, request: Draft) -> None:
        self.replies.send(Drafted(request.epoch, (), 0.0, f"cannot draft {request.count} after {request.letters!r}"))

    def left(self, reply: Drafted) -> None:
        """It waits for nothing."""

    def close(self) -> None:
        """It holds nothing."""


async def on_a_port_of_its_own(service: ToyTargetService) -> tuple[Server, int]:
    """A server that listens; nobody else is given its port while it is away."""
    ports = range(30_000, 32_000)  # below those that systems give out, above those of other tests
    for port in random.sample(ports, len(ports)):
        server = Server(TARGET, service, Listening(grace_seconds=0, port=port))
        with suppress(CannotListen):
            await server.start()
            return server, port
    raise AssertionError(f"all ports of {ports} are taken")
