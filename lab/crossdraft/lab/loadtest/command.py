"""`crossdraft loadtest`: sends requests to servers that run already, or to services that it starts, and reports.

A configuration is one way to have outputs made: over HTTP, over gRPC, or by a pipeline in this process. All
configurations are measured under one emulated delay after another; within a delay they take turns.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from crossdraft.cli.processes import MIN_OUTPUTS, HttpServer, base_url, check_addresses, patience, running
from crossdraft.cli.prompts import Prompt, read, texts_of
from crossdraft.cli.running import (
    STARTS_PROCESSES,
    CommandFailed,
    UsageError,
    check_report,
    checked_options,
    counted,
    needs_extra,
    print_whole,
    run_to_end,
    write_report,
)
from crossdraft.cli.serve import tls_files
from crossdraft.client import GenerationRequest, Overlap, SamplingOptions, connect
from crossdraft.client.api import software
from crossdraft.config.commands import NO_DRAFTER, ReportFile
from crossdraft.lab.harness import in_turns
from crossdraft.lab.loadtest.clients import GrpcClient, PipelineClient
from crossdraft.lab.loadtest.options import ExistingServers, LoadOptions, LoadRequests, Over, StartedServices
from crossdraft.lab.loadtest.report import GRPC, HTTP, IN_PROCESS, LoadReport, notes_of, plain, tables_of, titled
from crossdraft.lab.loadtest.requests import Request, requests_over
from crossdraft.lab.loadtest.runner import LoadClient, RequestTimeline, send
from crossdraft.lab.loadtest.summary import Repetitions
from crossdraft.lab.services import Served, delays_of, service
from crossdraft.lab.workload import gathered
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.generation import Generate
from crossdraft.rpc.security import trusting_credentials
from crossdraft.serving.grpc_client import Client
from crossdraft.session.models import requested_method

Stages = AsyncGenerator[tuple[float | None, Mapping[str, LoadClient]], None]
"""Of each stage: its delay in ms, one way, or None where nothing is emulated; its clients by their configuration."""


def check_addressed(given: ExistingServers) -> None:
    """Raises UsageError."""
    for name, addresses in (("--server", given.server), ("--target", given.target), ("--drafter", given.drafter)):
        if addresses:
            check_addresses(name, addresses)
    if given.url:
        base_url(given.url)
    if given.target:
        tls_files(given)
    elif given.drafter:
        raise UsageError("--drafter has an address and --target has none; a server's drafter is named by --use-drafter")


async def addressed(servers: ExistingServers) -> Stages:
    """One stage, of servers and services that run already. Raises ServiceError and CommandFailed."""
    async with clients_of(servers) as clients:
        yield None, clients


def models_of(asked: StartedServices) -> dict[str, Served]:
    """By role; raises UsageError if a value is out of its range."""
    return {
        "target": Served(asked.target_model, asked.pace_target, engine=asked.engine),
        "drafter": Served(asked.drafter_model, asked.pace_drafter, engine=asked.engine),
    }


def described(asked: StartedServices) -> str:
    """For the report; raises UsageError if a value is out of its range."""
    paced = {role: "" if one.pace is None else f" paced {one.pace} ms" for role, one in models_of(asked).items()}
    models = ", ".join(f"{role} {one.model}{paced[role]}" for role, one in models_of(asked).items())
    delays = delays_of(asked.delay_ms or "0")
    return f"{models}; drafter at {', '.join(f'{one:g}' for one in delays)} ms, one way" if any(delays) else models


async def started(asked: StartedServices, max_outputs: int, drafted: bool) -> Stages:
    """One stage for each delay to the drafter, each with a server of its own, over services that run throughout.

    Raises:
        ServiceError, CommandFailed: a service cannot be used.
    """
    delays, models = delays_of(asked.delay_ms or "0"), models_of(asked)
    distant = any(delays)
    async with (
        service("target", models["target"], 0, False) as target,
        service("drafter", models["drafter"], 1, distant) as drafter,
    ):
        server = HttpServer(target.address, drafter.address, max_outputs)
        for delay in delays:
            await drafter.delay(delay)
            async with running([server]) as (front,):
                servers = ExistingServers(
                    url=f"http://{front.address}" if Over.HTTP in asked.over else "",
                    server=front.ready["grpc"] if Over.GRPC in asked.over else "",
                    target=target.address if asked.compare else "",
                    drafter=drafter.address if asked.compare and drafted else "",
                )
                async with clients_of(servers) as clients:
                    yield delay if distant else None, clients


@asynccontextmanager
async def clients_of(given: ExistingServers) -> AsyncIterator[dict[str, LoadClient]]:
    """A client of each server, and a pipeline of targets, by their names. Raises ServiceError and CommandFailed."""
    async with AsyncExitStack() as stack:
        clients: dict[str, LoadClient] = {}
        if given.url:
            clients[HTTP] = await _http(stack, given.url, given.api_key)
        if given.server:
            ca = None if given.target else given.tls_ca  # with --target, --tls-... are for the services
            with checked_options():
                tls = None if ca is None else trusting_credentials(ca)
            server = await stack.enter_async_context(Client(given.server, given.api_key, tls))
            clients[GRPC] = GrpcClient(server, await _chats(server))
        if given.target:
            drafters, files = given.drafter or None, tls_files(given)
            services = connect(given.target, drafters, patience(), needs_drafter=drafters is not None, tls=files)
            clients[IN_PROCESS] = PipelineClient(await stack.enter_async_context(services))
        yield clients


async def _chats(server: Client) -> bool:
    """Whether a model has a chat template; of a server that does not answer, requests will say so."""
    try:
        return any(model.chats for model in await server.models())
    except ServiceError:
        return True


async def _http(stack: AsyncExitStack, url: str, key: str) -> LoadClient:
    """A client of OpenAI's API; raises CommandFailed."""
    try:
        from crossdraft.lab.loadtest.http_client import HttpClient
    except ImportError as error:
        raise CommandFailed(f"HTTP {needs_extra('http')}; or use gRPC (--over grpc, --server)") from error
    client = await stack.enter_async_context(HttpClient(base_url(url), key))
    await client.learn()
    return client


def loadtest(
    servers: ExistingServers, services: StartedServices, load: LoadOptions, asked: LoadRequests, file: ReportFile
) -> None:
    """Runs the test; tables on stdout, and a file if a path is given.

    Raises:
        UsageError: a value is out of its range, options do not go together, or the models cannot serve a request.
        CommandFailed: a service or server cannot be used; the report of what was done before is written.
    """
    check_report(file)
    drafted = asked.use_drafter != NO_DRAFTER
    if servers.url or servers.server or servers.target or servers.drafter:
        if services.compare or services.delay_ms is not None:
            raise UsageError(
                "--compare and --delay-ms need services that this command starts: leave out --url, --server, --target "
                "and --drafter (a running server is compared by --target beside --url)"
            )
        check_addressed(servers)
        what, stages = "", addressed(servers if drafted else replace(servers, drafter=""))
    else:
        what, stages = described(services), started(services, max(MIN_OUTPUTS, load.requests), drafted)
    with checked_options():
        test = LoadTest(load, read(asked.prompts), generate_of(asked), file)
    run_to_end(test.run(stages, LoadReport(conditions_of(load, asked, what))), STARTS_PROCESSES)


def generate_of(asked: LoadRequests) -> Generate:
    """What all requests have in common; raises ValueError if no server would take it."""
    k = asked.num_speculative_tokens
    forced: dict[str, Any] = {} if k is None else {"overlap": Overlap.OFF, "num_speculative_tokens": k}
    sampling = SamplingOptions(asked.temperature)
    like = GenerationRequest(
        "x", method=asked.method, max_tokens=asked.max_tokens, options=sampling, ignore_eos=asked.ignore_eos, **forced
    )
    requested_method(like)
    return Generate(like, model=asked.model, drafter="" if asked.use_drafter == NO_DRAFTER else asked.use_drafter)


def conditions_of(load: LoadOptions, asked: LoadRequests, services: str) -> dict[str, Any]:
    """What the options say, as the report has it."""
    wishes = asdict(asked)
    prompts = wishes.pop("prompts")
    return asdict(load) | {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": software(),
        "cores": len(os.sched_getaffinity(0)),
        "wishes": wishes,
        "prompts": "bundled" if prompts is None else prompts.name,
        "services": services,
    }


@dataclass(frozen=True)
class LoadTest:
    """A test."""

    load: LoadOptions
    prompts: tuple[Prompt, ...]
    like: Generate  # what all requests have in common
    file: ReportFile

    async def run(self, given: Stages, report: LoadReport) -> None:
        async with aclosing(given) as stages:
            async for delay_ms, clients in stages:
                report = report.with_stage(delay_ms, await self._stage(delay_ms, clients))
                # After each stage: an interruption loses only the next.
                write_report(self.file, plain(report))
        show(report)
        if not any(one.ok for run in report.runs for one in run.timelines):
            raise CommandFailed("no request was answered")

    async def _stage(self, delay_ms: float | None, clients: Mapping[str, LoadClient]) -> Mapping[str, Repetitions]:
        for name, client in clients.items() if self.load.warm_up else ():
            timelines = await self._made(f"{name}, warm-up", client, self.load.warm_up)
            if not any(one.ok for one in timelines):
                error, fault = timelines[0].error, timelines[0].fault
                raise CommandFailed(f"the first requests failed ({error}): {fault or 'no token came'}")

        async def turn(name: str, _: int) -> list[RequestTimeline]:
            return await self._made(titled(name, delay_ms), clients[name], self.load.requests)

        return await in_turns(list(clients), self.load.repeat, turn)

    async def _made(self, title: str, client: LoadClient, count: int) -> list[RequestTimeline]:
        """The first `count` requests."""
        prompts = self.prompts if client.chats else texts_of(self.prompts)
        with counted(count, title) as advance:

            async def sent(request: Request) -> RequestTimeline:
                timeline = await send(client, request, self.load.timeout)
                advance()
                return timeline

            return await gathered(sent, requests_over(prompts, count, self.like, self.load.seed), self.load.clients)


def show(report: LoadReport) -> None:
    """Tables on stdout; warnings and the first error of each kind on stderr."""
    for table in tables_of(report):
        print_whole(table)
    notes = Console(stderr=True)
    for note in notes_of(report):
        notes.print(note, highlight=False, markup=False, soft_wrap=True)
