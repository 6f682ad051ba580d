"""`crossdraft bench controller`: controlled generations (auto) beside fixed choices and no drafter, on real services.

Target and drafter are one small model that costs next to nothing. Their steps are paced, noise on the drafter's logits
sets how much of its draft is accepted, and it stands behind an emulated network. What is compared takes turns on the
same prompts, and all turns of auto share one connection, as in a server, so that it may learn; the turn in which it
begins to is a figure of its own. The best fixed choice, which may be no drafter, is chosen afterwards from the same
runs: chance is in its favour.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, ClassVar

import numpy as np

from crossdraft.cli.measuring import SEED, Columns, Table, finished, total_of
from crossdraft.cli.processes import patience
from crossdraft.cli.running import STARTS_PROCESSES, ProgressCounter, Run, checked_options
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.config.engine import EngineOptions
from crossdraft.config.request import AUTO, Overlap
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab.commands import ControllerPlan
from crossdraft.lab.emulation.steps import Emulation, Pace
from crossdraft.lab.harness import Benchmark, in_turns, optional
from crossdraft.lab.models import write_free
from crossdraft.lab.outputs import ratio
from crossdraft.lab.services import Distant, Served, service
from crossdraft.rpc.server import Listening, freeze_heap
from crossdraft.speculation.choice import TREES
from crossdraft.target.service import ServeTarget, target_server
from crossdraft.verification.methods import method_named

WITHOUT_DRAFTER = "no drafter"
CHOICES: dict[str, dict[str, Any]] = {  # the arms and some between them, and what a request says for each
    WITHOUT_DRAFTER: {},
    AUTO: {},
    **{f"lock-step, K = {k}": {"overlap": Overlap.OFF, "num_speculative_tokens": k} for k in (2, 3, 5, 8)},
    **{
        f"lock-step, trees of {nodes}": {"overlap": Overlap.OFF, "num_speculative_tokens": depth, "tree_nodes": nodes}
        for depth, nodes in TREES
    },
    **{
        f"overlapped, {most}, {wait}": {"overlap": Overlap.ON, "max_draft_tokens": most, "min_draft_tokens": wait}
        for most, wait in ((8, 0), (8, 2), (16, 4))
    },
}
NEAR_BEST, AS_WITHOUT = 0.9, 0.97  # ratios that the summary counts
SURELY_AS_WITHOUT = 0.94  # ... and lower ends of intervals
RESAMPLES = 4_000  # of the prompts, with replacement (the bootstrap)


# Speeds on the same prompts: ratios with their 95 % intervals, over prompts drawn again.


@dataclass(frozen=True)
class Timed:
    """Outputs of one choice that were made together."""

    figures: Statistics  # of all of them
    seconds: float


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds, and its 95 % confidence interval over sets of prompts like these."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speed_of(runs: Sequence[Timed]) -> float:
    """Tokens a second over all of them."""
    return ratio(sum(run.figures.tokens for run in runs), sum(run.seconds for run in runs)) or 0.0


def speed_ratio(ours: Sequence[Timed], others: Sequence[Timed]) -> Ratio:
    """Of all tokens over all time, ours and others'; runs at the same place are of the same prompt."""
    if len(ours) != len(others) or not ours:
        raise ValueError(f"runs are compared in pairs, at least one: {len(ours)} and {len(others)} were given")
    samples = np.array([[(run.figures.tokens, run.seconds) for run in runs] for runs in (ours, others)])
    drawn = np.random.default_rng(SEED).integers(len(ours), size=(RESAMPLES, len(ours)))
    tokens, seconds = np.moveaxis(samples[:, [range(len(ours)), *drawn]].sum(2), -1, 0)  # all, then each sample
    speeds = tokens / seconds
    value, *others_ = speeds[0] / speeds[1]
    return Ratio(float(value), *np.quantile(others_, (0.025, 0.975)).tolist())


@dataclass(frozen=True)
class ControllerConditions:
    """What all choices of a comparison have in common."""

    method: str
    temperature: float
    outputs: int  # at once
    acceptance: float  # of a draft token, as wanted
    pass_ms: float  # of a pass of the target that computes few tokens
    trip_ms: float  # to the drafter and back


@dataclass(frozen=True)
class Compared:
    """All choices under the same conditions."""

    conditions: ControllerConditions
    speeds: Mapping[str, float]  # tokens a second of all outputs together, by choice
    best: str  # the fastest choice besides auto
    to_best: Ratio | None  # of auto's speed; None: there was none to compare with
    to_none: Ratio | None  # ... to no drafter's
    accepted: float | None  # share of the draft tokens that were judged, of all choices; None: none was judged
    tokens_per_pass: float  # of auto
    lost: int  # times that a drafter was lost, of all choices
    at_first: float  # tokens a second of auto in the turn in which it begins to learn, not in `speeds`


def compared(conditions: ControllerConditions, first: Timed, found: Mapping[str, Sequence[Timed]]) -> Compared:
    """Sums up; samples at the same place are of the same prompts, `first` is auto's before them."""
    speeds = {choice: speed_of(samples) for choice, samples in found.items()}
    best = max((choice for choice in found if choice != AUTO), key=speeds.__getitem__)
    total = total_of([sample.figures for samples in found.values() for sample in samples])
    return Compared(
        conditions,
        speeds,
        best,
        to_best=_ratio(found[AUTO], found[best]),
        to_none=_ratio(found[AUTO], found[WITHOUT_DRAFTER]),
        accepted=_accepted(total),
        tokens_per_pass=total_of([sample.figures for sample in found[AUTO]]).tokens_per_pass,
        lost=total.drafters_lost,
        at_first=speed_of([first]),
    )


def _ratio(ours: Sequence[Timed], others: Sequence[Timed]) -> Ratio | None:
    return speed_ratio(ours, others) if all(sample.figures.tokens for sample in others) else None


def _accepted(total: Statistics) -> float | None:
    """Of the draft tokens that were judged."""
    return ratio(sum(total.accepted_at), sum(total.judged_at))


def summary(results: Sequence[Compared]) -> str:
    """How near auto comes to the others."""
    parts = [
        f"at least {limit:g} of {name} in {sum(ratio.value >= limit for ratio in ratios)} of {len(ratios)} "
        f"({np.mean([ratio.value >= limit for ratio in ratios]):.0%}), least {min(ratio.value for ratio in ratios):.2f}"
        for name, limit, ratios in (
            ("the best fixed choice", NEAR_BEST, [result.to_best for result in results if result.to_best is not None]),
            ("no drafter", AS_WITHOUT, [result.to_none for result in results if result.to_none is not None]),
        )
        if ratios
    ]
    lows = [result.to_none.low > SURELY_AS_WITHOUT for result in results if result.to_none is not None]
    surely = f", lower end of the interval above {SURELY_AS_WITHOUT:g} in {sum(lows)} of {len(lows)}" if lows else ""
    return f"auto is {'; '.join(parts)}{surely}"


# The cells of the grid.


def covering(dimensions: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Combinations in which any three values of different dimensions meet; in the first few any two do.

    Greedy: the next one is the one in which most meet that have not yet.
    """
    met = {cell: [set(combinations(enumerate(cell), size)) for size in (2, 3)] for cell in product(*dimensions)}
    left = [set[Any]().union(*(groups[place] for groups in met.values())) for place in range(2)]
    found = []
    while any(left):
        best = max(met, key=lambda cell: [len(new & wanted) for new, wanted in zip(met[cell], left, strict=True)])
        for new, wanted in zip(met[best], left, strict=True):
            wanted -= new
        found.append(best)
    return found


# Noise for a wanted acceptance.

NOISES = (0.05, 0.2, 0.6, 1.2, 2.4)  # standard deviations on the drafter's logits
FREE_MIB = 128  # for keys and values: those of a token of the free model are small
FREE = EngineOptions(cache_mib=FREE_MIB)
CALIBRATED_ON, CALIBRATED_TOKENS = 6, 64  # outputs of each method with each noise, and tokens of each
AT_ONCE = Listening(grace_seconds=0)


@dataclass(frozen=True)
class Curve:
    """Acceptance of one method with each of `NOISES`."""

    noises: tuple[float, ...]  # ascending
    acceptances: tuple[float, ...]

    def noise(self, acceptance: float) -> float:
        """The noise for it, between two that were measured; the nearest one if it is outside of them."""
        falling = np.minimum.accumulate(self.acceptances)
        return float(np.exp(np.interp(acceptance, falling[::-1], np.log(self.noises)[::-1])))


async def calibrated(folder: str, methods: Sequence[str]) -> dict[str, Curve]:
    """By method, with services in this process and as fast as they are: only shares are measured."""
    found: dict[str, list[float]] = {method: [] for method in methods}
    async with await target_server(ServeTarget(ModelOptions(folder, budget=FREE_MIB, threads=1), AT_ONCE)) as target:
        for noise in NOISES:
            options = ModelOptions(folder, budget=FREE_MIB, threads=1, emulation=Emulation(logit_noise=noise))
            async with (
                await drafter_server(ServeDrafter(options, AT_ONCE)) as drafter,
                connect(target.address, drafter.address, patience(), needs_drafter=True) as pipeline,
            ):
                for method in methods:
                    found[method].append(await _acceptance(pipeline, method))
    return {method: Curve(NOISES, tuple(acceptances)) for method, acceptances in found.items()}


async def _acceptance(pipeline: Pipeline, method: str) -> float:
    given = ControllerConditions(method, temperature_of(method), CALIBRATED_ON, 0.0, 0.0, 0.0)
    sample = await ComparedPipelines(given, CALIBRATED_TOKENS, {"": pipeline}).sample("lock-step, K = 5", 0)
    return _accepted(sample.figures) or 0.0


def temperature_of(method: str) -> float:
    """At which a method is measured: greedy with the target's own draws, which repeat by themselves, else sampling."""
    return 0.0 if method == "slem" else 1.0


# What generates.

LEAST_TOKENS, MOST_TOKENS = 48, 2048  # of an output
OUTPUT_MS = 0.3  # about what a token of one more output adds to a pass, on two cores
WARM_UP, WARM_UP_TOKENS = 100_000, 8  # number of the first prompt


@dataclass(frozen=True, eq=False)
class ComparedPipelines:
    """Connections for one comparison."""

    given: ControllerConditions
    tokens: int  # of each output
    pipelines: Mapping[str, Pipeline]  # WITHOUT_DRAFTER, AUTO, and the one of all other choices under an empty name

    async def sample(self, choice: str, first: int) -> Timed:
        """All outputs at once, of the prompts from a number on; their drafter may be lost on the way. Raises
        CommandFailed."""
        pipeline, began = self.pipelines.get(choice) or self.pipelines[""], monotonic()
        asked = [self._request(choice, first + number) for number in range(self.given.outputs)]
        figures = await asyncio.gather(*(finished(pipeline.run(request), lost=True) for request in asked))
        return Timed(total_of(figures), monotonic() - began)

    def _request(self, choice: str, number: int) -> GenerationRequest:
        """One output of a made-up prompt of this number, in chains if the method has no trees."""
        method = method_named(self.given.method)
        settings = {name: value for name, value in CHOICES[choice].items() if name != "tree_nodes" or method.samples}
        return GenerationRequest(
            f"Prompt number {number}: ",
            method=self.given.method,
            max_tokens=self.tokens,
            options=SamplingOptions(self.given.temperature),
            seed=number if method.keyed else None,
            ignore_eos=True,
            **settings,
        )

    async def warm_up(self) -> None:
        """A few tokens on each connection, from which nothing can be learnt for auto."""
        for name, pipeline in self.pipelines.items():
            choice = WITHOUT_DRAFTER if name == WITHOUT_DRAFTER else "lock-step, K = 2"
            await replace(self, tokens=WARM_UP_TOKENS, pipelines={"": pipeline}).sample(choice, WARM_UP)

    async def in_turns(self, turns: int) -> Compared:
        """Each choice on the same prompts, others in each turn, once auto has had a turn for itself."""
        first = await self.sample(AUTO, turns * self.given.outputs)
        found = await in_turns([*CHOICES], turns, lambda choice, turn: self.sample(choice, turn * self.given.outputs))
        return compared(self.given, first, found)


@dataclass(eq=False)
class RunningServices:
    """The services of a run. Once started they stay, since loading one takes seconds of a core."""

    plan: ControllerPlan
    folder: str  # of the free model
    curves: Mapping[str, Curve]
    stack: AsyncExitStack
    started: dict[Any, Distant] = field(default_factory=dict)

    async def service(self, role: str, given: ControllerConditions) -> Distant:
        """A node of a token tree costs a target what it does beside an accelerator's pass of 8 ms. A drafter is behind
        the emulated network also if its distance is 0, so that all are."""
        served = Served(self.folder, f"{given.pass_ms:g},{given.pass_ms / 400:g}", engine=FREE)
        if distant := role == "drafter":
            noise = self.curves[given.method].noise(given.acceptance)
            served = Served(self.folder, self.plan.drafter_pace, noise, FREE)
        if (role, served) not in self.started:
            made = service(role, served, int(distant), distant)
            self.started[role, served] = await self.stack.enter_async_context(made)
        found = self.started[role, served]
        await found.delay(given.trip_ms / 2)
        return found

    @asynccontextmanager
    async def connected(self, given: ControllerConditions) -> AsyncIterator[ComparedPipelines]:
        """New connections, warmed up."""
        target, drafter = [(await self.service(role, given)).address for role in ("target", "drafter")]
        tokens = round(1000 * self.plan.seconds / (given.pass_ms + OUTPUT_MS * given.outputs))
        async with (
            connect(target, patience=patience()) as plain,
            connect(target, drafter, patience(), needs_drafter=True) as auto,
            connect(target, drafter, patience(), needs_drafter=True) as fixed,
        ):
            pipelines = {WITHOUT_DRAFTER: plain, AUTO: auto, "": fixed}
            compared_pipelines = ComparedPipelines(given, min(MOST_TOKENS, max(LEAST_TOKENS, tokens)), pipelines)
            await compared_pipelines.warm_up()
            freeze_heap()
            yield compared_pipelines


# The benchmark.


class ControllerBenchmark(Benchmark[ControllerPlan, Compared]):
    """The grid: every cell with all choices in turns."""

    unit: ClassVar[str] = "comparisons"
    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)
    title: ClassVar[str] = "Tokens a second, and auto's speed as a ratio [95 %]"
    columns: ClassVar[Columns] = {
        "method": lambda cell: f"{cell.conditions.method}, T = {cell.conditions.temperature:g}",
        "outputs": lambda cell: cell.conditions.outputs,
        "pass, ms": lambda cell: f"{cell.conditions.pass_ms:g}",
        "trip, ms": lambda cell: f"{cell.conditions.trip_ms:g}",
        "wanted": lambda cell: f"{cell.conditions.acceptance:.0%}",
        "accepted": lambda cell: optional(cell.accepted, ".0%"),
        WITHOUT_DRAFTER: lambda cell: f"{cell.speeds[WITHOUT_DRAFTER]:,.1f}",
        AUTO: lambda cell: f"{cell.speeds[AUTO]:,.1f}",
        "at first": lambda cell: f"{cell.at_first:,.1f}",
        "best fixed": lambda cell: f"{cell.speeds[cell.best]:,.1f}",
        "choice": lambda cell: cell.best,
        "auto / best": lambda cell: cell.to_best or "",
        "auto / no drafter": lambda cell: cell.to_none or "",
        "tokens/pass": lambda cell: f"{cell.tokens_per_pass:.2f}",
        "lost": lambda cell: cell.lost or "",
    }

    @cached_property
    def comparisons(self) -> list[ControllerConditions]:
        """In their order."""
        plan = self.plan
        dimensions = plan.outputs, plan.acceptance, plan.pass_ms, plan.trip_ms, plan.methods
        cells = covering(dimensions)
        if plan.all_cells:
            cells += [cell for cell in product(*dimensions) if cell not in cells]
        return [
            ControllerConditions(method, temperature_of(method), outputs, acceptance, pass_ms, trip_ms)
            for outputs, acceptance, pass_ms, trip_ms, method in cells[: plan.cells]
        ]

    @property
    def total(self) -> int:
        return len(self.comparisons)

    def check(self) -> None:
        with checked_options():
            Pace.parsed(self.plan.drafter_pace)
            for method in self.plan.methods:
                method_named(method)

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Compared, None]:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            await asyncio.to_thread(write_free, Path(folder))
            advance(0, "calibrating")
            curves = await calibrated(folder, sorted({given.method for given in self.comparisons}))
            services = RunningServices(self.plan, folder, curves, stack)
            for given in self.comparisons:
                advance(0, f"{given.method}, {given.outputs} at once")
                async with services.connected(given) as pipelines:
                    yield await pipelines.in_turns(self.plan.turns)
                advance()

    def report(self, results: Sequence[Compared]) -> Iterator[Table | str]:
        yield from super().report(results)
        if results:
            yield summary(results)
