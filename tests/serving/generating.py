"""A gRPC server of outputs on loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crossdraft.client import GenerationRequest
from crossdraft.rpc.generation import Generate
from crossdraft.rpc.server import Listening
from crossdraft.serving.grpc import GenerationOptions, GenerationServer, serve_generation
from tests.serving.fakes import FakeBackend

ASKED = Generate(GenerationRequest("Hello"), id="r-1", model="toy")
LISTENING = Listening(grace_seconds=0)


@asynccontextmanager
async def serving(outputs: FakeBackend, options: GenerationOptions | None = None) -> AsyncIterator[GenerationServer]:
    async with serve_generation(outputs, LISTENING, options) as server:
        yield server
