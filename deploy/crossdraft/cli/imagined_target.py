"""The target of a made-up language, as a service without a model, and what it and its drafter both know."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from crossdraft.cli.in_memory import InMemory, Noises
from crossdraft.cli.invented import DISAGREEMENT, Language, tokenization, tokenizer_json
from crossdraft.pipeline.events import Replied
from crossdraft.pipeline.events import Send as Sent
from crossdraft.text.letters import Side
from crossdraft.text.pairing import Pair
from crossdraft.text.vocabulary import tokenizer_digest
from crossdraft.verification.exchange import Description, FetchRow, OpenTarget, Pass, PassDone, RowFetched, RunTo
from crossdraft.verification.methods import Method
from crossdraft.verification.trees import Path

WIDTH = 64  # ids of a row
CONTEXT = 100_000  # tokens


@dataclass(frozen=True, eq=False)
class World:
    """What both services know."""

    method: Method
    size: int
    seconds: float  # that a pass or a proposal takes
    language: Language
    noises: Noises

    @staticmethod
    def of(method: Method, size: int, seconds: float) -> "World":
        """The two vocabularies, and what is expected of texts."""
        target, drafter = (tokenization(size, side).vocabulary for side in Side)
        pair = Pair(target, target if method.same_vocabulary else drafter)
        return World(method, size, seconds, Language(pair, DISAGREEMENT), Noises.of(pair))

    def description(self, side: Side) -> Description:
        """Of one of the models."""
        text = tokenizer_json(self.size, side.value)
        return Description(f"imagined {side.name.lower()}", text, (), (), self.size, CONTEXT, tokenizer_digest(text))


@dataclass(frozen=True, eq=False)
class TargetService:
    """A target."""

    world: World
    description: Description

    async def open(self, request: OpenTarget) -> "TargetSession":
        """A new session."""
        world = self.world
        return TargetSession(InMemory(world.language, world.noises, world.method, WIDTH, seed=0), world.seconds)

    async def close(self) -> None:
        """Nothing runs."""


@dataclass
class Run:
    """Tokens that are drawn one after another."""

    most: int  # that are wanted; this may change


@dataclass(frozen=True, eq=False)
class TargetSession:
    """One output."""

    memory: InMemory
    seconds: float

    async def converse(
        self, requests: AsyncIterator[Pass | FetchRow | RunTo]
    ) -> AsyncGenerator[PassDone | RowFetched, None]:
        """One reply for each request, in order; for a run one for each token, until a pass or a row is asked for."""
        request = await _following(requests, Run(0))
        while request is not None:
            run = Run(request.run if isinstance(request, Pass) else 0)
            following = asyncio.ensure_future(_following(requests, run))
            try:
                if isinstance(request, Pass) and request.run > 1:
                    async for done in self._drawn(request, run, following):
                        yield done
                else:
                    yield await self._answer(request)
                request = await following
            finally:
                following.cancel()

    async def _drawn(self, request: Pass, run: Run, following: "asyncio.Future[Any]") -> AsyncIterator[PassDone]:
        drawn: Path = ()
        more = True
        while more:
            await asyncio.sleep(self.seconds)
            sample = self.memory.draw(request, drawn)
            drawn = (*drawn, sample.token)
            more = len(drawn) < run.most and not following.done()
            yield PassDone(request.number, (sample,), self.seconds, more=more, first=len(drawn) - 1)

    async def _answer(self, request: Pass | FetchRow) -> PassDone | RowFetched:
        if isinstance(request, Pass):
            await asyncio.sleep(self.seconds)
        event = self.memory.answer(Sent(0, request))
        assert isinstance(event, Replied)
        assert isinstance(event.reply, PassDone | RowFetched)
        return event.reply

    async def close(self) -> None:
        """Nothing is held."""


async def _following(requests: AsyncIterator[Pass | FetchRow | RunTo], run: Run) -> Pass | FetchRow | None:
    """The next pass or row that is asked for; a run that is told of before goes on so far."""
    async for request in requests:
        if not isinstance(request, RunTo):
            return request
        run.most = request.tokens
    return None
