"""`crossdraft loadtest`: sends requests to servers that run already, or to services that it starts, and reports.

A configuration is one way to have outputs made: over HTTP, over gRPC, or by a pipeline in this process. All
configurations are measured under one emulated delay after another; within a delay they take turns.
"""

import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.harness import rotated, write_text
from crossdraft.bench.services import Distant, Served, delays_of, service
from crossdraft.cli.options import (
    NO_DRAFTER,
    ExistingServers,
    LoadFiles,
    LoadOptions,
    LoadRequests,
    Over,
    StartedServices,
    check_addresses,
)
from crossdraft.client import connect
from crossdraft.console.pictures import check_picture
from crossdraft.console.processes import running
from crossdraft.console.running import (
    STARTS_PROCESSES,
    CommandFailed,
    UsageError,
    check_output,
    checked_options,
    print_whole,
    run_to_end,
)
from crossdraft.loadtest import requests
from crossdraft.loadtest.clients import GrpcClient, PipelineClient
from crossdraft.loadtest.plots import plot
from crossdraft.loadtest.report import Comparison, Conditions, Report, Run, as_csv, notes_of, plain, tables_of
from crossdraft.loadtest.requests import Prompt, Request, RequestOptions, requests_over
from crossdraft.loadtest.runner import ClosedLoop, Load, OpenLoop, Runner
from crossdraft.loadtest.summary import Goal, added_by, summary_of
from crossdraft.loadtest.timeline import Client, Timeline
from crossdraft.rpc.generation import GenerationClient
from crossdraft.rpc.security import TlsFiles, trusting_credentials

HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"  # names of configurations
DEFAULT_CLIENTS = 2
MIN_OUTPUTS = 64  # --max-outputs of a started server, at least
MODEL, DRAFTER = "loadtest", "drafter"  # the names that a started server has for its models
MISSING = "HTTP needs the extra `serve`: install crossdraft with it, or use gRPC (--over grpc, --server)"


@dataclass(frozen=True, eq=False)
class Stage:
    """The configurations that are compared under one delay."""

    delay_ms: float | None  # one way; None: nothing is emulated
    clients: Mapping[str, Client]  # by the configuration's name


@dataclass(frozen=True)
class Addressed:
    """Servers and services that run already, by their addresses. Raises UsageError."""

    url: str = ""  # of an HTTP server
    server: str = ""  # HOST:PORT of a gRPC server
    targets: str = ""  # HOST:PORT,... for a pipeline in this process
    drafters: str = ""
    key: str = field(default="", repr=False)  # API key of the servers
    ca: Path | None = None  # that signed the gRPC server's certificate; None: nothing is encrypted
    tls: TlsFiles | None = None  # for services

    def __post_init__(self) -> None:
        given = (("--server", self.server), ("--target", self.targets), ("--drafter", self.drafters))
        for name, addresses in given:
            if addresses:
                check_addresses(name, addresses)
        if self.url:
            base_url(self.url)
        if self.drafters and not self.targets:
            raise UsageError(
                "--drafter has an address and --target has none; a server's drafter is named by --use-drafter"
            )

    @property
    def services(self) -> str:
        """What the test starts, for the report: nothing."""
        return ""

    async def stages(self) -> AsyncGenerator[Stage, None]:
        """One stage. Raises ServiceError and CommandFailed."""
        async with AsyncExitStack() as stack:
            clients: dict[str, Client] = {}
            if self.url:
                clients[HTTP] = await _http(stack, self.url, self.key)
            if self.server:
                with checked_options():
                    tls = None if self.ca is None else trusting_credentials(self.ca)
                clients[GRPC] = GrpcClient(
                    await stack.enter_async_context(GenerationClient(self.server, self.key, tls))
                )
            if self.targets:
                clients[IN_PROCESS] = await _in_process(stack, self.targets, self.drafters, self.tls)
            yield Stage(None, clients)


@dataclass(frozen=True)
class Started:
    """Services that run as long as the test, and a server in a process of its own."""

    target: Served
    drafter: Served
    delays: tuple[float, ...]  # ms, one way, to a distant host; each in turn
    far: frozenset[str]  # which of target and drafter are on hosts of their own; the server is where this process is
    over: frozenset[str]  # HTTP, gRPC
    compare: bool  # with a pipeline in this process
    max_outputs: int  # that the server makes at once

    @property
    def services(self) -> str:
        """What is started, and where."""
        models = ", ".join(
            f"{role} {_described(one)}" for role, one in (("target", self.target), ("drafter", self.drafter))
        )
        if not any(self.delays):
            return models
        far = " and ".join(sorted(self.far, reverse=True))
        return f"{models}; {far} at {', '.join(f'{delay:g}' for delay in self.delays)} ms, one way"

    async def stages(self) -> AsyncGenerator[Stage, None]:
        """One stage for each delay, each with a server of its own. Raises ServiceError and CommandFailed."""
        distant = any(self.delays)
        async with (
            service("target", self.target, 0, distant and "target" in self.far) as target,
            service("drafter", self.drafter, 1, distant and "drafter" in self.far) as drafter,
        ):
            for delay in self.delays:
                await target.delay(delay)
                await drafter.delay(delay)
                async with AsyncExitStack() as stack:
                    clients = await self._clients(stack, target, drafter)
                    yield Stage(delay if distant else None, clients)

    async def _clients(self, stack: AsyncExitStack, target: Distant, drafter: Distant) -> dict[str, Client]:
        clients: dict[str, Client] = {}
        server = HttpServer(target.address, drafter.address, self.max_outputs)
        (ready,) = await stack.enter_async_context(running([server]))
        if HTTP in self.over:
            clients[HTTP] = await _http(stack, f"http://{ready.address}", "")
        if GRPC in self.over:
            clients[GRPC] = GrpcClient(await stack.enter_async_context(GenerationClient(ready.ready["grpc"])))
        if self.compare:
            clients[IN_PROCESS] = await _in_process(stack, target.address, drafter.address, None)
        return clients


@dataclass(frozen=True)
class HttpServer:
    """`crossdraft serve http`, with gRPC beside it, on any free ports."""

    target: str  # host:port
    drafter: str
    max_outputs: int
    role: str = "front"

    def command(self) -> list[str]:
        """The command line. The server ends with its standard input, so it does not outlive this process."""
        services = ["--target", self.target, "--drafter", f"{DRAFTER}={self.drafter}", "--model", MODEL]
        where = ["--port", "0", "--grpc-port", "0", "--max-outputs", str(self.max_outputs)]
        ends = ["--grace-seconds", "0", "--until-stdin-ends", "--log-level", "warning"]
        return [sys.executable, "-m", "crossdraft.cli", "serve", "http", *services, *where, *ends]


def base_url(url: str) -> str:
    """The URL of a server without `/v1` and slashes at its end.

    Raises:
        UsageError: this is not http://HOST[:PORT][/PATH] or the same with https.
    """
    complaint = f"--url must be such as http://127.0.0.1:8000, got {url}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except ValueError as error:
        raise UsageError(complaint) from error
    if not known or parts.query or parts.fragment:
        raise UsageError(complaint)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


async def _http(stack: AsyncExitStack, url: str, key: str) -> Client:
    """A client of OpenAI's API; raises CommandFailed."""
    try:
        from crossdraft.loadtest.http_client import HttpClient
    except ImportError as error:
        raise CommandFailed(MISSING) from error
    return await stack.enter_async_context(HttpClient(base_url(url), key))


async def _in_process(stack: AsyncExitStack, targets: str, drafters: str, tls: TlsFiles | None) -> Client:
    """A pipeline of this process, and one without a drafter; raises ServiceError."""
    plain = await stack.enter_async_context(connect(targets, tls=tls))
    if not drafters:
        return PipelineClient(plain, plain)
    drafted = await stack.enter_async_context(connect(targets, drafters, needs_drafter=True, tls=tls))
    return PipelineClient(drafted, plain)


def _described(served: Served) -> str:
    """The name of a model, and whether it is slowed down."""
    return served.model if served.pace is None else f"{served.model} paced {served.pace} ms"


@dataclass(frozen=True)
class LoadTestPlan:
    """Which requests are sent, when, and how often.

    Raises:
        UsageError: a number is out of its range.
    """

    load: Load
    options: RequestOptions
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
                raise UsageError(complaint)

    def first(self, count: int) -> tuple[Request, ...]:
        """The first requests."""
        return requests_over(self.prompts, count, self.options)

    def conditions(self, services: str) -> Conditions:
        """The settings as the report has them, and the services that the test starts."""
        try:
            software = version("crossdraft")
        except PackageNotFoundError:
            software = "not installed"
        return Conditions(
            begun=datetime.now(UTC).isoformat(timespec="seconds"),
            software=software,
            cores=len(os.sched_getaffinity(0)),
            load=self.load,
            goal=self.goal,
            wishes=self.options,
            requests=self.requests,
            warm_up=self.warm_up,
            repeat=self.repeat,
            seed=self.seed,
            prompts=self.prompts_from,
            services=services,
        )


def prompts_of(path: Path | None) -> tuple[tuple[Prompt, ...], str]:
    """The prompts of a file or the bundled ones, and their source for the report; raises UsageError."""
    if path is None:
        return requests.bundled(), "bundled"
    with checked_options():
        return requests.read(path), path.name


@dataclass(frozen=True)
class Files:
    """Where the report is written, besides the tables on stdout. Raises UsageError."""

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


def loadtest(
    servers: ExistingServers, services: StartedServices, load: LoadOptions, asked: LoadRequests, files: LoadFiles
) -> None:
    """Runs the test; tables on stdout, and files if paths are given.

    Raises:
        UsageError: a value is out of its range, options do not go together, or the models cannot serve a request.
        CommandFailed: a service or server cannot be used; the report of what was done before is written.
    """
    plan = _plan_of(load, asked)
    written = Files(files.json_file, files.csv_file, files.picture)
    run(plan, _tested(servers, services, load.requests), written)


def run(plan: LoadTestPlan, tested: Addressed | Started, files: Files) -> None:
    """The same, of checked options."""
    run_to_end(LoadTest(plan, tested, files).run(), STARTS_PROCESSES)


def _plan_of(load: LoadOptions, asked: LoadRequests) -> LoadTestPlan:
    drafter = "" if asked.use_drafter == NO_DRAFTER else asked.use_drafter
    with checked_options():
        options = RequestOptions(
            asked.max_tokens,
            asked.temperature,
            asked.method,
            drafter,
            asked.model,
            asked.ignore_eos,
            load.seed,
            asked.trace,
        )
        kind, goal = _load_of(load), Goal(asked.ttft_ms, asked.tpot_ms)
    counts = load.requests, load.warm_up, load.repeat, load.seed
    return LoadTestPlan(kind, options, goal, *prompts_of(asked.prompts), *counts, load.timeout)


def _load_of(options: LoadOptions) -> Load:
    """What --rate, --clients and --max-concurrency say together. Raises UsageError and ValueError."""
    most = options.most_at_once if options.max_concurrency is None else options.max_concurrency
    if options.rate is not None and options.clients is not None:
        raise UsageError("--rate and --clients are two kinds of load: give one of them")
    if options.rate is not None:
        return OpenLoop(options.rate, most)
    if most is not None:
        raise UsageError("--max-concurrency is for --rate; without it, --clients says how many requests are under way")
    return ClosedLoop(DEFAULT_CLIENTS if options.clients is None else options.clients)


def _tested(servers: ExistingServers, services: StartedServices, requests: int) -> Addressed | Started:
    """Raises UsageError."""
    url, server, target, drafter = servers.url, servers.server, servers.target, servers.drafter
    if url or server or target or drafter:
        if services.compare or services.delay_ms is not None:
            raise UsageError("--compare and --delay-ms are for services that are started; give --target beside --url")
        ca, tls = (None, servers.tls.files()) if target else (servers.tls.tls_ca, None)
        return Addressed(url, server, target, drafter, servers.api_key, ca, tls)
    models = Served(services.target_model, services.pace_target), Served(services.drafter_model, services.pace_drafter)
    protocols = frozenset(HTTP if one is Over.HTTP else GRPC for one in services.over)
    delays, far = delays_of(services.delay_ms or "0"), frozenset(services.far)
    return Started(*models, delays, far, protocols, services.compare, max(MIN_OUTPUTS, requests))


@dataclass(eq=False)
class LoadTest:
    """A running test."""

    plan: LoadTestPlan
    tested: Addressed | Started
    files: Files
    runs: list[Run] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)  # text of the first error of each kind

    async def run(self) -> None:
        """All stages, then the tables."""
        conditions = self.plan.conditions(self.tested.services)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as self._progress:
            self._task = self._progress.add_task("starting", total=None)
            async with aclosing(self.tested.stages()) as stages:
                async for stage in stages:
                    await self._stage(stage)
                    self.files.write(self._report(conditions))  # after each stage: an interruption loses only the next
        show(self._report(conditions), self.faults)
        if all(not one.ok for run in self.runs for one in run.timelines):
            raise CommandFailed("no request was answered")

    async def _stage(self, stage: Stage) -> None:
        for client in stage.clients.values():
            await self._warm_up(client)
        found: dict[str, list[list[Timeline]]] = {name: [] for name in stage.clients}
        names = list(stage.clients)
        requests = self.plan.first(self.plan.requests)
        for number in range(self.plan.repeat):
            for place in rotated(len(names), number):
                name = names[place]
                delay = "" if stage.delay_ms is None else f", {stage.delay_ms:g} ms"
                self._progress.reset(self._task, description=f"{name}{delay}", total=self.plan.requests)
                runner = self._runner(stage.clients[name])
                found[name].append(await runner.run(self.plan.load, requests, self.plan.seed + number))
        self._keep(stage.delay_ms, found)

    async def _warm_up(self, client: Client) -> None:
        """Raises CommandFailed if all of its requests fail."""
        if not self.plan.warm_up:
            return
        load = self.plan.load if isinstance(self.plan.load, ClosedLoop) else ClosedLoop(1)
        timelines = await self._runner(client).run(load, self.plan.first(self.plan.warm_up), 0)
        if not any(one.ok for one in timelines):
            error = timelines[0].error
            raise CommandFailed(f"the first requests failed ({error}): {self.faults.get(error, 'no token came')}")
        self.faults.clear()

    def _runner(self, client: Client) -> Runner:
        return Runner(client, self.plan.timeout_seconds, self._ended)

    def _ended(self, timeline: Timeline, text: str) -> None:
        self._progress.advance(self._task)
        if timeline.error:
            self.faults.setdefault(timeline.error, text)

    def _keep(self, delay_ms: float | None, found: dict[str, list[list[Timeline]]]) -> None:
        for name, repetitions in found.items():
            summary = summary_of(repetitions, self.plan.load, self.plan.goal)
            self.runs.append(Run(name, delay_ms, summary, tuple(map(tuple, repetitions))))
        if IN_PROCESS in found:
            for name in (name for name in found if name != IN_PROCESS):
                added = added_by(name, found[name], IN_PROCESS, found[IN_PROCESS])
                self.comparisons.append(Comparison(delay_ms, added))

    def _report(self, conditions: Conditions) -> Report:
        return Report(conditions, tuple(self.runs), tuple(self.comparisons))


def show(report: Report, faults: dict[str, str]) -> None:
    """Tables on stdout; warnings and the first error of each kind on stderr."""
    for table in tables_of(report):
        print_whole(table)
    notes = Console(stderr=True)
    for note in notes_of(report):
        notes.print(note, highlight=False, soft_wrap=True)
    for kind, text in faults.items():
        notes.print(f"{kind}: {text}", highlight=False, markup=False, soft_wrap=True)
