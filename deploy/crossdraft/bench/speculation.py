"""`crossdraft bench speculation`: two targets that work on one output, beside one.

The targets are paced: on a machine with few cores they sleep rather than compute. All texts are seeded, so that every
configuration must write the same ones.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

from crossdraft.bench.commands import SpeculationPlan
from crossdraft.bench.harness import (
    SEED,
    Advance,
    Columns,
    Ratio,
    Timed,
    drafts_accepted,
    finished,
    in_turns,
    speed_of,
    speed_ratio,
    total_of,
)
from crossdraft.bench.services import OfPair, Watch, delays_of, drafter_service
from crossdraft.client import Generation, GenerationRequest, Overlap, Statistics, connect
from crossdraft.console.processes import Wanted, running
from crossdraft.console.running import checked_options
from crossdraft.session.resolution import Models, resolve
from crossdraft.speculation.controller import TargetController


@dataclass(frozen=True)
class Configuration:
    """How many targets, and how."""

    targets: int
    speculation: bool
    controlled: bool  # else max_draft_tokens and min_draft_tokens are fixed

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.targets}{', speculation' if self.speculation else ''}"


CONFIGURATIONS = tuple(
    Configuration(*kind, controlled) for controlled in (False, True) for kind in ((1, False), (2, False), (2, True))
)


@dataclass(frozen=True)
class Run(Timed):
    """One output."""

    text: str
    figures: Statistics
    busy: tuple[float, ...]  # seconds that each target was at work


@dataclass(frozen=True)
class Measured:
    """One configuration under some conditions, over all prompts."""

    noise: float
    delay_ms: float
    configuration: Configuration
    acceptance: float  # of the draft tokens that were judged
    speed: float  # tokens a second
    ratio: Ratio  # of its speed to that with one target
    idle: tuple[float, ...]  # of each target: share of the time in which it had no pass
    tokens_per_pass: float
    speculated: int  # passes that began while another was in flight
    passes: int
    equal: int  # texts that are those with one target
    texts: int


class SpeculationParallelism(OfPair[SpeculationPlan, Measured]):
    """Each configuration on each prompt, in turns, with every noise and delay of the drafter."""

    needs_statistics: ClassVar[bool] = True
    unit: ClassVar[str] = "generations"
    columns: ClassVar[Columns] = {
        "noise": lambda one: f"{one.noise:g}",
        "delay, ms": lambda one: f"{one.delay_ms:g}",
        "accepted": lambda one: f"{one.acceptance:.1%}",
        "epochs run": lambda one: "controlled" if one.configuration.controlled else "overlapped",
        "targets": lambda one: one.configuration.label,
        "tokens/s": lambda one: f"{one.speed:.1f}",
        "× one target": lambda one: "1" if one.configuration.targets == 1 else one.ratio,
        "targets idle": lambda one: " and ".join(f"{share:.0%}" for share in one.idle),
        "tokens/pass": lambda one: f"{one.tokens_per_pass:.2f}",
        "passes begun early": lambda one: f"{one.speculated} of {one.passes}",
        "texts equal": lambda one: f"{one.equal} of {one.texts}",
    }

    @property
    def total(self) -> int:
        delays = delays_of(self.plan.delay_ms)
        return len(self.plan.logit_noise) * len(delays) * len(self.prompts) * len(CONFIGURATIONS)

    def request(self, configuration: Configuration, number: int) -> GenerationRequest:
        """For the prompt of this number; raises ValueError."""
        return GenerationRequest(
            self.prompts[number],
            "seeded",
            max_tokens=self.plan.tokens,
            seed=SEED,
            choice=number,
            ignore_eos=True,
            overlap=Overlap.AUTO if configuration.controlled else Overlap.ON,
            max_draft_tokens=None if configuration.controlled else self.plan.max_draft_tokens,
            min_draft_tokens=None if configuration.controlled else self.plan.min_draft_tokens,
            speculation=configuration.speculation,
        )

    def check(self) -> None:
        super().check()
        delays_of(self.plan.delay_ms)
        for noise in self.plan.logit_noise:
            replace(self.drafter, logit_noise=noise)
        with checked_options():
            for configuration in CONFIGURATIONS:
                self.request(configuration, 0)

    async def measure(self, advance: Advance) -> AsyncGenerator[Measured, None]:
        delays = delays_of(self.plan.delay_ms)
        wanted = [Wanted("target", self.target.model, 1, self.target.options)] * 2
        async with running(wanted) as found:
            targets = tuple(one.address for one in found)
            for noise in self.plan.logit_noise:
                served = replace(self.drafter, logit_noise=noise)
                async with drafter_service(served, distant=any(delays)) as drafter:
                    for delay in delays:
                        await drafter.delay(delay)
                        async with _stage(self, targets, drafter.address, advance) as stage:
                            runs = await stage.compare()
                        for configuration in CONFIGURATIONS:
                            yield measured(noise, delay, configuration, runs)


@dataclass(frozen=True, eq=False)
class Stage:
    """What generates."""

    bench: SpeculationParallelism
    models: Models
    targets: tuple[str, ...]  # addresses
    watches: Mapping[int, Watch]  # by the number of targets
    advance: Advance
    controllers: Mapping[Configuration, TargetController] = field(
        default_factory=lambda: {one: TargetController() for one in CONFIGURATIONS}
    )

    async def compare(self) -> dict[Configuration, list[Run]]:
        """Each configuration on each prompt. The first prompt comes once before: it warms up, and does not count."""
        for configuration in CONFIGURATIONS:
            await self._run(configuration, 0)

        async def run(configuration: Configuration, number: int) -> Run:
            found = await self._run(configuration, number)
            self.advance()
            return found

        return await in_turns(CONFIGURATIONS, len(self.bench.prompts), run)

    async def _run(self, configuration: Configuration, number: int) -> Run:
        request, shared = self.bench.request(configuration, number), self.controllers[configuration]
        assignment = resolve(request, self.models, targets=configuration.targets, shared=shared)
        watch, targets = self.watches[configuration.targets], self.targets[: configuration.targets]
        watch.busy(targets)
        generation = Generation(assignment, watch.services)
        figures = await finished(generation, lost=True)
        return Run(figures.tokens, figures.seconds, generation.text, figures, watch.busy(targets))


@asynccontextmanager
async def _stage(
    bench: SpeculationParallelism, targets: tuple[str, ...], drafter: str, advance: Advance
) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        async with connect(targets, drafter, needs_drafter=True) as pipeline:
            models = pipeline.models
        watches = {count: await Watch.of(targets[:count], [drafter], stack) for count in (1, 2)}
        yield Stage(bench, models, targets, watches, advance)


def measured(
    noise: float, delay: float, configuration: Configuration, runs: Mapping[Configuration, Sequence[Run]]
) -> Measured:
    """Sums up one configuration; its speed and texts are compared with those of one target."""
    ours, alone = runs[configuration], runs[replace(configuration, targets=1, speculation=False)]
    total = total_of([run.figures for run in ours])
    seconds = sum(run.seconds for run in ours)
    return Measured(
        noise=noise,
        delay_ms=delay,
        configuration=configuration,
        acceptance=drafts_accepted(total),
        speed=speed_of(ours),
        ratio=speed_ratio(ours, alone),
        idle=tuple(1 - sum(busy) / seconds for busy in zip(*(run.busy for run in ours), strict=True)),
        tokens_per_pass=total.tokens_per_pass,
        speculated=total.speculated,
        passes=total.passes,
        equal=sum(one.text == other.text for one, other in zip(ours, alone, strict=True)),
        texts=len(ours),
    )
