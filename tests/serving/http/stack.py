"""The bundled models behind gRPC in this process, counting their sessions, and the API before them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from crossdraft.client import GenerationRequest, Pipeline, connect
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.server import Listening, Server
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.target.service import ServeTarget, target_server
from tests.serving.http.conftest import Front, front

AT_ONCE = Listening(grace_seconds=0)
MOST = 8  # outputs at once


@dataclass(frozen=True)
class Stack:
    """All of it."""

    front: Front
    outputs: LocalBackend
    servers: tuple[Server[Any, Any, Any], ...]
    target: str
    drafter: str

    def connect(self) -> Pipeline:
        """The Python API without a drafter."""
        return connect(self.target)

    async def text(self, prompt: str, **settings: Any) -> str:
        """What the Python API makes, without a drafter."""
        request = GenerationRequest(prompt, **settings)
        async with self.connect() as pipeline, pipeline.run(request) as generation:
            async for _ in generation:
                pass
            return generation.text

    async def released(self) -> None:
        """Returns once no service has a session any more."""
        async with asyncio.timeout(60):
            while self.outputs.running or any(server.activity.open for server in self.servers):  # noqa: ASYNC110
                await asyncio.sleep(0)  # what ends them runs in this loop, too


@asynccontextmanager
async def running() -> AsyncIterator[Stack]:
    """The stack, for the time of the block."""
    options = {name: ModelOptions(f"bundled:{name}", budget=128, threads=1) for name in ("target", "drafter-a")}
    async with (
        await target_server(ServeTarget(options["target"], AT_ONCE)) as target,
        await drafter_server(ServeDrafter(options["drafter-a"], AT_ONCE)) as drafter,
    ):
        named = NamedDrafter("a", (drafter.address,))
        async with (
            LocalBackend((LocalModel("demo", (target.address,), (named,)),), LocalOptions(MOST)) as outputs,
            front(outputs) as served,
        ):
            yield Stack(served, outputs, (target, drafter), target.address, drafter.address)
