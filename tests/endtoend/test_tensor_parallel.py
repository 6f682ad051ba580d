"""A target that two processes share, either of which is killed in the middle of streams, and started again."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from crossdraft.cli.processes import Wanted
from crossdraft.client import Generation, GenerationRequest, Pipeline, Reason, connect
from crossdraft.rpc.links import Patience
from tests.conftest import FULL
from tests.endtoend.stack import TARGET
from tests.prompts import PROMPTS
from tests.started import Killable

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]
KILLS = 20 if FULL else 2
TOKENS = 60
BEFORE = 8  # tokens of each stream, at least, when a rank is killed
STREAMS = 3
SECONDS = 300.0


def generations(pipeline: Pipeline) -> list[Generation]:
    return [
        pipeline.run(GenerationRequest(text, method="seeded", max_tokens=TOKENS, seed=seed, ignore_eos=True))
        for seed, text in enumerate(PROMPTS[:STREAMS])
    ]


async def heard(generation: Generation, begun: asyncio.Event) -> str:
    count = 0
    async with generation:
        async for _ in generation:
            count += 1
            if count == BEFORE:
                begun.set()
    assert (count, generation.reason) == (TOKENS, Reason.LENGTH)
    return generation.text


def children(process: int) -> list[int]:
    """Ids of the processes that a process has started and that live."""
    return [int(one.name) for one in Path("/proc").glob("[0-9]*") if parent_of(int(one.name)) == process]


def parent_of(process: int) -> int | None:
    """None: there is no such process, or only its exit status."""
    try:
        state, parent, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def rank_of(process: int) -> int:
    """The id of the process of rank 1; another child cleans up after Python's multiprocessing."""
    (found,) = (one for one in children(process) if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes())
    return found


async def gone(processes: Sequence[int]) -> None:
    for one in processes:
        while parent_of(one) is not None:  # noqa: ASYNC110 - nothing tells of processes that are not this one's
            await asyncio.sleep(0.01)


async def test_nothing_is_lost_or_doubled_or_left_whichever_rank_is_killed() -> None:
    wanted = Wanted("target", f"bundled:{TARGET}", 1, ("--tensor-parallel-size", "2", "--pace", "30,0"))
    async with asyncio.timeout(SECONDS * KILLS), AsyncExitStack() as stack:
        victim = await Killable.started(wanted, stack)
        pipeline = await stack.enter_async_context(connect(victim.address, patience=Patience(target_seconds=SECONDS)))
        undisturbed = await asyncio.gather(*(heard(one, asyncio.Event()) for one in generations(pipeline)))
        for number in range(KILLS):
            begun = [asyncio.Event() for _ in range(STREAMS)]
            running = generations(pipeline)
            streams = asyncio.gather(*map(heard, running, begun))
            for event in begun:
                await event.wait()
            serving = victim.running.process_id
            both = [serving, *children(serving)]
            os.kill(serving if number % 2 == 0 else rank_of(serving), signal.SIGKILL)
            await gone(both)
            victim = await victim.restarted()
            assert await streams == undisturbed
            assert any(one.statistics is not None and one.statistics.targets_lost for one in running)
        last = [victim.running.process_id, *children(victim.running.process_id)]
    await gone(last)
