"""Runs of a target: the same draws as of passes one by one, and what no run can be."""

import asyncio
from dataclasses import replace
from itertools import accumulate

import pytest

from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.clients import TargetClient
from crossdraft.rpc.errors import BadRequest, ContextTooLong, ProtocolBroken
from crossdraft.target.service import TargetSession
from crossdraft.types.messages import MOST_RUN, FetchRow, NoiseKey, OpenTarget, Pass, SamplingOptions
from crossdraft.types.trees import ROOT, TokenTree
from tests.services.drawing import (
    NO_TREE,
    OPENING,
    PENALISED,
    PROMPT,
    drawn_in,
    one_by_one,
    run_of,
    same,
    samples_of,
    standing,
)


@pytest.mark.parametrize("options", [PENALISED, SamplingOptions(temperature=0)], ids=["warm", "greedy"])
async def test_a_run_draws_what_passes_would(target: TargetClient, target_model: RunningModel, options) -> None:
    opening = OpenTarget(PROMPT, options, NoiseKey(7), likely=2)
    due = await one_by_one(target_model, opening, 20)
    async with target.session(opening) as session:
        first = [done async for done in session.draw(run_of(1, 12))]
        committed = tuple(one.token for one in samples_of(first))
        second = [done async for done in session.draw(run_of(2, 8, committed))]
    replies = first + second
    same(samples_of(replies), due)
    assert [done.more for done in first] == [True] * (len(first) - 1) + [False]
    assert sum(done.forwards for done in replies) == 20
    assert [done.first for done in first] == [0, *accumulate(len(done.nodes) for done in first[:-1])]
    assert all(done.forwards == len(done.nodes) for done in replies)


async def test_what_was_drawn_and_not_committed_is_drawn_again(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 8)
    session = TargetSession(target_model, OPENING)
    await drawn_in(session, run_of(1, 8))
    again = await drawn_in(session, run_of(2, 5, tuple(one.token for one in due[:3])))
    same(samples_of(again), due[3:])


async def test_a_pass_over_a_tree_after_a_run_feeds_the_tree_only(target_model: RunningModel) -> None:
    session = TargetSession(target_model, OPENING)
    drawn = [one.token for one in samples_of(await drawn_in(session, run_of(1, 4)))]
    fed = target_model.thread.engine.computed
    await session.answer(Pass(2, tuple(drawn), TokenTree((5, 6), (ROOT, 0))))
    assert target_model.thread.engine.computed - fed == 3  # the last token drawn was never fed


async def test_a_run_ends_after_a_stop_id(target_model: RunningModel) -> None:
    (stop,) = target_model.description.stops
    opening = OpenTarget(PROMPT, SamplingOptions(temperature=0, logit_bias=((stop, 100.0),)), NoiseKey(1))
    (reply,) = await drawn_in(TargetSession(target_model, opening), run_of(1, 8))
    assert [one.token for one in samples_of([reply])] == [stop]
    assert not reply.more
    ignoring = TargetSession(target_model, replace(opening, ignore_stops=True))
    assert [one.token for one in samples_of(await drawn_in(ignoring, run_of(1, 8)))] == [stop] * 8


async def test_runs_share_steps(target_model: RunningModel) -> None:
    """Each is ready for the next step when the one before is over, whatever the event loop is at."""
    sessions = [TargetSession(target_model, OpenTarget(PROMPT, PENALISED, NoiseKey(key))) for key in (1, 2, 3)]
    alone = [await one_by_one(target_model, OpenTarget(PROMPT, PENALISED, NoiseKey(key)), 20) for key in (1, 2, 3)]
    before = target_model.thread.steps
    async with standing(target_model):
        tasks = [asyncio.create_task(drawn_in(session, run_of(1, 20))) for session in sessions]
    found = await asyncio.gather(*tasks)
    for replies, due in zip(found, alone, strict=True):
        same(samples_of(replies), due)
    assert target_model.thread.steps - before < 45  # 60 if none were shared, 20 if all were


async def test_a_run_that_does_not_fit_is_refused_before_it_begins(target_model: RunningModel) -> None:
    session = TargetSession(target_model, OpenTarget(PROMPT * 20, PENALISED, NoiseKey(1)))
    with pytest.raises(ContextTooLong, match="a run of 30 has 129 tokens"):
        await drawn_in(session, run_of(1, 30))
    whole = TargetSession(target_model, OpenTarget(PROMPT * 20, PENALISED, NoiseKey(1)))
    assert len(samples_of(await drawn_in(whole, run_of(1, 29)))) == 29


async def test_no_rows_of_a_run_can_be_had(target_model: RunningModel) -> None:
    session = TargetSession(target_model, OPENING)
    await drawn_in(session, run_of(1, 3))
    with pytest.raises(ProtocolBroken, match=r"has answered \[\]"):
        await session.answer(FetchRow(1, 0))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (Pass(1, (), NO_TREE, run=4), "needs draws"),
        (Pass(1, (), TokenTree((5,), (ROOT,)), draws=True, run=4), "has no tree"),
        (run_of(1, MOST_RUN + 1), "run has 65; at most 64"),
    ],
)
async def test_runs_that_cannot_be(target: TargetClient, wrong: Pass, complaint: str) -> None:
    async with target.session(OPENING) as session:
        with pytest.raises(BadRequest, match=complaint):
            async for _ in session.draw(wrong):
                pass
