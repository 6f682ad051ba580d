"""Runs requests on their schedule and writes down what happened to each."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext

from crossdraft.loadtest.arrivals import ClosedLoop, Load, OpenLoop, poisson
from crossdraft.loadtest.prompts import Question
from crossdraft.loadtest.timeline import Chunk, Failure, Figures, Over, Timeline, Way

TIMED_OUT = "timed out"


class Trial:
    """One way to have outputs made, under one load.

    Args:
        way: who makes them.
        timeout_seconds: after which a request is given up.
        told: is called after each request, with its timeline and what its error said.
        now: seconds of a clock; that of the ways' moments.
    """

    def __init__(
        self,
        way: Way,
        timeout_seconds: float,
        told: Callable[[Timeline, str], None] = lambda timeline, text: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._way = way
        self._timeout_seconds = timeout_seconds
        self._told = told
        self._now = now

    async def run(self, load: Load, questions: Sequence[Question], seed: int) -> list[Timeline]:
        """All requests, each to its end; their timelines in the order of their numbers."""
        match load:
            case OpenLoop():
                return await self._on_schedule(load, questions, poisson(load.rate, len(questions), seed))
            case ClosedLoop():
                return await self._by_clients(load.clients, questions)

    async def _on_schedule(
        self, load: OpenLoop, questions: Sequence[Question], dues: Sequence[float]
    ) -> list[Timeline]:
        room = nullcontext() if load.most is None else asyncio.Semaphore(load.most)
        begin = self._now()

        async def one(question: Question, due: float) -> Timeline:
            async with room:
                return await self._ask(question, due)

        async with asyncio.TaskGroup() as group:
            tasks = []
            for question, offset in zip(questions, dues, strict=True):
                await asyncio.sleep(max(0.0, begin + offset - self._now()))
                tasks.append(group.create_task(one(question, begin + offset)))
        return [task.result() for task in tasks]

    async def _by_clients(self, clients: int, questions: Sequence[Question]) -> list[Timeline]:
        left = iter(questions)
        found: list[Timeline] = []

        async def client() -> None:
            for question in left:  # the clients share it
                found.append(await self._ask(question, self._now()))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return sorted(found, key=lambda one: one.number)

    async def _ask(self, question: Question, due: float) -> Timeline:
        sent, error, text = self._now(), "", ""
        chunks: list[Chunk] = []
        over: Over | None = None
        try:
            async with asyncio.timeout(self._timeout_seconds), aclosing(self._way.ask(question)) as heard:
                async for one in heard:
                    match one:
                        case Chunk():
                            chunks.append(one)
                        case Over():
                            over = one
        except TimeoutError:
            error, text = TIMED_OUT, f"no end after {self._timeout_seconds:g} s"
        except Failure as failure:
            error, text = failure.kind, str(failure)
        timeline = timeline_of(question, (due, sent, self._now()), chunks, over, error)
        self._told(timeline, text)
        return timeline


def timeline_of(
    question: Question, moments: tuple[float, float, float], chunks: Sequence[Chunk], over: Over | None, error: str
) -> Timeline:
    """From when a request was due, sent, and over or broken, and what was heard of it."""
    due, sent, ended = moments
    made = tuple(one.made for one in chunks if one.made is not None)
    figures: Figures | None = None if over is None else over.figures
    return Timeline(
        number=question.number,
        category=question.prompt.category,
        due=due,
        sent=sent,
        chunks=tuple(one.at for one in chunks),
        ended=ended if over is None else over.at,
        tokens=len(chunks) if over is None or over.tokens is None else over.tokens,
        made=made if len(made) == len(chunks) else (),
        error=error,
        figures=figures,
    )
