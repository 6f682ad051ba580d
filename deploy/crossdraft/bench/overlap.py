"""`crossdraft bench overlap`: how fast the overlapped pipeline is, beside lock-step, plain decoding and transformers.

Speeds are compared in one run: the services are real processes with a core each, the drafter at an emulated distance,
and all configurations take turns on the same prompts. The numbers of each kind (draft tokens, windows, branches) are
chosen on a few prompts first. What the simulator predicts of each comes from what was measured in the run itself.
"""

import time
from asyncio import to_thread
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from crossdraft.bench.commands import OverlapPlan
from crossdraft.bench.harness import (
    SEED,
    Columns,
    Ratio,
    Timed,
    drafts_accepted,
    finished,
    in_turns,
    optional,
    speed_of,
    speed_ratio,
    total_of,
)
from crossdraft.bench.services import OfPair, delays_of, service
from crossdraft.bench.transformers_peer import AssistedGeneration, PeerFailedError
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, connect
from crossdraft.console.running import CommandFailed, ProgressCounter, UsageError, checked_options
from crossdraft.engine.names import ModelLoadError
from crossdraft.session.resolution import requested_method, resolve
from crossdraft.speculation.choice import PLAIN, Choice, lock_step
from crossdraft.speculation.controller import OutputController, TargetController
from crossdraft.speculation.forecast import forecast
from crossdraft.types.request import Overlap
from crossdraft.verification.methods import method_named

WARM_UP_TOKENS = 16
TRIALS, TRIAL_TOKENS = 2, 48  # prompts, and tokens of each, on which the best numbers of a kind are chosen
ASSISTED_KS = (None, 1, 2, 3, 5)  # None: transformers' own rule


# The configurations that are compared.


@dataclass(frozen=True)
class DecodingConfiguration:
    """One way to decode with our services; without a choice the controller decides."""

    name: str  # what it is called in tables: plain, lock-step, overlapped ...
    choice: Choice | None

    @property
    def drafts(self) -> bool:
        """Whether it needs a drafter."""
        return self.choice is None or self.choice.drafts

    @property
    def label(self) -> str:
        """Its name and numbers."""
        if self.choice is None or not self.choice.drafts:
            return self.name
        if not self.choice.overlap:
            return f"{self.name}, K = {self.choice.max_draft_tokens}"
        numbers = f"{self.name}, {self.choice.max_draft_tokens}/{self.choice.min_draft_tokens}"
        depth, width = self.choice.branch_depth, self.choice.branch_width
        return f"{numbers}, branches {depth}×{width}" if depth else numbers


@dataclass(frozen=True)
class Assisted:
    """transformers' assisted generation as one more configuration, in this process."""

    k: int | None  # drafted at once; None: transformers' own rule
    threads: int  # of torch
    name: str = "transformers"

    @property
    def label(self) -> str:
        """Its name and numbers."""
        k = "its own K" if self.k is None else f"K = {self.k}"
        return f"{self.name}, {k}, {self.threads} {'threads' if self.threads > 1 else 'thread'}"


AnyConfiguration = DecodingConfiguration | Assisted
PLAIN_CONFIGURATION = DecodingConfiguration("plain", PLAIN)
CONTROLLED = DecodingConfiguration("controlled", None)
LOCK_STEP = "lock-step"


def lock_steps(ks: Sequence[int]) -> tuple[DecodingConfiguration, ...]:
    """The classic round with each number of draft tokens."""
    return tuple(DecodingConfiguration(LOCK_STEP, lock_step(k).choice) for k in ks)


def overlapped(windows: Sequence[tuple[int, int]]) -> tuple[DecodingConfiguration, ...]:
    """The drafter drafts on, within each window and with each wait."""
    return tuple(DecodingConfiguration("overlapped", Choice(window, wait)) for window, wait in windows)


def branched(unbranched: DecodingConfiguration, shapes: Sequence[tuple[int, int]]) -> tuple[DecodingConfiguration, ...]:
    """The same configuration with prepared continuations of each depth and width."""
    assert unbranched.choice is not None
    window, wait = unbranched.choice.max_draft_tokens, unbranched.choice.min_draft_tokens
    return tuple(
        DecodingConfiguration("with branches", Choice(window, wait, branch_depth=depth, branch_width=width))
        for depth, width in shapes
    )


def pairs_of(option: str, form: str, given: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Values of a repeatable option of the form A,B; raises UsageError."""
    pairs = []
    for text in given:
        try:
            first, second = (int(part) for part in text.split(","))
        except ValueError as error:
            raise UsageError(f"{option}: {form} expected, two whole numbers such as 16,4, got {text}") from error
        pairs.append((first, second))
    return tuple(pairs)


def _chosen(request: GenerationRequest, choice: Choice) -> GenerationRequest:
    if not choice.overlap:
        return replace(request, overlap=Overlap.OFF, num_speculative_tokens=choice.max_draft_tokens)
    return replace(
        request,
        overlap=Overlap.ON,
        max_draft_tokens=choice.max_draft_tokens,
        min_draft_tokens=choice.min_draft_tokens,
        branches=choice.branch_depth,
        branch_width=choice.branch_width,
    )


# What was measured.


@dataclass(frozen=True)
class OverlapConditions:
    """What configurations that are compared have in common."""

    method: str
    temperature: float
    logit_noise: float  # on the drafter's logits
    delay_ms: float  # to the drafter, one way


@dataclass(frozen=True)
class OverlapResult:
    """One configuration under some conditions, over all prompts."""

    conditions: OverlapConditions
    name: str
    label: str
    tokens: int
    seconds: float
    speed: float  # tokens a second
    ratio: Ratio  # of its speed to plain decoding's
    beside_lock_step: Ratio | None  # ... to that of the best lock-step; None: that was not run
    beside_better: Ratio | None  # ... to that of the faster one of these two
    predicted: float | None  # the ratio to plain decoding that was expected; None: nothing was
    tokens_per_pass: float | None  # None: no draft token was accepted, or it is not one of ours
    acceptance: float | None  # of the draft tokens that were judged; None likewise
    idle: float  # share of the time in which the target had no pass
    branches_hit: float | None  # share of the refusals that a branch continued; None: no branches

    @property
    def kept(self) -> float | None:
        """The measured ratio, as a share of the predicted one."""
        return None if self.predicted is None else self.ratio.value / self.predicted


def compared(
    conditions: OverlapConditions, found: Mapping[AnyConfiguration, Sequence[Timed]], predicted: Mapping[str, float]
) -> list[OverlapResult]:
    """Sums up; `predicted` has ratios to plain decoding by a configuration's name. Plain decoding must be there."""
    by_name = {given.name: runs for given, runs in found.items()}
    plain, locked = by_name[PLAIN_CONFIGURATION.name], by_name.get(LOCK_STEP)
    better = plain if locked is None or speed_of(plain) > speed_of(locked) else locked
    results = []
    for given, runs in found.items():
        figures = [run.figures for run in runs if run.figures is not None]
        total = total_of(figures) if figures else None
        drafted = total if total and given != PLAIN_CONFIGURATION and drafts_accepted(total) else None
        results.append(
            OverlapResult(
                conditions,
                given.name,
                given.label,
                tokens=sum(run.tokens for run in runs),
                seconds=sum(run.seconds for run in runs),
                speed=speed_of(runs),
                ratio=speed_ratio(runs, plain),
                beside_lock_step=None if locked is None else speed_ratio(runs, locked),
                beside_better=None if locked is None else speed_ratio(runs, better),
                predicted=predicted.get(given.name),
                tokens_per_pass=drafted.tokens_per_pass if drafted else None,
                acceptance=drafts_accepted(drafted) if drafted else None,
                idle=total.idle_share if total else 0.0,
                branches_hit=total.branch_hits if total and total.branches_tried else None,
            )
        )
    return results


# The benchmark.


class OverlapBenchmark(OfPair[OverlapPlan, OverlapResult]):
    """Every temperature at every distance with every noise on the drafter's logits.

    The numbers of each kind of configuration are chosen on TRIALS prompts first.
    """

    needs_statistics: ClassVar[bool] = True
    unit: ClassVar[str] = "generations"
    columns: ClassVar[Columns] = {
        "T": lambda one: f"{one.conditions.temperature:g}",
        "noise": lambda one: f"{one.conditions.logit_noise:g}",
        "delay, ms": lambda one: f"{one.conditions.delay_ms:g}",
        "configuration": lambda one: one.label,
        "tokens/s": lambda one: f"{one.speed:.1f}",
        "× plain": lambda one: "1" if one.name == PLAIN_CONFIGURATION.name else one.ratio,
        "predicted": lambda one: optional(one.predicted, ".2f"),
        "kept": lambda one: optional(one.kept, ".2f"),
        "× lock-step": lambda one: "" if one.name == LOCK_STEP else one.beside_lock_step or "",
        "× the better": lambda one: (
            "" if one.name in (PLAIN_CONFIGURATION.name, LOCK_STEP) else one.beside_better or ""
        ),
        "tokens/pass": lambda one: optional(one.tokens_per_pass, ".2f"),
        "accepted": lambda one: optional(one.acceptance, ".1%"),
        "idle": lambda one: f"{one.idle:.0%}" if one.idle else "",
        "branches hit": lambda one: optional(one.branches_hit, ".0%"),
    }

    def request(
        self, given: DecodingConfiguration, temperature: float, number: int, max_tokens: int | None = None
    ) -> GenerationRequest:
        """For the prompt of this number. Where the method takes a seed, each prompt has the same noise in every run.

        Raises:
            ValueError: a value is out of its range.
        """
        plan = self.plan
        plain = GenerationRequest(
            self.prompts[number],
            method=plan.method,
            max_tokens=max_tokens or plan.max_tokens,
            options=SamplingOptions(temperature),
            seed=SEED if plan.method and method_named(plan.method).seedable else None,
            choice=number,
            row_width=plan.row_width,
            allow_inexact=True,
        )
        return plain if given.choice is None or not given.choice.drafts else _chosen(plain, given.choice)

    @property
    def windows(self) -> tuple[DecodingConfiguration, ...]:
        """Overlapped drafts that are tried; raises UsageError."""
        return overlapped(pairs_of("--draft-tokens", "MAX,MIN", self.plan.window))

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """Depths and widths of prepared continuations that are tried; raises UsageError."""
        return pairs_of("--branches", "DEPTH,WIDTH", self.plan.branches)

    def check(self) -> None:
        super().check()
        delays_of(self.plan.delay_ms)
        for noise in self.plan.logit_noise:
            replace(self.drafter, logit_noise=noise)
        with checked_options():
            tried = [*lock_steps(self.plan.k), *self.windows]
            tried += branched(tried[-1], self.branches)
            for temperature in self.plan.temperatures:
                for given in (PLAIN_CONFIGURATION, CONTROLLED, *tried):
                    requested_method(self.request(given, temperature, 0))

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[OverlapResult, None]:
        plan, delays = self.plan, delays_of(self.plan.delay_ms)
        assisted = self._assisted_generation()
        async with service("target", self.target, 0, distant=False) as target:
            for noise in plan.logit_noise:
                served = replace(self.drafter, logit_noise=noise)
                async with service("drafter", served, 1, distant=any(delays)) as drafter:
                    for delay in delays:
                        await drafter.delay(delay)
                        for temperature in plan.temperatures:
                            conditions = OverlapConditions(plan.method or "default", temperature, noise, delay)
                            async with (
                                connect(target.address) as plain,
                                connect(target.address, drafter.address, needs_drafter=True) as drafted,
                            ):
                                for one in await Generators(
                                    self, temperature, plain, drafted, assisted, advance
                                ).measured(conditions):
                                    yield one

    def _assisted_generation(self) -> AssistedGeneration | None:
        if not self.plan.assisted:
            return None
        try:
            return AssistedGeneration(self.plan.target, self.plan.drafter)
        except ModelLoadError as error:
            raise CommandFailed(f"transformers cannot load this pair: {error}") from error


@dataclass(frozen=True, eq=False)
class Generators:
    """What generates at a temperature."""

    bench: OverlapBenchmark
    temperature: float
    plain: Pipeline  # without a drafter
    drafted: Pipeline
    assisted: AssistedGeneration | None
    advance: ProgressCounter  # called after each generation that is compared

    async def measured(self, conditions: OverlapConditions) -> list[OverlapResult]:
        """Plain decoding, the best of each kind, and what the controller does."""
        bench, plan = self.bench, self.bench.plan
        await self.warm_up([PLAIN_CONFIGURATION, *lock_steps(plan.k[:1]), CONTROLLED])
        locked, drafted_on = await self.best(lock_steps(plan.k)), await self.best(bench.windows)
        assert isinstance(drafted_on, DecodingConfiguration)
        tried = [
            PLAIN_CONFIGURATION,
            locked,
            drafted_on,
            await self.best(branched(drafted_on, bench.branches)),
            CONTROLLED,
        ]
        if plan.assisted:
            theirs = [Assisted(k, threads) for threads in plan.assisted for k in ASSISTED_KS]
            await self.warm_up(theirs)
            tried.append(await self.best(theirs))
        found = await self.compare(tried, plan.repeat * len(bench.prompts))
        return compared(conditions, found, self.predictions(tried))

    async def compare(
        self, tried: Sequence[AnyConfiguration], turns: int, max_tokens: int | None = None
    ) -> Mapping[AnyConfiguration, list[Timed]]:
        """Each configuration on one prompt after the other, in turns.

        Raises:
            CommandFailed: a service fails, or transformers cannot generate with this pair.
        """

        async def run(given: AnyConfiguration, turn: int) -> Timed:
            found = await self.run(given, turn % len(self.bench.prompts), max_tokens)
            self.advance()
            return found

        return await in_turns(tried, turns, run)

    async def best(self, tried: Sequence[AnyConfiguration]) -> AnyConfiguration:
        """The fastest of some configurations on a few prompts."""
        if len(tried) == 1:
            return tried[0]
        found = await self.compare(tried, min(TRIALS, len(self.bench.prompts)), TRIAL_TOKENS)
        return max(tried, key=lambda given: speed_of(found[given]))

    async def warm_up(self, tried: Sequence[AnyConfiguration]) -> None:
        """Each once, briefly: code is loaded, and the services have seen such requests."""
        for given in tried:
            await self.run(given, 0, WARM_UP_TOKENS)

    async def run(self, given: AnyConfiguration, number: int, max_tokens: int | None = None) -> Timed:
        """One generation for the prompt of this number, to its end."""
        if isinstance(given, Assisted):
            return await to_thread(self._assisted, given, number, max_tokens or self.bench.plan.max_tokens)
        pipeline = self.drafted if given.drafts else self.plain
        request = self.bench.request(given, self.temperature, number, max_tokens)
        figures = await finished(pipeline.run(request), lost=True)
        return Timed(figures.tokens, figures.seconds, figures)

    def predictions(self, tried: Sequence[AnyConfiguration]) -> Mapping[str, float]:
        """What the controller's forecast is for each fixed one, by name; plain decoding is 1."""
        request = self.bench.request(CONTROLLED, self.temperature, 0)
        shared = TargetController(self.drafted.estimates)
        controller = resolve(request, self.drafted.models, shared=shared).controller
        if not (isinstance(controller, OutputController) and controller.target.known):
            return {}
        given = controller.conditions
        return {
            one.name: forecast(given, one.choice).speed / forecast(given, PLAIN).speed
            for one in tried
            if isinstance(one, DecodingConfiguration) and one.choice is not None and one.drafts
        }

    def _assisted(self, given: Assisted, number: int, max_tokens: int) -> Timed:
        assert self.assisted is not None
        torch.set_num_threads(given.threads)
        began = time.monotonic()
        try:
            ids = self.assisted.continuation(self.bench.prompts[number], max_tokens, given.k, self.temperature)
        except PeerFailedError as error:
            raise CommandFailed(str(error)) from error
        return Timed(len(ids), time.monotonic() - began)
