"""Outputs by a pipeline in this process: gRPC to the services, and no front."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from crossdraft.loadtest.asking import Question
from crossdraft.loadtest.figures import Figures, LaneFigures
from crossdraft.loadtest.hearing import Chunk, Failure, Over
from crossdraft.pipeline import Pipeline, RequestError, Statistics
from crossdraft.rpc.errors import ServiceError, name_of


@dataclass(frozen=True, eq=False)
class InProcess:
    """A connected pipeline with the default drafter, and one without, for requests that ask for plain decoding."""

    pipeline: Pipeline
    plain: Pipeline

    async def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """As in `hearing.Way`."""
        pipeline = self.plain if question.wishes.drafter == "" else self.pipeline
        try:
            async with pipeline.run(question.for_pipeline) as generation:
                async for _ in generation:
                    yield Chunk(time.monotonic())
                assert generation.statistics is not None
                yield Over(time.monotonic(), generation.statistics.tokens, figures_in(generation.statistics))
        except RequestError as error:
            raise Failure("bad request", str(error)) from error
        except ServiceError as error:
            raise Failure(name_of(error).replace("_", " "), str(error)) from error


def figures_in(statistics: Statistics) -> Figures:
    """What a test needs of an output's statistics."""
    return Figures(
        statistics.tokens,
        statistics.passes,
        statistics.accepted,
        statistics.corrected,
        statistics.judged_at,
        statistics.accepted_at,
        statistics.verification_seconds,
        tuple(
            LaneFigures(
                lane.role,
                lane.bytes_sent,
                lane.bytes_received,
                lane.trips.counts,
                lane.trips.seconds,
                lane.trips.queued_seconds,
                lane.model_seconds,
                lane.codec_seconds,
                lane.open_seconds,
                lane.idle_seconds,
                lane.lost,
            )
            for lane in statistics.lanes
        ),
    )
