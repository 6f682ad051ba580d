"""`crossdraft bench acceptance`: tokens per pass of methods and drafters, over many prompts."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.engine import check_shares, sizes_of
from crossdraft.bench.harness import (
    finished,
    markdown,
    print_table,
    write_json,
    write_text,
)
from crossdraft.bench.overhead import Watch
from crossdraft.bench.workload import Setting, Workload, running_pairs
from crossdraft.client import Generation, GenerationRequest, Overlap, Pipeline, Statistics, connect
from crossdraft.console.corpora import Named, corpus_texts
from crossdraft.console.processes import Wanted, services, threads_each
from crossdraft.console.running import Misused, check_output, checked_options, counted, run_to_end
from crossdraft.engine.names import BUNDLED_PREFIX
from crossdraft.rpc.clients import Patience
from crossdraft.session.resolution import Models, fault_of_pair, resolve
from crossdraft.text.frequencies import Ranking, count_frequencies
from crossdraft.text.letters import Side
from crossdraft.training.corpus import read_corpus
from crossdraft.verification.methods import method_named

PATIENCE = Patience(reply_seconds=600.0)  # many generations wait for one model
COLUMNS = (
    *("method", "drafter", "T", "k", "tokens/pass", "no misses", "accepted", "a round"),
    *("misses", "tokens", "passes", "s"),
)


@dataclass(frozen=True)
class Cell:
    """What was measured with one setting, over all prompts."""

    method: str
    drafter: str  # a model's name
    temperature: float
    k: int  # draft tokens in a round
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


@dataclass(frozen=True)
class Skipped:
    """A setting that the pair refuses."""

    method: str
    drafter: str  # a model's name
    reason: str


def measure(workload: Workload, concurrency: int, json_path: Path | None) -> None:
    """Measures every setting; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails.
    """
    if concurrency < 1:
        raise Misused(f"--concurrency must be at least 1, got {concurrency}")
    workload.check()
    run_to_end(_measure(workload, concurrency, json_path))


async def _measure(workload: Workload, concurrency: int, json_path: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    cells: list[Cell] = []
    skipped: list[Skipped] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=len(workload.settings) * len(workload.prompts))
        async with aclosing(running_pairs(workload)) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline:
                    for setting in settings:
                        progress.update(task, description=" ".join(_labels(setting)))
                        found = await _found(
                            pipeline, workload, setting, concurrency, lambda count: progress.advance(task, count)
                        )
                        if isinstance(found, Cell):
                            cells.append(found)
                        elif found not in skipped:
                            skipped.append(found)
    _print(cells, skipped)
    if json_path is not None:
        record = {"target": workload.target, "max_tokens": workload.max_tokens, "concurrency": concurrency}
        lists = {"cells": [asdict(cell) for cell in cells], "skipped": [asdict(one) for one in skipped]}
        write_json(json_path, record | lists)


async def _found(
    pipeline: Pipeline, workload: Workload, setting: Setting, concurrency: int, advance: Callable[[int], None]
) -> Cell | Skipped:
    fault = fault_of_pair(method_named(setting.method), pipeline.models)
    if fault:
        advance(len(workload.prompts))
        return Skipped(setting.method, setting.drafter, fault)
    requests = setting.requests(workload.prompts, workload.max_tokens)
    began = time.monotonic()
    figures = await run_all(pipeline, requests, concurrency, lambda: advance(1))
    return cell_of(setting, figures, time.monotonic() - began)


def _print(cells: Sequence[Cell], skipped: Sequence[Skipped]) -> None:
    print_table("Tokens per pass", COLUMNS, [shown(cell) for cell in cells])
    places = max((len(cell.acceptance_at) for cell in cells), default=0)
    names = ("method", "drafter", "T", "k", *(str(place + 1) for place in range(places)))
    rows = [
        (*_labels(cell), *(f"{share:.1%}" for share in cell.acceptance_at), *[""] * (places - len(cell.acceptance_at)))
        for cell in cells
    ]
    print_table("Accepted by place in a round, of the draft tokens judged there", names, rows)
    for one in skipped:
        print(f"Skipped {one.method} with {one.drafter}: it {one.reason}")


async def run_all(
    pipeline: Pipeline, requests: Sequence[GenerationRequest], concurrency: int, advance: Callable[[], None]
) -> list[Statistics]:
    """The requests' figures, in their order, with so many under way at once."""
    places = asyncio.Semaphore(concurrency)

    async def run(request: GenerationRequest) -> Statistics:
        async with places:
            figures = await finished(pipeline.run(request))
        advance()
        return figures

    return await asyncio.gather(*map(run, requests))


def cell_of(setting: Setting, figures: Sequence[Statistics], seconds: float) -> Cell:
    """Sums over prompts.

    The standard error is that of a ratio of sums, to first order: with r the ratio and n prompts, the residuals
    tokens − r·passes have mean 0, and the error is √(n/(n−1) Σ residual²) / Σ passes; 0 for one prompt.
    """
    tokens = sum(figure.tokens for figure in figures)
    passes = sum(figure.passes for figure in figures)
    accepted = sum(figure.accepted for figure in figures)
    judged = accepted + sum(figure.corrected for figure in figures)
    squares = sum((figure.tokens - tokens / passes * figure.passes) ** 2 for figure in figures)
    count = len(figures)
    misses = sum(figure.row_misses for figure in figures)
    proposed_at = summed([figure.proposed_at for figure in figures])
    judged_at = summed([figure.judged_at for figure in figures])
    accepted_at = summed([figure.accepted_at for figure in figures])
    return Cell(
        **asdict(setting),
        prompts=count,
        tokens=tokens,
        passes=passes,
        tokens_per_pass=tokens / passes,
        standard_error=sqrt(count / (count - 1) * squares) / passes if count > 1 else 0.0,
        tokens_per_planned_pass=tokens / (passes - misses),
        acceptance=accepted / judged if judged else 0.0,
        accepted_length=sum(accepted_at) / proposed_at[0] if proposed_at else 0.0,
        acceptance_at=tuple(one / all_ if all_ else 0.0 for one, all_ in zip(accepted_at, judged_at, strict=True)),
        row_misses=misses,
        draft_tokens=sum(figure.draft_tokens for figure in figures),
        seconds=seconds,
    )


def summed(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Sums by place; a generation without rounds so long has none there."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _labels(cell: Cell | Setting) -> tuple[str, ...]:
    return (cell.method, cell.drafter.removeprefix(BUNDLED_PREFIX), f"{cell.temperature:g}", str(cell.k))


def shown(cell: Cell) -> tuple[str, ...]:
    """A row of the table."""
    return (
        *_labels(cell),
        f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}",
        f"{cell.tokens_per_planned_pass:.2f}",
        f"{cell.acceptance:.1%}",
        f"{cell.accepted_length:.2f}",
        f"{cell.row_misses:,}",
        f"{cell.tokens:,}",
        f"{cell.passes:,}",
        f"{cell.seconds:.1f}",
    )


# `crossdraft bench trees`: what it brings that a pass carries a tree of paths instead of a chain.

BRANCHES = 4  # draft tokens of a prepared continuation
HEADINGS = (
    *("method", "drafter", "T", "epochs run", "paths", "tokens/pass", "row misses", "a pass", "nodes a pass"),
    *("accepted", "branches hit"),
)


@dataclass(frozen=True)
class Shape:
    """How epochs are run, and how many paths a tree has at most."""

    overlap: bool
    paths: int
    branches: int = 0  # draft tokens of each prepared continuation

    @property
    def label(self) -> str:
        """How epochs are run, for a table."""
        branches = f", branches {self.branches}" if self.branches else ""
        return f"{'overlapped' if self.overlap else 'lock-step'}{branches}"

    def request(self, plain: GenerationRequest) -> GenerationRequest:
        """The same request, run in this way."""
        if not self.overlap:
            return replace(plain, paths=self.paths)
        return replace(
            plain, overlap=Overlap.ON, paths=self.paths, branches=self.branches, branch_width=2 if self.branches else 1
        )


SHAPES = (
    *(Shape(overlap, paths) for overlap in (False, True) for paths in (1, 2)),
    *(Shape(True, paths, BRANCHES) for paths in (2, 6)),
)


@dataclass(frozen=True)
class Measured:
    """One setting with one shape, over all prompts."""

    shape: Shape
    cell: Cell
    nodes: float  # of a pass's tree, on average
    branches_hit: float | None  # share of the refusals that a branch continued; None: no branches


def trees_measure(workload: Workload, concurrency: int, json_path: Path | None, markdown_path: Path | None) -> None:
    """Measures every setting with every shape; a table in Markdown on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: a service does not start or fails.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    workload.check()
    with checked_options():
        for setting in workload.settings:
            for shape in SHAPES:
                shape.request(setting.requests(workload.prompts[:1], workload.max_tokens)[0])
    run_to_end(_trees_measure(workload, concurrency, json_path, markdown_path))


async def _trees_measure(
    workload: Workload, concurrency: int, json_path: Path | None, markdown_path: Path | None
) -> None:
    found: list[Measured] = []
    with counted(len(workload.settings) * len(SHAPES), "settings") as advance:
        async with aclosing(_all(workload, concurrency)) as measured:
            async for one in measured:
                found.append(one)
                advance()
                if json_path is not None:
                    write_json(json_path, {"target": workload.target, "measured": [asdict(each) for each in found]})
    table = markdown(HEADINGS, [_row(one) for one in found])
    if markdown_path is not None:
        write_text(markdown_path, table)
    print(table, end="")


async def _all(workload: Workload, concurrency: int) -> AsyncGenerator[Measured, None]:
    async with aclosing(running_pairs(workload)) as pairs:
        async for target, drafter, settings in pairs:
            async with AsyncExitStack() as stack:
                async with connect(target, drafter, needs_drafter=True) as pipeline:
                    models = pipeline.models
                watch = await Watch.of([target], [drafter], stack)
                for setting in settings:
                    for shape in SHAPES:
                        yield await Run(workload, setting, shape, models, watch).measured(concurrency)


@dataclass(frozen=True, eq=False)
class Run:
    """One setting with one shape."""

    workload: Workload
    setting: Setting
    shape: Shape
    models: Models
    watch: Watch

    async def measured(self, concurrency: int) -> Measured:
        """Over all prompts, so many at once."""
        places, began = asyncio.Semaphore(concurrency), time.monotonic()
        nodes = self._nodes()

        async def run(request: GenerationRequest) -> Statistics:
            async with places:
                return await finished(Generation(resolve(request, self.models), self.watch.services))

        plain = self.setting.requests(self.workload.prompts, self.workload.max_tokens)
        figures = await asyncio.gather(*(run(self.shape.request(one)) for one in plain))
        cell = cell_of(self.setting, figures, time.monotonic() - began)
        tried, hit = sum(one.branches_tried for one in figures), sum(one.branches_hit for one in figures)
        return Measured(self.shape, cell, (self._nodes() - nodes) / cell.passes, hit / tried if tried else None)

    def _nodes(self) -> int:
        return sum(port.nodes for port in self.watch.ports.values())


def _row(one: Measured) -> tuple[str, ...]:
    cell = one.cell
    return (
        *(cell.method, cell.drafter.removeprefix(BUNDLED_PREFIX), f"{cell.temperature:g}"),
        *(one.shape.label, str(one.shape.paths), f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}"),
        *(f"{cell.row_misses:,}", f"{cell.row_misses / cell.passes:.3f}", f"{one.nodes:.1f}", f"{cell.acceptance:.1%}"),
        "" if one.branches_hit is None else f"{one.branches_hit:.0%}",
    )


# `crossdraft bench pruning`: tokens per pass with drafters that keep fewer and fewer ids of their head.

PRUNING_COLUMNS = (
    "method",
    "drafter",
    "T",
    "k",
    "keep",
    "of the corpus",
    "tokens/pass",
    "of the whole",
    "accepted",
    "tokens",
)


@dataclass(frozen=True)
class Pruned:
    """What was measured with one setting and one size of the head."""

    keep: int  # ids
    covered: float  # share of the corpus's tokens that the `keep` most frequent ids make
    cell: Cell


@dataclass(frozen=True)
class Counted:
    """A drafter's vocabulary ranked by a corpus."""

    name: str
    ranking: Ranking
    file: Path

    def options(self, keep: int) -> tuple[str, ...]:
        """Those of the drafter's command that keep so many ids; none for the whole head."""
        if keep >= len(self.ranking.counts):
            return ()
        return ("--vocab-keep", str(keep), "--frequencies", str(self.file))


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    workload: Workload
    shares: tuple[float, ...]  # of the vocabulary
    corpus: Path | None  # None: what the bundled models have learnt from
    concurrency: int


def pruning_measure(plan: Plan, json_path: Path | None) -> None:
    """Measures every drafter with every size of its head; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails, or the corpus cannot be read.
    """
    check_shares(plan.shares)
    if plan.concurrency < 1:
        raise Misused(f"--concurrency must be at least 1, got {plan.concurrency}")
    plan.workload.check()
    with TemporaryDirectory() as folder:
        names = dict.fromkeys(setting.drafter for setting in plan.workload.settings)
        counted = [_counted(name, plan.corpus, Path(folder, str(number))) for number, name in enumerate(names)]
        run_to_end(_pruning_measure(plan, counted, json_path))


def _counted(name: str, corpus: Path | None, file: Path) -> Counted:
    named = Named.load(name, Side.DRAFTER)
    texts = (document.text for document in read_corpus().training) if corpus is None else corpus_texts(corpus, name)
    ranking = count_frequencies(named.tokenizer_json, named.tokenization, texts)
    ranking.write(file)
    return Counted(name, ranking, file)


async def _pruning_measure(plan: Plan, counted: Sequence[Counted], json_path: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = sum(len(_sizes(plan, one)) * len(_settings(plan, one)) for one in counted)
        task = progress.add_task("starting", total=total * len(plan.workload.prompts))
        async with aclosing(_cells(plan, counted, lambda: progress.advance(task))) as cells:
            async for one in cells:
                progress.update(task, description=f"{one.cell.drafter}, {one.keep:,} kept")
                found.append(one)
    whole = {_key(one.cell): one.cell.tokens_per_pass for one in reversed(found)}  # the whole head comes first
    print_table("Tokens per pass", PRUNING_COLUMNS, [pruning_shown(one, whole[_key(one.cell)]) for one in found])
    if json_path is not None:
        tokens = {one.name: one.ranking.tokens for one in counted}
        record = {"target": plan.workload.target, "max_tokens": plan.workload.max_tokens, "corpus_tokens": tokens}
        write_json(json_path, record | {"cells": [asdict(one) for one in found]})


async def _cells(plan: Plan, counted: Sequence[Counted], advance: Callable[[], None]) -> AsyncGenerator[Pruned, None]:
    """Every drafter with every size of its head, the whole one first."""
    workload, threads = plan.workload, threads_each(2)
    async with services([Wanted("target", workload.target, threads)]) as (target,):
        for one in counted:
            for keep in _sizes(plan, one):
                wanted = Wanted("drafter", one.name, threads, one.options(keep))
                async with (
                    services([wanted]) as (drafter,),
                    connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline,
                ):
                    for setting in _settings(plan, one):
                        requests = setting.requests(workload.prompts, workload.max_tokens)
                        began = time.monotonic()
                        figures = await run_all(pipeline, requests, plan.concurrency, advance)
                        cell = cell_of(setting, figures, time.monotonic() - began)
                        yield Pruned(keep, one.ranking.covered(keep), cell)


def _sizes(plan: Plan, one: Counted) -> list[int]:
    return sizes_of(len(one.ranking.counts), plan.shares)


def _settings(plan: Plan, one: Counted) -> list[Setting]:
    return [setting for setting in plan.workload.settings if setting.drafter == one.name]


def _key(cell: Cell) -> tuple[object, ...]:
    """What cells have in common that differ in their heads only."""
    return (cell.method, cell.drafter, cell.temperature, cell.k)


def pruning_shown(one: Pruned, whole: float) -> tuple[str, ...]:
    """A row of the table; `whole`: tokens per pass with the whole head."""
    cell = one.cell
    return (
        cell.method,
        cell.drafter,
        f"{cell.temperature:g}",
        str(cell.k),
        f"{one.keep:,}",
        f"{one.covered:.1%}",
        f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}",
        f"{cell.tokens_per_pass / whole:.1%}",
        f"{cell.acceptance:.1%}",
        f"{cell.tokens:,}",
    )
