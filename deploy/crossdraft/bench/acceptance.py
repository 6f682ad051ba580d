"""Tokens per pass of methods and drafters over many prompts: `crossdraft bench acceptance`, `trees` and `pruning`."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from crossdraft.bench.engine import check_shares, sizes_of
from crossdraft.bench.harness import Advance, Benchmark, Columns, Table, finished, optional
from crossdraft.bench.services import Watch
from crossdraft.bench.workload import PATIENCE, SETTING, Setting, Workload, check_concurrency, gathered
from crossdraft.client import Generation, GenerationRequest, Overlap, Pipeline, Statistics, connect
from crossdraft.console.corpora import Named, corpus_texts, find_corpus
from crossdraft.console.processes import Wanted, services, threads_each
from crossdraft.console.running import checked_options
from crossdraft.session.resolution import Models, fault_of_pair, resolve
from crossdraft.text.frequencies import TokenFrequencies, count_frequencies
from crossdraft.text.letters import Side
from crossdraft.training.corpus import read_corpus
from crossdraft.verification.methods import method_named


@dataclass(frozen=True, kw_only=True)
class Cell(Setting):
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
    drafted_at = summed([figure.drafted_at for figure in figures])
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
        accepted_length=sum(accepted_at) / drafted_at[0] if drafted_at else 0.0,
        acceptance_at=tuple(one / all_ if all_ else 0.0 for one, all_ in zip(accepted_at, judged_at, strict=True)),
        row_misses=misses,
        draft_tokens=sum(figure.draft_tokens for figure in figures),
        seconds=seconds,
    )


def summed(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Sums by place; a generation without rounds so long has none there."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _tokens_per_pass(cell: Cell) -> str:
    return f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A setting that the pair refuses."""

    method: str
    drafter: str  # a model's name
    reason: str


@dataclass(frozen=True, kw_only=True)
class Acceptance(Workload, Benchmark[Cell | Skipped]):
    """`crossdraft bench acceptance`: every setting over all prompts, in lock-step rounds."""

    concurrency: int  # generations at once

    unit: ClassVar[str] = "generations"
    columns: ClassVar[Columns] = {
        **SETTING,
        "tokens/pass": _tokens_per_pass,
        "no misses": lambda cell: f"{cell.tokens_per_planned_pass:.2f}",
        "accepted": lambda cell: f"{cell.acceptance:.1%}",
        "a round": lambda cell: f"{cell.accepted_length:.2f}",
        "misses": lambda cell: f"{cell.row_misses:,}",
        "tokens": lambda cell: f"{cell.tokens:,}",
        "passes": lambda cell: f"{cell.passes:,}",
        "s": lambda cell: f"{cell.seconds:.1f}",
    }

    @property
    def total(self) -> int:
        return len(self.settings) * len(self.prompts)

    def check(self) -> None:
        check_concurrency(self.concurrency)
        super().check()

    async def measure(self, advance: Advance) -> AsyncGenerator[Cell | Skipped, None]:
        refused: set[Skipped] = set()
        async with aclosing(self.pairs()) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline:
                    for setting in settings:
                        advance(0, f"{setting.method}, {setting.drafter}")
                        fault = fault_of_pair(method_named(setting.method), pipeline.models)
                        if not fault:
                            requests = setting.requests(self.prompts, self.max_tokens)
                            yield await _cell(pipeline, setting, requests, self.concurrency, advance)
                            continue
                        advance(len(self.prompts))
                        skipped = Skipped(method=setting.method, drafter=setting.drafter, reason=fault)
                        if skipped not in refused:
                            refused.add(skipped)
                            yield skipped

    def report(self, results: Sequence[Cell | Skipped]) -> Iterator[Table | str]:
        cells = [one for one in results if isinstance(one, Cell)]
        yield Table.of(cells, self.columns, "Tokens per pass")
        places = max((len(cell.acceptance_at) for cell in cells), default=0)
        at = {str(place + 1): _accepted_at(place) for place in range(places)}
        yield Table.of(cells, {**SETTING, **at}, "Accepted by place in a round, of the draft tokens judged there")
        for one in results:
            if isinstance(one, Skipped):
                yield f"Skipped {one.method} with {one.drafter}: it {one.reason}"


def _accepted_at(place: int) -> Callable[[Cell], str]:
    return lambda cell: f"{cell.acceptance_at[place]:.1%}" if place < len(cell.acceptance_at) else ""


async def _cell(
    pipeline: Pipeline,
    setting: Setting,
    requests: Sequence[GenerationRequest],
    concurrency: int,
    advance: Callable[[], None],
) -> Cell:
    began = time.monotonic()

    async def generated(request: GenerationRequest) -> Statistics:
        figures = await finished(pipeline.run(request))
        advance()
        return figures

    figures = await gathered(generated, requests, concurrency)
    return cell_of(setting, figures, time.monotonic() - began)


# What it brings that a pass carries a tree of paths instead of a chain.

BRANCH_DEPTH = 4  # draft tokens of a prepared continuation


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
        """The same request, run with this shape."""
        if not self.overlap:
            return replace(plain, paths=self.paths)
        width = 2 if self.branches else 1
        return replace(plain, overlap=Overlap.ON, paths=self.paths, branches=self.branches, branch_width=width)


SHAPES = (
    *(Shape(overlap, paths) for overlap in (False, True) for paths in (1, 2)),
    *(Shape(True, paths, BRANCH_DEPTH) for paths in (2, 6)),
)


@dataclass(frozen=True, kw_only=True)
class TreeCell(Cell):
    """One setting with one shape, over all prompts."""

    shape: Shape
    nodes: float  # of a pass's tree, on average
    branches_hit: float | None  # share of the refusals that a branch continued; None: no branches


@dataclass(frozen=True, kw_only=True)
class Trees(Workload, Benchmark[TreeCell]):
    """`crossdraft bench trees`: every setting with every shape of a pass."""

    concurrency: int  # generations at once

    columns: ClassVar[Columns] = {
        **{name: of for name, of in SETTING.items() if name != "k"},
        "epochs run": lambda one: one.shape.label,
        "paths": lambda one: one.shape.paths,
        "tokens/pass": _tokens_per_pass,
        "row misses": lambda one: f"{one.row_misses:,}",
        "a pass": lambda one: f"{one.row_misses / one.passes:.3f}",
        "nodes a pass": lambda one: f"{one.nodes:.1f}",
        "accepted": lambda one: f"{one.acceptance:.1%}",
        "branches hit": lambda one: optional(one.branches_hit, ".0%"),
    }

    @property
    def total(self) -> int:
        return len(self.settings) * len(SHAPES)

    def check(self) -> None:
        super().check()
        with checked_options():
            for setting in self.settings:
                for shape in SHAPES:
                    shape.request(setting.requests(self.prompts[:1], self.max_tokens)[0])

    async def measure(self, advance: Advance) -> AsyncGenerator[TreeCell, None]:
        async with aclosing(self.pairs()) as pairs:
            async for target, drafter, settings in pairs:
                async with AsyncExitStack() as stack:
                    async with connect(target, drafter, needs_drafter=True) as pipeline:
                        models = pipeline.models
                    watch = await Watch.of([target], [drafter], stack)
                    for setting in settings:
                        for shape in SHAPES:
                            yield await self._cell(setting, shape, models, watch)
                            advance()

    async def _cell(self, setting: Setting, shape: Shape, models: Models, watch: Watch) -> TreeCell:
        async def generated(plain: GenerationRequest) -> Statistics:
            return await finished(Generation(resolve(shape.request(plain), models), watch.services))

        began, nodes = time.monotonic(), watch.nodes
        figures = await gathered(generated, setting.requests(self.prompts, self.max_tokens), self.concurrency)
        cell = cell_of(setting, figures, time.monotonic() - began)
        tried, hit = sum(one.branches_tried for one in figures), sum(one.branches_hit for one in figures)
        return TreeCell(
            **asdict(cell),
            shape=shape,
            nodes=(watch.nodes - nodes) / cell.passes,
            branches_hit=hit / tried if tried else None,
        )


# Drafters that keep fewer and fewer ids of their head.


@dataclass(frozen=True, kw_only=True)
class PrunedCell(Cell):
    """What was measured with one setting and one size of the head."""

    keep: int  # ids
    covered: float  # share of the corpus's tokens that the `keep` most frequent ids make


@dataclass(frozen=True)
class Ranked:
    """A drafter's vocabulary ranked by a corpus."""

    name: str
    ranking: TokenFrequencies
    file: Path

    @staticmethod
    def of(name: str, corpus: Path | None, file: Path) -> "Ranked":
        """Counts a corpus's tokens and writes their ranking to a file; raises CommandFailed."""
        named = Named.load(name, Side.DRAFTER)
        texts = (one.text for one in read_corpus().training) if corpus is None else corpus_texts(corpus, name)
        ranking = count_frequencies(named.tokenizer_json, named.tokenization, texts)
        ranking.write(file)
        return Ranked(name, ranking, file)

    def options(self, keep: int) -> tuple[str, ...]:
        """Those of the drafter's command that keep so many ids; none for the whole head."""
        if keep >= len(self.ranking.counts):
            return ()
        return ("--vocab-keep", str(keep), "--frequencies", str(self.file))


@dataclass(frozen=True, kw_only=True)
class Pruning(Workload, Benchmark[PrunedCell]):
    """`crossdraft bench pruning`: every drafter with every size of its head, the whole one first."""

    shares: tuple[float, ...]  # of the vocabulary
    corpus: Path | None  # None: what the bundled models have learnt from
    concurrency: int

    unit: ClassVar[str] = "generations"

    @property
    def total(self) -> int:
        return (1 + len(set(self.shares) - {1.0})) * len(self.settings) * len(self.prompts)

    def check(self) -> None:
        check_shares(self.shares)
        check_concurrency(self.concurrency)
        if self.corpus is not None:
            find_corpus(self.corpus)
        super().check()

    def measure(self, advance: Advance) -> AsyncGenerator[PrunedCell, None]:
        folder = TemporaryDirectory()
        names = dict.fromkeys(setting.drafter for setting in self.settings)
        ranked = [Ranked.of(name, self.corpus, Path(folder.name, str(place))) for place, name in enumerate(names)]
        return self._cells(ranked, folder, advance)

    async def _cells(
        self, ranked: Sequence[Ranked], folder: "TemporaryDirectory[str]", advance: Advance
    ) -> AsyncGenerator[PrunedCell, None]:
        threads = threads_each(2)
        with folder:
            async with services([Wanted("target", self.target, threads)]) as (target,):
                for one in ranked:
                    for keep in sizes_of(len(one.ranking.counts), self.shares):
                        wanted = Wanted("drafter", one.name, threads, one.options(keep))
                        async with (
                            services([wanted]) as (drafter,),
                            connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline,
                        ):
                            for setting in (each for each in self.settings if each.drafter == one.name):
                                advance(0, f"{one.name}, {keep:,} kept")
                                requests = setting.requests(self.prompts, self.max_tokens)
                                cell = await _cell(pipeline, setting, requests, self.concurrency, advance)
                                yield PrunedCell(**asdict(cell), keep=keep, covered=one.ranking.covered(keep))

    def report(self, results: Sequence[PrunedCell]) -> Iterator[Table | str]:
        whole: dict[tuple[object, ...], PrunedCell] = {}
        for one in results:  # the whole head comes first
            whole.setdefault(_setting(one), one)
        columns: Columns = {
            **SETTING,
            "keep": lambda one: f"{one.keep:,}",
            "of the corpus": lambda one: f"{one.covered:.1%}",
            "tokens/pass": _tokens_per_pass,
            "of the whole": lambda one: f"{one.tokens_per_pass / whole[_setting(one)].tokens_per_pass:.1%}",
            "accepted": lambda one: f"{one.acceptance:.1%}",
            "tokens": lambda one: f"{one.tokens:,}",
        }
        yield Table.of(results, columns, "Tokens per pass")


def _setting(cell: Cell) -> tuple[object, ...]:
    return (cell.method, cell.drafter, cell.temperature, cell.k)
