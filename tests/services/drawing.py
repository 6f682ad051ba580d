"""Runs that a target is asked for, and the draws of passes one by one, which theirs must be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from crossdraft.engine.served_model import RunningModel
from crossdraft.target.service import TargetSession
from crossdraft.types.messages import FetchRow, NoiseKey, OpenTarget, Pass, PassDone, RunTo, Sample, SamplingOptions
from crossdraft.types.trees import TokenTree
from tests.engine.gathering import Gate

PROMPT = (40, 41, 42, 300, 7)
PENALISED = SamplingOptions(temperature=0.8, presence_penalty=0.7, repetition_penalty=1.2)
OPENING = OpenTarget(PROMPT, PENALISED, NoiseKey(7), likely=2)
NO_TREE = TokenTree()
Request = Pass | FetchRow | RunTo


def run_of(number: int, tokens: int, committed: tuple[int, ...] = ()) -> Pass:
    return Pass(number, committed, NO_TREE, draws=True, run=tokens)


async def asked(*requests: Request) -> AsyncIterator[Request]:
    """They come at once, and nothing after them; the stream stays open."""
    for request in requests:
        yield request
    await asyncio.Event().wait()


async def one_by_one(model: RunningModel, opening: OpenTarget, count: int) -> list[Sample]:
    """The draws of as many passes."""
    session, drawn = TargetSession(model, opening), list[Sample]()
    for number in range(1, count + 1):
        done = await session.answer(Pass(number, tuple(one.token for one in drawn[-1:]), NO_TREE, draws=True))
        assert isinstance(done, PassDone)
        drawn += [node for node in done.nodes if isinstance(node, Sample)]
    await session.close()
    return drawn


@asynccontextmanager
async def standing(model: RunningModel) -> AsyncIterator[None]:
    """The model thread stands still until all that tasks of the block ask of it waits."""
    gate = Gate()
    held = asyncio.create_task(model.thread.run(gate.job()))
    assert await asyncio.to_thread(gate.entered.wait, 60)
    try:
        yield
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
    finally:
        gate.let_go.set()
    await held


async def drawn_in(session: TargetSession, *requests: Request) -> list[PassDone]:
    """The replies up to the end of the last run asked for."""
    replies: list[PassDone] = []
    conversation, last = session.converse(asked(*requests)), max(one.number for one in requests)
    async for reply in conversation:
        assert isinstance(reply, PassDone)
        replies.append(reply)
        if reply.number == last and not reply.more:
            break
    await conversation.aclose()
    return replies


def samples_of(replies: list[PassDone]) -> list[Sample]:
    return [node for reply in replies for node in reply.nodes if isinstance(node, Sample)]


def same(drawn: list[Sample], due: list[Sample]) -> None:
    assert [one.token for one in drawn] == [one.token for one in due]
    assert [one.log_probability for one in drawn] == pytest.approx([one.log_probability for one in due], abs=1e-4)
    assert [[token for token, _ in one.likely] for one in drawn] == [[token for token, _ in one.likely] for one in due]
