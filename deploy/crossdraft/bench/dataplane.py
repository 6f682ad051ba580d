"""`crossdraft bench dataplane`: what the machinery around the models costs.

Target and drafter are the same small model, which costs next to nothing, and their steps are paced like those of an
accelerator. So the speed is that of the machinery, and the processor time of the three processes is its cost.
"""

import asyncio
import os
import resource
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from crossdraft.bench.commands import DataplanePlan
from crossdraft.bench.harness import Advance, Benchmark, Columns, finished, in_turns
from crossdraft.bench.models import write_free
from crossdraft.client import GenerationRequest, Overlap, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.console.processes import Running, Wanted, running
from crossdraft.console.running import STARTS_PROCESSES, Run, UsageError, checked_options
from crossdraft.engine.emulation import Pace
from crossdraft.rpc.server import freeze_heap
from crossdraft.verification.methods import method_named

MILLISECONDS = 1000.0
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "no drafter": {},
    "auto": {},
    "lock-step, K = 8": {"overlap": Overlap.OFF, "num_speculative_tokens": 8},
    "overlapped, 16": {"overlap": Overlap.ON, "max_draft_tokens": 16, "min_draft_tokens": 4},
}
WARM_UP = 4  # outputs before each measurement


@dataclass(frozen=True)
class Measured:
    """One configuration with so many outputs at once."""

    outputs: int
    configuration: str
    speed: float  # tokens/s of all outputs together
    tokens_per_pass: float
    orchestrator_ms: float  # of processor time, a token
    target_ms: float
    drafter_ms: float
    target_pass_ms: float  # of the target's processor time, a pass of one session
    to_plain: float  # speed, relative to no drafter
    to_best: float  # speed, relative to the best fixed choice

    @property
    def processor_ms(self) -> float:
        """Of all processes, a token."""
        return self.orchestrator_ms + self.target_ms + self.drafter_ms


@dataclass(frozen=True)
class Turn:
    """All outputs of one configuration, once."""

    seconds: float
    tokens: int
    passes: int
    processor: tuple[float, float, float]  # seconds of orchestrator, target, drafter


class Dataplane(Benchmark[DataplanePlan, Measured]):
    """Every number of outputs, with every configuration in turns."""

    unit = "turns"
    title = "Speed, and milliseconds of processor time a token"
    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)
    columns: ClassVar[Columns] = {
        "outputs": lambda one: one.outputs,
        "configuration": lambda one: one.configuration,
        "tokens/s": lambda one: f"{one.speed:,.0f}",
        "tokens/pass": lambda one: f"{one.tokens_per_pass:.2f}",
        "to no drafter": lambda one: f"{one.to_plain:.2f}",
        "to best fixed": lambda one: f"{one.to_best:.2f}",
        "orchestrator": lambda one: f"{one.orchestrator_ms:.3f}",
        "target": lambda one: f"{one.target_ms:.3f}",
        "drafter": lambda one: f"{one.drafter_ms:.3f}",
        "all": lambda one: f"{one.processor_ms:.3f}",
        "target, a pass": lambda one: f"{one.target_pass_ms:.3f}",
    }

    @property
    def total(self) -> int:
        """Turns of all configurations."""
        return len(self.plan.outputs) * len(CONFIGURATIONS) * self.plan.turns

    def check(self) -> None:
        """As `Benchmark.check`."""
        with checked_options():
            method_named(self.plan.method)
            Pace.parsed(self.plan.target_pace)
            Pace.parsed(self.plan.drafter_pace)
        if not all(1 <= count <= 1024 for count in self.plan.outputs):
            raise UsageError(f"--outputs must be between 1 and 1024, got {self.plan.outputs}")

    async def measure(self, advance: Advance) -> AsyncGenerator[Measured, None]:
        """As `Benchmark.measure`."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            await asyncio.to_thread(write_free, folder)
            plan = self.plan
            wanted = [
                Wanted("target", str(folder), 1, ("--pace", plan.target_pace, "--log-level", "error")),
                Wanted(
                    "drafter",
                    str(folder),
                    1,
                    ("--pace", plan.drafter_pace, "--logit-noise", str(plan.noise), "--log-level", "error"),
                ),
            ]
            services = await stack.enter_async_context(running(wanted))
            target, drafter = (one.address for one in services)
            plain = await stack.enter_async_context(connect(target))
            drafted = await stack.enter_async_context(connect(target, drafter, needs_drafter=True))
            freeze_heap()
            for count in plan.outputs:

                async def turn(configuration: str, number: int, count: int = count) -> Turn:
                    pipeline = plain if configuration == "no drafter" else drafted
                    await self._run(pipeline, configuration, min(WARM_UP, count), 1000)
                    found = await self._timed(pipeline, configuration, count, services)
                    advance()
                    return found

                turns = await in_turns(list(CONFIGURATIONS), plan.turns, turn)
                for one in _summed_up(count, turns):
                    yield one

    async def _timed(self, pipeline: Pipeline, configuration: str, count: int, services: Sequence[Running]) -> Turn:
        before, began = _processor_seconds(services), time.monotonic()
        figures = await self._run(pipeline, configuration, count, 0)
        took, after = time.monotonic() - began, _processor_seconds(services)
        spent = tuple(end - begin for begin, end in zip(before, after, strict=True))
        tokens, passes = sum(one.tokens for one in figures), sum(one.passes for one in figures)
        return Turn(took, tokens, passes, (spent[0], spent[1], spent[2]))

    async def _run(self, pipeline: Pipeline, configuration: str, count: int, first: int) -> list[Statistics]:
        return list(
            await asyncio.gather(
                *(
                    finished(pipeline.run(self._request(configuration, first + number)), lost=configuration == "auto")
                    for number in range(count)
                )
            )
        )

    def _request(self, configuration: str, number: int) -> GenerationRequest:
        plan = self.plan
        return GenerationRequest(
            f"Prompt number {number}: ",
            method=plan.method,
            max_tokens=plan.max_tokens,
            options=SamplingOptions(plan.temperature),
            seed=number if method_named(plan.method).keyed else None,
            ignore_eos=True,
            **CONFIGURATIONS[configuration],
        )


def _processor_seconds(services: Sequence[Running]) -> tuple[float, ...]:
    """Of this process and of the services, so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ticks = os.sysconf("SC_CLK_TCK")
    found = [own.ru_utime + own.ru_stime]
    for service in services:
        fields = Path(f"/proc/{service.process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / ticks)  # utime and stime, as in proc(5)
    return tuple(found)


def _summed_up(count: int, turns: dict[str, list[Turn]]) -> list[Measured]:
    """The figures of all turns of each configuration."""
    speeds = {
        name: sum(one.tokens for one in found) / sum(one.seconds for one in found) for name, found in turns.items()
    }
    best = max(speed for name, speed in speeds.items() if CONFIGURATIONS[name])
    results = []
    for name, found in turns.items():
        tokens, passes = sum(one.tokens for one in found), sum(one.passes for one in found)
        spent = [MILLISECONDS * sum(one.processor[place] for one in found) for place in range(3)]
        results.append(
            Measured(
                outputs=count,
                configuration=name,
                speed=speeds[name],
                tokens_per_pass=tokens / passes,
                orchestrator_ms=spent[0] / tokens,
                target_ms=spent[1] / tokens,
                drafter_ms=spent[2] / tokens,
                target_pass_ms=spent[1] / passes,
                to_plain=speeds[name] / speeds["no drafter"],
                to_best=speeds[name] / best,
            )
        )
    return results
