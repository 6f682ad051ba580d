"""Services that are killed while they work: the client sees a pause, and the text of an undisturbed run."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from crossdraft.cli.processes import Running, Wanted, patience, running
from crossdraft.client import (
    Generation,
    GenerationRequest,
    Grammar,
    Kind,
    Overlap,
    Pipeline,
    Reason,
    SamplingOptions,
    connect,
)
from crossdraft.drafter.service import drafter_server
from crossdraft.engine import engine
from crossdraft.engine.kv_cache import KVCache
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab.emulation.steps import Emulation, Pace
from crossdraft.rpc.errors import CannotListen, Unreachable
from crossdraft.rpc.links import Patience
from crossdraft.rpc.server import Listening
from crossdraft.serving.models import serving
from crossdraft.target.service import TargetServer, target_server
from crossdraft.types.statistics import Statistics
from tests.client.together import ended
from tests.endtoend.stack import AT_ONCE, TARGET, Copying, model
from tests.prompts import PROMPTS

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 60
BEFORE = 8  # tokens
SECONDS = 120.0
PACE = "30,0"  # of a target: what is killed is in the middle of it


TEXTS = Grammar.json({"type": "array", "items": {"type": "string"}, "minItems": TOKENS})


def request(overlap: Overlap, grammar: Grammar | None = None) -> GenerationRequest:
    text, options = PROMPTS[3], SamplingOptions(grammar=grammar)
    return GenerationRequest(
        text, method="seeded", max_tokens=TOKENS, seed=11, ignore_eos=True, overlap=overlap, options=options
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncIterator[TargetServer]:
    """In this process, where nothing kills it."""
    async with await target_server(model(TARGET, Emulation(Pace.parsed(PACE))), AT_ONCE) as server:
        yield server


async def undisturbed(pipeline: Pipeline, grammar: Grammar | None = None) -> str:
    return (await ended(pipeline.run(request(Overlap.OFF, grammar)))).text


async def disturbed(
    generation: Generation, victim: Running, drafted: bool = True, begun: asyncio.Barrier | None = None
) -> Statistics:
    """Its figures; a service is killed when some tokens are there, of draft tokens unless `drafted`, and not before
    all others that wait for `begun` have one."""
    count, killed = 0, False
    async with asyncio.timeout(SECONDS), generation:
        async for token in generation:
            count += 1
            if count == 1 and begun is not None:
                await begun.wait()
            drafted = drafted or token.kind is not Kind.BONUS
            if count >= BEFORE and drafted and not killed:
                with suppress(ProcessLookupError):
                    os.kill(victim.process_id, signal.SIGKILL)
                killed = True
    assert (killed, count, generation.reason) == (True, TOKENS, Reason.LENGTH)
    assert generation.statistics is not None
    return generation.statistics


@pytest.mark.full
@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize("overlap", [Overlap.ON, Overlap.OFF])
async def test_drafters_that_are_killed_one_after_the_other(target: TargetServer, overlap: Overlap) -> None:
    async with (
        running([Copying()] * 2) as drafters,
        connect(target.address, [one.address for one in drafters], needs_drafter=True) as pipeline,
    ):
        wanted = await undisturbed(pipeline)
        for drafter in drafters:
            generation = pipeline.run(request(overlap))
            figures = await disturbed(generation, drafter, drafted=False)
            assert generation.text == wanted
            assert figures.draft_tokens > 0
            assert figures.targets_lost == 0


@pytest.mark.usefixtures("drafter_first")
async def test_a_target_that_is_killed_is_replaced_by_another_and_then_a_drafter_is_killed(target: TargetServer):
    """In outputs that are free, in mid-object, and drafted by hidden states, which travel to a process of its own: this
    goes on with those of the target that follows, and then is killed, too."""
    started = Wanted("target", f"bundled:{TARGET}", 1, ("--pace", PACE)), Wanted("drafter", "bundled:drafter-eagle", 1)
    async with (
        running(started) as (victim, eagle),
        await drafter_server(model("drafter-a"), AT_ONCE) as drafter,
        connect([victim.address, target.address], drafter.address, needs_drafter=True) as pipeline,
        connect([victim.address, target.address], eagle.address, needs_drafter=True) as of_states,
    ):
        wanted = [await undisturbed(pipeline), await undisturbed(pipeline, TEXTS), await undisturbed(of_states)]
        assert wanted[1].lstrip().startswith("[")
        asked = (pipeline, Overlap.ON, None), (pipeline, Overlap.ON, TEXTS), (of_states, Overlap.OFF, None)
        # Of each kind one on each target.
        generations = [by.run(request(overlap, grammar)) for by, overlap, grammar in asked for _ in range(2)]
        begun = asyncio.Barrier(len(generations))
        figures = await asyncio.gather(*(disturbed(one, victim, begun=begun) for one in generations))
        assert [one.text for one in generations] == [text for text in wanted for _ in range(2)]
        for pair in (figures[:2], figures[2:4], figures[4:]):
            assert sorted(figure.targets_lost for figure in pair) == [0, 1]
        assert [figure.drafters_lost for figure in figures[:4]] == [0] * 4
        assert sum(figure.tokens for figure in figures[4:]) > 1.5 * sum(figure.passes for figure in figures[4:])
        generation = of_states.run(request(Overlap.OFF))
        await disturbed(generation, eagle)
        assert generation.text == wanted[2]


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize("port", [0, None], ids=["gRPC", "memory"])
async def test_services_of_this_process_that_end_in_the_middle(port: int | None) -> None:
    """First the drafter, then the target, whose outputs have nobody else."""
    listening = Listening(port=port, grace_seconds=0)
    async with (
        serving((model(TARGET, Emulation(Pace(15, 0))), listening), (model("drafter-a"), listening)) as servers,
        connect(*(server.address for server in servers.values()), Patience(target_seconds=3)) as pipeline,
    ):
        await pipeline.drafter_known()
        assert all((server.address == server.here) == (port is None) for server in servers.values())
        wanted = await undisturbed(pipeline)

        async def without(role: str) -> Generation:
            """An output that loses its service after some tokens."""
            generation, left = pipeline.run(request(Overlap.ON)), False
            async for _ in generation:
                if len(generation.ids) >= BEFORE and not left:
                    left = True
                    await servers[role].drain()
            return generation

        drafted = await without("drafter")
        assert (drafted.text, drafted.statistics.drafters_lost) == (wanted, 1)
        with pytest.raises(Unreachable):
            await without("target")


async def test_models_of_this_process_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target's cache is made of is what the drafter's has left."""
    left = [64.0]

    def unused(*_: object) -> float:
        return left[0]

    def populated(cache: KVCache, _: int | None) -> None:
        left[0] -= cache.mib

    monkeypatch.setattr(engine, "unused_memory", unused)
    monkeypatch.setattr(KVCache, "populate", populated)
    options = [ModelOptions(f"bundled:{name}", threads=1) for name in (TARGET, "drafter-a")]
    async with serving((options[0], AT_ONCE), (options[1], AT_ONCE)) as servers:
        slots = [server._statistics().kv_slots for server in servers.values() if server._statistics is not None]
        assert slots[0] == pytest.approx(slots[1], rel=0.1)
        assert 0 <= left[0] < 4


async def test_models_of_this_process_are_waited_for_however_long_their_vocabularies_take() -> None:
    here = Listening(port=None, grace_seconds=0)
    async with serving((model("drafter-b"), here), (model("drafter-a"), here)) as servers:
        addresses = [server.here for server in servers.values()]
        async with connect(*addresses, patience(describe_seconds=1e-6), needs_drafter=True) as pipeline:
            assert pipeline.models.drafter is not None


@pytest.mark.usefixtures("target")  # whose model runs meanwhile
@pytest.mark.parametrize("fault", ["no model", "no affinity", "no port", "other states"])
@pytest.mark.parametrize("port", [0, None], ids=["gRPC", "memory"])
async def test_models_end_if_they_cannot_serve_together(fault: str, port: int | None, tmp_path: Path) -> None:
    def models() -> int:
        return sum("model" in thread.name for thread in threading.enumerate())

    before, listening = models(), Listening(port=port, grace_seconds=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        drafter = {
            "no model": (model("no-such-model"), listening),
            "no affinity": (model("drafter-b", affinity=tmp_path / "none"), listening),
            "no port": (model("drafter-b"), Listening(port=taken.getsockname()[1])),
            "other states": (model("drafter-eagle"), listening),  # it reads those of another target
        }[fault]
        with pytest.raises((ValueError, CannotListen)):
            async with serving((model("drafter-a"), listening), drafter):
                pytest.fail("they serve")
    assert models() == before
