"""`crossdraft loadtest`: sends requests to servers that run already, or to services that it starts, and reports.

A configuration is one way to have outputs made: over HTTP, over gRPC, or by a pipeline in this process. All
configurations are measured under one emulated delay after another; within a delay they take turns.
"""

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console

from crossdraft.bench.harness import in_turns
from crossdraft.bench.services import Distant, Served, delays_of, service
from crossdraft.bench.workload import gathered
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
from crossdraft.loadtest.report import (
    GRPC,
    HTTP,
    IN_PROCESS,
    LoadReport,
    LoadSettings,
    notes_of,
    plain,
    tables_of,
    titled,
)
from crossdraft.loadtest.requests import Prompt, Request, RequestSettings, requests_over
from crossdraft.loadtest.runner import LoadClient, RequestTimeline, send
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.generation import GenerationClient
from crossdraft.rpc.security import TlsFiles, trusting_credentials


@dataclass(frozen=True, eq=False)
class DelayedClients:
    """The configurations that are compared under one delay."""

    delay_ms: float | None  # one way; None: nothing is emulated
    clients: Mapping[str, LoadClient]  # by the configuration's name


Stages = AsyncGenerator[DelayedClients, None]


async def addressed(servers: ExistingServers) -> Stages:
    """One stage, of servers and services that run already. Raises ServiceError and CommandFailed."""
    async with clients_of(servers) as clients:
        yield DelayedClients(None, clients)


def check_addressed(given: ExistingServers) -> None:
    """Raises UsageError."""
    for name, addresses in (("--server", given.server), ("--target", given.target), ("--drafter", given.drafter)):
        if addresses:
            check_addresses(name, addresses)
    if given.url:
        base_url(given.url)
    if given.target:
        given.tls.files()
    elif given.drafter:
        raise UsageError("--drafter has an address and --target has none; a server's drafter is named by --use-drafter")


@dataclass(frozen=True)
class StartedLoad:
    """Services that run as long as the test, and a server in a process of its own."""

    asked: StartedServices
    max_outputs: int  # that the server makes at once

    @property
    def delays(self) -> tuple[float, ...]:
        """Milliseconds, one way, to the drafter's host; each in turn."""
        return delays_of(self.asked.delay_ms or "0")

    @property
    def models(self) -> tuple[Served, Served]:
        """Target and drafter."""
        asked = self.asked
        target = Served(asked.target_model, asked.pace_target, engine=asked.engine)
        return target, Served(asked.drafter_model, asked.pace_drafter, engine=asked.engine)

    @property
    def described(self) -> str:
        """For the report; raises UsageError if a value is out of its range."""
        models = "target {}, drafter {}".format(*map(_described, self.models))
        if not any(self.delays):
            return models
        return f"{models}; drafter at {', '.join(f'{delay:g}' for delay in self.delays)} ms, one way"

    async def stages(self) -> Stages:
        """One stage for each delay, each with a server of its own. Raises ServiceError and CommandFailed."""
        distant = any(self.delays)
        verifying, drafting = self.models
        async with (
            service("target", verifying, 0, False) as target,
            service("drafter", drafting, 1, distant) as drafter,
        ):
            server = HttpServer(target.address, drafter.address, self.max_outputs)
            for delay in self.delays:
                await drafter.delay(delay)
                async with running([server]) as (front,), clients_of(self._servers(front, target, drafter)) as clients:
                    yield DelayedClients(delay if distant else None, clients)

    def _servers(self, front: Running, target: Distant, drafter: Distant) -> ExistingServers:
        over, compare = self.asked.over, self.asked.compare
        return ExistingServers(
            url=f"http://{front.address}" if Over.HTTP in over else "",
            server=front.ready["grpc"] if Over.GRPC in over else "",
            target=target.address if compare else "",
            drafter=drafter.address if compare else "",
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
    stages, described = _tested(servers, services, load.requests)
    with checked_options():
        prompts = requests.bundled() if asked.prompts is None else requests.read(asked.prompts)
        conditions = _conditions_of(load, asked, described)
    run_to_end(LoadTest(conditions, prompts, load.timeout, files).run(stages), STARTS_PROCESSES)


def _conditions_of(load: LoadOptions, asked: LoadRequests, services: str) -> LoadSettings:
    """What the options say, as the report has it. Raises ValueError."""
    drafter = "" if asked.use_drafter == NO_DRAFTER else asked.use_drafter
    return LoadSettings(
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        software=software(),
        cores=len(os.sched_getaffinity(0)),
        wishes=RequestSettings(**named(RequestSettings, vars(asked) | {"drafter": drafter, "seed": load.seed})),
        prompts="bundled" if asked.prompts is None else asked.prompts.name,
        services=services,
        **named(LoadSettings, vars(load)),
    )


def _tested(servers: ExistingServers, services: StartedServices, requests: int) -> tuple[Stages, str]:
    """The stages, and for the report what they start. Raises UsageError."""
    if servers.url or servers.server or servers.target or servers.drafter:
        if services.compare or services.delay_ms is not None:
            raise UsageError(
                "--compare and --delay-ms need services that this command starts: leave out --url, --server, --target "
                "and --drafter (a running server is compared by --target beside --url)"
            )
        check_addressed(servers)
        return addressed(servers), ""
    started = StartedLoad(services, max(MIN_OUTPUTS, requests))
    return started.stages(), started.described


@dataclass(frozen=True)
class LoadTest:
    """A test."""

    conditions: LoadSettings
    prompts: tuple[Prompt, ...]
    timeout_seconds: float  # of a request
    files: LoadFiles

    async def run(self, given: Stages) -> None:
        report = LoadReport(self.conditions)
        async with aclosing(given) as stages:
            async for stage in stages:
                report = report.with_stage(stage.delay_ms, await self._stage(stage))
                self._write(report)  # after each stage: an interruption loses only the next
        show(report)
        if not any(one.ok for run in report.runs for one in run.timelines):
            raise CommandFailed("no request was answered")

    async def _stage(self, stage: DelayedClients) -> dict[str, list[list[RequestTimeline]]]:
        for name, client in stage.clients.items() if self.conditions.warm_up else ():
            timelines = await self._made(f"{name}, warm-up", client, self.conditions.warm_up)
            if not any(one.ok for one in timelines):
                error, fault = timelines[0].error, timelines[0].fault
                raise CommandFailed(f"the first requests failed ({error}): {fault or 'no token came'}")

        async def turn(name: str, _: int) -> list[RequestTimeline]:
            return await self._made(titled(name, stage.delay_ms), stage.clients[name], self.conditions.requests)

        return await in_turns(list(stage.clients), self.conditions.repeat, turn)

    async def _made(self, title: str, client: LoadClient, count: int) -> list[RequestTimeline]:
        """The first `count` requests."""
        prompts = self.prompts if client.chats else requests.texts_of(self.prompts)
        with counted(count, title) as advance:

            async def sent(request: Request) -> RequestTimeline:
                timeline = await send(client, request, self.timeout_seconds)
                advance()
                return timeline

            asked = requests_over(prompts, count, self.conditions.wishes)
            return await gathered(sent, asked, self.conditions.clients)

    def _write(self, report: LoadReport) -> None:
        """Raises CommandFailed."""
        if self.files.json_file is not None:
            write_text(self.files.json_file, json.dumps(plain(report), indent=1) + "\n")
        if self.files.picture is not None:
            save_picture(figure_of(report), self.files.picture, DOTS_PER_INCH)


def show(report: LoadReport) -> None:
    """Tables on stdout; warnings and the first error of each kind on stderr."""
    for table in tables_of(report):
        print_whole(table)
    notes = Console(stderr=True)
    for note in notes_of(report):
        notes.print(note, highlight=False, markup=False, soft_wrap=True)
