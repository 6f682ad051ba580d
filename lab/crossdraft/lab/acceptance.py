"""`crossdraft bench acceptance`: tokens per pass of methods and drafters over many prompts."""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from math import sqrt
from operator import attrgetter
from typing import ClassVar

from crossdraft.cli.measuring import Columns, Setting, Skipped, Table, finished, repeats, total_of
from crossdraft.cli.processes import Wanted, patience, running, threads_each
from crossdraft.cli.prompts import by_category
from crossdraft.cli.running import ProgressCounter, UsageError, checked_options
from crossdraft.client import GenerationRequest, Pipeline, Statistics, connect
from crossdraft.engine.names import BUNDLED_PREFIX
from crossdraft.lab.commands import AcceptancePlan
from crossdraft.lab.harness import Prompted, gathered, optional
from crossdraft.lab.services import NO_DEFAULTS
from crossdraft.session.models import fault_of_pair
from crossdraft.verification.methods import method_named

REPLY_SECONDS = 600.0  # many generations wait for one model
COUNTED = (  # figures of `Statistics` that a result has, too
    *("tokens", "passes", "tokens_per_pass", "row_misses", "draft_tokens"),
    *("acceptance", "accepted_length", "acceptance_at"),
)
SETTING: Columns = {
    "method": lambda cell: cell.method,
    "drafter": lambda cell: cell.drafter.removeprefix(BUNDLED_PREFIX),
    "T": lambda cell: f"{cell.temperature:g}",
    "k": lambda cell: cell.k,
    "nodes": lambda cell: cell.nodes or "",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredSetting(Setting):
    """What was measured with one setting, over all prompts."""

    prompts: int
    tokens: int  # emitted
    passes: int  # of the target, row misses included
    tokens_per_pass: float  # sum over sum
    standard_error: float  # of tokens_per_pass, over prompts
    tokens_per_planned_pass: float  # the same with row misses not counted as passes
    acceptance: float  # share of the judged tokens that agreed with the draft
    accepted_length: float  # draft tokens accepted in a round, mean over the rounds that had any
    acceptance_at: tuple[float, ...]  # by place in a round, of the draft tokens judged there
    row_misses: int
    draft_tokens: int
    seconds: float  # wall clock, for all prompts together
    step_seconds: float  # of the drafter, for each step: a draft token, or a level of a tree
    repeating: int  # outputs that repeat themselves
    without_repeats: float  # tokens_per_pass of the others; 0: there are none
    kinds: "Mapping[str, MeasuredSetting]" = field(default_factory=dict)  # the same by category of prompts, if several


def cell_of(setting: Setting, made: Sequence[tuple[Statistics, bool]], seconds: float = 0.0) -> MeasuredSetting:
    """Sums over prompts: of each the figures, and whether its output repeats itself.

    The standard error is that of a ratio of sums, to first order: with r the ratio and n prompts, the residuals
    tokens − r·passes have mean 0, and the error is √(n/(n−1) Σ residual²) / Σ passes; 0 for one prompt.
    """
    total, count = total_of([figure for figure, _ in made]), len(made)
    others = [figure for figure, repeats_ in made if not repeats_]
    squares = sum((figure.tokens - total.tokens_per_pass * figure.passes) ** 2 for figure, _ in made)
    return MeasuredSetting(
        **asdict(setting),
        **{name: getattr(total, name) for name in COUNTED},
        prompts=count,
        standard_error=sqrt(count / (count - 1) * squares) / total.passes if count > 1 else 0.0,
        tokens_per_planned_pass=total.tokens / (total.passes - total.row_misses),
        seconds=seconds,
        step_seconds=total.drafter_seconds / max(1, total.draft_tokens),
        repeating=count - len(others),
        without_repeats=total_of(others).tokens_per_pass if others else 0.0,
    )


def per_pass(cell: MeasuredSetting) -> str:
    return f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}"


def without_repeats(cell: MeasuredSetting) -> str:
    return f"{optional(cell.without_repeats or None, '.2f') or 'none'} ({cell.repeating})"


class AcceptanceBenchmark(Prompted[AcceptancePlan, MeasuredSetting | Skipped]):
    """`crossdraft bench acceptance`: every setting over all prompts, in lock-step rounds."""

    unit: ClassVar[str] = "generations"
    columns: ClassVar[Columns] = {
        **SETTING,
        "tokens/pass": per_pass,
        "without repeats": without_repeats,
        "no misses": lambda cell: f"{cell.tokens_per_planned_pass:.2f}",
        "accepted": lambda cell: f"{cell.acceptance:.1%}",
        "a round": lambda cell: f"{cell.accepted_length:.2f}",
        "misses": lambda cell: f"{cell.row_misses:,}",
        "tokens": lambda cell: f"{cell.tokens:,}",
        "passes": lambda cell: f"{cell.passes:,}",
        "ms a step": lambda cell: f"{1e3 * cell.step_seconds:.2f}",
        "s": lambda cell: f"{cell.seconds:.1f}",
    }

    def __init__(self, plan: AcceptancePlan, settings: tuple[Setting, ...] | None = None) -> None:
        """`settings`: others than those of the plan, by drafter and its options. Raises UsageError."""
        super().__init__(plan)
        self.settings = settings_of(plan) if settings is None else settings

    @property
    def total(self) -> int:
        return len(self.settings) * len(self.prompts)

    def check(self) -> None:
        with checked_options():
            for setting in self.settings:
                setting.requests(self.prompts, self.plan.max_tokens)

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[MeasuredSetting | Skipped, None]:
        threads, waiting, engine = threads_each(2), patience(reply_seconds=REPLY_SECONDS), self.plan.engine
        refused: set[Skipped] = set()
        async with running([Wanted("target", self.plan.target, threads, NO_DEFAULTS, engine=engine)]) as (target,):
            for (name, more), alike in groupby(self.settings, key=attrgetter("drafter", "options")):
                async with (
                    running([Wanted("drafter", name, threads, more, engine=engine)]) as (drafter,),
                    connect(target.address, drafter.address, waiting, needs_drafter=True) as pipeline,
                ):
                    for setting in alike:
                        advance(0, f"{setting.method}, {name}")
                        fault = fault_of_pair(method_named(setting.method), pipeline.models)
                        if not fault:
                            yield await self.cell(pipeline, setting, advance)
                            continue
                        advance(len(self.prompts))
                        skipped = Skipped(setting.method, name, fault)
                        if skipped not in refused:
                            refused.add(skipped)
                            yield skipped

    async def cell(self, pipeline: Pipeline, setting: Setting, advance: ProgressCounter) -> MeasuredSetting:
        """All prompts in one setting, which the pipeline's drafter has."""
        began = time.monotonic()

        async def generated(request: GenerationRequest) -> tuple[Statistics, bool]:
            generation = pipeline.run(request)
            figures = await finished(generation)
            advance()
            return figures, repeats(generation.ids)

        requests = setting.requests(self.prompts, self.plan.max_tokens)
        found = await gathered(generated, requests, self.plan.concurrency)
        kinds = {kind: cell_of(setting, some) for kind, some in by_category(self.kinds, found).items()}
        return replace(cell_of(setting, found, time.monotonic() - began), kinds=kinds)

    def report(self, results: Sequence[MeasuredSetting | Skipped]) -> Iterator[Table | str]:
        cells = [result for result in results if isinstance(result, MeasuredSetting)]
        yield Table.of(cells, self.columns, "Tokens per pass")
        places = max((len(cell.acceptance_at) for cell in cells), default=0)
        at: Columns = {str(place + 1): partial(_accepted_at, place) for place in range(places)}
        yield Table.of(cells, {**SETTING, **at}, "Accepted by place in a round, of the draft tokens judged there")
        kinds = {kind: partial(_of_kind, kind) for cell in cells[:1] for kind in cell.kinds}
        if kinds:
            yield Table.of(cells, {**SETTING, **kinds}, "Tokens per pass by kind of prompt; without repeats")
        yield from (str(result) for result in results if isinstance(result, Skipped))


def _accepted_at(place: int, cell: MeasuredSetting) -> str:
    return f"{cell.acceptance_at[place]:.1%}" if place < len(cell.acceptance_at) else ""


def _of_kind(kind: str, cell: MeasuredSetting) -> str:
    return f"{per_pass(cell.kinds[kind])}; {without_repeats(cell.kinds[kind])}"


# The settings.


def settings_of(plan: AcceptancePlan) -> tuple[Setting, ...]:
    """Every combination, by drafter, so that each is started once.

    A method for one vocabulary has the target's own model as its drafter. Raises UsageError: there is no such method,
    or an affinity is not of a drafter."""
    affinities = _affinities(plan)
    with checked_options():
        own = [name for name in plan.methods if method_named(name).same_vocabulary]
    pairs = [(name, drafter) for drafter in plan.drafter for name in plan.methods if name not in own]
    pairs += [(name, plan.target) for name in own]
    return tuple(
        Setting(method, drafter, temperature, k, affinities.get(drafter, ()), nodes=nodes)
        for method, drafter in pairs
        for temperature in plan.temperatures
        for k in plan.k
        for nodes in plan.tree
        if not nodes or (nodes > k and not method_named(method).whole_draft)
    )


def _affinities(plan: AcceptancePlan) -> dict[str, tuple[str, ...]]:
    """Options of each drafter that has a matrix; raises UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    for given in plan.affinity:
        name, _, file = given.rpartition("=")
        if not file or name not in plan.drafter:
            raise UsageError(f"--affinity takes NAME=FILE, NAME one of {', '.join(plan.drafter)}, got {given!r}")
        found[name] = ("--affinity", file)
    return found
