"""`crossdraft loadtest`: sends requests on a schedule, to servers that run or that it starts, and measures them."""

import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.harness import check_picture, rotated, write_text
from crossdraft.bench.overlap import Distant, Served, delays_of, service
from crossdraft.cli.generate import NO_DRAFTER, check_addresses
from crossdraft.cli.options import (
    ExistingServers,
    Far,
    LoadFiles,
    LoadOptions,
    LoadRequests,
    Over,
    StartedServices,
)
from crossdraft.client import connect
from crossdraft.console.processes import running
from crossdraft.console.running import (
    STARTS_PROCESSES,
    CommandFailed,
    Misused,
    check_output,
    checked_options,
    print_whole,
    run_to_end,
)
from crossdraft.loadtest import prompts
from crossdraft.loadtest.arrivals import ClosedLoop, Load, OpenLoop
from crossdraft.loadtest.clients import InProcess, Origin, OverGrpc
from crossdraft.loadtest.plots import plot
from crossdraft.loadtest.prompts import Prompt, Question, Wishes, questions_of
from crossdraft.loadtest.report import Comparison, Conditions, Report, Run, as_csv, notes_of, plain, tables_of
from crossdraft.loadtest.runner import Trial
from crossdraft.loadtest.summary import Goal, added_by, summary_of
from crossdraft.loadtest.timeline import Timeline, Way
from crossdraft.rpc.generation import GenerationClient
from crossdraft.rpc.security import TlsFiles, trusting_credentials

HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"
MODEL, DRAFTER = "loadtest", "drafter"  # the names that a started server has for them
DEFAULT_CLIENTS = 2
MIN_OUTPUTS = 64  # --max-outputs of a started server, at least
MISSING = "HTTP needs the extra `serve`: install crossdraft with it, or use gRPC (--over grpc, --server)"


def loadtest(
    servers: ExistingServers, services: StartedServices, load: LoadOptions, asked: LoadRequests, files: LoadFiles
) -> None:
    """Runs the test; tables on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range, options do not go together, or a request cannot be served by the models.
        CommandFailed: a service or server cannot be used; the report of what was done before is written.
    """
    plan = _plan_of(load, asked)
    _check(files)
    staging: Addressed | Started
    if servers.url or servers.server or servers.target or servers.drafter:
        if services.compare or services.delay_ms is not None:
            raise Misused("--compare and --delay-ms are for services that are started; give --target beside --url")
        staging = Addressed(servers)
    else:
        models = (
            Served(services.target_model, services.pace_target),
            Served(services.drafter_model, services.pace_drafter),
        )
        staging = Started(services, *models, delays_of(services.delay_ms or "0"), max(MIN_OUTPUTS, load.requests))
    run_to_end(LoadTest(plan, staging, files).run(), STARTS_PROCESSES)


@dataclass(frozen=True, eq=False)
class Stage:
    """Where the same outputs can be made, under one delay."""

    delay_ms: float | None  # one way; None: nothing is emulated
    ways: Mapping[str, Way]  # by name


@dataclass(frozen=True)
class Plan:
    """What is asked, when, and how often."""

    load: Load
    wishes: Wishes
    goal: Goal
    prompts: tuple[Prompt, ...]
    prompts_from: str  # for the report
    options: LoadOptions

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
        counts = self.options.requests, self.options.warm_up, self.options.repeat, self.options.seed
        return Conditions(
            begun, software, cores, self.load, self.goal, self.wishes, *counts, self.prompts_from, services
        )


def _plan_of(options: LoadOptions, asked: LoadRequests) -> Plan:
    """Raises Misused if a number is out of its range, or the prompts cannot be read."""
    checks = (
        (options.requests >= 1, f"--requests must be at least 1, got {options.requests}"),
        (options.warm_up >= 0, f"--warm-up must be 0 or more, got {options.warm_up}"),
        (options.repeat >= 1, f"--repeat must be at least 1, got {options.repeat}"),
        (0 <= options.seed < 2**32, f"--seed must be between 0 and 2**32 - 1, got {options.seed}"),
        (0 < options.timeout < float("inf"), f"--timeout must be above 0, got {options.timeout:g}"),
    )
    for holds, complaint in checks:
        if not holds:
            raise Misused(complaint)
    drafter = "" if asked.use_drafter == NO_DRAFTER else asked.use_drafter
    with checked_options():
        load = _load_of(options)
        wishes = Wishes(
            asked.max_tokens,
            asked.temperature,
            asked.method,
            drafter,
            asked.model,
            asked.ignore_eos,
            options.seed,
            asked.trace,
        )
        goal = Goal(asked.ttft_ms, asked.tpot_ms)
        path = asked.prompts
        found, where = (prompts.bundled(), "bundled") if path is None else (prompts.read(path), path.name)
    return Plan(load, wishes, goal, found, where, options)


def _load_of(options: LoadOptions) -> Load:
    """What --rate, --clients and --max-concurrency say together. Raises Misused and ValueError."""
    most = options.most_at_once if options.max_concurrency is None else options.max_concurrency
    if options.rate is not None and options.clients is not None:
        raise Misused("--rate and --clients are two kinds of load: give one of them")
    if options.rate is not None:
        return OpenLoop(options.rate, most)
    if most is not None:
        raise Misused("--max-concurrency is for --rate; without it, --clients says how many requests are under way")
    return ClosedLoop(DEFAULT_CLIENTS if options.clients is None else options.clients)


def _check(files: LoadFiles) -> None:
    """Raises Misused if one of them cannot be written."""
    check_picture(files.picture)
    for path in (files.json_file, files.csv_file, files.picture):
        if path is not None:
            check_output(path)


def _write(report: Report, files: LoadFiles) -> None:
    """Raises CommandFailed."""
    if files.json_file is not None:
        write_text(files.json_file, json.dumps(plain(report), indent=1) + "\n")
    if files.csv_file is not None:
        write_text(files.csv_file, as_csv(report))
    if files.picture is not None:
        try:
            plot(files.picture, report)
        except OSError as error:
            raise CommandFailed(f"cannot write the picture: {error}") from error


@dataclass(eq=False)
class LoadTest:
    """A test under way."""

    plan: Plan
    staging: "Addressed | Started"
    files: LoadFiles
    runs: list[Run] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)  # kind of error -> text of its first occurrence

    async def run(self) -> None:
        """Runs all stages, then prints the report."""
        conditions = self.plan.conditions(self.staging.said)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as self._progress:
            self._task = self._progress.add_task("starting", total=None)
            async with aclosing(self.staging.stages()) as stages:
                async for stage in stages:
                    await self._stage(stage)
                    _write(self._report(conditions), self.files)  # an interruption loses no finished stage
        show(self._report(conditions), self.faults)
        if all(not one.fine for run in self.runs for one in run.timelines):
            raise CommandFailed("no request was answered")

    async def _stage(self, stage: Stage) -> None:
        found: dict[str, list[list[Timeline]]] = {name: [] for name in stage.ways}
        for way in stage.ways.values():
            await self._warm_up(way)
        names = list(stage.ways)
        for number in range(self.plan.options.repeat):
            for place in rotated(len(names), number):
                delay = "" if stage.delay_ms is None else f", {stage.delay_ms:g} ms"
                self._progress.reset(self._task, description=f"{names[place]}{delay}", total=self.plan.options.requests)
                questions = self.plan.questions(self.plan.options.requests)
                trial = self._trial(stage.ways[names[place]])
                found[names[place]].append(await trial.run(self.plan.load, questions, self.plan.options.seed + number))
        self._keep(stage.delay_ms, found)

    async def _warm_up(self, way: Way) -> None:
        """Raises CommandFailed if all of it fails."""
        if not self.plan.options.warm_up:
            return
        load = self.plan.load if isinstance(self.plan.load, ClosedLoop) else ClosedLoop(1)
        tried = await self._trial(way).run(load, self.plan.questions(self.plan.options.warm_up), 0)
        if not any(one.fine for one in tried):
            error = tried[0].error
            raise CommandFailed(f"the first requests failed ({error}): {self.faults.get(error, 'no token came')}")
        self.faults.clear()

    def _trial(self, way: Way) -> Trial:
        return Trial(way, self.plan.options.timeout, self._ended)

    def _ended(self, timeline: Timeline, text: str) -> None:
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
    """Tables on stdout; notes and errors on stderr."""
    for table in tables_of(report):
        print_whole(table)
    notes = Console(stderr=True)
    for note in notes_of(report):
        notes.print(note, highlight=False, soft_wrap=True)
    for kind, text in faults.items():
        notes.print(f"{kind}: {text}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Addressed:
    """Servers and services that run already. Raises Misused."""

    servers: ExistingServers

    def __post_init__(self) -> None:
        servers = self.servers
        for name in ("server", "target", "drafter"):
            if getattr(servers, name):
                check_addresses(f"--{name}", getattr(servers, name))
        if servers.url:
            with checked_options():
                Origin.parsed(servers.url)
        if servers.drafter and not servers.target:
            raise Misused(
                "--drafter has an address and --target has none; a server's drafter is named by --use-drafter"
            )
        if servers.target:
            servers.tls.files()

    @property
    def said(self) -> str:
        """What is started: nothing."""
        return ""

    async def stages(self) -> AsyncGenerator[Stage, None]:
        """The only one. Raises ServiceError and CommandFailed."""
        servers, ca = self.servers, None if self.servers.target else self.servers.tls.tls_ca
        async with AsyncExitStack() as stack:
            ways: dict[str, Way] = {}
            if servers.url:
                ways[HTTP] = await http(stack, servers.url, servers.api_key)
            if servers.server:
                with checked_options():
                    tls = None if ca is None else trusting_credentials(ca)
                client = GenerationClient(servers.server, servers.api_key, tls)
                ways[GRPC] = OverGrpc(await stack.enter_async_context(client))
            if servers.target:
                ways[IN_PROCESS] = await in_process(stack, servers.target, servers.drafter, servers.tls.files())
            yield Stage(None, ways)


@dataclass(frozen=True)
class Started:
    """Services that run as long as the test, and a server that uses them in a process of its own."""

    options: StartedServices
    target: Served
    drafter: Served
    delays: tuple[float, ...]  # ms of a message to a far host, and of one back; the server is on this host
    max_outputs: int  # of the server

    @property
    def said(self) -> str:
        """What is started, and where."""
        far = " and ".join(sorted(set(self.options.far), reverse=True))
        away = f"; {far} at {', '.join(f'{delay:g}' for delay in self.delays)} ms, one way" if any(self.delays) else ""
        return f"target {_described(self.target)}, drafter {_described(self.drafter)}{away}"

    async def stages(self) -> AsyncGenerator[Stage, None]:
        """One for each delay, each with a server of its own. Raises ServiceError and CommandFailed."""
        distant = any(self.delays)
        async with (
            service("target", self.target, 0, distant and Far.TARGET in self.options.far) as target,
            service("drafter", self.drafter, 1, distant and Far.DRAFTER in self.options.far) as drafter,
        ):
            for delay in self.delays:
                await target.delay(delay)
                await drafter.delay(delay)
                async with AsyncExitStack() as stack:
                    ways = await self._ways(stack, target, drafter)
                    yield Stage(delay if distant else None, ways)

    async def _ways(self, stack: AsyncExitStack, target: Distant, drafter: Distant) -> dict[str, Way]:
        ways: dict[str, Way] = {}
        server = ApiServer(target.address, drafter.address, self.max_outputs)
        (found,) = await stack.enter_async_context(running([server]))
        if Over.HTTP in self.options.over:
            ways[HTTP] = await http(stack, f"http://{found.address}", "")
        if Over.GRPC in self.options.over:
            ways[GRPC] = OverGrpc(await stack.enter_async_context(GenerationClient(found.ready["grpc"])))
        if self.options.compare:
            ways[IN_PROCESS] = await in_process(stack, target.address, drafter.address, None)
        return ways


@dataclass(frozen=True)
class ApiServer:
    """`crossdraft serve http`, with gRPC beside it, on any free ports."""

    target: str  # host:port
    drafter: str
    max_outputs: int
    role: str = "server"

    def command(self) -> list[str]:
        """As it would be typed. It ends with its standard input, also if this process is killed."""
        services = ["--target", self.target, "--drafter", f"{DRAFTER}={self.drafter}", "--model", MODEL]
        where = ["--port", "0", "--grpc-port", "0", "--max-outputs", str(self.max_outputs)]
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


def _described(served: Served) -> str:
    """Its model, and its pace if it is slowed down."""
    return served.model if served.pace is None else f"{served.model} paced {served.pace} ms"
