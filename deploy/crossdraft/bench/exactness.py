"""`crossdraft bench distribution`: whether many continuations of one prompt have the target's own distribution.

The services draw; a plain forward of the target, without cache, engine and service, says what they should have drawn.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from crossdraft.bench.harness import Advance, Benchmark, Columns, Fit, Table, finished, fit_of, optional
from crossdraft.bench.transformers_peer import AssistanceFailedError, AssistedGeneration
from crossdraft.bench.workload import PATIENCE, Setting, Workload, check_concurrency, gathered
from crossdraft.client import GenerationRequest, Overlap, Pipeline, connect
from crossdraft.console.running import CommandFailed, UsageError, checked_options
from crossdraft.engine.loader import load_model
from crossdraft.session.resolution import fault_of_pair, tokenization_of
from crossdraft.text.letters import Side, to_bytes
from crossdraft.types.rows import Probabilities
from crossdraft.verification.methods import method_named

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


@dataclass(frozen=True, kw_only=True)
class Exactness(Workload, Benchmark[Tested]):
    """Continuations of one prompt, by each setting that the pair can do, tested against the target's distribution."""

    count: int  # continuations of each setting
    concurrency: int  # of them at once
    assisted: int  # continuations by transformers' own assisted generation; 0: none

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
        return len(self.settings) * self.count + len(list(peers(self))) * self.assisted

    def requests(self, setting: Setting) -> Iterator[GenerationRequest]:
        """One a continuation; where the drafter shares the target's noise, each has a seed of its own.

        Raises:
            ValueError: a value is out of its range.
        """
        method = method_named(setting.method)
        for number in range(self.count):
            yield GenerationRequest(
                self.prompts[0],
                setting.method,
                setting.k,
                max_tokens=self.max_tokens,
                drafter_temperature=OWN_TEMPERATURE if method.same_vocabulary else None,
                seed=number if method.keyed else None,
                ignore_eos=True,
                allow_inexact=True,
                overlap=Overlap.OFF,
            )

    def check(self) -> None:
        for name, value, least in (("--count", self.count, 1), ("--transformers", self.assisted, 0)):
            if value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")
        check_concurrency(self.concurrency)
        with checked_options():
            for setting in self.settings:
                next(self.requests(setting))

    async def measure(self, advance: Advance) -> AsyncGenerator[Tested, None]:
        trial = await asyncio.to_thread(Trial, self.target, self.prompts[0])
        async with aclosing(self.pairs()) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline:
                    for setting in settings:
                        advance(0, f"{setting.method}, {setting.drafter}")
                        if fault := fault_of_pair(method_named(setting.method), pipeline.models):
                            print(f"crossdraft: {setting.method!r} is left out: it {fault}", file=sys.stderr)
                            advance(self.count)
                            continue
                        for test in trial.tests(await self._drawn(pipeline, setting, advance)):
                            yield test
        for name in peers(self) if self.assisted else ():
            advance(0, f"{TRANSFORMERS}, {name}")
            drawn = await asyncio.to_thread(self._assisted, name, advance)
            for test in trial.tests(drawn) if drawn.continuations else ():
                yield test

    async def _drawn(self, pipeline: Pipeline, setting: Setting, advance: Advance) -> Drawn:
        """The continuations of one setting, through the services."""
        accepted = corrected = 0

        async def draw(request: GenerationRequest) -> Continuation:
            nonlocal accepted, corrected
            generation = pipeline.run(request)
            figures = await finished(generation)
            accepted, corrected = accepted + figures.accepted, corrected + figures.corrected
            advance()
            return tuple(generation.ids)

        continuations = await gathered(draw, self.requests(setting), self.concurrency)
        judged = accepted + corrected
        exact = method_named(setting.method).exact
        return Drawn(setting.method, setting.drafter, continuations, accepted / judged if judged else None, exact)

    def _assisted(self, drafter: str, advance: Advance) -> Drawn:
        """The same by transformers' own assisted generation, which promises nothing."""
        continuations = []
        try:
            pair = AssistedGeneration(self.target, drafter)
            for ids in pair.continuations(self.prompts[0], self.assisted, self.max_tokens, self.settings[0].k):
                continuations.append(ids)
                advance()
        except AssistanceFailedError as error:
            print(f"crossdraft: {drafter}: {error}", file=sys.stderr)
        return Drawn(TRANSFORMERS, drafter, continuations)

    def report(self, results: Sequence[Tested]) -> Iterator[Table | str]:
        yield Table.of(results, self.columns, f"Continuations of {self.prompts[0]!r}")

    def finish(self, results: Sequence[Tested]) -> None:
        failed = [f"{one.method} with {one.drafter}, {one.token}" for one in results if one.failed]
        if failed:
            raise CommandFailed(
                f"p is {LEAST_P:g} or less in {len(failed)} of {len(results)} tests: {'; '.join(failed)}"
            )


def peers(workload: Workload) -> Iterable[str]:
    """The drafters whose vocabulary is not known to be the target's, each once."""
    return dict.fromkeys(setting.drafter for setting in workload.settings if setting.drafter != workload.target)
