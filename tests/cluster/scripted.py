"""Orchestrators that say what a test tells them to."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NoReturn

from crossdraft.client import GenerationRequest, Kind, Token
from crossdraft.cluster.failover import Began, Lost, Replies, Reply
from crossdraft.rpc.generation import Committed
from crossdraft.serving.backend import OutputRequest
from crossdraft.types.output import ServedModel

SMALL = ServedModel("small", 0, 100, (), ("slem",), False)
REQUEST = OutputRequest("one", "small", GenerationRequest("go", seed=1))
BEGAN = Began("here 1")
Act = Reply | Exception | None  # None: nothing for ever


async def nothing() -> NoReturn:
    """For ever."""
    while True:
        await asyncio.Event().wait()


def tokens(*numbers: int) -> Committed:
    """Those of one pass."""
    made = tuple(Token(one, str(one), str(one).encode(), Kind.BONUS, None) for one in numbers)
    return Committed(made, target="a")


class Scripted:
    """Orchestrators of which each call meets the next script."""

    def __init__(self, *scripts: Sequence[Act]) -> None:
        self.scripts = list(scripts)
        self.requests: list[OutputRequest] = []
        self.closed = 0
        self.avoided: list[str] = []
        self.answer: Exception | tuple[ServedModel, ...] | None = (SMALL,)  # which models there are; as of an act

    def avoid(self, orchestrator: str) -> None:
        self.avoided.append(orchestrator)

    async def models(self) -> tuple[ServedModel, ...]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return await nothing() if self.answer is None else self.answer

    async def stream(self, request: OutputRequest) -> AsyncGenerator[Replies, None]:
        self.requests.append(request)
        try:
            for act in self.scripts.pop(0) if self.scripts else [Lost("nobody is there")]:
                if isinstance(act, Exception):
                    raise act
                if act is None:
                    await nothing()
                else:
                    yield (act,)
        finally:
            self.closed += 1
