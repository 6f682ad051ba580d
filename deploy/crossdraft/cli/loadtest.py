"""`crossdraft loadtest`: sends requests to servers that run already, or to services that it starts, and reports.

A configuration is one way to have outputs made: over HTTP, over gRPC, or by a pipeline in this process. All
configurations are measured under one emulated delay after another; within a delay they take turns.
"""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from rich.console import Console

from crossdraft.bench.harness import rotated
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
    named,
)
from crossdraft.client import connect
from crossdraft.client.api import software
from crossdraft.console.processes import MIN_OUTPUTS, HttpServer, Running, base_url, patience, running
from crossdraft.console.running import (
    STARTS_PROCESSES,
    CommandFailed,
    UsageError,
    checked_options,
    counted,
    needs_extra,
    print_whole,
    run_to_end,
    save_picture,
    write_text,
)
from crossdraft.loadtest import requests
from crossdraft.loadtest.clients import GrpcClient, PipelineClient
from crossdraft.loadtest.plots import DOTS_PER_INCH, figure_of
from crossdraft.loadtest.report import Comparison, LoadReport, LoadRun, LoadSettings, notes_of, plain, tables_of, titled
from crossdraft.loadtest.requests import Prompt, RequestSettings, requests_over
from crossdraft.loadtest.runner import ClosedLoop, Load, OpenLoop, Runner
from crossdraft.loadtest.summary import Goal, added_by, summary_of
from crossdraft.loadtest.timeline import LoadClient, RequestTimeline
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.generation import GenerationClient
from crossdraft.rpc.security import TlsFiles, trusting_credentials

HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"  # names of configurations
DEFAULT_CLIENTS = 2


@dataclass(frozen=True, eq=False)
class DelayedClients:
    """The configurations that are compared under one delay."""

    delay_ms: float | None  # one way; None: nothing is emulated
    clients: Mapping[str, LoadClient]  # by the configuration's name


@dataclass(frozen=True)
class Addressed:
    """Servers and services that run already, by their addresses. Raises UsageError."""

    servers: ExistingServers
    services: str = ""  # what the test starts, for the report

    def __post_init__(self) -> None:
        given = self.servers
        for name, addresses in (("--server", given.server), ("--target", given.target), ("--drafter", given.drafter)):
            if addresses:
                check_addresses(name, addresses)
        if given.url:
            base_url(given.url)
        if given.target:
            given.tls.files()
        elif given.drafter:
            raise UsageError(
                "--drafter has an address and --target has none; a server's drafter is named by --use-drafter"
            )

    async def stages(self) -> AsyncGenerator[DelayedClients, None]:
        """One stage. Raises ServiceError and CommandFailed."""
        async with clients_of(self.servers) as clients:
            yield DelayedClients(None, clients)


@dataclass(frozen=True)
class StartedLoad:
    """Services that run as long as the test, and a server in a process of its own."""

    target: Served
    drafter: Served
    delays: tuple[float, ...]  # ms, one way, to the drafter's host; each in turn
    over: Sequence[Over]
    compare: bool  # with a pipeline in this process
    max_outputs: int  # that the server makes at once

    @property
    def services(self) -> str:
        models = f"target {_described(self.target)}, drafter {_described(self.drafter)}"
        if not any(self.delays):
            return models
        return f"{models}; drafter at {', '.join(f'{delay:g}' for delay in self.delays)} ms, one way"

    async def stages(self) -> AsyncGenerator[DelayedClients, None]:
        """One stage for each delay, each with a server of its own. Raises ServiceError and CommandFailed."""
        distant = any(self.delays)
        async with (
            service("target", self.target, 0, False) as target,
            service("drafter", self.drafter, 1, distant) as drafter,
        ):
            server = HttpServer(target.address, drafter.address, self.max_outputs)
            for delay in self.delays:
                await drafter.delay(delay)
                async with running([server]) as (front,), clients_of(self._servers(front, target, drafter)) as clients:
                    yield DelayedClients(delay if distant else None, clients)

    def _servers(self, front: Running, target: Distant, drafter: Distant) -> ExistingServers:
        return ExistingServers(
            url=f"http://{front.address}" if Over.HTTP in self.over else "",
            server=front.ready["grpc"] if Over.GRPC in self.over else "",
            target=target.address if self.compare else "",
            drafter=drafter.address if self.compare else "",
        )


@asynccontextmanager
async def clients_of(given: ExistingServers) -> AsyncIterator[dict[str, LoadClient]]:
    """A client of each server, and a pipeline of targets, by their names. Raises ServiceError and CommandFailed."""
    async with AsyncExitStack() as stack:
        clients: dict[str, LoadClient] = {}
        if given.url:
            clients[HTTP] = await _http(stack, given.url, given.api_key)
        if given.server:
            ca = None if given.target else given.tls.tls_ca  # with --target, --tls-... are for the services
            with checked_options():
                tls = None if ca is None else trusting_credentials(ca)
            server = await stack.enter_async_context(GenerationClient(given.server, given.api_key, tls))
            clients[GRPC] = GrpcClient(server, await _chats(server))
        if given.target:
            clients[IN_PROCESS] = await _in_process(stack, given.target, given.drafter, given.tls.files())
        yield clients


async def _chats(server: GenerationClient) -> bool:
    """Whether a model has a chat template; of a server that does not answer, requests will say so."""
    try:
        return any(model.chats for model in await server.models())
    except ServiceError:
        return True


async def _http(stack: AsyncExitStack, url: str, key: str) -> LoadClient:
    """A client of OpenAI's API; raises CommandFailed."""
    try:
        from crossdraft.loadtest.http_client import HttpClient
    except ImportError as error:
        raise CommandFailed(f"HTTP {needs_extra('http')}; or use gRPC (--over grpc, --server)") from error
    client = await stack.enter_async_context(HttpClient(base_url(url), key))
    await client.learn()
    return client


async def _in_process(stack: AsyncExitStack, targets: str, drafters: str, tls: TlsFiles | None) -> LoadClient:
    """A pipeline of this process, and one without a drafter; raises ServiceError."""
    plain = await stack.enter_async_context(connect(targets, patience=patience(), tls=tls))
    if not drafters:
        return PipelineClient(plain, plain)
    drafted = await stack.enter_async_context(connect(targets, drafters, patience(), needs_drafter=True, tls=tls))
    return PipelineClient(drafted, plain)


def _described(served: Served) -> str:
    return served.model if served.pace is None else f"{served.model} paced {served.pace} ms"


def loadtest(
    servers: ExistingServers, services: StartedServices, load: LoadOptions, asked: LoadRequests, files: LoadFiles
) -> None:
    """Runs the test; tables on stdout, and files if paths are given.

    Raises:
        UsageError: a value is out of its range, options do not go together, or the models cannot serve a request.
        CommandFailed: a service or server cannot be used; the report of what was done before is written.
    """
    files.check()
    if not 0 < load.timeout < float("inf"):
        raise UsageError(f"--timeout must be above 0, got {load.timeout:g}")
    tested = _tested(servers, services, load.requests)
    with checked_options():
        prompts = requests.bundled() if asked.prompts is None else requests.read(asked.prompts)
        conditions = _conditions_of(load, asked, tested.services)
    run_to_end(LoadTest(conditions, prompts, load.timeout, tested, files).run(), STARTS_PROCESSES)


def _conditions_of(load: LoadOptions, asked: LoadRequests, services: str) -> LoadSettings:
    """What the options say, as the report has it. Raises UsageError and ValueError."""
    drafter = "" if asked.use_drafter == NO_DRAFTER else asked.use_drafter
    return LoadSettings(
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        software=software(),
        cores=len(os.sched_getaffinity(0)),
        load=_load_of(load),
        goal=Goal(asked.ttft_ms, asked.tpot_ms),
        wishes=RequestSettings(**named(RequestSettings, vars(asked) | {"drafter": drafter, "seed": load.seed})),
        prompts="bundled" if asked.prompts is None else asked.prompts.name,
        services=services,
        requests=load.requests,
        warm_up=load.warm_up,
        repeat=load.repeat,
        seed=load.seed,
    )


def _load_of(options: LoadOptions) -> Load:
    """What --rate, --clients and --max-concurrency say together. Raises UsageError and ValueError."""
    if options.rate is not None and options.clients is not None:
        raise UsageError("--rate and --clients are two kinds of load: give one of them")
    if options.rate is not None:
        return OpenLoop(options.rate, options.max_concurrency)
    if options.max_concurrency is not None:
        raise UsageError("--max-concurrency is for --rate; without it, --clients says how many requests are under way")
    return ClosedLoop(DEFAULT_CLIENTS if options.clients is None else options.clients)


def _tested(servers: ExistingServers, services: StartedServices, requests: int) -> Addressed | StartedLoad:
    """Raises UsageError."""
    if servers.url or servers.server or servers.target or servers.drafter:
        if services.compare or services.delay_ms is not None:
            raise UsageError(
                "--compare and --delay-ms need services that this command starts: leave out --url, --server, --target "
                "and --drafter (a running server is compared by --target beside --url)"
            )
        return Addressed(servers)
    models = (
        Served(services.target_model, services.pace_target, engine=services.engine),
        Served(services.drafter_model, services.pace_drafter, engine=services.engine),
    )
    delays = delays_of(services.delay_ms or "0")
    return StartedLoad(*models, delays, services.over, services.compare, max(MIN_OUTPUTS, requests))


@dataclass(eq=False)
class LoadTest:
    """A running test."""

    conditions: LoadSettings
    prompts: tuple[Prompt, ...]
    timeout_seconds: float  # of a request
    tested: Addressed | StartedLoad
    files: LoadFiles
    runs: list[LoadRun] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)  # text of the first error of each kind

    async def run(self) -> None:
        async with aclosing(self.tested.stages()) as stages:
            async for stage in stages:
                await self._stage(stage)
                self._write()  # after each stage: an interruption loses only the next
        show(self._report, self.faults)
        if all(not one.ok for run in self.runs for one in run.timelines):
            raise CommandFailed("no request was answered")

    async def _stage(self, stage: DelayedClients) -> None:
        for name, client in stage.clients.items():
            await self._warm_up(name, client)
        found: dict[str, list[list[RequestTimeline]]] = {name: [] for name in stage.clients}
        names, conditions = list(stage.clients), self.conditions
        for number in range(conditions.repeat):
            for name in (names[place] for place in rotated(len(names), number)):
                title, client = titled(name, stage.delay_ms), stage.clients[name]
                seed, count = conditions.seed + number, conditions.requests
                found[name].append(await self._made(title, client, conditions.load, count, seed))
        self._keep(stage.delay_ms, found)

    async def _warm_up(self, name: str, client: LoadClient) -> None:
        """Raises CommandFailed if all of its requests fail."""
        if not self.conditions.warm_up:
            return
        load = self.conditions.load if isinstance(self.conditions.load, ClosedLoop) else ClosedLoop(1)
        timelines = await self._made(f"{name}, warm-up", client, load, self.conditions.warm_up, 0)
        if not any(one.ok for one in timelines):
            error = timelines[0].error
            raise CommandFailed(f"the first requests failed ({error}): {self.faults.get(error, 'no token came')}")
        self.faults.clear()

    async def _made(self, title: str, client: LoadClient, load: Load, count: int, seed: int) -> list[RequestTimeline]:
        """The first `count` requests under a load."""
        with counted(count, title) as advance:
            runner = Runner(client, self.timeout_seconds, partial(self._ended, advance))
            prompts = self.prompts if client.chats else requests.texts_of(self.prompts)
            return await runner.run(load, requests_over(prompts, count, self.conditions.wishes), seed)

    def _ended(self, advance: Callable[[], None], timeline: RequestTimeline, text: str) -> None:
        advance()
        if timeline.error:
            self.faults.setdefault(timeline.error, text)

    def _keep(self, delay_ms: float | None, found: dict[str, list[list[RequestTimeline]]]) -> None:
        for name, repetitions in found.items():
            summary = summary_of(repetitions, self.conditions.load, self.conditions.goal)
            self.runs.append(LoadRun(name, delay_ms, summary, tuple(map(tuple, repetitions))))
        if IN_PROCESS in found:
            for name in (name for name in found if name != IN_PROCESS):
                added = added_by(name, found[name], IN_PROCESS, found[IN_PROCESS])
                self.comparisons.append(Comparison(delay_ms, added))

    @property
    def _report(self) -> LoadReport:
        return LoadReport(self.conditions, tuple(self.runs), tuple(self.comparisons))

    def _write(self) -> None:
        """Raises CommandFailed."""
        if self.files.json_file is not None:
            write_text(self.files.json_file, json.dumps(plain(self._report), indent=1) + "\n")
        if self.files.picture is not None:
            save_picture(figure_of(self._report), self.files.picture, DOTS_PER_INCH)


def show(report: LoadReport, faults: dict[str, str]) -> None:
    """Tables on stdout; warnings and the first error of each kind on stderr."""
    for table in tables_of(report):
        print_whole(table)
    notes = Console(stderr=True)
    for note in (note for run in report.runs for note in notes_of(run)):
        notes.print(note, highlight=False, soft_wrap=True)
    for kind, text in faults.items():
        notes.print(f"{kind}: {text}", highlight=False, markup=False, soft_wrap=True)
