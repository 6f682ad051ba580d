"""`crossdraft loadtest`: sends requests to servers that run already, or to services that it starts.

A configuration is one way to have outputs made: over HTTP, over gRPC, or by a pipeline in this process. All
configurations are measured under one emulated delay after another; within a delay they take turns.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, ClassVar

from crossdraft.cli.measuring import Columns, Table
from crossdraft.cli.processes import MIN_OUTPUTS, HttpServer, base_url, check_addresses, patience, running
from crossdraft.cli.prompts import read, texts_of
from crossdraft.cli.running import (
    STARTS_PROCESSES,
    CommandFailed,
    ProgressCounter,
    Run,
    UsageError,
    checked_options,
    needs_extra,
)
from crossdraft.cli.serve import tls_files
from crossdraft.client import GenerationRequest, Overlap, SamplingOptions, connect
from crossdraft.config.commands import NO_DRAFTER
from crossdraft.lab.harness import Benchmark, in_turns
from crossdraft.lab.loadtest.clients import Stream, generated, http_stream, send
from crossdraft.lab.loadtest.figures import ADDED, HOP, ROLES, SEEN, LoadRun
from crossdraft.lab.loadtest.plan import ExistingServers, LoadPlan, Over
from crossdraft.lab.outputs import Output
from crossdraft.lab.services import Served, delays_of, service
from crossdraft.lab.workload import gathered
from crossdraft.rpc.generation import Generate
from crossdraft.rpc.security import trusting_credentials
from crossdraft.serving.grpc_client import Client
from crossdraft.session.models import requested_method
from crossdraft.verification.methods import method_named

HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"  # names of configurations
# Of each stage: its delay in ms, one way, or None where nothing is emulated; its configurations.
Stages = AsyncGenerator[tuple[float | None, Mapping[str, Stream]], None]


def requests_over(prompts: Sequence[str], count: int, like: Generate, seed: int) -> list[Generate]:
    """`count` requests; the prompts take turns.

    Args:
        prompts: in place of that of `like`.
        count: of requests.
        like: what all have in common.
        seed: of the first, those of the others follow; sent if a method is named that takes one.
    """
    request = like.request
    seeded = request.method is not None and not request.greedy and method_named(request.method).seedable
    return [
        replace(like, request=replace(request, prompt=prompts[number % len(prompts)], seed=seed + number))
        if seeded
        else replace(like, request=replace(request, prompt=prompts[number % len(prompts)]))
        for number in range(count)
    ]


class LoadTest(Benchmark[LoadPlan, LoadRun]):
    """A test."""

    unit: ClassVar[str] = "requests"
    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """Raises UsageError. Of chats what their messages say: a model without a chat template has no others."""
        with checked_options():
            return tuple(str(one.content) for one in texts_of(read(self.plan.prompts)))

    @cached_property
    def like(self) -> Generate:
        """What all requests have in common; raises UsageError if no server would take it."""
        plan, k = self.plan, self.plan.num_speculative_tokens
        forced: dict[str, Any] = {} if k is None else {"overlap": Overlap.OFF, "num_speculative_tokens": k}
        with checked_options():
            sampling = SamplingOptions(plan.temperature)
            more = {"max_tokens": plan.max_tokens, "options": sampling, "ignore_eos": plan.ignore_eos, **forced}
            request = GenerationRequest("x", method=plan.method, **more)
            requested_method(request)
        return Generate(request, model=plan.model, drafter="" if plan.use_drafter == NO_DRAFTER else plan.use_drafter)

    @property
    def drafted(self) -> bool:
        return self.plan.use_drafter != NO_DRAFTER

    @property
    def addressed(self) -> bool:
        """Whether what is tested runs already."""
        there = self.plan.servers
        return bool(there.url or there.server or there.target or there.drafter)

    @cached_property
    def delays(self) -> tuple[float, ...]:
        """To the drafter, in ms, one way; raises UsageError."""
        return delays_of(self.plan.services.delay_ms or "0")

    @cached_property
    def models(self) -> dict[str, Served]:
        """Those that are started, by role; raises UsageError."""
        given = self.plan.services
        return {
            "target": Served(given.target_model, given.pace_target, engine=given.engine),
            "drafter": Served(given.drafter_model, given.pace_drafter, engine=given.engine),
        }

    @property
    def total(self) -> int:
        there, given = self.plan.servers, self.plan.services
        ways = len(given.over) + given.compare
        if self.addressed:
            ways = sum(map(bool, (there.url, there.server, there.target)))
        return ways * len(self.delays) * self.plan.repeat * self.plan.requests

    def described(self) -> dict[str, Any]:
        """Without addresses and keys."""
        return {name: value for name, value in super().described().items() if name != "servers"}

    def check(self) -> None:
        there, given = self.plan.servers, self.plan.services
        if self.addressed and (given.compare or given.delay_ms is not None):
            raise UsageError(
                "--compare and --delay-ms need services that this command starts: leave out --url, --server, --target "
                "and --drafter (a running server is compared by --target beside --url)"
            )
        for name, addresses in (("--server", there.server), ("--target", there.target), ("--drafter", there.drafter)):
            if addresses:
                check_addresses(name, addresses)
        if there.url:
            base_url(there.url)
        if there.target:
            tls_files(there)
        elif there.drafter:
            raise UsageError("--drafter has an address and --target has none; a server's is named by --use-drafter")
        _ = self.delays, self.models, self.prompts, self.like  # which raise UsageError

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[LoadRun, None]:
        async with aclosing(self.stages()) as stages:
            async for delay_ms, ways in stages:
                for way, stream in ways.items() if self.plan.warm_up else ():
                    advance(0, f"{way}, warm-up")
                    timelines = await self._made(stream, self.plan.warm_up, lambda: None)
                    if not any(one.ok for one in timelines):
                        error, fault = timelines[0].error, timelines[0].fault
                        raise CommandFailed(f"the first requests failed ({error}): {fault or 'no token came'}")
                advance(0, "" if delay_ms is None else f"{delay_ms:g} ms")
                made = {way: partial(self._made, stream, self.plan.requests, advance) for way, stream in ways.items()}
                found = await in_turns(list(ways), self.plan.repeat, lambda way, _, made=made: made[way]())  # type: ignore[misc]
                direct = found.get(IN_PROCESS)
                for way, each in found.items():
                    yield LoadRun.of(way, delay_ms, each, None if way == IN_PROCESS else direct)

    async def _made(self, stream: Stream, count: int, advance: Any) -> list[Output]:
        """The first `count` requests."""

        async def sent(asked: Generate) -> Output:
            timeline = await send(stream, asked, self.plan.timeout)
            advance()
            return timeline

        return await gathered(sent, requests_over(self.prompts, count, self.like, self.plan.seed), self.plan.clients)

    async def stages(self) -> Stages:
        """One of servers and services that run already, or one for each delay to the drafter, each with a server of its
        own, over services that run throughout.

        Raises:
            ServiceError, CommandFailed: a service cannot be used.
        """
        there, given, distant = self.plan.servers, self.plan.services, any(self.delays)
        if self.addressed:
            async with streams_of(there if self.drafted else replace(there, drafter="")) as ways:
                yield None, ways
            return
        async with (
            service("target", self.models["target"], 0, False) as target,
            service("drafter", self.models["drafter"], 1, distant) as drafter,
        ):
            for delay in self.delays:
                await drafter.delay(delay)
                server = HttpServer(target.address, drafter.address, max(MIN_OUTPUTS, self.plan.clients))
                async with running([server]) as (front,):
                    servers = ExistingServers(
                        url=f"http://{front.address}" if Over.HTTP in given.over else "",
                        server=front.ready["grpc"] if Over.GRPC in given.over else "",
                        target=target.address if given.compare else "",
                        drafter=drafter.address if given.compare and self.drafted else "",
                    )
                    async with streams_of(servers) as ways:
                        yield delay if distant else None, ways

    def report(self, results: Sequence[LoadRun]) -> Iterator[Table | str]:
        yield Table.of(results, SEEN).turned()
        for role in ROLES:
            yield from _parts(f"orchestrator and {role}", results, HOP, lambda one, role=role: _hop(one, role))
        yield from _parts(f"added to {IN_PROCESS}", results, ADDED, attrgetter("added"))
        for run in results:
            if run.errors:
                counted = ", ".join(f"{count} {kind}" for kind, count in run.errors.items())
                said = "; ".join(f"{kind}: {text}" for kind, text in sorted(run.faults.items()))
                yield f"{run.name}: {sum(run.errors.values())} of {run.requests} requests failed: {counted}. {said}"

    def finish(self, results: Sequence[LoadRun]) -> None:
        if not any(run.requests > sum(run.errors.values()) for run in results):
            raise CommandFailed("no request was answered")


def _hop(run: LoadRun, role: str) -> Any:
    return next((hop for hop in run.hops if hop.role == role), None)


def _parts(title: str, results: Sequence[LoadRun], columns: Columns, part: Any) -> Iterator[Table]:
    """A table of a part of the results, if any has it."""
    found = [(run.name, part(run)) for run in results if part(run) is not None]
    named = {title: lambda one: one[0]} | {name: lambda one, of=of: of(one[1]) for name, of in columns.items()}
    if found:
        yield Table.of(found, named).turned()


@asynccontextmanager
async def streams_of(given: ExistingServers) -> AsyncIterator[dict[str, Stream]]:
    """Of each server, and of a pipeline of targets, by their names. Raises ServiceError and CommandFailed."""
    async with AsyncExitStack() as stack:
        ways: dict[str, Stream] = {}
        if given.url:
            try:
                ways[HTTP] = await stack.enter_async_context(http_stream(base_url(given.url), given.api_key))
            except ImportError as error:
                raise CommandFailed(f"HTTP {needs_extra('http')}; or use gRPC (--over grpc, --server)") from error
        if given.server:
            ca = None if given.target else given.tls_ca  # with --target, --tls-... are for the services
            with checked_options():
                tls = None if ca is None else trusting_credentials(ca)
            server = await stack.enter_async_context(Client(given.server, given.api_key, tls))
            ways[GRPC] = partial(generated, lambda asked: server.run(asked.request, asked.model, asked.drafter))
        if given.target:
            drafters, files = given.drafter or None, tls_files(given)
            services = connect(given.target, drafters, patience(), needs_drafter=drafters is not None, tls=files)
            pipeline = await stack.enter_async_context(services)
            ways[IN_PROCESS] = partial(generated, lambda asked: pipeline.run(asked.request))
        yield ways
