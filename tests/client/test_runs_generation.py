"""Plain decoding over real gRPC with a tiny random model: runs give the text that passes one by one give."""

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, connect
from crossdraft.drafter.service import DrafterService
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.server import Server
from crossdraft.session import session
from crossdraft.session.assignment import Secrets
from crossdraft.session.events import Emitted, Replied
from crossdraft.speculation.choice import Choice
from crossdraft.target.service import TargetService
from crossdraft.types.messages import PassDone
from crossdraft.types.rows import Row
from tests.client.together import ended
from tests.rpc.sessions import TargetClient
from tests.services.conftest import AT_ONCE
from tests.trace.recordings import Keeper

PROMPT = "def main(argument):"
GREEDY = SamplingOptions(temperature=0)
ONE_BY_ONE = Choice(0)


@pytest.fixture
async def pipeline(target: TargetClient) -> AsyncIterator[Pipeline]:
    async with connect(target.address) as connected:
        yield connected


@pytest.mark.parametrize(
    "settings", [{"options": GREEDY}, {"seed": 3, "method": "slem"}, {"seed": 5, "logprobs": 2}], ids=str
)
async def test_the_text_is_the_same(pipeline: Pipeline, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    with_runs = await ended(pipeline.generate(PROMPT, max_tokens=50, **settings))
    with monkeypatch.context() as patched:
        patched.setattr(session, "PLAIN", ONE_BY_ONE)
        without = await ended(pipeline.generate(PROMPT, max_tokens=50, **settings))
    assert with_runs.ids == without.ids
    assert (with_runs.text, with_runs.reason) == (without.text, without.reason)
    ours, theirs = with_runs.statistics, without.statistics
    assert (ours.passes, ours.tokens) == (theirs.passes, theirs.tokens)
    assert ours.tokens_per_pass == 1
    assert (ours.runs > 0, theirs.runs) == (True, 0)
    assert ours.bytes_sent < theirs.bytes_sent / 2


async def test_tokens_come_while_the_run_goes_on(pipeline: Pipeline, target_model: RunningModel) -> None:
    """They are not kept until the run is over: nor is one drawn after the output was left."""
    generation = pipeline.generate(PROMPT, max_tokens=100, seed=7, ignore_eos=True)
    await anext(generation)
    steps = target_model.thread.steps
    assert steps < 100
    await generation.aclose()


async def test_a_recorded_run_has_its_passes(pipeline: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    await ended(pipeline.generate(PROMPT, max_tokens=40, seed=7, ignore_eos=True, record=path))
    passes = [one for one in json.loads(path.read_text())["traceEvents"] if one.get("cat") == "pass"]
    assert len(passes) > 1
    assert all(before["ts"] + before["dur"] <= after["ts"] + 100 for before, after in pairwise(passes))


async def test_services_of_this_process_give_what_those_behind_a_wire_give(
    target_model: RunningModel, drafter_model: RunningModel, drafter_first: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same output, and the same rows: those of a target are rounded on any link."""
    monkeypatch.setattr(Secrets, "drawn", staticmethod(lambda: Secrets(1, 2, 3)))
    settings: dict[str, Any] = {"method": "coupled", "overlap": "off", "num_speculative_tokens": 3, "audit": True}
    async with (
        Server(TARGET, TargetService(target_model), AT_ONCE) as target,
        Server(DRAFTER, DrafterService(drafter_model), AT_ONCE) as drafter,
    ):
        made = []
        for addresses in ((target.address, drafter.address), (target.here, drafter.here)):
            async with connect(*addresses) as pipeline:
                keeper = Keeper()
                request = GenerationRequest.of(PROMPT, max_tokens=40, logprobs=2, **settings)
                await ended(pipeline.run(request, keeper))
            steps = keeper.steps
            tokens = [one for step in steps for one in step.commands if isinstance(one, Emitted)]
            replies = [step.event.reply for step in steps if isinstance(step.event, Replied)]
            nodes = [node for reply in replies if isinstance(reply, PassDone) for node in reply.nodes]
            rows = [(node.ids.tolist(), node.probabilities.tolist()) for node in nodes if isinstance(node, Row)]
            made.append((tokens, rows))
    assert made[0] == made[1]
    assert len(made[0][1]) > 10
