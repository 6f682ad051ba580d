"""How far a run of a target goes: as far as it is told, and no further than somebody wants it."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch

from crossdraft.engine.requests import ScheduledRequest
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import ContextTooLong, ProtocolBroken
from crossdraft.target.service import TargetSession
from crossdraft.types.messages import MOST_RUN, NoiseKey, OpenTarget, Pass, RunTo
from tests.services.drawing import (
    NO_TREE,
    OPENING,
    PENALISED,
    PROMPT,
    Request,
    asked,
    drawn_in,
    one_by_one,
    run_of,
    same,
    samples_of,
    standing,
)


@pytest.mark.parametrize("following", [RunTo(1, 0), Pass(2, (), NO_TREE, draws=True)], ids=["told to", "another pass"])
async def test_a_run_ends_when_something_else_is_asked(target_model: RunningModel, following: Request) -> None:
    due = await one_by_one(target_model, OPENING, 1)
    session = TargetSession(target_model, OPENING)
    async with standing(target_model):
        drawing = asyncio.create_task(drawn_in(session, run_of(1, MOST_RUN), following))
    replies = await drawing
    first = [done for done in replies if done.number == 1]
    assert not first[-1].more
    assert 1 <= sum(done.forwards for done in first) < MOST_RUN
    same(samples_of(first)[:1], due)
    if isinstance(following, Pass):
        same(samples_of([done for done in replies if done.number == 2]), due)  # nothing was committed


async def test_a_run_goes_on_as_far_as_it_is_told(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 9)
    session = TargetSession(target_model, OPENING)
    replies = await drawn_in(session, run_of(1, 4), RunTo(1, 9))
    same(samples_of(replies), due)
    assert [reply.more for reply in replies] == [True] * (len(replies) - 1) + [False]


async def test_what_is_told_of_another_run_changes_nothing(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 4)
    same(samples_of(await drawn_in(TargetSession(target_model, OPENING), run_of(1, 4), RunTo(0, 9))), due)


async def test_a_run_that_is_to_go_on_beyond_the_context_is_refused(target_model: RunningModel) -> None:
    session = TargetSession(target_model, OpenTarget(PROMPT * 20, PENALISED, NoiseKey(1)))
    with pytest.raises(ContextTooLong, match="a run of 30 has 129 tokens"):
        _ = [reply.number async for reply in session.converse(asked(run_of(1, 20), RunTo(1, 30)))]


async def test_a_run_goes_on_so_far_at_once(target_model: RunningModel) -> None:
    session = TargetSession(target_model, OPENING)
    with pytest.raises(ProtocolBroken, match="a run of 4 tokens is to have 69; at most 64 more are possible at once"):
        _ = [reply.number async for reply in session.converse(asked(run_of(1, 4), RunTo(1, 69)))]
    other = TargetSession(target_model, OPENING)
    assert len(samples_of(await drawn_in(other, run_of(1, 4), RunTo(1, 68), RunTo(1, 80)))) == 80


async def test_the_end_of_a_run_that_is_over_is_nothing(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 2)
    session = TargetSession(target_model, OPENING)
    committed = (due[0].token,)
    replies = await drawn_in(
        session, Pass(1, (), NO_TREE, draws=True), RunTo(1, 0), Pass(2, committed, NO_TREE, draws=True)
    )
    same(samples_of(replies), due)


async def test_a_run_that_nobody_reads_any_more_draws_no_further(
    target_model: RunningModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, thread = TargetSession(target_model, OPENING), target_model.thread
    places, step = threading.Semaphore(2), thread._engine_step  # the third step stands still

    def held(shares: Sequence[ScheduledRequest]) -> list[torch.Tensor | None]:
        assert places.acquire(timeout=60)
        return step(shares)

    monkeypatch.setattr(thread, "_engine_step", held)
    conversation = session.converse(asked(run_of(1, MOST_RUN)))
    await anext(conversation)
    await conversation.aclose()
    places.release(MOST_RUN)
    await session.close()
    assert thread.steps <= 3
    steps = thread.steps
    await one_by_one(target_model, OPENING, 1)
    assert thread.steps == steps + 1
