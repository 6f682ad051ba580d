"""Runs of a target: the draws of passes one by one, as far as they are wanted, in replies that wait for each other."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from crossdraft.engine.requests import ScheduledRequest
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.clients import TargetClient
from crossdraft.rpc.errors import BadRequest, ContextTooLong, ProtocolBroken
from crossdraft.target.service import BATCHED_SECONDS, joined
from crossdraft.types.messages import (
    MOST_RUN,
    FetchRow,
    NoiseKey,
    OpenTarget,
    Pass,
    PassDone,
    RunTo,
    Sample,
    SamplingOptions,
)
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.gathering import Gate
from tests.rpc.linked import Direct
from tests.target.conftest import opened

PROMPT = (40, 41, 42, 300, 7)
PENALISED = SamplingOptions(temperature=0.8, presence_penalty=0.7, repetition_penalty=1.2)
OPENING = OpenTarget(PROMPT, PENALISED, NoiseKey(7), likely=2)
NO_TREE = TokenTree()
Request = Pass | FetchRow | RunTo


def run_of(number: int, tokens: int, committed: tuple[int, ...] = ()) -> Pass:
    return Pass(number, committed, NO_TREE, draws=True, run=tokens)


async def one_by_one(model: RunningModel, opening: OpenTarget, count: int) -> list[Sample]:
    """The draws of as many passes."""
    session, drawn = opened(model, opening), list[Sample]()
    for number in range(1, count + 1):
        done = await session.answer(Pass(number, tuple(one.token for one in drawn[-1:]), NO_TREE, draws=True))
        assert isinstance(done, PassDone)
        drawn += [node for node in done.nodes if isinstance(node, Sample)]
    session.close()
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


async def drawn_in(session: Direct, *requests: Request) -> list[PassDone]:
    """The replies up to the end of the last run asked for."""
    replies, last = list[PassDone](), max(one.number for one in requests)
    session.ask(*requests)
    while not replies or replies[-1].number != last or replies[-1].more:
        replies.append(await session.receive())
    return replies


def samples_of(replies: list[PassDone]) -> list[Sample]:
    return [node for reply in replies for node in reply.nodes if isinstance(node, Sample)]


def same(drawn: list[Sample], due: list[Sample]) -> None:
    assert [one.token for one in drawn] == [one.token for one in due]
    assert [one.log_probability for one in drawn] == pytest.approx([one.log_probability for one in due], abs=1e-4)
    assert [[token for token, _ in one.likely] for one in drawn] == [[token for token, _ in one.likely] for one in due]


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
    session = opened(target_model, OPENING)
    await drawn_in(session, run_of(1, 8))
    again = await drawn_in(session, run_of(2, 5, tuple(one.token for one in due[:3])))
    same(samples_of(again), due[3:])


async def test_a_pass_over_a_tree_after_a_run_feeds_the_tree_only(target_model: RunningModel) -> None:
    session = opened(target_model, OPENING)
    drawn = [one.token for one in samples_of(await drawn_in(session, run_of(1, 4)))]
    fed = target_model.thread.engine.computed
    await session.answer(Pass(2, tuple(drawn), TokenTree((5, 6), (ROOT, 0))))
    assert target_model.thread.engine.computed - fed == 3  # the last token drawn was never fed


async def test_a_run_ends_after_a_stop_id(target_model: RunningModel) -> None:
    (stop,) = target_model.description.stops
    opening = OpenTarget(PROMPT, SamplingOptions(temperature=0, logit_bias=((stop, 100.0),)), NoiseKey(1))
    (reply,) = await drawn_in(opened(target_model, opening), run_of(1, 8))
    assert [one.token for one in samples_of([reply])] == [stop]
    assert not reply.more
    ignoring = opened(target_model, replace(opening, ignore_stops=True))
    assert [one.token for one in samples_of(await drawn_in(ignoring, run_of(1, 8)))] == [stop] * 8


async def test_runs_share_steps(target_model: RunningModel) -> None:
    """Each is ready for the next step when the one before is over, whatever the event loop is at."""
    sessions = [opened(target_model, OpenTarget(PROMPT, PENALISED, NoiseKey(key))) for key in (1, 2, 3)]
    alone = [await one_by_one(target_model, OpenTarget(PROMPT, PENALISED, NoiseKey(key)), 20) for key in (1, 2, 3)]
    before = target_model.thread.steps
    async with standing(target_model):
        tasks = [asyncio.create_task(drawn_in(session, run_of(1, 20))) for session in sessions]
    found = await asyncio.gather(*tasks)
    for replies, due in zip(found, alone, strict=True):
        same(samples_of(replies), due)
    assert target_model.thread.steps - before < 45  # 60 if none were shared, 20 if all were


async def test_a_run_that_does_not_fit_is_refused_before_it_begins(target_model: RunningModel) -> None:
    session = opened(target_model, OpenTarget(PROMPT * 20, PENALISED, NoiseKey(1)))
    with pytest.raises(ContextTooLong, match="a run of 30 has 129 tokens"):
        await drawn_in(session, run_of(1, 30))
    whole = opened(target_model, OpenTarget(PROMPT * 20, PENALISED, NoiseKey(1)))
    assert len(samples_of(await drawn_in(whole, run_of(1, 29)))) == 29


async def test_no_rows_of_a_run_can_be_had(target_model: RunningModel) -> None:
    session = opened(target_model, OPENING)
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


@pytest.mark.parametrize("following", [RunTo(1, 0), Pass(2, (), NO_TREE, draws=True)], ids=["told to", "another pass"])
async def test_a_run_ends_when_something_else_is_asked(target_model: RunningModel, following: Request) -> None:
    due = await one_by_one(target_model, OPENING, 1)
    session = opened(target_model, OPENING)
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
    session = opened(target_model, OPENING)
    replies = await drawn_in(session, run_of(1, 4), RunTo(1, 9))
    same(samples_of(replies), due)
    assert [reply.more for reply in replies] == [True] * (len(replies) - 1) + [False]


async def test_what_is_told_of_another_run_changes_nothing(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 4)
    same(samples_of(await drawn_in(opened(target_model, OPENING), run_of(1, 4), RunTo(0, 9))), due)


async def test_a_run_that_is_to_go_on_beyond_the_context_is_refused(target_model: RunningModel) -> None:
    session = opened(target_model, OpenTarget(PROMPT * 20, PENALISED, NoiseKey(1)))
    with pytest.raises(ContextTooLong, match="a run of 30 has 129 tokens"):
        session.ask(run_of(1, 20), RunTo(1, 30))
    session.close()


async def test_a_run_goes_on_so_far_at_once(target_model: RunningModel) -> None:
    session = opened(target_model, OPENING)
    with pytest.raises(ProtocolBroken, match="a run of 4 tokens is to have 69; at most 64 more are possible at once"):
        session.ask(run_of(1, 4), RunTo(1, 69))
    session.close()
    other = opened(target_model, OPENING)
    assert len(samples_of(await drawn_in(other, run_of(1, 4), RunTo(1, 68), RunTo(1, 80)))) == 80


async def test_the_end_of_a_run_that_is_over_is_nothing(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 2)
    session = opened(target_model, OPENING)
    committed = (due[0].token,)
    replies = await drawn_in(
        session, Pass(1, (), NO_TREE, draws=True), RunTo(1, 0), Pass(2, committed, NO_TREE, draws=True)
    )
    same(samples_of(replies), due)


async def test_a_run_that_nobody_reads_any_more_draws_no_further(
    target_model: RunningModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, thread = opened(target_model, OPENING), target_model.thread
    places, step = threading.Semaphore(2), thread._engine_step  # the third step stands still

    def held(shares: Sequence[ScheduledRequest]) -> list[torch.Tensor | None]:
        assert places.acquire(timeout=60)
        return step(shares)

    monkeypatch.setattr(thread, "_engine_step", held)
    await session.answer(run_of(1, MOST_RUN))
    session.close()
    places.release(MOST_RUN)
    await one_by_one(target_model, OPENING, 1)
    assert thread.steps <= 3 + 1


async def test_tokens_of_a_run_wait_for_each_other_but_not_the_first_and_the_last(target_model: RunningModel) -> None:
    session = opened(target_model, OPENING)
    replies = await drawn_in(session, run_of(1, 8))
    assert len(session.withins) == 8
    assert session.withins[0] == session.withins[-1] == 0.0
    assert max(session.withins) <= BATCHED_SECONDS
    assert len(samples_of(replies)) == 8
    session.close()


async def test_tokens_that_wait_leave_as_one_reply(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 6)
    session = opened(target_model, OPENING)
    session.ask(run_of(1, 6))
    await session.news.until(lambda: session.waiting and not session.waiting[-1].more)
    (reply,) = session.waiting
    same(samples_of([reply]), due)
    assert (reply.forwards, reply.first, reply.more) == (6, 0, False)
    session.close()


async def test_what_was_drawn_before_a_fault_is_told_and_then_the_fault(target_model: RunningModel) -> None:
    session = opened(target_model, OPENING)
    sampling, left = session.session._sampling, iter(range(2))

    def failing(*asked: object) -> object:
        if next(left, None) is None:
            raise ContextTooLong("it is full")
        return sampling(*asked)

    session.session._sampling = failing
    session.ask(run_of(1, 9))
    drawn: list[Sample] = []
    while len(drawn) < 2:
        drawn += samples_of([await session.receive()])
    with pytest.raises(ContextTooLong, match="it is full"):
        await session.receive()
    session.close()


def test_replies_that_wait_are_told_together() -> None:
    one, other = (
        PassDone(3, (Sample(token, -1.0),), 0.5, 0.25, True, shared=token, fed=token, first=token) for token in (4, 5)
    )
    both = joined(one, other)
    assert both is not None
    assert [node.token for node in both.nodes if isinstance(node, Sample)] == [4, 5]
    assert (both.seconds, both.queued, both.forwards, both.shared, both.fed) == (1.0, 0.5, 2, 5, 5)
    assert (both.first, both.more) == (4, True)
    assert joined(one, replace(other, number=4)) is None
