"""`crossdraft bench overlap`: how fast the overlapped pipeline is, beside lock-step, plain decoding and others.

Speeds are compared in one run: the services are real processes with a core each, the drafter at an emulated distance,
and all ways to decode take turns on the same prompts.
"""

import time
from asyncio import to_thread
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.emulation import Link, network
from crossdraft.bench.harness import SEED as HARNESS_SEED
from crossdraft.bench.harness import Ratio, Timed, markdown, on_core, rotated, speed_of, speed_ratio, write_json
from crossdraft.bench.transformers_peer import AssistanceFailedError, AssistedGeneration
from crossdraft.client import Generation, GenerationRequest, SamplingOptions, Statistics, connect
from crossdraft.client.driver import Services
from crossdraft.console.processes import Running, Wanted, running
from crossdraft.console.running import CommandFailed, Misused, check_output, checked_options, run_to_end
from crossdraft.engine.emulation import Pace
from crossdraft.engine.names import ModelLoadError
from crossdraft.rpc.clients import DrafterClient, TargetClient
from crossdraft.session.assignment import Assignment
from crossdraft.session.resolution import Models, resolve
from crossdraft.speculation.choice import PLAIN as PLAIN_CHOICE
from crossdraft.speculation.choice import Choice, Controller, Estimates, Observation, lock_step
from crossdraft.speculation.estimator import Learner
from crossdraft.speculation.shared import SharedEstimates
from crossdraft.speculation.simulator import simulate
from crossdraft.types.request import Overlap
from crossdraft.verification.methods import method_named


def delays_of(text: str) -> tuple[float, ...]:
    """Milliseconds with commas between; raises Misused."""
    try:
        delays = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise Misused(f"--delay-ms takes numbers with commas between, such as 0,5,20, got {text}") from error
    for delay in delays:
        if not 0 <= delay <= LONGEST_DELAY:
            raise Misused(f"--delay-ms must be between 0 and {LONGEST_DELAY}, got {delay:g}")
    return delays


def pairs_of(option: str, form: str, given: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Values of a repeatable option of the form A,B; raises Misused."""
    pairs = []
    for text in given:
        try:
            first, second = (int(part) for part in text.split(","))
        except ValueError as error:
            raise Misused(f"{option}: {form} expected, two whole numbers such as 16,4, got {text}") from error
        pairs.append((first, second))
    return tuple(pairs)


@dataclass(frozen=True)
class Search:
    """Which numbers of each way are tried on a few prompts, before the best ones are compared."""

    ks: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]  # and waits
    branches: tuple[tuple[int, int], ...]  # depths and widths
    prompts: int = 2
    max_tokens: int = 48

    @staticmethod
    def of(ks: Sequence[int], windows: Sequence[str], branches: Sequence[str]) -> "Search":
        """From options as they were typed; raises Misused."""
        return Search(
            tuple(ks),
            pairs_of("--window", "WINDOW,WAIT", windows),
            pairs_of("--branches", "DEPTH,WIDTH", branches),
        )


# The ways to decode that `crossdraft bench overlap` compares.


@dataclass(frozen=True)
class Way:
    """One way to decode; without a choice the controller decides."""

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
            return f"{self.name}, K = {self.choice.window}"
        numbers = f"{self.name}, {self.choice.window}/{self.choice.wait}"
        depth, width = self.choice.branch_depth, self.choice.branch_width
        return f"{numbers}, branches {depth}×{width}" if depth else numbers


@dataclass(frozen=True)
class Task:
    """What is generated, whatever the way."""

    prompts: tuple[str, ...]
    method: str | None  # None: the default
    temperature: float
    max_tokens: int
    row_width: int = 64  # ids of a draft token's row

    def request(self, way: Way, number: int, max_tokens: int | None = None) -> GenerationRequest:
        """For the prompt of this number. Where the method takes a seed, each prompt has the same noise in every run.

        Raises:
            ValueError: a value is out of its range.
        """
        plain = GenerationRequest(
            self.prompts[number],
            method=self.method,
            max_tokens=max_tokens or self.max_tokens,
            options=SamplingOptions(self.temperature),
            seed=HARNESS_SEED if self.method and method_named(self.method).seedable else None,
            choice=number,
            row_width=self.row_width,
            allow_inexact=True,
        )
        return plain if way.choice is None or not way.choice.drafts else _chosen(plain, way.choice)


# Services of a benchmark: a core for each model, the drafter at a distance.


@dataclass(frozen=True)
class Served:
    """A model as a service, perhaps unlike itself.

    Raises:
        Misused: it cannot be paced so, or its logits disturbed so.
    """

    model: str
    pace: str | None = None  # A,B in ms, as --pace has it; None: as fast as it is
    logit_noise: float = 0.0  # of a drafter

    def __post_init__(self) -> None:
        with checked_options():
            if self.pace is not None:
                Pace.parsed(self.pace)
        if not 0 <= self.logit_noise < float("inf"):
            raise Misused(f"--logit-noise must be 0 or more, got {self.logit_noise:g}")

    @property
    def options(self) -> tuple[str, ...]:
        """Of its command."""
        pace = () if self.pace is None else ("--pace", self.pace)
        return (*pace, *(("--logit-noise", str(self.logit_noise)) if self.logit_noise else ()))


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: Served
    drafter: Served
    noises: tuple[float, ...]  # on the drafter's logits
    delays: tuple[float, ...]  # ms to the drafter, one way
    temperatures: tuple[float, ...]
    method: str | None
    prompts: tuple[str, ...]
    row_width: int  # ids of a draft token's row
    max_tokens: int
    repeat: int
    assisted: tuple[int, ...]  # threads of transformers' assisted generation that are tried; none: it is left out
    search: Search

    def task(self, temperature: float) -> Task:
        """What is generated at a temperature."""
        return Task(self.prompts, self.method, temperature, self.max_tokens, self.row_width)

    def check(self) -> None:
        """Raises Misused if a request would be refused, before anything is started."""
        if self.repeat < 1:
            raise Misused(f"--repeat must be at least 1, got {self.repeat}")
        if not self.prompts:
            raise Misused("there are no prompts")
        if min(self.search.ks) < 1:
            raise Misused(f"-k must be at least 1, got {min(self.search.ks)}")
        for noise in self.noises:
            replace(self.drafter, logit_noise=noise)
        with checked_options():
            tried = [*lock_steps(self.search.ks), *overlapped(self.search.windows)]
            tried += branched(tried[-1], self.search.branches)
            for temperature in self.temperatures:
                for way in (PLAIN, GOVERNED, *tried):
                    self.task(temperature).request(way, 0)


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    """Measures every cell; a table in Markdown on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    plan.check()
    run_to_end(_measure(plan, json_path, markdown_path))


async def _measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    cells: list[Cell] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)
        async with aclosing(_cells(plan, lambda: progress.advance(task))) as found:
            async for cell in found:
                cells.append(cell)
                progress.update(task, description=f"{len(cells)} cells")
                _write(plan, cells, json_path, markdown_path)  # what there is survives an interruption
    print(markdown(HEADINGS, rows_of(cells)), end="")


# What `crossdraft bench overlap` found, in numbers and as Markdown.


@dataclass(frozen=True)
class Conditions:
    """What a table's rows have in common."""

    method: str
    temperature: float
    logit_noise: float  # on the drafter's logits
    delay_ms: float  # to the drafter, one way


@dataclass(frozen=True)
class Measured:
    """One way under some conditions, over all prompts."""

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


@dataclass(frozen=True)
class Cell:
    """All ways under some conditions."""

    conditions: Conditions
    ways: tuple[Measured, ...]
    estimates: Estimates | None  # what the predictions start from


def _write(plan: Plan, cells: Sequence[Cell], json_path: Path | None, markdown_path: Path | None) -> None:
    if json_path is not None:
        shown = asdict(replace(plan, prompts=())) | {"prompts": len(plan.prompts)}
        write_json(json_path, {"plan": shown, "cells": [asdict(cell) for cell in cells]})
    if markdown_path is not None:
        try:
            markdown_path.write_text(markdown(HEADINGS, rows_of(cells)), encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"cannot write the table: {error}") from error


async def _cells(plan: Plan, advance: Callable[[], None]) -> AsyncGenerator[Cell, None]:
    assisted = _assisted(plan)
    async with target_service(plan.target) as target:
        for noise in plan.noises:
            served = replace(plan.drafter, logit_noise=noise)
            async with drafter_service(served, distant=any(plan.delays)) as drafter:
                for delay in plan.delays:
                    await drafter.delay(delay)
                    for temperature in plan.temperatures:
                        conditions = Conditions(plan.method or "default", temperature, noise, delay)
                        yield await _cell(plan, conditions, target.address, drafter, assisted, advance)


@dataclass(frozen=True)
class Distant:
    """A service at the far end of a link."""

    address: str
    process_id: int
    link: Link | None  # None: on loopback

    async def delay(self, milliseconds: float) -> None:
        """Sets the time of a message to it, and of one back."""
        if self.link is not None:
            await self.link.delay(milliseconds)


async def _cell(
    plan: Plan,
    conditions: Conditions,
    target: str,
    drafter: Distant,
    assisted: AssistedGeneration | None,
    advance: Callable[[], None],
) -> Cell:
    async with (
        connect(target) as plain,
        connect(target, drafter.address, needs_drafter=True) as drafted,
        TargetClient(target) as verify,
        DrafterClient(drafter.address) as draft,
    ):
        sides = Side(plain.models, Services.of(verify)), Side(drafted.models, Services.of(verify, draft))
        bench = Bench(plan.task(conditions.temperature), *sides, assisted, advance)
        ways = await _ways(bench, plan)
        found = await bench.compare(ways, len(plan.prompts), plan.repeat)
        return cell_of(conditions, found, bench.predictions(ways), bench.estimates)


# Generations of `crossdraft bench overlap`: one at a time, each way in its turn on each prompt.


@dataclass(frozen=True)
class Assisted:
    """transformers' assisted generation as one more way, in this process."""

    k: int | None  # drafted at once; None: transformers' own rule
    threads: int  # of torch
    name: str = "transformers"

    @property
    def label(self) -> str:
        """Its name and numbers."""
        k = "its own K" if self.k is None else f"K = {self.k}"
        return f"{self.name}, {k}, {self.threads} {'threads' if self.threads > 1 else 'thread'}"


AnyWay = Way | Assisted


@dataclass(frozen=True)
class Outcome(Timed):
    """A generation that has ended."""

    figures: Statistics | None = None  # None: not one of ours


@dataclass(frozen=True, eq=False)
class Side:
    """Where generations run: with a drafter or without."""

    models: Models
    services: Services


@dataclass(eq=False)
class Bench:
    """What generates, what is generated, and what is learnt meanwhile."""

    task: Task
    plain: Side
    drafted: Side
    assisted: AssistedGeneration | None = None
    advance: Callable[[], None] = field(default=lambda: None)  # called after each generation
    experience: SharedEstimates = field(default_factory=SharedEstimates)  # of controllers, as a pipeline keeps it

    def __post_init__(self) -> None:
        self._method = self._assignment(Way("governed", None), 0, None).method
        self._learner = Learner(Estimates(), self._method.samples)
        self._believed: list[Estimates] = []

    async def compare(
        self, ways: Sequence[AnyWay], prompts: int, repeat: int = 1, max_tokens: int | None = None
    ) -> Mapping[AnyWay, list[Outcome]]:
        """Each way on each of the first `prompts` prompts, `repeat` times; the ways take turns.

        Raises:
            CommandFailed: a service fails, or transformers cannot generate with this pair.
        """
        found: dict[AnyWay, list[Outcome]] = {way: [] for way in ways}
        self._believed.clear()
        for turn in range(repeat * prompts):
            for place in rotated(len(ways), turn):
                found[ways[place]].append(await self.run(ways[place], turn % prompts, max_tokens))
                self.advance()
        return found

    async def best(self, ways: Sequence[AnyWay], prompts: int, max_tokens: int) -> AnyWay:
        """The fastest of some ways on a few prompts."""
        if len(ways) == 1:
            return ways[0]
        found = await self.compare(ways, prompts, max_tokens=max_tokens)
        return max(ways, key=lambda way: speed_of(found[way]))

    async def warm_up(self, ways: Sequence[AnyWay]) -> None:
        """Each way once, briefly: code is loaded, and the services have seen such requests."""
        for way in ways:
            await self.run(way, 0, WARM_UP_TOKENS)

    async def run(self, way: AnyWay, number: int, max_tokens: int | None = None) -> Outcome:
        """One generation for the prompt of this number, to its end."""
        if isinstance(way, Assisted):
            return await to_thread(self._assisted, way, number, max_tokens or self.task.max_tokens)
        assignment = self._assignment(way, number, max_tokens)
        services = self.plain.services
        if way.drafts:
            self.experience.keep(self.task.request(way, number), assignment.controller)
            assignment = replace(assignment, controller=Watched(assignment.controller, self._learner))
            services = self.drafted.services
        async with Generation(assignment, services) as generation:
            async for _ in generation:
                pass
        figures = generation.statistics
        if figures is None:
            raise CommandFailed("a generation ended without its statistics")
        if way.drafts:
            self._believed.append(self._learner.estimates)
        return Outcome(figures.tokens, figures.seconds, figures)

    def predictions(self, ways: Sequence[AnyWay]) -> Mapping[str, float]:
        """What the simulator expects of each way since `compare` last began, by name; plain decoding is 1."""
        estimates = self.estimates
        if estimates is None or not estimates.known:
            return {}
        return {
            way.name: predicted_ratio(estimates, self._how(way, estimates), self._method.samples)
            for way in ways
            if isinstance(way, Way) and way.drafts
        }

    @property
    def estimates(self) -> Estimates | None:
        """What predictions start from; None before any drafter was used."""
        return mean_of(self._believed) if self._believed else None

    def _how(self, way: Way, estimates: Estimates) -> Choice | Controller:
        if way.choice is not None:
            return way.choice
        return resolve(self.task.request(way, 0), self.drafted.models, before=estimates).controller

    def _assignment(self, way: Way, number: int, max_tokens: int | None) -> Assignment:
        request = self.task.request(way, number, max_tokens)
        side = self.drafted if way.drafts else self.plain
        return resolve(request, side.models, before=self.experience.of(request))

    def _assisted(self, way: Assisted, number: int, max_tokens: int) -> Outcome:
        assert self.assisted is not None
        began = time.monotonic()
        try:
            ids = self.assisted.continuation(
                self.task.prompts[number], max_tokens, way.k, self.task.temperature, way.threads
            )
        except AssistanceFailedError as error:
            raise CommandFailed(str(error)) from error
        return Outcome(len(ids), time.monotonic() - began)


async def _ways(bench: Bench, plan: Plan) -> list[AnyWay]:
    """Plain decoding, the best of each kind, and what the controller does."""
    search = plan.search

    async def best(ways: Sequence[AnyWay]) -> AnyWay:
        return await bench.best(ways, min(search.prompts, len(plan.prompts)), search.max_tokens)

    await bench.warm_up([PLAIN, *lock_steps(search.ks[:1]), GOVERNED])
    locked = await best(lock_steps(search.ks))
    drafted_on = await best(overlapped(search.windows))
    assert isinstance(drafted_on, Way)
    ways: list[AnyWay] = [PLAIN, locked, drafted_on, await best(branched(drafted_on, search.branches)), GOVERNED]
    if bench.assisted is not None:
        tried = assisted_ways(plan.assisted)
        await bench.warm_up(tried)
        ways.append(await best(tried))
    return ways


def _assisted(plan: Plan) -> AssistedGeneration | None:
    if not plan.assisted:
        return None
    try:
        return AssistedGeneration(plan.target.model, plan.drafter.model)
    except ModelLoadError as error:
        raise CommandFailed(f"transformers cannot load this pair: {error}") from error


PLAIN = Way("plain", PLAIN_CHOICE)
GOVERNED = Way("governed", None)


def lock_steps(ks: Sequence[int]) -> tuple[Way, ...]:
    """The classic round with each number of draft tokens."""
    return tuple(Way("lock-step", lock_step(k).choice) for k in ks)


def overlapped(windows: Sequence[tuple[int, int]]) -> tuple[Way, ...]:
    """The drafter drafts on, within each window and with each wait."""
    return tuple(Way("overlapped", Choice(window, wait)) for window, wait in windows)


def branched(way: Way, shapes: Sequence[tuple[int, int]]) -> tuple[Way, ...]:
    """The same way with prepared continuations of each depth and width."""
    assert way.choice is not None
    window, wait = way.choice.window, way.choice.wait
    return tuple(
        Way("with branches", Choice(window, wait, branch_depth=depth, branch_width=width)) for depth, width in shapes
    )


def _chosen(request: GenerationRequest, choice: Choice) -> GenerationRequest:
    if not choice.overlap:
        return replace(request, overlap=Overlap.OFF, k=choice.window)
    return replace(
        request,
        overlap=Overlap.ON,
        window=choice.window,
        wait=choice.wait,
        branches=choice.branch_depth,
        branch_width=choice.branch_width,
    )


WARM_UP_TOKENS = 16
ASSISTED_KS = (None, 1, 2, 3, 5)  # None: transformers' own rule


def assisted_ways(threads: Sequence[int]) -> tuple[Assisted, ...]:
    """What is tried."""
    return tuple(Assisted(k, count) for count in threads for k in ASSISTED_KS)


LONGEST_DELAY = 60_000  # ms of a message on an emulated network


@asynccontextmanager
async def target_service(target: Served) -> AsyncIterator[Running]:
    """A target on loopback, on the first core; raises CommandFailed."""
    async with running([Wanted("target", target.model, 1, target.options, on_core(0))]) as (found,):
        yield found


def drafter_service(drafter: Served, distant: bool) -> AbstractAsyncContextManager[Distant]:
    """A drafter on the second core, on a host with a link of its own if it is distant; raises CommandFailed."""
    return service("drafter", drafter, 1, distant)


@asynccontextmanager
async def service(role: str, served: Served, core: int, distant: bool) -> AsyncIterator[Distant]:
    """A target or drafter on a core, on a host with a link of its own if it is distant; raises CommandFailed."""
    async with AsyncExitStack() as stack:
        link, prefix, options = None, on_core(core), served.options
        if distant:
            link = (await stack.enter_async_context(network([role])))[role]
            prefix = (*link.place.prefix, *prefix)
            options = (*options, "--host", link.place.listen)
        (found,) = await stack.enter_async_context(running([Wanted(role, served.model, 1, options, prefix)]))
        address = found.address if link is None else await link.address_through(found.address)
        yield Distant(address, found.process_id, link)


OVERLAP_REPORT_PLAIN, LOCK_STEP = "plain", "lock-step"  # names of ways


def cell_of(
    conditions: Conditions,
    found: Mapping[AnyWay, Sequence[Outcome]],
    predicted: Mapping[str, float],
    estimates: Estimates | None = None,
) -> Cell:
    """Sums up; `predicted` has ratios to plain decoding by a way's name. Plain decoding must be among the ways."""
    by_name = {way.name: runs for way, runs in found.items()}
    plain, locked = by_name[OVERLAP_REPORT_PLAIN], by_name.get(LOCK_STEP)
    better = plain if locked is None or speed_of(plain) > speed_of(locked) else locked
    return Cell(
        conditions,
        tuple(
            _measured(way, runs, speed_ratio(runs, plain), locked, better, predicted.get(way.name))
            for way, runs in found.items()
        ),
        estimates,
    )


def _measured(
    way: AnyWay,
    runs: Sequence[Outcome],
    ratio: Ratio,
    locked: Sequence[Outcome] | None,
    better: Sequence[Outcome],
    predicted: float | None,
) -> Measured:
    figures = [run.figures for run in runs if run.figures is not None]
    tokens = sum(run.tokens for run in runs)
    judged = sum(sum(one.judged_at) for one in figures)
    tried = sum(one.branches_tried for one in figures)
    lanes = sum(one.target_lane_seconds for one in figures)
    return Measured(
        name=way.name,
        label=way.label,
        tokens=tokens,
        seconds=sum(run.seconds for run in runs),
        speed=speed_of(runs),
        ratio=ratio,
        beside_lock_step=None if locked is None else speed_ratio(runs, locked),
        beside_better=None if locked is None else speed_ratio(runs, better),
        predicted=predicted,
        tokens_per_pass=tokens / max(1, sum(one.passes for one in figures)),
        acceptance=sum(sum(one.accepted_at) for one in figures) / judged if judged else 0.0,
        idle=sum(one.idle_seconds for one in figures) / lanes if lanes else 0.0,
        branches_hit=sum(one.branches_hit for one in figures) / tried if tried else None,
        branch_tokens=sum(one.branch_tokens for one in figures) / max(1, tokens),
        row_misses=sum(one.row_misses for one in figures),
        drafters_lost=sum(one.drafters_lost for one in figures),
        bytes_per_token=sum(one.bytes_sent + one.bytes_received for one in figures) / max(1, tokens),
    )


HEADINGS = (
    *("T", "noise", "delay, ms", "way", "tokens/s", "× plain", "predicted", "kept", "× lock-step", "× the better"),
    *("tokens/pass", "accepted", "idle", "branches hit"),
)


def rows_of(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """One row for each way under each of the conditions."""
    return [_row(cell.conditions, way) for cell in cells for way in cell.ways]


def _row(conditions: Conditions, way: Measured) -> tuple[str, ...]:
    drafts = way.name not in (OVERLAP_REPORT_PLAIN,) and way.acceptance > 0
    return (
        f"{conditions.temperature:g}",
        f"{conditions.logit_noise:g}",
        f"{conditions.delay_ms:g}",
        way.label,
        f"{way.speed:.1f}",
        "1" if way.name == OVERLAP_REPORT_PLAIN else str(way.ratio),
        _optional(way.predicted, ".2f"),
        _optional(way.kept, ".2f"),
        "" if way.beside_lock_step is None or way.name == LOCK_STEP else str(way.beside_lock_step),
        "" if way.beside_better is None or way.name in (OVERLAP_REPORT_PLAIN, LOCK_STEP) else str(way.beside_better),
        f"{way.tokens_per_pass:.2f}" if drafts else "",
        f"{way.acceptance:.1%}" if drafts else "",
        f"{way.idle:.0%}" if way.idle else "",
        _optional(way.branches_hit, ".0%"),
    )


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# What the simulator expects of each way, from what was measured in the run itself.

TOKENS = 4_000  # of a simulation
SEED = 0


class Watched:
    """A controller whose observations are learnt from besides, which changes nothing that it does."""

    def __init__(self, controller: Controller, learner: Learner) -> None:
        self._controller, self._learner = controller, learner

    @property
    def waits_for_drafter(self) -> bool:
        """As the controller has it."""
        return self._controller.waits_for_drafter

    def observe(self, seen: Observation, now: float) -> None:
        """As the controller does, and learnt from."""
        self._learner.observe(seen, now)
        self._controller.observe(seen, now)

    def choose(self, now: float) -> Choice:
        """As the controller does."""
        choice = self._controller.choose(now)
        self._learner.begin(choice, now)
        return choice


def mean_of(all_estimates: Sequence[Estimates]) -> Estimates:
    """What was believed on average. An estimate forgets what is long ago; the mean of many does not.

    Raises:
        ValueError: there are none.
    """
    if not all_estimates:
        raise ValueError("a mean needs at least one of the estimates")
    latest = all_estimates[-1]
    numbers = [field.name for field in fields(latest) if isinstance(getattr(latest, field.name), float)]
    means: dict[str, Any] = {name: mean(getattr(one, name) for one in all_estimates) for name in numbers}
    by_place = zip(*(one.acceptance for one in all_estimates), strict=True)
    return replace(latest, acceptance=tuple(map(mean, by_place)), **means)


def predicted_ratio(estimates: Estimates, way: Choice | Controller, samples: bool) -> float:
    """The simulated speed of a way, as a multiple of plain decoding's.

    Args:
        estimates: of the services, both seen at work.
        way: the choice for all epochs, or who decides it.
        samples: the target draws by itself (`slem`, `seeded`).
    """
    workload = estimates.workload(samples)
    run, plain = (simulate(workload, how, TOKENS, np.random.default_rng(SEED)) for how in (way, PLAIN_CHOICE))
    return run.speed / plain.speed
