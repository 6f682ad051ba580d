"""Services that a benchmark starts: a core for each model, the drafter at a distance; or both in this process."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from crossdraft.cli.processes import Wanted, patience, running
from crossdraft.cli.running import checked_options
from crossdraft.client import Pipeline, connect
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.lab.emulation.network import EmulatedHost, network
from crossdraft.lab.emulation.steps import Emulation

if TYPE_CHECKING:
    from crossdraft.engine.served_model import ModelOptions

# Of a target that is measured: its requests get what they ask for, and nothing of the model's own.
NO_DEFAULTS = ("--generation-config", "vllm")


def served(
    role: str, model: str, engine: EngineOptions = STARTED, pace: str | None = None, logit_noise: float = 0.0
) -> Wanted:
    """A target or drafter with one thread, perhaps slower or worse than its model is; `pace` and `logit_noise` as its
    command has them. Raises UsageError: one of these is out of its range."""
    with checked_options():
        Emulation.parsed(pace, logit_noise)
    options = [*(NO_DEFAULTS if role == "target" else ()), *(() if pace is None else ("--pace", pace))]
    options += ["--logit-noise", str(logit_noise)] if logit_noise else []
    return Wanted(role, model, 1, tuple(options), engine=engine)


@asynccontextmanager
async def service(asked: Wanted, core: int, distant: bool) -> AsyncIterator[tuple[str, EmulatedHost | None]]:
    """The address of a target or drafter on a core, and of one that is distant the host, with a link of its own, by
    which it is reached; raises CommandFailed."""
    async with AsyncExitStack() as stack:
        prefix = on_core(core)
        if not distant:
            (found,) = await stack.enter_async_context(running([replace(asked, prefix=prefix)]))
            yield found.address, None
            return
        link = (await stack.enter_async_context(network([asked.role])))[asked.role]
        more = (*asked.more, "--host", link.place.listen)
        far = replace(asked, more=more, prefix=(*link.place.prefix, *prefix))
        (found,) = await stack.enter_async_context(running([far]))
        yield await link.address_through(found.address), link


def on_core(number: int) -> tuple[str, ...]:
    """What a command is run by so that it has one core to itself; nothing where there is no taskset (util-linux)."""
    cores = sorted(os.sched_getaffinity(0))
    return () if shutil.which("taskset") is None else ("taskset", "-c", str(cores[number % len(cores)]))


@asynccontextmanager
async def pair_here(target: "ModelOptions", drafter: "ModelOptions") -> AsyncIterator[Pipeline]:
    """A pipeline over two models in this process, as fast as they are."""
    from crossdraft.rpc.server import Listening
    from crossdraft.serving.models import serving  # what starts processes does without this

    place = Listening(port=None, grace_seconds=0)
    async with (
        serving((target, place), (drafter, place)) as servers,
        connect(servers["target"].here, servers["drafter"].here, patience(), needs_drafter=True) as pipeline,
    ):
        yield pipeline
