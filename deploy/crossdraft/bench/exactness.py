"""`crossdraft.bench.exactness`: many continuations of one prompt through the services, against the target's own
softmax.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.acceptance import PATIENCE
from crossdraft.bench.harness import Fit, finished, fit_of, print_table, write_json
from crossdraft.bench.transformers_peer import AssistanceFailedError, AssistedGeneration
from crossdraft.bench.workload import Setting, Workload, running_pairs
from crossdraft.client import GenerationRequest, Overlap, Pipeline, connect
from crossdraft.console.running import CommandFailed, Misused, checked_options, run_to_end
from crossdraft.engine.loader import load_model
from crossdraft.session.resolution import fault_of_pair, tokenization_of
from crossdraft.text.letters import Side, to_bytes
from crossdraft.types.rows import Probabilities
from crossdraft.verification.methods import method_named

TOKENS = 2  # of a continuation
FIRST_TOKENS = 5  # the most frequent ones, after which the second token is tested
LEAST_P = 1e-4  # a smaller one is no chance
OWN_TEMPERATURE = 0.7  # of a drafter that is the target's own model: at the target's, nothing would be refused
COLUMNS = ("method", "drafter", "token", "draws", "accepted", "chi-square", "freedom", "p")
TRANSFORMERS = "transformers"  # its assisted generation, as one more method
Advance = Callable[[], None]  # one more is done
Counted = Callable[[str, str, int], Advance]  # of a method, a drafter, so many continuations
Continuation = tuple[int, ...]  # target ids: two, or one that ends the text


@dataclass(frozen=True)
class Plan:
    """What is drawn."""

    prompt: str
    count: int  # continuations of each setting
    concurrency: int  # of them at once
    assisted: int  # continuations by transformers' own assisted generation; 0: none

    def requests(self, setting: Setting) -> Iterator[GenerationRequest]:
        """One a continuation; where the drafter shares the target's noise, each has a seed of its own.

        Raises:
            ValueError: a value is out of its range.
        """
        method = method_named(setting.method)
        for number in range(self.count):
            yield GenerationRequest(
                self.prompt,
                setting.method,
                setting.k,
                max_tokens=TOKENS,
                drafter_temperature=OWN_TEMPERATURE if method.same_vocabulary else None,
                seed=number if method.keyed else None,
                ignore_eos=True,
                allow_inexact=True,
                overlap=Overlap.OFF,
            )

    def check(self, settings: Sequence[Setting]) -> None:
        """Raises Misused if a request would be refused, before anything is started."""
        for name, value, least in (
            ("--count", self.count, 1),
            ("--concurrency", self.concurrency, 1),
            ("--transformers", self.assisted, 0),
        ):
            if value < least:
                raise Misused(f"{name} must be at least {least}, got {value}")
        with checked_options():
            for setting in settings:
                next(self.requests(setting))


@dataclass(frozen=True)
class Drawn:
    """The continuations of one setting."""

    method: str
    drafter: str
    continuations: Sequence[Continuation]
    acceptance: float | None = None  # share of the judged tokens that agreed with the draft, if known
    exact: bool = False  # whether they are promised to have the target's distribution


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


def measure(workload: Workload, plan: Plan, json_path: Path | None) -> None:
    """Draws and tests every setting; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails, or an exact method's continuations have not the target's
            distribution.
    """
    plan.check(workload.settings)
    run_to_end(_measure(workload, plan, json_path))


async def _measure(workload: Workload, plan: Plan, json_path: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def counted(method: str, drafter: str, total: int) -> Advance:
            task = progress.add_task(f"{method}, {drafter}", total=total)
            return lambda: progress.advance(task)

        trial = await asyncio.to_thread(Trial, workload.target, plan.prompt)
        tested = await _ours(workload, plan, trial, counted)
        for name in peers(workload) if plan.assisted else ():
            advance = counted(TRANSFORMERS, name, plan.assisted)
            drawn = await asyncio.to_thread(_assisted, workload.target, name, plan, workload.settings[0].k, advance)
            tested += trial.tests(drawn) if drawn.continuations else []
    _report(workload, plan, tested, json_path)


async def _ours(workload: Workload, plan: Plan, trial: "Trial", counted: Counted) -> list[Tested]:
    """Every setting that its pair can do, through the services."""
    tested: list[Tested] = []
    async with aclosing(running_pairs(workload)) as pairs:
        async for target, drafter, settings in pairs:
            async with connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline:
                for setting in settings:
                    if fault := fault_of_pair(method_named(setting.method), pipeline.models):
                        print(f"crossdraft: {setting.method!r} is left out: it {fault}", file=sys.stderr)
                        continue
                    advance = counted(setting.method, setting.drafter, plan.count)
                    tested += trial.tests(await _drawn(pipeline, plan, setting, advance))
    return tested


def peers(workload: Workload) -> Iterable[str]:
    """The drafters whose vocabulary is not known to be the target's, each once."""
    return dict.fromkeys(setting.drafter for setting in workload.settings if setting.drafter != workload.target)


class Trial:
    """Compares continuations with the target's distributions after the prompt and after the most frequent first
    tokens.
    """

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


async def _drawn(pipeline: Pipeline, plan: Plan, setting: Setting, advance: Advance) -> Drawn:
    """The continuations of one setting, through the services."""
    places = asyncio.Semaphore(plan.concurrency)
    accepted = corrected = 0

    async def draw(request: GenerationRequest) -> Continuation:
        nonlocal accepted, corrected
        async with places:
            generation = pipeline.run(request)
            figures = await finished(generation)
        accepted, corrected = accepted + figures.accepted, corrected + figures.corrected
        advance()
        return tuple(generation.ids)

    continuations = await asyncio.gather(*map(draw, plan.requests(setting)))
    judged = accepted + corrected
    exact = method_named(setting.method).exact
    return Drawn(setting.method, setting.drafter, continuations, accepted / judged if judged else None, exact)


def _assisted(target: str, drafter: str, plan: Plan, k: int, advance: Advance) -> Drawn:
    """The same by transformers' own assisted generation; promised nothing, as it is not ours."""
    continuations = []
    try:
        for ids in AssistedGeneration(target, drafter).continuations(plan.prompt, plan.assisted, TOKENS, k):
            continuations.append(ids)
            advance()
    except AssistanceFailedError as error:
        print(f"crossdraft: {drafter}: {error}", file=sys.stderr)
    return Drawn(TRANSFORMERS, drafter, continuations)


def _report(workload: Workload, plan: Plan, tested: Sequence[Tested], json_path: Path | None) -> None:
    """Table and file; raises CommandFailed if a promise is broken."""
    print_table(f"Continuations of {plan.prompt!r}", COLUMNS, [shown(one) for one in tested])
    if json_path is not None:
        tests = [asdict(one) for one in tested]
        write_json(json_path, {"target": workload.target, "plan": asdict(plan), "tests": tests})
    failed = [f"{one.method} with {one.drafter}, {one.token}" for one in tested if one.failed]
    if failed:
        raise CommandFailed(f"p is {LEAST_P:g} or less in {len(failed)} of {len(tested)} tests: {'; '.join(failed)}")


def shown(one: Tested) -> tuple[str, ...]:
    """A row of the table."""
    return (
        one.method,
        one.drafter,
        one.token,
        f"{one.fit.count:,}",
        "" if one.acceptance is None else f"{one.acceptance:.1%}",
        f"{one.fit.statistic:.1f}",
        str(one.fit.freedom),
        f"{one.fit.p:.2g}",
    )


# A model's own distribution of the next token, by a plain forward: what outputs are compared with.


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
