"""`crossdraft bench dataplane`: what the machinery around the models costs.

Target and drafter are the same small model, which costs next to nothing, and their steps are paced like those of an
accelerator. So the speed is that of the machinery, and the processor time of the three processes is its cost: the
orchestrator is in this one. Of an output's lock-step round it says what is neither the target's pass nor the drafter's
steps. With --trip-ms the drafter is behind an emulated network.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from crossdraft.cli.measuring import Columns, Table, total_of
from crossdraft.cli.processes import patience
from crossdraft.cli.running import STARTS_PROCESSES, ProgressCounter, Run, UsageError, checked_options
from crossdraft.client import connect
from crossdraft.config.request import AUTO
from crossdraft.lab.commands import DataplanePlan
from crossdraft.lab.emulation.steps import Pace
from crossdraft.lab.harness import Benchmark, Timed, in_turns, processor_seconds, speed_of
from crossdraft.lab.models import write_free
from crossdraft.lab.outputs import MILLISECONDS, ratio
from crossdraft.lab.services import Served, service
from crossdraft.lab.workload import CHOICES, WITHOUT_DRAFTER, request_of, sampled
from crossdraft.rpc.server import freeze_heap
from crossdraft.verification.methods import method_named

ROUNDS = ("lock-step, K = 5", "lock-step, K = 8", "lock-step, trees of 16")  # one thing after another
CONFIGURATIONS = (WITHOUT_DRAFTER, AUTO, *ROUNDS, "overlapped, 16, 4")
WARM_UP = 4  # outputs before each measurement
PARTS = ("round_ms", "pass_ms", "draft_ms")  # of a round


@dataclass(frozen=True)
class DataplaneResult:
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
    round_ms: float | None = None  # of an output; None: not in rounds, and so in what follows
    pass_ms: float | None = None  # in the target's pass for it, sampling included
    draft_ms: float | None = None  # in the drafter's steps for it, likewise

    @property
    def processor_ms(self) -> float:
        """Of all processes, a token."""
        return self.orchestrator_ms + self.target_ms + self.drafter_ms

    @property
    def machinery_ms(self) -> float:
        """Of a round: orchestrator, links, codecs, queues."""
        return (self.round_ms or 0.0) - (self.pass_ms or 0.0) - (self.draft_ms or 0.0)


ROUND: Columns = {
    "outputs": lambda one: one.outputs,
    "configuration": lambda one: one.configuration,
    "round": lambda one: f"{one.round_ms:.1f}",
    "target": lambda one: f"{one.pass_ms:.1f}",
    "drafter": lambda one: f"{one.draft_ms:.1f}",
    "machinery": lambda one: f"{one.machinery_ms:.1f}",
    "machinery, an output": lambda one: f"{one.machinery_ms / one.outputs:.2f}",
}


class Dataplane(Benchmark[DataplanePlan, DataplaneResult]):
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
        return len(self.plan.outputs) * len(CONFIGURATIONS) * self.plan.turns

    def check(self) -> None:
        with checked_options():
            method_named(self.plan.method)
            Pace.parsed(self.plan.target_pace)
            Pace.parsed(self.plan.drafter_pace)
        if not all(1 <= count <= 1024 for count in self.plan.outputs):
            raise UsageError(f"--outputs must be between 1 and 1024, got {self.plan.outputs}")

    def report(self, results: Sequence[DataplaneResult]) -> Iterator[Table | str]:
        yield from super().report(results)
        yield Table.of([one for one in results if one.round_ms], ROUND, "Where an output's round goes, in ms")

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[DataplaneResult, None]:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            await asyncio.to_thread(write_free, Path(folder))
            plan, distant = self.plan, self.plan.trip_ms > 0
            drafting = Served(folder, plan.drafter_pace, plan.noise)
            target = await stack.enter_async_context(service("target", Served(folder, plan.target_pace), None, False))
            drafter = await stack.enter_async_context(service("drafter", drafting, None, distant))
            await drafter.delay(plan.trip_ms / 2)
            services = (target, drafter)
            plain = await stack.enter_async_context(connect(target.address, patience=patience()))
            drafted = await stack.enter_async_context(
                connect(target.address, drafter.address, patience(), needs_drafter=True)
            )

            def processor() -> tuple[float, ...]:
                """Seconds of orchestrator, target and drafter so far."""
                return time.process_time(), *(processor_seconds(one.process_id) for one in services)

            async def run(configuration: str, count: int, first: int) -> Timed:
                """Makes so many outputs at once."""
                given = (plan.method, plan.temperature, plan.max_tokens)
                requests = [request_of(configuration, first + number, *given) for number in range(count)]
                pipeline = plain if configuration == WITHOUT_DRAFTER else drafted
                return await sampled(pipeline, requests, lost=configuration == AUTO)

            freeze_heap()
            for count in plan.outputs:

                async def turn(configuration: str, number: int, count: int = count) -> Timed:
                    await run(configuration, min(WARM_UP, count), 1000)
                    before = processor()
                    found = await run(configuration, count, 0)
                    spent = tuple(late - early for late, early in zip(processor(), before, strict=True))
                    advance()
                    return replace(found, processor=spent)

                for one in _summed_up(count, await in_turns(CONFIGURATIONS, plan.turns, turn)):
                    yield one


def _summed_up(count: int, turns: dict[str, list[Timed]]) -> list[DataplaneResult]:
    """The figures of all turns of each configuration."""
    speeds = {name: speed_of(found) for name, found in turns.items()}
    best = max(speed for name, speed in speeds.items() if CHOICES[name])
    results = []
    for name, found in turns.items():
        total = total_of([one.figures for one in found if one.figures])
        spent = [MILLISECONDS * sum(column) for column in zip(*(one.processor for one in found), strict=True)]
        orchestrator, target, drafter = (milliseconds / total.tokens for milliseconds in spent)
        lasted = (count * sum(one.seconds for one in found), total.target_seconds, total.drafter_seconds)
        rounds = total.epochs if name in ROUNDS else 0
        results.append(
            DataplaneResult(
                count,
                name,
                speeds[name],
                total.tokens_per_pass,
                orchestrator,
                target,
                drafter,
                target_pass_ms=spent[1] / total.passes,
                to_plain=speeds[name] / speeds[WITHOUT_DRAFTER],
                to_best=speeds[name] / best,
                **{name: ratio(MILLISECONDS * part, rounds) for name, part in zip(PARTS, lasted, strict=True)},
            )
        )
    return results
