"""`crossdraft bench prefill`: what a long prompt does to the streams that share the target with it."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from crossdraft.bench.commands import PrefillPlan
from crossdraft.bench.harness import MILLISECONDS, Benchmark, Table, on_core
from crossdraft.bench.models import lengthened
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, connect
from crossdraft.console.processes import NEUTRAL, Wanted, running
from crossdraft.console.running import STARTS_PROCESSES, CommandFailed, ProgressCounter, Run, UsageError
from crossdraft.engine.names import ModelLoadError
from crossdraft.loadtest.summary import Spread
from crossdraft.rpc.server import freeze_heap

STEADY = 24  # tokens of every stream before the prompt comes
SHORT = 16  # tokens of a stream's own prompt
ANSWER = 4  # tokens of the long prompt's output
HEADINGS = ("gaps between tokens of the streams", "gaps", "p50, ms", "p99, ms", "longest, ms", "delayed by, passes")


@dataclass(frozen=True)
class Arrival:
    """One long prompt among streams."""

    usual: tuple[float, ...]  # seconds between tokens of all streams, before it came
    meanwhile: tuple[float, ...]  # seconds between tokens of all streams, from its coming to its first token
    first_token: float  # seconds that it waited for that
    alone: float  # seconds that it waits where there are no streams


class Prefill(Benchmark[PrefillPlan, Arrival]):
    """What is measured. Raises UsageError if the model's context cannot be made long enough."""

    unit = "arrivals"
    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)

    @property
    def context(self) -> int:
        """Tokens that a session may have."""
        return self.plan.prompt + 512

    @property
    def total(self) -> int:
        return 1 + self.plan.times

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Arrival, None]:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            try:
                name = await asyncio.to_thread(lengthened, self.plan.target, self.context, folder)
            except (ModelLoadError, OSError) as error:
                raise UsageError(f"{error}; give a model with a context of {self.context} tokens") from error
            options = (*NEUTRAL, "--max-model-len", str(self.context), "--cache-mib", str(self.plan.cache_mib))
            (target,) = await stack.enter_async_context(running([Wanted("target", name, 1, options, on_core(0))]))
            pipeline = await stack.enter_async_context(connect(target.address))
            freeze_heap()
            for number in range(self.total):
                found = await arrival(pipeline, self, number)
                advance()
                if number:
                    yield found

    def report(self, results: Sequence[Arrival]) -> Iterator[Table | str]:
        usual, meanwhile = ([gap for one in results for gap in getattr(one, name)] for name in ("usual", "meanwhile"))
        before = Spread.of(usual, MILLISECONDS)
        beside = Spread.of((one.first_token for one in results), MILLISECONDS)
        alone = Spread.of((one.alone for one in results), MILLISECONDS)
        assert before is not None
        assert beside is not None
        assert alone is not None
        rows = (_row("before the prompt", usual, before.p50), _row("while it was read", meanwhile, before.p50))
        yield Table(HEADINGS, rows)
        plan = self.plan
        yield (
            f"A pass is the median gap before the prompt. {plan.streams} streams of {plan.target}, a prompt of "
            f"{plan.prompt:,} tokens, {len(results)} times. Its first token came after {beside.p50:.0f} ms (median); "
            f"without streams after {alone.p50:.0f} ms."
        )


def _row(name: str, gaps: Sequence[float], usual: float) -> tuple[str, ...]:
    spread = Spread.of(gaps, MILLISECONDS)
    if spread is None:
        return (name, "0", "", "", "", "")
    longest = MILLISECONDS * max(gaps)
    figures = (spread.p50, spread.p99, longest)
    return (name, str(spread.count), *(f"{one:.1f}" for one in figures), f"{longest / usual - 1:.2f}")


@dataclass(eq=False)
class EndlessStream:
    """A stream that goes on until it is cancelled."""

    moments: list[float] = field(default_factory=list)  # of its tokens, in seconds of the monotonic clock

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of those gaps that overlap a period."""
        first, last = bisect_left(self.moments, begin), bisect_left(self.moments, end)
        moments = self.moments[max(0, first - 1) : last + 1]
        return [after - before for before, after in pairwise(moments)]

    async def run(self, pipeline: Pipeline, prompt: tuple[int, ...], tokens: int) -> None:
        """Generates."""
        async with pipeline.run(_request(prompt, tokens)) as generation:
            async for _ in generation:
                self.moments.append(time.monotonic())


async def arrival(pipeline: Pipeline, bench: Prefill, number: int) -> Arrival:
    """Runs streams and one long prompt; raises CommandFailed."""
    size = pipeline.models.tokenization.vocabulary.size

    def text(seed: int, length: int) -> tuple[int, ...]:
        """No two have a beginning in common."""
        return tuple((31 * seed + (1 + seed % 7) * place) % (size - 1) + 1 for place in range(length))

    alone = await _first_token(pipeline, text(1000 + number, bench.plan.prompt))
    streams = [EndlessStream() for _ in range(bench.plan.streams)]
    tasks = [
        asyncio.create_task(stream.run(pipeline, text(100 * number + place, SHORT), bench.context - SHORT))
        for place, stream in enumerate(streams)
    ]
    try:
        await _steady(streams, tasks)
        steady = time.monotonic()
        await _steady(streams, tasks, steady)
        asked = time.monotonic()
        first_token = await _first_token(pipeline, text(2000 + number, bench.plan.prompt))
        came = asked + first_token
        await _steady(streams, tasks, came, 2)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    usual = tuple(gap for stream in streams for gap in stream.gaps(steady, asked))
    meanwhile = tuple(gap for stream in streams for gap in stream.gaps(asked, came))
    return Arrival(usual, meanwhile, first_token, alone)


async def _first_token(pipeline: Pipeline, prompt: tuple[int, ...]) -> float:
    began = time.monotonic()
    async with pipeline.run(_request(prompt, ANSWER)) as generation:
        async for _ in generation:
            return time.monotonic() - began
    raise CommandFailed("an output ended without a token")


async def _steady(
    streams: Sequence[EndlessStream], tasks: Sequence["asyncio.Task[None]"], since: float = 0.0, tokens: int = STEADY
) -> None:
    """Returns when every stream has had so many tokens since a moment; raises CommandFailed if one ends before."""
    while not all(len(one.moments) - bisect_left(one.moments, since) >= tokens for one in streams):
        for task in tasks:
            if task.done():
                await task
                raise CommandFailed("a stream ended before the long prompt was answered: give a shorter one")
        await asyncio.sleep(0.005)


def _request(prompt: tuple[int, ...], tokens: int) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens=tokens, options=SamplingOptions(0.0), ignore_eos=True)
