"""`crossdraft bench overlap`: how fast the overlapped pipeline is, beside lock-step, plain decoding and transformers.

Speeds are compared in one run: the services are real processes with a core each, the drafter at an emulated distance,
and all configurations take turns on the same prompts. The numbers of each kind (draft tokens, windows, branches) are
chosen on a few prompts first. What the simulator predicts of each comes from what was measured in the run itself.
"""

import time
from asyncio import to_thread
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from crossdraft.bench.commands import OverlapPlan
from crossdraft.bench.harness import (
    SEED,
    Advance,
    Columns,
    Ratio,
    Table,
    Timed,
    branches_matched,
    drafts_accepted,
    finished,
    in_turns,
    optional,
    speed_of,
    speed_ratio,
    total_of,
)
from crossdraft.bench.services import Distant, OfPair, delays_of, drafter_service, target_service
from crossdraft.bench.transformers_peer import AssistanceFailedError, AssistedGeneration
from crossdraft.client import Generation, GenerationRequest, SamplingOptions, Statistics, connect
from crossdraft.client.roster import Services
from crossdraft.console.running import CommandFailed, UsageError, checked_options
from crossdraft.engine.names import ModelLoadError
from crossdraft.rpc.clients import DrafterClient, TargetClient
from crossdraft.session.assignment import Assignment
from crossdraft.session.resolution import Models, requested_method, resolve
from crossdraft.speculation.choice import PLAIN as PLAIN_CHOICE
from crossdraft.speculation.choice import Choice, lock_step
from crossdraft.speculation.controller import Estimates, OutputController, TargetController
from crossdraft.speculation.forecast import forecast
from crossdraft.types.request import Overlap
from crossdraft.verification.methods import method_named

WARM_UP_TOKENS = 16
TRIALS, TRIAL_TOKENS = 2, 48  # prompts, and tokens of each, on which the best numbers of a kind are chosen
SIMULATED_TOKENS = 4_000  # of a simulation
ASSISTED_KS = (None, 1, 2, 3, 5)  # None: transformers' own rule


# The configurations that are compared.


@dataclass(frozen=True)
class Configuration:
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


AnyConfiguration = Configuration | Assisted
PLAIN = Configuration("plain", PLAIN_CHOICE)
CONTROLLED = Configuration("controlled", None)
LOCK_STEP = "lock-step"


def lock_steps(ks: Sequence[int]) -> tuple[Configuration, ...]:
    """The classic round with each number of draft tokens."""
    return tuple(Configuration(LOCK_STEP, lock_step(k).choice) for k in ks)


def overlapped(windows: Sequence[tuple[int, int]]) -> tuple[Configuration, ...]:
    """The drafter drafts on, within each window and with each wait."""
    return tuple(Configuration("overlapped", Choice(window, wait)) for window, wait in windows)


def branched(unbranched: Configuration, shapes: Sequence[tuple[int, int]]) -> tuple[Configuration, ...]:
    """The same configuration with prepared continuations of each depth and width."""
    assert unbranched.choice is not None
    window, wait = unbranched.choice.max_draft_tokens, unbranched.choice.min_draft_tokens
    return tuple(
        Configuration("with branches", Choice(window, wait, branch_depth=depth, branch_width=width))
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


@dataclass(frozen=True)
class Task:
    """What is generated, whatever the configuration."""

    prompts: tuple[str, ...]
    method: str | None  # None: the default
    temperature: float
    max_tokens: int
    row_width: int = 64  # ids of a draft token's row

    def request(self, given: Configuration, number: int, max_tokens: int | None = None) -> GenerationRequest:
        """For the prompt of this number. Where the method takes a seed, each prompt has the same noise in every run.

        Raises:
            ValueError: a value is out of its range.
        """
        plain = GenerationRequest(
            self.prompts[number],
            method=self.method,
            max_tokens=max_tokens or self.max_tokens,
            options=SamplingOptions(self.temperature),
            seed=SEED if self.method and method_named(self.method).seedable else None,
            choice=number,
            row_width=self.row_width,
            allow_inexact=True,
        )
        return plain if given.choice is None or not given.choice.drafts else _chosen(plain, given.choice)


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
class Conditions:
    """What the configurations of a cell have in common."""

    method: str
    temperature: float
    logit_noise: float  # on the drafter's logits
    delay_ms: float  # to the drafter, one way


@dataclass(frozen=True)
class Outcome(Timed):
    """A generation that has ended."""

    figures: Statistics | None = None  # None: not one of ours


@dataclass(frozen=True)
class Measured:
    """One configuration under some conditions, over all prompts."""

    name: str
    label: str
    tokens: int
    seconds: float
    speed: float  # tokens a second
    ratio: Ratio  # of its speed to plain decoding's
    beside_lock_step: Ratio | None  # ... to that of the best lock-step; None: that was not run
    beside_better: Ratio | None  # ... to that of the faster one of these two
    predicted: float | None  # the ratio to plain decoding that was expected; None: nothing was
    tokens_per_pass: float
    acceptance: float  # of the draft tokens that were judged
    idle: float  # share of the time in which the target had no pass
    branches_hit: float | None  # share of the refusals that a branch continued; None: no branches
    branch_tokens: float  # draft tokens in branches, for each emitted token
    row_misses: int
    drafters_lost: int
    bytes_per_token: float

    @property
    def kept(self) -> float | None:
        """The measured ratio, as a share of the predicted one."""
        return None if self.predicted is None else self.ratio.value / self.predicted

    @property
    def drafted(self) -> bool:
        """Whether draft tokens were accepted, so that shares of them mean something."""
        return self.name != PLAIN.name and self.acceptance > 0


@dataclass(frozen=True)
class Cell:
    """All configurations under some conditions."""

    conditions: Conditions
    configurations: tuple[Measured, ...]
    estimates: Estimates | None  # what the predictions start from


def cell_of(
    conditions: Conditions,
    found: Mapping[AnyConfiguration, Sequence[Outcome]],
    predicted: Mapping[str, float],
    estimates: Estimates | None = None,
) -> Cell:
    """Sums up; `predicted` has ratios to plain decoding by a configuration's name. Plain decoding must be there."""
    by_name = {given.name: runs for given, runs in found.items()}
    plain, locked = by_name[PLAIN.name], by_name.get(LOCK_STEP)
    better = plain if locked is None or speed_of(plain) > speed_of(locked) else locked
    return Cell(
        conditions,
        tuple(
            _measured(given, runs, speed_ratio(runs, plain), locked, better, predicted.get(given.name))
            for given, runs in found.items()
        ),
        estimates,
    )


def _measured(
    given: AnyConfiguration,
    runs: Sequence[Outcome],
    ratio: Ratio,
    locked: Sequence[Outcome] | None,
    better: Sequence[Outcome],
    predicted: float | None,
) -> Measured:
    figures = [run.figures for run in runs if run.figures is not None]
    total = total_of(figures) if figures else None
    tokens = sum(run.tokens for run in runs)
    return Measured(
        name=given.name,
        label=given.label,
        tokens=tokens,
        seconds=sum(run.seconds for run in runs),
        speed=speed_of(runs),
        ratio=ratio,
        beside_lock_step=None if locked is None else speed_ratio(runs, locked),
        beside_better=None if locked is None else speed_ratio(runs, better),
        predicted=predicted,
        tokens_per_pass=total.tokens_per_pass if total else 0.0,
        acceptance=drafts_accepted(total) if total else 0.0,
        idle=total.idle_share if total else 0.0,
        branches_hit=branches_matched(total) if total else None,
        branch_tokens=total.branch_tokens / max(1, tokens) if total else 0.0,
        row_misses=total.row_misses if total else 0,
        drafters_lost=total.drafters_lost if total else 0,
        bytes_per_token=(total.bytes_sent + total.bytes_received) / max(1, tokens) if total else 0.0,
    )


# The benchmark.


class OverlapBenchmark(OfPair[OverlapPlan, Cell]):
    """Every temperature at every distance with every noise on the drafter's logits.

    The numbers of each kind of configuration are chosen on TRIALS prompts first.
    """

    needs_statistics: ClassVar[bool] = True
    unit: ClassVar[str] = "generations"
    columns: ClassVar[Columns] = {  # of (Conditions, Measured)
        "T": lambda row: f"{row[0].temperature:g}",
        "noise": lambda row: f"{row[0].logit_noise:g}",
        "delay, ms": lambda row: f"{row[0].delay_ms:g}",
        "configuration": lambda row: row[1].label,
        "tokens/s": lambda row: f"{row[1].speed:.1f}",
        "× plain": lambda row: "1" if row[1].name == PLAIN.name else row[1].ratio,
        "predicted": lambda row: optional(row[1].predicted, ".2f"),
        "kept": lambda row: optional(row[1].kept, ".2f"),
        "× lock-step": lambda row: "" if row[1].name == LOCK_STEP else row[1].beside_lock_step or "",
        "× the better": lambda row: "" if row[1].name in (PLAIN.name, LOCK_STEP) else row[1].beside_better or "",
        "tokens/pass": lambda row: f"{row[1].tokens_per_pass:.2f}" if row[1].drafted else "",
        "accepted": lambda row: f"{row[1].acceptance:.1%}" if row[1].drafted else "",
        "idle": lambda row: f"{row[1].idle:.0%}" if row[1].idle else "",
        "branches hit": lambda row: optional(row[1].branches_hit, ".0%"),
    }

    def task(self, temperature: float) -> Task:
        """What is generated at a temperature."""
        return Task(self.prompts, self.plan.method, temperature, self.plan.max_tokens, self.plan.row_width)

    @property
    def windows(self) -> tuple[Configuration, ...]:
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
                for given in (PLAIN, CONTROLLED, *tried):
                    requested_method(self.task(temperature).request(given, 0))

    async def measure(self, advance: Advance) -> AsyncGenerator[Cell, None]:
        plan, delays = self.plan, delays_of(self.plan.delay_ms)
        assisted = self._assisted_generation()
        async with target_service(self.target) as target:
            for noise in plan.logit_noise:
                served = replace(self.drafter, logit_noise=noise)
                async with drafter_service(served, distant=any(delays)) as drafter:
                    for delay in delays:
                        await drafter.delay(delay)
                        for temperature in plan.temperatures:
                            conditions = Conditions(plan.method or "default", temperature, noise, delay)
                            yield await self._cell(conditions, target.address, drafter, assisted, advance)

    def _assisted_generation(self) -> AssistedGeneration | None:
        if not self.plan.assisted:
            return None
        try:
            return AssistedGeneration(self.plan.target, self.plan.drafter)
        except ModelLoadError as error:
            raise CommandFailed(f"transformers cannot load this pair: {error}") from error

    async def _cell(
        self,
        conditions: Conditions,
        target: str,
        drafter: Distant,
        assisted: AssistedGeneration | None,
        advance: Advance,
    ) -> Cell:
        async with (
            connect(target) as plain,
            connect(target, drafter.address, needs_drafter=True) as drafted,
            TargetClient(target) as verify,
            DrafterClient(drafter.address) as draft,
        ):
            await verify.described()
            await draft.described()
            sides = Side(plain.models, Services.of(verify)), Side(drafted.models, Services.of(verify, draft))
            stage = Stage(self.task(conditions.temperature), *sides, assisted, advance)
            compared = await self._best_of_each_kind(stage)
            found = await stage.compare(compared, len(self.prompts), self.plan.repeat)
            return cell_of(conditions, found, stage.predictions(compared), stage.estimates)

    async def _best_of_each_kind(self, stage: "Stage") -> list[AnyConfiguration]:
        """Plain decoding, the best of each kind, and what the controller does."""

        async def best(tried: Sequence[AnyConfiguration]) -> AnyConfiguration:
            return await stage.best(tried, min(TRIALS, len(self.prompts)), TRIAL_TOKENS)

        await stage.warm_up([PLAIN, *lock_steps(self.plan.k[:1]), CONTROLLED])
        locked = await best(lock_steps(self.plan.k))
        drafted_on = await best(self.windows)
        assert isinstance(drafted_on, Configuration)
        found: list[AnyConfiguration] = [PLAIN, locked, drafted_on]
        found += [await best(branched(drafted_on, self.branches)), CONTROLLED]
        if self.plan.assisted:
            tried = [Assisted(k, threads) for threads in self.plan.assisted for k in ASSISTED_KS]
            await stage.warm_up(tried)
            found.append(await best(tried))
        return found

    def report(self, results: Sequence[Cell]) -> Iterator[Table | str]:
        yield Table.of([(cell.conditions, one) for cell in results for one in cell.configurations], self.columns)


@dataclass(frozen=True, eq=False)
class Side:
    """Where generations run: with a drafter or without."""

    models: Models
    services: Services


@dataclass(eq=False)
class Stage:
    """What generates, what is generated, and what is learnt meanwhile."""

    task: Task
    plain: Side
    drafted: Side
    assisted: AssistedGeneration | None
    advance: Advance  # called after each generation that is compared
    controller: TargetController = field(default_factory=TargetController)  # as a pipeline has it

    async def compare(
        self, compared: Sequence[AnyConfiguration], prompts: int, repeat: int = 1, max_tokens: int | None = None
    ) -> Mapping[AnyConfiguration, list[Outcome]]:
        """Each configuration on each of the first `prompts` prompts, `repeat` times, in turns.

        Raises:
            CommandFailed: a service fails, or transformers cannot generate with this pair.
        """

        async def run(given: AnyConfiguration, turn: int) -> Outcome:
            outcome = await self.run(given, turn % prompts, max_tokens)
            self.advance()
            return outcome

        return await in_turns(compared, repeat * prompts, run)

    async def best(self, tried: Sequence[AnyConfiguration], prompts: int, max_tokens: int) -> AnyConfiguration:
        """The fastest of some configurations on a few prompts."""
        if len(tried) == 1:
            return tried[0]
        found = await self.compare(tried, prompts, max_tokens=max_tokens)
        return max(tried, key=lambda given: speed_of(found[given]))

    async def warm_up(self, tried: Sequence[AnyConfiguration]) -> None:
        """Each once, briefly: code is loaded, and the services have seen such requests."""
        for given in tried:
            await self.run(given, 0, WARM_UP_TOKENS)

    async def run(self, given: AnyConfiguration, number: int, max_tokens: int | None = None) -> Outcome:
        """One generation for the prompt of this number, to its end."""
        if isinstance(given, Assisted):
            return await to_thread(self._assisted, given, number, max_tokens or self.task.max_tokens)
        assignment = self._assignment(given, number, max_tokens)
        if not given.drafts:
            figures = await finished(Generation(assignment, self.plain.services), lost=True)
            return Outcome(figures.tokens, figures.seconds, figures)
        figures = await finished(Generation(assignment, self.drafted.services), lost=True)
        return Outcome(figures.tokens, figures.seconds, figures)

    def predictions(self, compared: Sequence[AnyConfiguration]) -> Mapping[str, float]:
        """What the controller's forecast is for each fixed one, by name; plain decoding is 1."""
        controller = self._assignment(CONTROLLED, 0, None).controller
        if not (isinstance(controller, OutputController) and controller.target.known):
            return {}
        given = controller.conditions
        return {
            one.name: forecast(given, one.choice).speed / forecast(given, PLAIN_CHOICE).speed
            for one in compared
            if isinstance(one, Configuration) and one.choice is not None and one.drafts
        }

    @property
    def estimates(self) -> Estimates:
        """What predictions start from."""
        return self.controller.estimates

    def _assignment(self, given: Configuration, number: int, max_tokens: int | None) -> Assignment:
        request = self.task.request(given, number, max_tokens)
        side = self.drafted if given.drafts else self.plain
        return resolve(request, side.models, shared=self.controller)

    def _assisted(self, given: Assisted, number: int, max_tokens: int) -> Outcome:
        assert self.assisted is not None
        prompt, temperature = self.task.prompts[number], self.task.temperature
        began = time.monotonic()
        try:
            ids = self.assisted.continuation(prompt, max_tokens, given.k, temperature, given.threads)
        except AssistanceFailedError as error:
            raise CommandFailed(str(error)) from error
        return Outcome(len(ids), time.monotonic() - began)
