"""Toys behind the ports of services."""

import asyncio
from dataclasses import dataclass, field

from crossdraft.rpc.codec import Opened
from crossdraft.rpc.errors import Closed, ServiceError
from crossdraft.rpc.stream import Traffic
from crossdraft.verification.exchange import (
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
from tests.fakes import ToyDrafter, ToyTarget


@dataclass
class MemoryTarget:
    """A toy behind a target's port."""

    toy: ToyTarget
    refuses: ServiceError | None = None
    fails_at: int = 10**9  # pass
    closed: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    replies: asyncio.Queue[PassDone | RowFetched | None] = field(default_factory=asyncio.Queue)

    async def open(self, request: OpenTarget) -> "MemoryTarget":
        if self.refuses is not None:
            raise self.refuses
        return self

    async def send(self, request: OpenTarget | Pass | FetchRow) -> None:
        if isinstance(request, Pass):
            self.replies.put_nowait(None if request.number == self.fails_at else self.toy.run(request))
        elif isinstance(request, FetchRow):
            self.replies.put_nowait(self.toy.fetch(request.number, request.node))

    async def receive(self) -> Opened | PassDone | RowFetched:
        reply = await self.replies.get()
        if reply is None:
            raise Closed("the target ended the session")
        return reply

    async def close(self) -> None:
        self.closed += 1


@dataclass
class MemoryDrafter:
    """A toy behind a drafter's port."""

    toy: ToyDrafter
    refuses: ServiceError | None = None
    silent: bool = False
    scoreless: bool = False  # never answers Score
    opened_twice: bool = False
    closed: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    traffic: Traffic = field(default_factory=Traffic)
    replies: asyncio.Queue[Opened | Drafted | Scored] = field(default_factory=asyncio.Queue)

    async def open(self, request: OpenDrafter) -> "MemoryDrafter":
        if self.refuses is not None:
            raise self.refuses
        return self

    async def send(self, request: OpenDrafter | Draft | Score) -> None:
        self.asked.set()
        if self.opened_twice:
            self.replies.put_nowait(Opened("f1"))
        elif isinstance(request, Draft) and not self.silent:
            self.replies.put_nowait(self.toy.draft(request))
        elif isinstance(request, Score) and not self.scoreless:
            self.replies.put_nowait(self.toy.score(request))

    async def receive(self) -> Opened | Drafted | Scored:
        return await self.replies.get()

    async def close(self) -> None:
        self.closed += 1
