"""The bundled models as gRPC services in this process, and generations through the Python API."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from crossdraft.drafter.servicer import ServeDrafter, drafter_server
from crossdraft.models.running import ModelOptions
from crossdraft.pipeline import Generation, GenerationRequest, Pipeline, Statistics, connect
from crossdraft.rpc.server import Listening
from crossdraft.target.servicer import ServeTarget, target_server

TARGET = "target"
DRAFTERS = ("drafter-a", "drafter-b", "drafter-c")
AT_ONCE = Listening(grace_seconds=0)
CONCURRENT = 16  # generations at once, which the engines batch
BUDGET = 256  # MiB for keys and values of one model: at least CONCURRENT sessions


@dataclass(frozen=True)
class Stack:
    """Addresses of the running services."""

    target: str
    drafters: Mapping[str, str]  # by name; the target's model is there as a drafter, too

    def connect(self, drafter: str | None) -> Pipeline:
        """A pipeline with the drafter of this name, or without one."""
        return connect(self.target, None if drafter is None else self.drafters[drafter])

    async def run(self, drafter: str | None, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """The requests' generations, finished, in their order."""
        places = asyncio.Semaphore(CONCURRENT)

        async def run(pipeline: Pipeline, request: GenerationRequest) -> Generation:
            async with places, pipeline.run(request) as generation:
                async for _ in generation:
                    pass
            return generation

        async with self.connect(drafter) as pipeline:
            return await asyncio.gather(*(run(pipeline, request) for request in requests))


@asynccontextmanager
async def serving() -> AsyncIterator[Stack]:
    """All services, for the time of the block."""
    async with AsyncExitStack() as started:
        target = await started.enter_async_context(await target_server(ServeTarget(model(TARGET), AT_ONCE)))
        drafters = {}
        for name in (TARGET, *DRAFTERS):
            server = await drafter_server(ServeDrafter(model(name), AT_ONCE))
            drafters[name] = (await started.enter_async_context(server)).address
        yield Stack(target.address, drafters)


def model(name: str) -> ModelOptions:
    return ModelOptions(f"bundled:{name}", budget=BUDGET, threads=1)


def statistics(generation: Generation) -> Statistics:
    """The figures of a generation whose drafter was there to its end, if it had one."""
    assert generation.statistics is not None
    assert generation.statistics.drafter_lost == ""
    return generation.statistics
