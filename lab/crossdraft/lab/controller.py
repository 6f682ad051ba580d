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
from typing import Any, ClassVar

import numpy as np

from crossdraft.cli.measuring import SEED, Columns, Table, total_of
from crossdraft.cli.processes import Wanted, patience
from crossdraft.cli.running import ProgressCounter, checked_options
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.config.engine import EngineOptions
from crossdraft.config.request import AUTO
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab.commands import ControllerPlan
from crossdraft.lab.emulation.network import EmulatedHost
from crossdraft.lab.emulation.steps import Emulation, Pace
from crossdraft.lab.harness import Benchmark, in_turns, lock_step, optional, overlapped
from crossdraft.lab.models import write_free
from crossdraft.lab.outputs import Ours, RunResult, ratio
from crossdraft.lab.services import pair_here, served, service
from crossdraft.rpc.server import freeze_heap
from crossdraft.speculation.choice import TREES
from crossdraft.verification.methods import method_named

WITHOUT_DRAFTER = "no drafter"
CHOICES: dict[str, dict[str, Any]] = {  # the arms and some between them, and what a request says for each
    WITHOUT_DRAFTER: {},
    AUTO: {},
    **{f"lock-step, K = {k}": lock_step(k) for k in (2, 3, 5, 8)},
    **{f"lock-step, trees of {nodes}": lock_step(depth, nodes) for depth, nodes in TREES},
    **{f"overlapped, {most}, {wait}": overlapped(most, wait) for most, wait in ((8, 0), (8, 2), (16, 4))},
}
NEAR_BEST, AS_WITHOUT = 0.9, 0.97  # ratios that the summary counts
SURELY_AS_WITHOUT = 0.94  # ... and lower ends of intervals
RESAMPLES = 4_000  # of the prompts, with replacement (the bootstrap)


# Speeds on the same prompts: ratios with their 95 % intervals, over prompts drawn again.


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds, and its 95 % confidence interval over sets of prompts like these."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speed_of(runs: Sequence[RunResult]) -> float:
    """Tokens a second over all of them."""
    return ratio(sum(run.figures.tokens for run in runs), sum(run.seconds for run in runs)) or 0.0


def speed_ratio(ours: Sequence[RunResult], others: Sequence[RunResult]) -> Ratio | None:
    """Of all tokens over all time, ours and others'; runs at the same place are of the same prompt. None: one of the
    others made no token."""
    if len(ours) != len(others) or not ours:
        raise ValueError(f"runs are compared in pairs, at least one: {len(ours)} and {len(others)} were given")
    if not all(run.figures.tokens for run in others):
        return None
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


def compared(conditions: ControllerConditions, first: RunResult, found: Mapping[str, Sequence[RunResult]]) -> Compared:
    """Sums up; samples at the same place are of the same prompts, `first` is auto's before them."""
    speeds = {choice: speed_of(samples) for choice, samples in found.items()}
    best = max((choice for choice in found if choice != AUTO), key=speeds.__getitem__)
    total = total_of([sample.figures for samples in found.values() for sample in samples])
    return Compared(
        conditions,
        speeds,
        best,
        to_best=speed_ratio(found[AUTO], found[best]),
        to_none=speed_ratio(found[AUTO], found[WITHOUT_DRAFTER]),
        accepted=_accepted(total),
        tokens_per_pass=total_of([sample.figures for sample in found[AUTO]]).tokens_per_pass,
        lost=total.drafters_lost,
        at_first=speed_of([first]),
    )


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
FREE = EngineOptions(cache_mib=128, threads=1)  # keys and values of a token of the free model are small
CALIBRATED_ON, CALIBRATED_TOKENS = 6, 64  # outputs of each method with each noise, and tokens of each


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
    model = ModelOptions.of(folder, FREE)
    for noise in NOISES:
        async with pair_here(model, replace(model, emulation=Emulation(logit_noise=noise))) as pipeline:
            for method in methods:
                found[method].append(await _acceptance(pipeline, method))
    return {method: Curve(NOISES, tuple(acceptances)) for method, acceptances in found.items()}


async def _acceptance(pipeline: Pipeline, method: str) -> float:
    fixed = configured(method, "lock-step, K = 5", pipeline)
    return _accepted((await fixed.run(numbered(0, CALIBRATED_ON), CALIBRATED_TOKENS, CALIBRATED_ON)).figures) or 0.0


def temperature_of(method: str) -> float:
    """At which a method is measured: greedy with the target's own draws, which repeat by themselves, else sampling."""
    return 0.0 if method == "slem" else 1.0


# What generates.

LEAST_TOKENS, MOST_TOKENS = 48, 2048  # of an output
OUTPUT_MS = 0.3  # about what a token of one more output adds to a pass, on two cores
WARM_UP, WARM_UP_TOKENS, NEVER_AGAIN = "lock-step, K = 2", 8, 100_000  # the last: number of the first prompt


def numbered(first: int, count: int) -> list[str]:
    """Made-up prompts."""
    return [f"Prompt number {number}: " for number in range(first, first + count)]


def configured(method: str, choice: str, pipeline: Pipeline) -> Ours:
    """A choice for a method, in chains if that has no trees."""
    named, settings = method_named(method), CHOICES[choice]
    if not named.samples:
        settings = {name: value for name, value in settings.items() if name != "tree_nodes"}
    sampling, seed = SamplingOptions(temperature_of(method)), SEED if named.keyed else None
    request = GenerationRequest("x", method=method, options=sampling, seed=seed, ignore_eos=True, **settings)
    return Ours(choice, pipeline, request)


@dataclass(eq=False)
class RunningServices:
    """The services of a run. Once started they stay, since loading one takes seconds of a core."""

    plan: ControllerPlan
    folder: str  # of the free model
    curves: Mapping[str, Curve]
    stack: AsyncExitStack
    started: dict[Wanted, tuple[str, EmulatedHost | None]] = field(default_factory=dict)

    async def service(self, role: str, given: ControllerConditions) -> str:
        """A node of a token tree costs a target what it does beside an accelerator's pass of 8 ms. A drafter is behind
        the emulated network also if its distance is 0, so that all are."""
        pace, noise, distant = f"{given.pass_ms:g},{given.pass_ms / 400:g}", 0.0, role == "drafter"
        if distant:
            pace, noise = self.plan.drafter_pace, self.curves[given.method].noise(given.acceptance)
        asked = served(role, self.folder, FREE, pace, noise)
        if asked not in self.started:
            self.started[asked] = await self.stack.enter_async_context(service(asked, int(distant), distant))
        address, link = self.started[asked]
        if link is not None:
            await link.delay(given.trip_ms / 2)
        return address

    @asynccontextmanager
    async def connected(self, given: ControllerConditions) -> AsyncIterator[dict[str, Ours]]:
        """All choices, on new connections: one without a drafter, one of auto, and one of all others. They are warmed
        up by a few tokens, from which nothing can be learnt for auto."""
        target, drafter = [await self.service(role, given) for role in ("target", "drafter")]
        async with (
            connect(target, patience=patience()) as plain,
            connect(target, drafter, patience(), needs_drafter=True) as auto,
            connect(target, drafter, patience(), needs_drafter=True) as fixed,
        ):
            for pipeline in (plain, auto, fixed):
                choice = configured(given.method, WITHOUT_DRAFTER if pipeline is plain else WARM_UP, pipeline)
                await choice.run(numbered(NEVER_AGAIN, given.outputs), WARM_UP_TOKENS, given.outputs)
            freeze_heap()
            pipelines = {WITHOUT_DRAFTER: plain, AUTO: auto}
            yield {name: configured(given.method, name, pipelines.get(name, fixed)) for name in CHOICES}

    async def compared(self, given: ControllerConditions) -> Compared:
        """Each choice on the same prompts, others in each turn, once auto has had a turn for itself."""
        tokens = round(1000 * self.plan.seconds / (given.pass_ms + OUTPUT_MS * given.outputs))
        tokens, turns = min(MOST_TOKENS, max(LEAST_TOKENS, tokens)), self.plan.turns
        async with self.connected(given) as choices:

            async def run(choice: str, turn: int) -> RunResult:
                return await choices[choice].run(numbered(turn * given.outputs, given.outputs), tokens, given.outputs)

            first = await run(AUTO, turns)
            return compared(given, first, await in_turns([*CHOICES], turns, run))


# The benchmark.


class ControllerBenchmark(Benchmark[ControllerPlan, Compared]):
    """The grid: every cell with all choices in turns."""

    unit: ClassVar[str] = "comparisons"
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
                yield await services.compared(given)
                advance()

    def report(self, results: Sequence[Compared]) -> Iterator[Table | str]:
        yield from super().report(results)
        if results:
            yield summary(results)
