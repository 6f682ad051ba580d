"""`crossdraft loadtest`: requests on a schedule, and what became of them."""

import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.harness import rotated, write_text
from crossdraft.bench.services import Distant, Served, service
from crossdraft.cli.generate import check_address
from crossdraft.client import connect
from crossdraft.console.pictures import check_picture
from crossdraft.console.processes import running
from crossdraft.console.running import (
    COLUMNS,
    STARTS_PROCESSES,
    CommandFailed,
    Misused,
    check_output,
    checked_options,
    run_to_end,
)
from crossdraft.loadtest import prompts
from crossdraft.loadtest.arrivals import ClosedLoop, Load
from crossdraft.loadtest.clients import InProcess, Origin, OverGrpc
from crossdraft.loadtest.plots import plot
from crossdraft.loadtest.prompts import Prompt, Question, Wishes, questions_of
from crossdraft.loadtest.report import Comparison, Conditions, Report, Run, as_csv, notes_of, plain, tables_of
from crossdraft.loadtest.runner import Trial
from crossdraft.loadtest.summary import Goal, added_by, summary_of
from crossdraft.loadtest.timeline import Timeline, Way
from crossdraft.rpc.generation import GenerationClient
from crossdraft.rpc.security import TlsFiles, trusting_credentials

# What a load test asks: servers that run already, or services that are started on hosts at a distance.


@dataclass(frozen=True, eq=False)
class Stage:
    """Ways to have the same outputs made, under one delay."""

    delay_ms: float | None  # None: nothing is emulated
    ways: Mapping[str, Way]  # by name


class Staging(Protocol):
    """Where outputs are made: `loadtest_stage.Addressed` or `Started`."""

    @property
    def said(self) -> str:
        """What is started for the test; empty: nothing."""
        ...

    def stages(self) -> AsyncGenerator[Stage, None]:
        """One for each delay; raises ServiceError and CommandFailed."""
        ...


@dataclass(frozen=True)
class Plan:
    """What is asked, when, and how often.

    Raises:
        Misused: a number is out of its range.
    """

    load: Load
    wishes: Wishes
    goal: Goal
    prompts: tuple[Prompt, ...]
    prompts_from: str  # for the report
    requests: int  # of each repetition
    warm_up: int  # requests before, which do not count
    repeat: int
    seed: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        checks = (
            (self.requests >= 1, f"--requests must be at least 1, got {self.requests}"),
            (self.warm_up >= 0, f"--warm-up must be 0 or more, got {self.warm_up}"),
            (self.repeat >= 1, f"--repeat must be at least 1, got {self.repeat}"),
            (0 <= self.seed < 2**32, f"--seed must be between 0 and 2**32 - 1, got {self.seed}"),
            (0 < self.timeout_seconds < float("inf"), f"--timeout must be above 0, got {self.timeout_seconds:g}"),
        )
        for holds, complaint in checks:
            if not holds:
                raise Misused(complaint)

    def questions(self, count: int) -> tuple[Question, ...]:
        """The first requests."""
        return questions_of(self.prompts, count, self.wishes)

    def conditions(self, services: str) -> Conditions:
        """What the report says of it."""
        try:
            software = version("crossdraft")
        except PackageNotFoundError:
            software = "not installed"
        begun, cores = datetime.now(UTC).isoformat(timespec="seconds"), len(os.sched_getaffinity(0))
        counts = self.requests, self.warm_up, self.repeat, self.seed
        return Conditions(
            begun, software, cores, self.load, self.goal, self.wishes, *counts, self.prompts_from, services
        )


@dataclass(frozen=True)
class Files:
    """What is written besides what is shown. Raises Misused."""

    as_json: Path | None = None
    as_csv: Path | None = None
    picture: Path | None = None

    def __post_init__(self) -> None:
        check_picture(self.picture)
        for path in (self.as_json, self.as_csv, self.picture):
            if path is not None:
                check_output(path)

    def write(self, report: Report) -> None:
        """Raises CommandFailed."""
        if self.as_json is not None:
            write_text(self.as_json, json.dumps(plain(report), indent=1) + "\n")
        if self.as_csv is not None:
            write_text(self.as_csv, as_csv(report))
        if self.picture is not None:
            try:
                plot(self.picture, report)
            except OSError as error:
                raise CommandFailed(f"cannot write the picture: {error}") from error


def prompts_of(path: Path | None) -> tuple[tuple[Prompt, ...], str]:
    """Those of a file or the bundled ones, and where they are from; raises Misused."""
    if path is None:
        return prompts.bundled(), "bundled"
    with checked_options():
        return prompts.read(path), path.name


def run(plan: Plan, staging: Staging, files: Files) -> None:
    """Runs the test; tables on stdout, files if paths are given.

    Raises:
        Misused: a request cannot be served by the pair of models.
        CommandFailed: a service or server cannot be used; the report of what was done before is written.
    """
    run_to_end(LoadTest(plan, staging, files).run(), STARTS_PROCESSES)


@dataclass(eq=False)
class LoadTest:
    """A test under way."""

    plan: Plan
    staging: Staging
    files: Files
    runs: list[Run] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)  # what the first error of each kind said

    async def run(self) -> None:
        """All stages, then the report for people."""
        conditions = self.plan.conditions(self.staging.said)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as self._progress:
            self._task = self._progress.add_task("starting", total=None)
            async with aclosing(self.staging.stages()) as stages:
                async for stage in stages:
                    await self._stage(stage)
                    self.files.write(self._report(conditions))  # what there is survives an interruption
        show(self._report(conditions), self.faults)
        if all(not one.fine for run in self.runs for one in run.timelines):
            raise CommandFailed("no request was answered")

    async def _stage(self, stage: Stage) -> None:
        found: dict[str, list[list[Timeline]]] = {name: [] for name in stage.ways}
        for way in stage.ways.values():
            await self._warm_up(way)
        names = list(stage.ways)
        for number in range(self.plan.repeat):
            for place in rotated(len(names), number):
                told = "" if stage.delay_ms is None else f", {stage.delay_ms:g} ms"
                self._progress.reset(self._task, description=f"{names[place]}{told}", total=self.plan.requests)
                questions = self.plan.questions(self.plan.requests)
                trial = self._trial(stage.ways[names[place]])
                found[names[place]].append(await trial.run(self.plan.load, questions, self.plan.seed + number))
        self._keep(stage.delay_ms, found)

    async def _warm_up(self, way: Way) -> None:
        """Raises CommandFailed if all of it fails."""
        if not self.plan.warm_up:
            return
        load = self.plan.load if isinstance(self.plan.load, ClosedLoop) else ClosedLoop(1)
        tried = await self._trial(way).run(load, self.plan.questions(self.plan.warm_up), 0)
        if not any(one.fine for one in tried):
            error = tried[0].error
            raise CommandFailed(f"the first requests failed ({error}): {self.faults.get(error, 'no token came')}")
        self.faults.clear()

    def _trial(self, way: Way) -> Trial:
        return Trial(way, self.plan.timeout_seconds, self._told)

    def _told(self, timeline: Timeline, text: str) -> None:
        self._progress.advance(self._task)
        if timeline.error:
            self.faults.setdefault(timeline.error, text)

    def _keep(self, delay_ms: float | None, found: dict[str, list[list[Timeline]]]) -> None:
        for name, repetitions in found.items():
            summary = summary_of(repetitions, self.plan.load, self.plan.goal)
            self.runs.append(Run(name, delay_ms, summary, tuple(map(tuple, repetitions))))
        others = [name for name in found if name != IN_PROCESS]
        if IN_PROCESS in found:
            for name in others:
                added = added_by(name, found[name], IN_PROCESS, found[IN_PROCESS])
                self.comparisons.append(Comparison(delay_ms, added))

    def _report(self, conditions: Conditions) -> Report:
        return Report(conditions, tuple(self.runs), tuple(self.comparisons))


def show(report: Report, faults: dict[str, str]) -> None:
    """Tables on stdout, what must not be overlooked on stderr."""
    console, notes = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=_width(report.runs))
    for table in tables_of(report):
        console.print(table, highlight=False)
    for note in notes_of(report):
        notes.print(note, highlight=False, soft_wrap=True)
    for kind, text in faults.items():
        notes.print(f"{kind}: {text}", highlight=False, markup=False, soft_wrap=True)


def _width(runs: Sequence[Run]) -> int:
    """Of tables that go to a file or pipe, so that no cell is cut."""
    return max(COLUMNS, 40 + 36 * len(runs))


HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"
MODEL, DRAFTER = "loadtest", "drafter"  # the names that a front of a test has for them
MISSING = "HTTP needs the extra `serve`: install crossdraft with it, or use gRPC (--over grpc, --server)"


@dataclass(frozen=True)
class Addressed:
    """Servers and services that run already, as they were typed. Raises Misused."""

    url: str = ""  # of an HTTP server
    server: str = ""  # HOST:PORT of a gRPC server
    targets: str = ""  # HOST:PORT,... for a pipeline in this process
    drafters: str = ""
    key: str = field(default="", repr=False)  # of the servers
    ca: Path | None = None  # of the gRPC server's certificate; None: nothing is encrypted
    tls: TlsFiles | None = None  # for services

    def __post_init__(self) -> None:
        given = (("--server", self.server), ("--target", self.targets), ("--drafter", self.drafters))
        for name, addresses in given:
            for one in addresses.split(",") if addresses else ():
                check_address(name, one.strip())
        if self.url:
            with checked_options():
                Origin.parsed(self.url)
        if self.drafters and not self.targets:
            raise Misused(
                "--drafter has an address and --target has none; a server's drafter is named by --use-drafter"
            )

    @property
    def said(self) -> str:
        """What was started: nothing."""
        return ""

    async def stages(self) -> AsyncGenerator[Stage, None]:
        """The only one. Raises ServiceError and CommandFailed."""
        async with AsyncExitStack() as stack:
            ways: dict[str, Way] = {}
            if self.url:
                ways[HTTP] = await http(stack, self.url, self.key)
            if self.server:
                with checked_options():
                    tls = None if self.ca is None else trusting_credentials(self.ca)
                client = await stack.enter_async_context(GenerationClient(self.server, self.key, tls))
                ways[GRPC] = OverGrpc(client)
            if self.targets:
                ways[IN_PROCESS] = await in_process(stack, self.targets, self.drafters, self.tls)
            yield Stage(None, ways)


@dataclass(frozen=True)
class Started:
    """Services that run as long as the test, and a front in a process of its own."""

    target: Served
    drafter: Served
    delays: tuple[float, ...]  # ms of a message to a far host, and of one back
    far: frozenset[str]  # which of target and drafter are on hosts of their own; the front is where this process is
    over: frozenset[str]  # HTTP, gRPC
    compare: bool  # a pipeline in this process, too
    most_outputs: int  # that the front makes at once

    @property
    def said(self) -> str:
        """What is started, and where."""
        models = [f"{role} {_told(served)}" for role, served in (("target", self.target), ("drafter", self.drafter))]
        far = " and ".join(sorted(self.far, reverse=True))
        away = f"; {far} at {', '.join(f'{delay:g}' for delay in self.delays)} ms, one way" if any(self.delays) else ""
        return f"{models[0]}, {models[1]}{away}"

    async def stages(self) -> AsyncGenerator[Stage, None]:
        """One for each delay, each with a front of its own. Raises ServiceError and CommandFailed."""
        distant = any(self.delays)
        async with (
            service("target", self.target, 0, distant and "target" in self.far) as target,
            service("drafter", self.drafter, 1, distant and "drafter" in self.far) as drafter,
        ):
            for delay in self.delays:
                await target.delay(delay)
                await drafter.delay(delay)
                async with AsyncExitStack() as stack:
                    ways = await self._ways(stack, target, drafter)
                    yield Stage(delay if distant else None, ways)

    async def _ways(self, stack: AsyncExitStack, target: Distant, drafter: Distant) -> dict[str, Way]:
        ways: dict[str, Way] = {}
        front = Front(target.address, drafter.address, self.most_outputs)
        (found,) = await stack.enter_async_context(running([front]))
        if HTTP in self.over:
            ways[HTTP] = await http(stack, f"http://{found.address}", "")
        if GRPC in self.over:
            ways[GRPC] = OverGrpc(await stack.enter_async_context(GenerationClient(found.ready["grpc"])))
        if self.compare:
            ways[IN_PROCESS] = await in_process(stack, target.address, drafter.address, None)
        return ways


@dataclass(frozen=True)
class Front:
    """`crossdraft serve http`, with gRPC beside it, on any free ports."""

    target: str  # host:port
    drafter: str
    most_outputs: int
    role: str = "front"

    def command(self) -> list[str]:
        """As it would be typed. It ends with its standard input: were this process killed, it would end too."""
        services = ["--target", self.target, "--drafter", f"{DRAFTER}={self.drafter}", "--model", MODEL]
        where = ["--port", "0", "--grpc-port", "0", "--max-outputs", str(self.most_outputs)]
        ends = ["--grace-seconds", "0", "--until-stdin-ends", "--log-level", "warning"]
        return [sys.executable, "-m", "crossdraft.cli", "serve", "http", *services, *where, *ends]


async def http(stack: AsyncExitStack, url: str, key: str) -> Way:
    """A server of OpenAI's API; raises CommandFailed."""
    try:
        from crossdraft.loadtest.clients import HttpStreams, OverHttp
    except ImportError as error:
        raise CommandFailed(MISSING) from error
    return OverHttp(await stack.enter_async_context(HttpStreams(Origin.parsed(url), key)))


async def in_process(stack: AsyncExitStack, targets: str, drafters: str, tls: TlsFiles | None) -> Way:
    """A pipeline of this process, and one without a drafter; raises ServiceError."""
    plain = await stack.enter_async_context(connect(targets, tls=tls))
    if not drafters:
        return InProcess(plain, plain)
    drafted = await stack.enter_async_context(connect(targets, drafters, needs_drafter=True, tls=tls))
    return InProcess(drafted, plain)


def _told(served: Served) -> str:
    """A service that is not as fast as it is says so."""
    return served.model if served.pace is None else f"{served.model} paced {served.pace} ms"
