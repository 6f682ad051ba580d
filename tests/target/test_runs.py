"""Runs of a target: the draws of passes one by one, as far as they are wanted, in replies that wait for each other;
and many sessions at once, with too few KV slots: each has the output that it has alone."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from crossdraft.engine.kv_cache_manager import CacheEntry, KVCacheManager
from crossdraft.engine.loader import LoadedModel, LoadOptions, load_model
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.distributions import distributions
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.errors import ContextTooLong, ProtocolBroken
from crossdraft.target import service
from crossdraft.target.service import Request, joined
from crossdraft.text.grammar import Grammar
from crossdraft.text.letters import Side
from crossdraft.types import messages
from crossdraft.types.messages import MAX_RUN, NoiseKey, OpenTarget, Pass, PassDone, RunTo, Sample, SamplingOptions
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.gathering import nothing, standing
from tests.engine.tiny import nodes
from tests.prompts import PROMPTS
from tests.rpc.linked import ROW
from tests.rpc.sessions import TargetClient
from tests.target.talking import PROMPT, Talk

PENALISED = SamplingOptions(temperature=0.8, presence_penalty=0.7, repetition_penalty=1.2)
OPENING = OpenTarget(PROMPT, PENALISED, NoiseKey(7), likely=2)
NO_TREE = TokenTree()
BEGINNING = 96  # tokens that a quarter of the prompts have in common
GREEDY = SamplingOptions(temperature=0)
WARM = SamplingOptions(temperature=0.9, top_p=0.95)


def run_of(number: int, tokens: int, committed: tuple[int, ...] = ()) -> Pass:
    return Pass(number, committed, NO_TREE, draws=True, run=tokens)


async def one_by_one(model: RunningModel, opening: OpenTarget, count: int) -> list[Sample]:
    """The draws of as many passes."""
    talk, drawn = Talk(model, opening), list[Sample]()
    for number in range(1, count + 1):
        done = await talk.passed(Pass(number, tuple(one.token for one in drawn[-1:]), NO_TREE, draws=True))
        drawn += samples_of([done])
    talk.close()
    return drawn


def samples_of(replies: list[PassDone]) -> list[Sample]:
    return [node for reply in replies for node in reply.nodes if isinstance(node, Sample)]


def same(drawn: list[Sample], due: list[Sample]) -> None:
    assert [one.token for one in drawn] == [one.token for one in due]
    assert [one.log_probability for one in drawn] == pytest.approx([one.log_probability for one in due], abs=1e-4)
    assert [[token for token, _ in one.likely] for one in drawn] == [[token for token, _ in one.likely] for one in due]


async def test_a_run_draws_what_passes_would(target: TargetClient, target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 20)
    async with target.session(OPENING) as session:
        first = [done async for done in session.draw(run_of(1, 12))]
        committed = tuple(one.token for one in samples_of(first))
        second = [done async for done in session.draw(run_of(2, 8, committed))]
    replies = first + second
    same(samples_of(replies), due)
    assert [done.more for done in first] == [True] * (len(first) - 1) + [False]
    assert sum(done.forwards for done in replies) == 20
    assert [done.first for done in first] == [0, *accumulate(len(done.nodes) for done in first[:-1])]
    assert all(done.forwards == len(done.nodes) for done in replies)


@pytest.mark.parametrize("wrong", [False, True])
async def test_what_a_grammar_forces_is_drawn_together_and_as_one_by_one(target_model, monkeypatch, wrong):
    """Also where it is drawn in other tokens than those that were guessed."""
    schema = {"type": "object", "properties": {"first": {"type": "boolean"}, "ok": {"enum": ["a", "ab"]}}}
    schema |= {"required": ["first", "ok"], "additionalProperties": False}
    options = replace(PENALISED, grammar=Grammar.json(schema, whitespace_flexible=False))
    opening = replace(OPENING, options=options)
    if wrong:
        guessed = service.TargetSession._forced
        monkeypatch.setattr(service.TargetSession, "_forced", lambda *given: guessed(*given)[:1] + guessed(*given)[:3])
    replies = await Talk(target_model, opening).draw(run_of(1, 40))
    drawn = samples_of(replies)
    same(drawn, await one_by_one(target_model, opening, len(drawn)))
    text = target_model.tokenization.letters_of([one.token for one in drawn[:-1]])
    assert json.loads(text)["ok"] in ("a", "ab")
    assert drawn[-1].token in target_model.description.stops
    assert sum(done.forwards for done in replies) == len(replies) <= len(drawn) - (not wrong)
    assert [done.first for done in replies] == [0, *accumulate(len(done.nodes) for done in replies[:-1])]
    few = await Talk(target_model, opening).draw(run_of(1, 3))  # no more than that, even if they are known
    same(samples_of(few), drawn[:3])


async def test_what_was_drawn_and_not_committed_is_drawn_again(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 8)
    talk = Talk(target_model, OPENING)
    await talk.draw(run_of(1, 8))
    again = await talk.draw(run_of(2, 5, tuple(one.token for one in due[:3])))
    same(samples_of(again), due[3:])
    with pytest.raises(ProtocolBroken, match=r"has answered \[\]"):  # a run leaves no rows
        await talk.answer(messages.FetchRow(2, 0))


async def test_a_pass_over_a_tree_after_a_run_feeds_the_tree_only(target_model: RunningModel) -> None:
    talk = Talk(target_model, OPENING)
    drawn = [one.token for one in samples_of(await talk.draw(run_of(1, 4)))]
    fed = target_model.thread.engine.computed
    await talk.passed(Pass(2, tuple(drawn), TokenTree((5, 6), (ROOT, 0))))
    assert target_model.thread.engine.computed - fed == 3  # the last token drawn was never fed


async def test_a_run_ends_after_a_stop_id(target_model: RunningModel) -> None:
    (stop,) = target_model.description.stops
    opening = OpenTarget(PROMPT, SamplingOptions(temperature=0, logit_bias=((stop, 100.0),)), NoiseKey(1))
    (reply,) = await Talk(target_model, opening).draw(run_of(1, 8))
    assert [one.token for one in samples_of([reply])] == [stop]
    assert not reply.more
    ignoring = Talk(target_model, replace(opening, ignore_stops=True))
    assert [one.token for one in samples_of(await ignoring.draw(run_of(1, 8)))] == [stop] * 8


async def test_runs_share_steps(target_model: RunningModel) -> None:
    """Each is ready for the next step when the one before is over, whatever the event loop is at."""
    talks = [Talk(target_model, OpenTarget(PROMPT, PENALISED, NoiseKey(key))) for key in (1, 2, 3)]
    alone = [await one_by_one(target_model, OpenTarget(PROMPT, PENALISED, NoiseKey(key)), 10) for key in (1, 2, 3)]
    before = target_model.thread.steps
    async with standing(target_model.thread):
        for talk in talks:
            talk.ask(run_of(1, 10))
    for talk, due in zip(talks, alone, strict=True):
        same(samples_of(await talk.drawn(1)), due)
    assert target_model.thread.steps - before < 23  # 30 if none were shared, 10 if all were


async def test_a_run_that_does_not_fit_is_refused_before_it_begins_or_goes_on_so_far(target_model):
    opening = OpenTarget(PROMPT * 20, PENALISED, NoiseKey(1))
    with pytest.raises(ContextTooLong, match="a run of 30 has 129 tokens"):
        await Talk(target_model, opening).draw(run_of(1, 30))
    assert len(samples_of(await Talk(target_model, opening).draw(run_of(1, 29)))) == 29
    talk = Talk(target_model, opening)
    talk.ask(run_of(1, 20))
    with pytest.raises(ContextTooLong, match="a run of 30 has 129 tokens"):
        talk.ask(RunTo(1, 30))
    talk = Talk(target_model, OPENING)
    talk.ask(run_of(1, 4))
    with pytest.raises(ProtocolBroken, match="a run of 4 tokens is to have 69; at most 64 more are possible at once"):
        talk.ask(RunTo(1, 69))
    other = Talk(target_model, OPENING)
    other.ask(run_of(1, 4), RunTo(1, 68), RunTo(1, 80))
    assert len(samples_of(await other.drawn(1))) == 80


@pytest.mark.parametrize("following", [RunTo(1, 0), Pass(2, (), NO_TREE, draws=True)], ids=["told to", "another pass"])
async def test_a_run_ends_when_something_else_is_asked(target_model: RunningModel, following: Request) -> None:
    due = await one_by_one(target_model, OPENING, 1)
    talk = Talk(target_model, OPENING)
    async with standing(target_model.thread):
        talk.ask(run_of(1, MAX_RUN), following)
    replies = await talk.drawn(following.number)
    first = [done for done in replies if done.number == 1]
    assert not first[-1].more
    assert 1 <= sum(done.forwards for done in first) < MAX_RUN
    same(samples_of(first)[:1], due)
    if isinstance(following, Pass):
        same(samples_of([done for done in replies if done.number == 2]), due)  # nothing was committed


async def test_a_run_goes_on_as_far_as_it_is_told(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 9)
    talk = Talk(target_model, OPENING)
    talk.ask(run_of(1, 4), RunTo(1, 9), RunTo(0, 12))  # the last is of another run, and changes nothing
    replies = await talk.drawn(1)
    same(samples_of(replies), due)
    assert [reply.more for reply in replies] == [True] * (len(replies) - 1) + [False]


@pytest.mark.parametrize("tokens", [0, 9], ids=["shorter", "longer"])
async def test_a_run_that_waits_goes_as_far_as_it_is_told_meanwhile(target_model: RunningModel, tokens: int) -> None:
    due = await one_by_one(target_model, OPENING, 9)
    talk = Talk(target_model, OPENING)
    talk.ask(Pass(1, (), NO_TREE, draws=True), RunTo(1, 3), run_of(2, 4), RunTo(1, 7), RunTo(2, tokens))
    same(samples_of((await talk.drawn(2))[1:]), due[: max(1, tokens)])


async def test_the_end_of_a_run_that_is_over_is_nothing(target_model: RunningModel) -> None:
    due = await one_by_one(target_model, OPENING, 2)
    talk = Talk(target_model, OPENING)
    committed = (due[0].token,)
    talk.ask(Pass(1, (), NO_TREE, draws=True), RunTo(1, 0), Pass(2, committed, NO_TREE, draws=True))
    same(samples_of(await talk.drawn(2)), due)


@pytest.fixture
def places(target_model: RunningModel, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """How many steps the model thread can still make: none, until it is released."""
    thread, places = target_model.thread, threading.Semaphore(0)
    step = thread._engine_step

    def held(shares: Sequence[ForwardRequest]) -> list[torch.Tensor | None]:
        assert places.acquire(timeout=120)
        return step(shares)

    monkeypatch.setattr(thread, "_engine_step", held)
    return places


async def test_a_run_that_nobody_reads_any_more_draws_no_further(target_model, places):
    talk, thread = Talk(target_model, OPENING), target_model.thread
    talk.ask(run_of(1, MAX_RUN))
    places.release(2)  # the third step stands still
    await talk.receive()
    talk.close()
    places.release(MAX_RUN)
    await thread.submit(nothing())
    assert thread.steps <= 3
    assert not thread.engine.slots_in_use
    steps = thread.steps
    await one_by_one(target_model, OPENING, 1)
    assert thread.steps == steps + 1


async def test_tokens_that_follow_a_reply_at_once_are_told_together_and_the_last_one_at_once(
    target: TargetClient, places: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BATCHED_SECONDS", 1e6)
    async with target.session(OPENING) as session:
        replies = session.draw(run_of(1, 4))
        places.release()
        first = await anext(replies)  # waits for none
        places.release(3)
        assert [len(done.nodes) async for done in replies] == [3]
    assert (len(first.nodes), first.more) == (1, True)


async def test_what_was_drawn_before_a_fault_is_told_and_then_the_fault(target_model, monkeypatch):
    due = await one_by_one(target_model, OPENING, 2)
    steps, step = iter((True, True, False)), target_model.thread._engine_step

    def full(shares: Sequence[ForwardRequest]) -> list[torch.Tensor | None]:
        if next(steps):
            return step(shares)
        raise ContextTooLong("it is full")

    monkeypatch.setattr(target_model.thread, "_engine_step", full)
    talk = Talk(target_model, OPENING)
    talk.ask(run_of(1, 4))
    drawn = [done for done in (await talk.receive(), await talk.receive()) if isinstance(done, PassDone)]
    with pytest.raises(ContextTooLong, match="it is full"):
        await talk.receive()
    same(samples_of(drawn), due)
    assert all(done.more for done in drawn)


def test_replies_that_wait_are_told_together() -> None:
    one, other = (PassDone(3, (Sample(at, -1.0),), 0.5, 0.25, True, shared=at, fed=at, first=at) for at in (4, 5))
    both = joined(one, other)
    assert [node.token for node in both.nodes if isinstance(node, Sample)] == [4, 5]
    assert (both.seconds, both.queued, both.forwards, both.shared, both.fed) == (1.0, 0.5, 2, 5, 5)
    assert (both.first, both.more) == (4, True)
    assert joined(one, replace(other, number=4)) is None
    assert joined(messages.RowFetched(3, 0, ROW), other) is None


@dataclass(frozen=True)
class Case:
    """One output."""

    opening: OpenTarget
    count: int  # tokens
    manner: int  # 0: token by token; 1: with trees; 2: in runs


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    return load_model(LoadOptions("bundled:target", dtype="float32"))


@pytest.fixture
def crowded(budget: int) -> Iterator[RunningModel]:
    options = ModelOptions("bundled:target", dtype="float32", cache_mib=budget)
    running = RunningModel.of(load_model(options), Side.TARGET, options)
    yield running
    running.close()


def cases(running: RunningModel, count: int, seed: int) -> list[Case]:
    """Prompts of 5 to 400 tokens, a quarter of them with a common beginning; 4 to 12 tokens of output."""
    draw = random.Random(seed)
    ids = [token for prompt in PROMPTS[:60] for token in running.tokenization.encode_prompt(prompt)]
    found = []
    for number in range(count):
        begin, length = draw.randrange(len(ids) - 400), draw.choice((5, 20, 70, 150, 400))
        prompt = tuple(ids[begin : begin + length])
        if number % 4 == 0:
            prompt = (*ids[:BEGINNING], *prompt[:60])
        opening = OpenTarget(prompt, GREEDY if number % 2 else WARM, NoiseKey(seed + number))
        found.append(Case(opening, draw.randint(4, 12), number % 3))
    return found


@torch.inference_mode()
def alone(plain: LoadedModel, running: RunningModel, case: Case) -> tuple[int, ...]:
    """By the bare model with transformers' own cache, and the keyed draws."""
    assert case.opening.noise is not None
    prompt, options, key = case.opening.prompt, case.opening.options, case.opening.noise
    cache, fed = DynamicCache(), prompt
    output: tuple[int, ...] = ()
    while len(output) < case.count:
        logits = plain.model(torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1:]
        (probabilities,) = distributions([nodes(logits, options)]).numpy()
        offset = len(running.tokenization.letters_of(output))
        fed = (running.clocks.noise.draw(np.arange(len(probabilities)), probabilities, key, offset),)
        output = (*output, *fed)
    return output


async def together(
    running: RunningModel, case: Case, due: tuple[int, ...], rest: asyncio.Event | None = None
) -> tuple[int, ...]:
    """One session's output as a target is asked for it; trees guess right more often than not.

    With `rest` it asks for nothing after its first tokens until then: others take its places meanwhile.
    """
    talk, draw, number = Talk(running, case.opening), random.Random(case.count), 0
    output: tuple[int, ...] = ()
    found: tuple[int, ...] = ()
    try:
        while len(output) < case.count:
            number, left = number + 1, case.count - len(output)
            run = min(left, 5) if case.manner == 2 else 1
            guess = [token if draw.random() < 0.8 else 7 for token in due[len(output) :][: min(left - 1, 4)]]
            tree = TokenTree(tuple(guess), tuple(range(ROOT, len(guess) - 1))) if case.manner == 1 else TokenTree()
            replies = await talk.draw(Pass(number, found, tree, draws=True, run=run))
            drawn = tuple(node.token for done in replies for node in done.nodes if isinstance(node, Sample))
            right = 0
            while right < len(tree) and tree.tokens[right] == drawn[right]:
                right += 1
            found = drawn[: right + 1] if run == 1 else drawn
            output += found
            if rest is not None:
                await rest.wait()
    finally:
        talk.close()
    return output


async def left_early(running: RunningModel, case: Case, seconds: float) -> None:
    task = asyncio.create_task(together(running, case, ()))
    await asyncio.wait((task,), timeout=seconds)
    task.cancel()
    await asyncio.wait((task,))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that new sessions began with, from what others have fed."""
    found: list[int] = []
    begun = KVCacheManager._begin

    def watched(self: KVCacheManager, request: ForwardRequest) -> CacheEntry | None:
        holding = begun(self, request)
        if holding is not None:
            found.append(len(holding.cached.ids))
        return holding

    monkeypatch.setattr(KVCacheManager, "_begin", watched)
    return found


# MiB for a quarter, and a sixth, of the KV slots that all sessions need.
@pytest.mark.parametrize(("sessions", "budget"), [(24, 12), pytest.param(64, 24, marks=pytest.mark.full)])
async def test_many_sessions_have_the_outputs_that_they_have_alone(plain, crowded, shared, sessions):
    every = cases(crowded, sessions, 1)
    due = [alone(plain, crowded, case) for case in every]
    leaving = cases(crowded, sessions // 5, 500)  # cancelled on their way
    rest = asyncio.Event()
    assert await together(crowded, every[0], due[0]) == due[0]  # what it has fed is there for the first of these
    tasks = [
        asyncio.create_task(together(crowded, case, tokens, rest if number % 8 == 0 else None))
        for number, (case, tokens) in enumerate(zip(every, due, strict=True))
    ]
    others = [task for number, task in enumerate(tasks) if number % 8]
    await asyncio.gather(*(left_early(crowded, case, 0.1 * number) for number, case in enumerate(leaving)))
    await asyncio.wait(others)
    rest.set()
    assert await asyncio.gather(*tasks) == due
    assert len({*due}) > sessions / 2  # they are different texts
    done = crowded.statistics()
    assert done.evictions > 0
    assert shared[1] >= BEGINNING
    assert max(done.batches) > 1
    await crowded.thread.submit(nothing())  # after the sessions' ends
    assert crowded.thread.engine.slots_in_use == 0
