"""Two targets, the second one slow, and a drafter in one process, which loads torch once and ends with its stdin."""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import pytest

from crossdraft.drafter.service import drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab.emulation.steps import Emulation, Pace
from crossdraft.target.service import target_server
from tests.rpc.linked import AT_ONCE
from tests.rpc.unhurried import unhurry

SLOW = Emulation(Pace.parsed("25,0"))


async def serve(target: str, drafter: str) -> None:
    """Prints their addresses as a line of JSON."""
    models = [ModelOptions(target, cache_mib=64, threads=1, emulation=some) for some in (Emulation(), SLOW)]
    servers = [await target_server(model, AT_ONCE) for model in models]
    helping = await drafter_server(ModelOptions(drafter, cache_mib=64, threads=1), AT_ONCE)
    async with AsyncExitStack() as stack:
        print(json.dumps([(await stack.enter_async_context(one)).address for one in (*servers, helping)]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        unhurry(patch)  # nobody is taken for lost because the machine stands still
        asyncio.run(serve(*sys.argv[1:]))
