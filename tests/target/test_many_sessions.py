"""Many sessions at once on the bundled target, with too few KV slots: each has the output that it has alone."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from crossdraft.engine.distributions import distributions
from crossdraft.engine.kv_cache_manager import CacheEntry, KVCacheManager
from crossdraft.engine.loader import LoadedModel, LoadOptions, load_model
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.served_model import RunningModel
from crossdraft.text.letters import Side
from crossdraft.types.messages import NoiseKey, OpenTarget, Pass, Sample, SamplingOptions
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.gathering import nothing
from tests.engine.tiny import nodes
from tests.prompts import PROMPTS
from tests.target.talking import Talk

BEGINNING = 96  # tokens that a quarter of the prompts have in common
GREEDY = SamplingOptions(temperature=0)
WARM = SamplingOptions(temperature=0.9, top_p=0.95)


@dataclass(frozen=True)
class Case:
    """One output."""

    opening: OpenTarget
    count: int  # tokens
    manner: int  # 0: token by token; 1: with trees; 2: in runs


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    return load_model(LoadOptions("bundled:target", "float32"))


@pytest.fixture
def crowded(budget: int) -> Iterator[RunningModel]:
    running = RunningModel.of(load_model(LoadOptions("bundled:target", "float32")), Side.TARGET, budget)
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
        fed = (running.noise.draw(np.arange(len(probabilities)), probabilities, key, offset),)
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
