"""Clients over gRPC: of crossdraft.v1.Generation, and of services through a pipeline in this process."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from crossdraft.client import Pipeline, RequestError
from crossdraft.loadtest.requests import Request
from crossdraft.loadtest.timeline import FIGURES, Chunk, End, Figures, RequestFailedError, figures_of
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.rpc.generation import Generated, GenerationClient, GenerationEnded

SECOND = 1000.0  # milliseconds
NO_CONNECTION, BROKEN_OFF = "no connection", "broken off"  # kinds of errors


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

    async def stream(self, request: Request) -> AsyncGenerator[Chunk | End, None]:
        """As `Client.stream`."""
        with _failures():
            async with aclosing(self.server.generate(request.for_grpc)) as replies:
                async for reply in replies:
                    at = time.monotonic()
                    match reply:
                        case Generated():
                            yield Chunk(at, reply.milliseconds / SECOND)
                        case GenerationEnded():
                            figures = _figures(reply)
                            yield End(at, figures.tokens, figures)


def _figures(ended: GenerationEnded) -> Figures:
    figures = cast(dict[str, Any], ended.figures)
    try:
        return figures_of({**figures, "lanes": map(vars, figures.get("lanes", ()))})
    except ValueError as error:
        raise RequestFailedError("bad reply", str(error)) from error


@dataclass(frozen=True, eq=False)
class PipelineClient:
    """A connected pipeline with a drafter, and one without for requests of plain decoding."""

    pipeline: Pipeline
    plain: Pipeline

    async def stream(self, request: Request) -> AsyncGenerator[Chunk | End, None]:
        """As `Client.stream`."""
        pipeline = self.plain if request.options.drafter == "" else self.pipeline
        with _failures():
            async with pipeline.run(request.for_pipeline) as generation:
                async for _ in generation:
                    yield Chunk(time.monotonic())
                statistics = generation.statistics
                assert statistics is not None
                figures = Figures(lanes=statistics.lanes, **{name: getattr(statistics, name) for name in FIGURES})
                yield End(time.monotonic(), figures.tokens, figures)
