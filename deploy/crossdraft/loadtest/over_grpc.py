"""Outputs by crossdraft.v1.Generation."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from crossdraft.loadtest.asking import Question
from crossdraft.loadtest.figures import Figures, figures_of
from crossdraft.loadtest.hearing import Chunk, Failure, Over
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.rpc.generation import Generated, GenerationEnded
from crossdraft.rpc.generation_client import GenerationClient

SECOND = 1000.0  # milliseconds


@dataclass(frozen=True, eq=False)
class OverGrpc:
    """A server of Generation."""

    client: GenerationClient

    async def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """As in `hearing.Way`."""
        try:
            async with aclosing(self.client.generate(question.for_grpc)) as replies:
                async for reply in replies:
                    at = time.monotonic()
                    match reply:
                        case Generated():
                            yield Chunk(at, reply.milliseconds / SECOND)
                        case GenerationEnded():
                            figures = _figures(cast(Mapping[str, Any], reply.figures))
                            yield Over(at, figures.tokens, figures)
        except ServiceError as error:
            raise Failure(name_of(error).replace("_", " "), str(error)) from error


def _figures(given: Mapping[str, Any]) -> Figures:
    lanes = [vars(lane) for lane in given.get("lanes", ())]
    try:
        return figures_of({**given, "lanes": lanes})
    except ValueError as error:
        raise Failure("bad reply", str(error)) from error
