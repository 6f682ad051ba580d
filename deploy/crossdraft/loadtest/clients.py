"""Clients over gRPC: of crossdraft.v1.Generation, and of services through a pipeline in this process."""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from crossdraft.client import Pipeline, RequestError
from crossdraft.loadtest.requests import Request
from crossdraft.loadtest.runner import Chunk, Pieces, RequestFailedError
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.rpc.generation import Committed, GenerationClient, OutputEnded

SECOND = 1000.0  # milliseconds


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestFailedError("bad request", str(error)) from error
    except ServiceError as error:
        raise RequestFailedError(name_of(error).replace("_", " "), str(error)) from error


@dataclass(frozen=True, eq=False)
class GrpcClient:
    """A server of Generation."""

    server: GenerationClient
    chats: bool = True

    async def stream(self, request: Request) -> Pieces:
        with _failures():
            async with aclosing(self.server.generate(request.asked)) as replies:
                async for reply in replies:
                    if isinstance(reply, Committed):
                        for _ in reply.tokens:
                            yield Chunk(reply.milliseconds / SECOND)
                    elif isinstance(reply, OutputEnded):
                        yield reply.statistics


@dataclass(frozen=True, eq=False)
class PipelineClient:
    """A connected pipeline; it has its drafter or none, whatever requests say."""

    pipeline: Pipeline

    @property
    def chats(self) -> bool:
        """As `LoadClient.chats`."""
        return self.pipeline.models.target.chat_template is not None

    async def stream(self, request: Request) -> Pieces:
        with _failures():
            async with self.pipeline.run(request.asked.request) as generation:
                async for _ in generation:
                    yield Chunk()
                assert generation.statistics is not None
                yield generation.statistics
