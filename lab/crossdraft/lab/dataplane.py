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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from crossdraft.cli.measuring import Columns, Table, finished, total_of
from crossdraft.cli.processes import patience
from crossdraft.cli.running import STARTS_PROCESSES, ProgressCounter, Run, UsageError, checked_options
from crossdraft.client import Statistics, connect
from crossdraft.config.request import AUTO
from crossdraft.lab.commands import DataplanePlan
from crossdraft.lab.emulation.steps import Pace
from crossdraft.lab.harness import MILLISECONDS, Benchmark, in_turns, processor_seconds
from crossdraft.lab.models import write_free
from crossdraft.lab.services import Served, service
from crossdraft.lab.workload import CHOICES, WITHOUT_DRAFTER, request_of
from crossdraft.rpc.server import freeze_heap
from crossdraft.verification.methods import method_named

ROUNDS = ("lock-step, K = 5", "lock-step, K = 8", "lock-step, trees of 16")  # one thing after another
CONFIGURATIONS = (WITHOUT_DRAFTER, AUTO, *ROUNDS, "overlapped, 16, 4")
WARM_UP = 4  # outputs before each measurement


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


@dataclass(frozen=True)
class Turn:
    """All outputs of one configuration, once."""

    seconds: float
    processor: tuple[float, ...]  # seconds of orchestrator, target, drafter
    figures: Statistics  # of all outputs


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

            async def run(configuration: str, count: int, first: int) -> Statistics:
                """Makes so many outputs at once."""
                pipeline, lost = plain if configuration == WITHOUT_DRAFTER else drafted, configuration == AUTO
                given = (plan.method, plan.temperature, plan.max_tokens)
                requests = (request_of(configuration, first + number, *given) for number in range(count))
                return total_of(await asyncio.gather(*(finished(pipeline.run(one), lost=lost) for one in requests)))

            freeze_heap()
            for count in plan.outputs:

                async def turn(configuration: str, number: int, count: int = count) -> Turn:
                    await run(configuration, min(WARM_UP, count), 1000)
                    before, began = processor(), time.monotonic()
                    figures = await run(configuration, count, 0)
                    took, after = time.monotonic() - began, processor()
                    advance()
                    return Turn(took, tuple(late - early for late, early in zip(after, before, strict=True)), figures)

                for one in _summed_up(count, await in_turns(CONFIGURATIONS, plan.turns, turn)):
                    yield one


def _summed_up(count: int, turns: dict[str, list[Turn]]) -> list[DataplaneResult]:
    """The figures of all turns of each configuration."""
    totals = {name: total_of([one.figures for one in found]) for name, found in turns.items()}
    seconds = {name: sum(one.seconds for one in found) for name, found in turns.items()}
    speeds = {name: total.tokens / seconds[name] for name, total in totals.items()}
    best = max(speed for name, speed in speeds.items() if CHOICES[name])
    results = []
    for name, total in totals.items():
        orchestrator, target, drafter = (
            MILLISECONDS * sum(one.processor[place] for one in turns[name]) for place in range(3)
        )
        lasted = (count * seconds[name], total.target_seconds, total.drafter_seconds)
        rounds = total.epochs if name in ROUNDS else 0
        whole, passed, drafted = (MILLISECONDS * part / rounds if rounds else None for part in lasted)
        results.append(
            DataplaneResult(
                outputs=count,
                configuration=name,
                speed=speeds[name],
                tokens_per_pass=total.tokens_per_pass,
                orchestrator_ms=orchestrator / total.tokens,
                target_ms=target / total.tokens,
                drafter_ms=drafter / total.tokens,
                target_pass_ms=target / total.passes,
                to_plain=speeds[name] / speeds[WITHOUT_DRAFTER],
                to_best=speeds[name] / best,
                round_ms=whole,
                pass_ms=passed,
                draft_ms=drafted,
            )
        )
    return results
