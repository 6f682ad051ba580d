"""`crossdraft bench prefill`: what a long prompt does to the streams that share the target with it."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from crossdraft.cli.benching import write_json
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.overlap_stage import on_core
from crossdraft.cli.processes import Wanted, running
from crossdraft.cli.running import STARTS_PROCESSES, run_to_end
from crossdraft.loadtest.spreads import Spread
from crossdraft.models.lengthening import lengthened
from crossdraft.models.names import ModelLoadError
from crossdraft.pipeline import GenerationRequest, Pipeline, SamplingOptions, connect
from crossdraft.rpc.heap import settle

MILLISECONDS = 1000.0
STEADY = 24  # tokens of every stream before the prompt comes
SHORT = 16  # tokens of a stream's own prompt
ANSWER = 4  # tokens of the long prompt's output
HEADINGS = ("gaps between tokens of the streams", "gaps", "p50, ms", "p99, ms", "longest, ms", "delayed by, passes")


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: str  # a model's name
    streams: int
    prompt: int  # tokens of the long prompt
    times: int  # that it comes
    mib: int  # for keys and values

    @property
    def context(self) -> int:
        """Tokens that a session may have."""
        return self.prompt + 512


@dataclass(eq=False)
class Stream:
    """A stream that goes on until it is stopped."""

    moments: list[float] = field(default_factory=list)  # of its tokens, in seconds of the monotonic clock

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of those gaps that lie in a time at least partly."""
        first, last = bisect_left(self.moments, begin), bisect_left(self.moments, end)
        moments = self.moments[max(0, first - 1) : last + 1]
        return [after - before for before, after in pairwise(moments)]


@dataclass(frozen=True)
class Arrival:
    """One long prompt among streams."""

    usual: tuple[float, ...]  # seconds between tokens of all streams, before it came
    meanwhile: tuple[float, ...]  # ... from its coming to its first token
    first_token: float  # seconds that it waited for that
    alone: float  # ... that it waits where there are no streams


def measure(plan: Plan, json_path: Path | None) -> None:
    """Measures some arrivals; a table on stdout, and JSON if a path is given.

    Raises:
        CommandFailed: the target does not start or fails.
        Misused: the model's context cannot be made long enough.
    """
    if json_path is not None:
        check_output(json_path)
    run_to_end(_measure(plan, json_path), STARTS_PROCESSES)


async def _measure(plan: Plan, json_path: Path | None) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        try:
            name = await asyncio.to_thread(lengthened, plan.target, plan.context, folder)
        except (ModelLoadError, OSError) as error:
            raise Misused(f"{error}; give a model with a context of {plan.context} tokens") from error
        options = ("--max-model-len", str(plan.context), "--cache-mib", str(plan.mib))
        (target,) = await stack.enter_async_context(running([Wanted("target", name, 1, options, on_core(0))]))
        pipeline = await stack.enter_async_context(connect(target.address))
        settle()
        arrivals = [await _arrival(pipeline, plan, number) for number in range(1 + plan.times)][
            1:
        ]  # the first warms up
    print(report(plan, arrivals), end="")
    if json_path is not None:
        write_json(json_path, {"plan": asdict(plan), "arrivals": [asdict(one) for one in arrivals]})


async def _arrival(pipeline: Pipeline, plan: Plan, number: int) -> Arrival:
    size = pipeline.models.tokenization.vocabulary.size

    def text(seed: int, length: int) -> tuple[int, ...]:
        """No two have a beginning in common."""
        return tuple((31 * seed + (1 + seed % 7) * place) % (size - 1) + 1 for place in range(length))

    alone = await _first_token(pipeline, text(1000 + number, plan.prompt))
    streams = [Stream() for _ in range(plan.streams)]
    tasks = [
        asyncio.create_task(_keep_on(pipeline, stream, text(100 * number + place, SHORT), plan.context - SHORT))
        for place, stream in enumerate(streams)
    ]
    try:
        await _steady(streams, tasks)
        steady = time.monotonic()
        await _steady(streams, tasks, steady)
        asked = time.monotonic()
        first_token = await _first_token(pipeline, text(2000 + number, plan.prompt))
        told = asked + first_token
        await _steady(streams, tasks, told, 2)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    usual = [gap for stream in streams for gap in stream.gaps(steady, asked)]
    meanwhile = [gap for stream in streams for gap in stream.gaps(asked, told)]
    return Arrival(tuple(usual), tuple(meanwhile), first_token, alone)


async def _keep_on(pipeline: Pipeline, stream: Stream, prompt: tuple[int, ...], tokens: int) -> None:
    async with pipeline.run(_request(prompt, tokens)) as generation:
        async for _ in generation:
            stream.moments.append(time.monotonic())


async def _first_token(pipeline: Pipeline, prompt: tuple[int, ...]) -> float:
    began = time.monotonic()
    async with pipeline.run(_request(prompt, ANSWER)) as generation:
        async for _ in generation:
            return time.monotonic() - began
    raise CommandFailed("an output ended without a token")


async def _steady(
    streams: Sequence[Stream], tasks: Sequence["asyncio.Task[None]"], since: float = 0.0, tokens: int = STEADY
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


def report(plan: Plan, arrivals: Sequence[Arrival]) -> str:
    """A table, and what the prompt itself waited."""
    usual = Spread.of((gap for one in arrivals for gap in one.usual), MILLISECONDS)
    assert usual is not None
    rows = [
        _row("before the prompt", [gap for one in arrivals for gap in one.usual], usual.p50),
        _row("while it was read", [gap for one in arrivals for gap in one.meanwhile], usual.p50),
    ]
    beside = Spread.of((one.first_token for one in arrivals), MILLISECONDS)
    alone = Spread.of((one.alone for one in arrivals), MILLISECONDS)
    assert beside is not None
    assert alone is not None
    return (
        f"{markdown(HEADINGS, rows)}\nA pass is the median gap before the prompt. "
        f"{plan.streams} streams of {plan.target}, a prompt of {plan.prompt:,} tokens, "
        f"{len(arrivals)} times. Its first token came after {beside.p50:.0f} ms (median); without streams after "
        f"{alone.p50:.0f} ms.\n"
    )


def _row(name: str, gaps: Sequence[float], usual: float) -> tuple[str, ...]:
    spread = Spread.of(gaps, MILLISECONDS)
    if spread is None:
        return (name, "0", "", "", "", "")
    longest = MILLISECONDS * max(gaps)
    return (
        *(name, str(spread.count), f"{spread.p50:.1f}", f"{spread.p99:.1f}", f"{longest:.1f}"),
        f"{longest / usual - 1:.2f}",
    )
