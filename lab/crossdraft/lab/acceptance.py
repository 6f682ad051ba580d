"""Tokens per pass of methods and drafters over many prompts (`crossdraft bench acceptance`), and whether what they draw
has the target's distribution (`distribution`)."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from math import sqrt
from typing import ClassVar

import numpy as np
import torch

from crossdraft.audit.statistics import Fit, fit_of
from crossdraft.cli.measuring import Columns, Setting, Skipped, Table, finished, total_of
from crossdraft.cli.running import CommandFailed, ProgressCounter, checked_options
from crossdraft.client import GenerationRequest, Pipeline, Statistics
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.config.request import Overlap
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.lab.commands import AcceptancePlan, ExactnessPlan
from crossdraft.lab.harness import Benchmark, optional
from crossdraft.lab.workload import SETTING, Prompted, files_of, gathered, pipelines_of, settings_of, settings_wanted
from crossdraft.session.models import tokenization_of
from crossdraft.text.letters import Side, to_bytes
from crossdraft.types.rows import Probabilities
from crossdraft.verification.methods import method_named


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


NGRAM, REPEATING = 3, 0.2  # an output repeats itself if more than this share of its different n-grams occur again


def repeats(ids: Sequence[int]) -> bool:
    """Whether an output repeats itself (TokenTiming, Algorithm 5, with its token ids for words)."""
    counts = Counter(zip(*(ids[place:] for place in range(NGRAM)), strict=False))
    return sum(count > 1 for count in counts.values()) > REPEATING * len(counts)


def cell_of(
    setting: Setting, figures: Sequence[Statistics], seconds: float, repeating: Sequence[bool] = ()
) -> MeasuredSetting:
    """Sums over prompts; `repeating` says of each whether its output repeats itself.

    The standard error is that of a ratio of sums, to first order: with r the ratio and n prompts, the residuals
    tokens − r·passes have mean 0, and the error is √(n/(n−1) Σ residual²) / Σ passes; 0 for one prompt.
    """
    total, count = total_of(figures), len(figures)
    others = [one for one, repeated in zip_longest(figures, repeating) if not repeated]
    squares = sum((figure.tokens - total.tokens_per_pass * figure.passes) ** 2 for figure in figures)
    return MeasuredSetting(
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
        step_seconds=total.drafter_seconds / max(1, total.draft_tokens),
        repeating=sum(repeating),
        without_repeats=total_of(others).tokens_per_pass if others else 0.0,
    )


class AcceptanceBenchmark(Prompted[AcceptancePlan, MeasuredSetting | Skipped]):
    """`crossdraft bench acceptance`: every setting over all prompts, in lock-step rounds."""

    unit: ClassVar[str] = "generations"
    columns: ClassVar[Columns] = {
        **SETTING,
        "tokens/pass": lambda cell: f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}",
        "without repeats": lambda cell: f"{cell.without_repeats:.2f} ({cell.repeating})",
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
        """`settings`: others than those of the plan, by drafter and its options."""
        super().__init__(plan)
        if settings is not None:
            self.settings = settings

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """By drafter; raises UsageError."""
        return settings_wanted(self.plan)

    @property
    def total(self) -> int:
        return len(self.settings) * len(self.prompts)

    def check(self) -> None:
        with checked_options():
            for setting in self.settings:
                setting.requests(self.prompts, self.plan.max_tokens)

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[MeasuredSetting | Skipped, None]:
        refused: set[Skipped] = set()
        async with aclosing(pipelines_of(self.plan.target, self.settings, self.plan.engine)) as pipelines:
            async for pipeline, setting, fault in pipelines:
                advance(0, f"{setting.method}, {setting.drafter}")
                if not fault:
                    yield await self._cell(pipeline, setting, advance)
                    continue
                advance(len(self.prompts))
                skipped = Skipped(setting.method, setting.drafter, fault)
                if skipped not in refused:
                    refused.add(skipped)
                    yield skipped

    async def _cell(self, pipeline: Pipeline, setting: Setting, advance: ProgressCounter) -> MeasuredSetting:
        began = time.monotonic()

        async def generated(request: GenerationRequest) -> tuple[Statistics, bool]:
            generation = pipeline.run(request)
            figures = await finished(generation)
            advance()
            return figures, repeats(generation.ids)

        requests = setting.requests(self.prompts, self.plan.max_tokens)
        found = await gathered(generated, requests, self.plan.concurrency)
        figures, repeating = zip(*found, strict=True)
        return cell_of(setting, figures, time.monotonic() - began, repeating)

    def report(self, results: Sequence[MeasuredSetting | Skipped]) -> Iterator[Table | str]:
        cells = [one for one in results if isinstance(one, MeasuredSetting)]
        yield Table.of(cells, self.columns, "Tokens per pass")
        places = max((len(cell.acceptance_at) for cell in cells), default=0)
        at = {str(place + 1): _accepted_at(place) for place in range(places)}
        yield Table.of(cells, {**SETTING, **at}, "Accepted by place in a round, of the draft tokens judged there")
        yield from (str(one) for one in results if isinstance(one, Skipped))


def _accepted_at(place: int) -> Callable[[MeasuredSetting], str]:
    return lambda cell: f"{cell.acceptance_at[place]:.1%}" if place < len(cell.acceptance_at) else ""


# Whether many continuations of one prompt have the target's own distribution. The services draw; a plain forward of the
# target, without cache, engine and service, says what they should have drawn.

TOKENS = 2  # of a continuation
FIRST_TOKENS = 5  # the most frequent ones, after which the second token is tested
LEAST_P = 1e-4  # a smaller p is not taken for chance
OWN_TEMPERATURE = 0.7  # of a drafter that is the target's own model: at the target's, nothing would be refused
Continuation = tuple[int, ...]  # target ids: two, or one that ends the text


@dataclass(frozen=True)
class Drawn:
    """The continuations of one setting."""

    method: str
    drafter: str
    continuations: Sequence[Continuation]
    acceptance: float | None  # share of the judged tokens that agreed with the draft; None: none was judged
    exact: bool  # whether the method promises the target's distribution


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


class DistributionCheck:
    """Compares continuations with the target's distributions after the prompt and after frequent first tokens.

    Its model has no cache, engine and service: nothing of what is checked has a part in its distributions.
    """

    def __init__(self, target: str, prompt: str, engine: EngineOptions = STARTED) -> None:
        """Loads the target once more, as a service does, but on a CPU; raises ModelLoadError."""
        loaded = load_model(LoadOptions(target, engine.dtype, quantization=engine.quantization))
        tokenization = tokenization_of(loaded.description, Side.TARGET)
        self._model = loaded.model
        self._prompt = tokenization.encode_prompt(prompt)
        self._letters = tokenization.vocabulary.letters

    @torch.inference_mode()
    def after(self, *ids: int) -> Probabilities:
        """The distribution of the token after the prompt and these, at temperature 1: float64, shape (V,)."""
        logits = self._model(torch.tensor([[*self._prompt, *ids]])).logits[0, -1]
        distribution: Probabilities = logits.double().softmax(-1).numpy().astype(np.float64)
        return distribution

    def tests(self, drawn: Drawn) -> list[Tested]:
        """The first token, and the second one after each of the most frequent first ones.

        Raises:
            CommandFailed: there are too few continuations.
        """
        first = Counter(ids[0] for ids in drawn.continuations)
        fit = fit_of(first, self.after())
        if fit is None:
            raise CommandFailed(f"{len(drawn.continuations)} continuations are too few for a test: raise --count")
        found: list[tuple[str, Fit | None]] = [("first", fit)]
        for token, _ in first.most_common(FIRST_TOKENS):
            second = Counter(ids[1] for ids in drawn.continuations if ids[0] == token and len(ids) > 1)
            if second:
                word = to_bytes(self._letters[token]).decode("utf-8", "replace")
                found.append((f"after {word!r}", fit_of(second, self.after(token))))
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
        return len(self.settings) * self.plan.count

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """By drafter; raises UsageError."""
        plan = self.plan
        affinities = files_of("--affinity", plan.affinity, plan.drafter)
        return settings_of(plan.target, plan.drafter, plan.methods, [1.0], [plan.k], affinities)

    def requests(self, setting: Setting) -> Iterator[GenerationRequest]:
        """One a continuation; where the drafter shares the target's noise, each has a seed of its own.

        Raises:
            ValueError: a value is out of its range.
        """
        method = method_named(setting.method)
        for number in range(self.plan.count):
            yield GenerationRequest(
                self.plan.prompt,
                method=setting.method,
                num_speculative_tokens=setting.k,
                max_tokens=TOKENS,
                drafter_temperature=OWN_TEMPERATURE if method.same_vocabulary else None,
                seed=number if method.keyed else None,
                ignore_eos=True,
                allow_inexact=True,
                overlap=Overlap.OFF,
            )

    def check(self) -> None:
        with checked_options():
            for setting in self.settings:
                next(self.requests(setting))

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Tested, None]:
        plan = self.plan
        trial = await asyncio.to_thread(DistributionCheck, plan.target, plan.prompt, plan.engine)
        async with aclosing(pipelines_of(plan.target, self.settings, plan.engine)) as pipelines:
            async for pipeline, setting, fault in pipelines:
                advance(0, f"{setting.method}, {setting.drafter}")
                if fault:
                    print(f"crossdraft: {setting.method!r} is left out: it {fault}", file=sys.stderr)
                    advance(plan.count)
                    continue
                for test in trial.tests(await self._drawn(pipeline, setting, advance)):
                    yield test

    async def _drawn(self, pipeline: Pipeline, setting: Setting, advance: ProgressCounter) -> Drawn:
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

    def report(self, results: Sequence[Tested]) -> Iterator[Table | str]:
        yield Table.of(results, self.columns, f"Continuations of {self.plan.prompt!r}")

    def finish(self, results: Sequence[Tested]) -> None:
        failed = [f"{one.method} with {one.drafter}, {one.token}" for one in results if one.failed]
        if failed:
            raise CommandFailed(
                f"p is {LEAST_P:g} or less in {len(failed)} of {len(results)} tests: {'; '.join(failed)}"
            )
