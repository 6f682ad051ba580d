"""Orchestrators that say what a test tells them to."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from crossdraft.client import GenerationRequest, Kind, Token
from crossdraft.cluster.failover import Began, Lost, Replies, Reply
from crossdraft.serving.backend import Committed, OutputRequest
from crossdraft.types.output import ServedModel

SMALL = ServedModel("small", 0, 100, (), ("slem",), False)
REQUEST = OutputRequest("one", "small", GenerationRequest("go", seed=1))
BEGAN = Began("a", "here 1")
Act = Reply | Exception | None  # None: nothing for ever


def tokens(*numbers: int) -> Committed:
    """Those of one pass."""
    return Committed(tuple(Token(one, str(one), str(one).encode(), Kind.BONUS, None) for one in numbers))


class Scripted:
    """Orchestrators of which each call meets the next script."""

    def __init__(self, *scripts: Sequence[Act]) -> None:
        self.scripts = list(scripts)
        self.requests: list[OutputRequest] = []
        self.closed = 0

    async def models(self) -> tuple[ServedModel, ...]:
        return (SMALL,)

    async def stream(self, request: OutputRequest) -> AsyncGenerator[Replies, None]:
        self.requests.append(request)
        try:
            for act in self.scripts.pop(0) if self.scripts else [Lost("nobody is there")]:
                if isinstance(act, Exception):
                    raise act
                if act is None:
                    await asyncio.Event().wait()
                else:
                    yield (act,)
        finally:
            self.closed += 1
