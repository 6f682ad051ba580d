"""Tokens per pass of methods and drafters over many prompts (`crossdraft bench acceptance`, `trees` and `pruning`), and
whether what they draw has the target's distribution (`distribution`)."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import torch

from crossdraft.bench.commands import AcceptancePlan, ExactnessPlan, PruningPlan, TreesPlan
from crossdraft.bench.engine import check_shares, sizes_of
from crossdraft.bench.harness import (
    Advance,
    Benchmark,
    Columns,
    Fit,
    Table,
    branches_matched,
    finished,
    fit_of,
    optional,
    total_of,
)
from crossdraft.bench.services import Watch
from crossdraft.bench.transformers_peer import AssistanceFailedError, AssistedGeneration
from crossdraft.bench.workload import (
    PATIENCE,
    SETTING,
    Epochs,
    OfSettings,
    Setting,
    affinities_of,
    gathered,
    pairs_of,
    settings_of,
)
from crossdraft.client import Generation, GenerationRequest, Overlap, Pipeline, Statistics, connect
from crossdraft.console.corpora import Named, corpus_texts, find_corpus
from crossdraft.console.processes import Wanted, services, threads_each
from crossdraft.console.running import CommandFailed, checked_options
from crossdraft.engine.loader import load_model
from crossdraft.session.resolution import Models, fault_of_pair, resolve, tokenization_of
from crossdraft.text.frequencies import TokenFrequencies, count_frequencies
from crossdraft.text.letters import Side, to_bytes
from crossdraft.training.corpus import read_corpus
from crossdraft.types.rows import Probabilities
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
    total, count = total_of(figures), len(figures)
    squares = sum((figure.tokens - total.tokens_per_pass * figure.passes) ** 2 for figure in figures)
    return Cell(
        **asdict(setting),
        prompts=count,
        tokens=total.tokens,
        passes=total.passes,
        tokens_per_pass=total.tokens_per_pass,
        standard_error=sqrt(count / (count - 1) * squares) / total.passes if count > 1 else 0.0,
        tokens_per_planned_pass=total.tokens / (total.passes - total.row_misses),
        acceptance=total.acceptance,
        accepted_length=total.accepted_length,
        acceptance_at=total.acceptance_at,
        row_misses=total.row_misses,
        draft_tokens=total.draft_tokens,
        seconds=seconds,
    )


def _tokens_per_pass(cell: Cell) -> str:
    return f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A setting that the pair refuses."""

    method: str
    drafter: str  # a model's name
    reason: str


class Acceptance(OfSettings[AcceptancePlan, Cell | Skipped]):
    """`crossdraft bench acceptance`: every setting over all prompts, in lock-step rounds."""

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

    async def measure(self, advance: Advance) -> AsyncGenerator[Cell | Skipped, None]:
        refused: set[Skipped] = set()
        async with aclosing(self.pairs()) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline:
                    for setting in settings:
                        advance(0, f"{setting.method}, {setting.drafter}")
                        fault = fault_of_pair(method_named(setting.method), pipeline.models)
                        if not fault:
                            requests = setting.requests(self.prompts, self.plan.max_tokens)
                            yield await _cell(pipeline, setting, requests, self.plan.concurrency, advance)
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
class Shape(Epochs):
    """How epochs are run, and how many paths a tree has at most."""

    paths: int = 1

    def request(self, plain: GenerationRequest) -> GenerationRequest:
        """The same request, run with this shape."""
        if not self.overlap:
            return replace(plain, paths=self.paths)
        width = 2 if self.branches else 1
        return replace(plain, overlap=Overlap.ON, paths=self.paths, branches=self.branches, branch_width=width)


SHAPES = (
    *(Shape(overlap, paths=paths) for overlap in (False, True) for paths in (1, 2)),
    *(Shape(True, BRANCH_DEPTH, paths) for paths in (2, 6)),
)


@dataclass(frozen=True, kw_only=True)
class TreeCell(Cell):
    """One setting with one shape, over all prompts."""

    shape: Shape
    nodes: float  # of a pass's tree, on average
    branches_hit: float | None  # share of the refusals that a branch continued; None: no branches


class Trees(OfSettings[TreesPlan, TreeCell]):
    """`crossdraft bench trees`: every setting with every shape of a pass."""

    columns: ClassVar[Columns] = {
        **SETTING,
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
                    shape.request(setting.requests(self.prompts[:1], self.plan.max_tokens)[0])

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
        requests = setting.requests(self.prompts, self.plan.max_tokens)
        figures = await gathered(generated, requests, self.plan.concurrency)
        cell = cell_of(setting, figures, time.monotonic() - began)
        return TreeCell(
            **asdict(cell),
            shape=shape,
            nodes=(watch.nodes - nodes) / cell.passes,
            branches_hit=branches_matched(total_of(figures)),
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


class Pruning(OfSettings[PruningPlan, PrunedCell]):
    """`crossdraft bench pruning`: every drafter with every size of its head, the whole one first."""

    unit: ClassVar[str] = "generations"

    @property
    def total(self) -> int:
        return (1 + len(set(self.plan.share) - {1.0})) * len(self.settings) * len(self.prompts)

    def check(self) -> None:
        check_shares(self.plan.share)
        if self.plan.corpus is not None:
            find_corpus(self.plan.corpus)
        super().check()

    def measure(self, advance: Advance) -> AsyncGenerator[PrunedCell, None]:
        folder = TemporaryDirectory()
        names = dict.fromkeys(setting.drafter for setting in self.settings)
        ranked = [Ranked.of(name, self.plan.corpus, Path(folder.name, str(place))) for place, name in enumerate(names)]
        return self._cells(ranked, folder, advance)

    async def _cells(
        self, ranked: Sequence[Ranked], folder: "TemporaryDirectory[str]", advance: Advance
    ) -> AsyncGenerator[PrunedCell, None]:
        threads, plan = threads_each(2), self.plan
        affinities = affinities_of(plan.affinity, plan.drafter)
        with folder:
            async with services([Wanted("target", plan.target, threads, engine=plan.engine)]) as (target,):
                for one in ranked:
                    for keep in sizes_of(len(one.ranking.counts), plan.share):
                        more = ("--affinity", str(affinities[one.name])) if one.name in affinities else ()
                        wanted = Wanted("drafter", one.name, threads, (*one.options(keep), *more), engine=plan.engine)
                        async with (
                            services([wanted]) as (drafter,),
                            connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline,
                        ):
                            for setting in (each for each in self.settings if each.drafter == one.name):
                                advance(0, f"{one.name}, {keep:,} kept")
                                requests = setting.requests(self.prompts, plan.max_tokens)
                                cell = await _cell(pipeline, setting, requests, plan.concurrency, advance)
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


# Whether many continuations of one prompt have the target's own distribution. The services draw; a plain forward of the
# target, without cache, engine and service, says what they should have drawn.

TOKENS = 2  # of a continuation
FIRST_TOKENS = 5  # the most frequent ones, after which the second token is tested
LEAST_P = 1e-4  # a smaller p is not taken for chance
OWN_TEMPERATURE = 0.7  # of a drafter that is the target's own model: at the target's, nothing would be refused
TRANSFORMERS = "transformers"  # its assisted generation, as one more method
Continuation = tuple[int, ...]  # target ids: two, or one that ends the text


@dataclass(frozen=True)
class Drawn:
    """The continuations of one setting."""

    method: str
    drafter: str
    continuations: Sequence[Continuation]
    acceptance: float | None = None  # share of the judged tokens that agreed with the draft, if known
    exact: bool = False  # whether the method promises the target's distribution


@dataclass(frozen=True)
class Tested:
    """One test of one setting."""

    method: str
    drafter: str
    acceptance: float | None
    exact: bool
    token: str  # which token, after what
    fit: Fit

    @property
    def failed(self) -> bool:
        """Whether a promise is broken."""
        return self.exact and self.fit.p <= LEAST_P


class NextTokenDistributions:
    """A model without cache, engine and service: nothing of what is to be checked has a part in its distributions."""

    def __init__(self, name: str) -> None:
        """Loads the model in float32; raises ModelLoadError."""
        loaded = load_model(name, "float32")
        self.description = loaded.description
        self._model = loaded.model

    @torch.inference_mode()
    def after(self, ids: Sequence[int]) -> Probabilities:
        """The distribution of the token after these, at temperature 1: float64, shape (V,)."""
        logits = self._model(torch.tensor([list(ids)], device=self._model.device)).logits[0, -1]
        distribution: Probabilities = logits.double().softmax(-1).cpu().numpy().astype(np.float64)
        return distribution


class Trial:
    """Compares continuations with the target's distributions after the prompt and after frequent first tokens."""

    def __init__(self, target: str, prompt: str) -> None:
        """Loads the target once more, apart from the service; raises ModelLoadError."""
        self._distributions = NextTokenDistributions(target)
        tokenization = tokenization_of(self._distributions.description, Side.TARGET)
        self._prompt = tokenization.encode_prompt(prompt)
        self._letters = tokenization.vocabulary.letters

    def tests(self, drawn: Drawn) -> list[Tested]:
        """The first token, and the second one after each of the most frequent first ones.

        Raises:
            CommandFailed: there are too few continuations.
        """
        first = Counter(ids[0] for ids in drawn.continuations)
        fit = fit_of(first, self._distributions.after(self._prompt))
        if fit is None:
            raise CommandFailed(f"{len(drawn.continuations)} continuations are too few for a test: raise --count")
        found: list[tuple[str, Fit | None]] = [("first", fit)]
        for token, _ in first.most_common(FIRST_TOKENS):
            second = Counter(ids[1] for ids in drawn.continuations if ids[0] == token and len(ids) > 1)
            if second:
                word = to_bytes(self._letters[token]).decode("utf-8", "replace")
                found.append((f"after {word!r}", fit_of(second, self._distributions.after((*self._prompt, token)))))
        return [
            Tested(drawn.method, drawn.drafter, drawn.acceptance, drawn.exact, token, fit)
            for token, fit in found
            if fit is not None  # a first token that is too rare
        ]


class Exactness(Benchmark[ExactnessPlan, Tested]):
    """`crossdraft bench distribution`: continuations of one prompt, by each setting that the pair can do."""

    needs_statistics: ClassVar[bool] = True
    unit: ClassVar[str] = "continuations"
    columns: ClassVar[Columns] = {
        "method": lambda one: one.method,
        "drafter": lambda one: one.drafter,
        "token": lambda one: one.token,
        "draws": lambda one: f"{one.fit.count:,}",
        "accepted": lambda one: optional(one.acceptance, ".1%"),
        "chi-square": lambda one: f"{one.fit.statistic:.1f}",
        "freedom": lambda one: one.fit.freedom,
        "p": lambda one: f"{one.fit.p:.2g}",
    }

    @property
    def total(self) -> int:
        return len(self.settings) * self.plan.count + len(self.peers) * self.plan.transformers

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """By drafter; raises UsageError."""
        plan = self.plan
        return settings_of(plan.target, plan.drafter, plan.methods, [1.0], [plan.k])

    @property
    def peers(self) -> Sequence[str]:
        """The drafters that are not the target's own model, if transformers shall draft with them."""
        return tuple(dict.fromkeys(one.drafter for one in self.settings if one.drafter != self.plan.target))

    def requests(self, setting: Setting) -> Iterator[GenerationRequest]:
        """One a continuation; where the drafter shares the target's noise, each has a seed of its own.

        Raises:
            ValueError: a value is out of its range.
        """
        method = method_named(setting.method)
        for number in range(self.plan.count):
            yield GenerationRequest(
                self.plan.prompt,
                setting.method,
                setting.k,
                max_tokens=TOKENS,
                drafter_temperature=OWN_TEMPERATURE if method.same_vocabulary else None,
                seed=number if method.keyed else None,
                ignore_eos=True,
                allow_inexact=True,
                overlap=Overlap.OFF,
            )

    def check(self) -> None:
        affinities_of(self.plan.affinity, self.plan.drafter)
        with checked_options():
            for setting in self.settings:
                next(self.requests(setting))

    async def measure(self, advance: Advance) -> AsyncGenerator[Tested, None]:
        plan = self.plan
        trial = await asyncio.to_thread(Trial, plan.target, plan.prompt)
        affinities = affinities_of(plan.affinity, plan.drafter)
        async with aclosing(pairs_of(plan.target, self.settings, affinities)) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline:
                    for setting in settings:
                        advance(0, f"{setting.method}, {setting.drafter}")
                        if fault := fault_of_pair(method_named(setting.method), pipeline.models):
                            print(f"crossdraft: {setting.method!r} is left out: it {fault}", file=sys.stderr)
                            advance(plan.count)
                            continue
                        for test in trial.tests(await self._drawn(pipeline, setting, advance)):
                            yield test
        for name in self.peers if plan.transformers else ():
            advance(0, f"{TRANSFORMERS}, {name}")
            drawn = await asyncio.to_thread(self._assisted, name, advance)
            for test in trial.tests(drawn) if drawn.continuations else ():
                yield test

    async def _drawn(self, pipeline: Pipeline, setting: Setting, advance: Advance) -> Drawn:
        """The continuations of one setting, through the services."""
        figures: list[Statistics] = []

        async def draw(request: GenerationRequest) -> Continuation:
            generation = pipeline.run(request)
            figures.append(await finished(generation))
            advance()
            return tuple(generation.ids)

        continuations = await gathered(draw, self.requests(setting), self.plan.concurrency)
        total, exact = total_of(figures), method_named(setting.method).exact
        judged = total.accepted + total.corrected
        return Drawn(setting.method, setting.drafter, continuations, total.acceptance if judged else None, exact)

    def _assisted(self, drafter: str, advance: Advance) -> Drawn:
        """The same by transformers' own assisted generation, which promises nothing."""
        continuations, plan = [], self.plan
        try:
            pair = AssistedGeneration(plan.target, drafter)
            for ids in pair.continuations(plan.prompt, plan.transformers, TOKENS, plan.k):
                continuations.append(ids)
                advance()
        except AssistanceFailedError as error:
            print(f"crossdraft: {drafter}: {error}", file=sys.stderr)
        return Drawn(TRANSFORMERS, drafter, continuations)

    def report(self, results: Sequence[Tested]) -> Iterator[Table | str]:
        yield Table.of(results, self.columns, f"Continuations of {self.plan.prompt!r}")

    def finish(self, results: Sequence[Tested]) -> None:
        failed = [f"{one.method} with {one.drafter}, {one.token}" for one in results if one.failed]
        if failed:
            raise CommandFailed(
                f"p is {LEAST_P:g} or less in {len(failed)} of {len(results)} tests: {'; '.join(failed)}"
            )
