"""Clients over gRPC: of crossdraft.v1.Generation, and of services through a pipeline in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from crossdraft.client import Generation, Pipeline, RequestError
from crossdraft.lab.loadtest.requests import Request
from crossdraft.lab.loadtest.runner import Chunk, Pieces, RequestFailedError
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.serving.grpc_client import Client, RemoteGeneration

SECOND = 1000.0  # milliseconds


@dataclass(frozen=True, eq=False)
class GrpcClient:
    """A connected client of a server."""

    client: Client
    chats: bool = True

    def stream(self, request: Request) -> Pieces:
        asked = request.asked
        return _pieces(partial(self.client.run, asked.request, asked.model, asked.drafter))


@dataclass(frozen=True, eq=False)
class PipelineClient:
    """A connected pipeline; it has its drafter or none, whatever requests say."""

    pipeline: Pipeline

    @property
    def chats(self) -> bool:
        """As `LoadClient.chats`."""
        return self.pipeline.models.target.chat_template is not None

    def stream(self, request: Request) -> Pieces:
        return _pieces(partial(self.pipeline.run, request.asked.request))


async def _pieces(begin: Callable[[], Generation | RemoteGeneration]) -> Pieces:
    try:
        async with begin() as generation:
            async for _ in generation:
                made = generation.milliseconds[-1] / SECOND if isinstance(generation, RemoteGeneration) else None
                yield Chunk(made)
            assert generation.statistics is not None
            yield generation.statistics
    except RequestError as error:
        raise RequestFailedError("bad request", str(error)) from error
    except ServiceError as error:
        raise RequestFailedError(name_of(error).replace("_", " "), str(error)) from error
