"""What a load test asks: servers that run already, or services that are started on hosts at a distance."""

import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.generate import check_address
from crossdraft.cli.overlap_stage import Distant, Served, service
from crossdraft.cli.processes import running
from crossdraft.cli.running import checked_options
from crossdraft.loadtest.hearing import Way
from crossdraft.loadtest.in_process import InProcess
from crossdraft.loadtest.origin import Origin
from crossdraft.loadtest.over_grpc import OverGrpc
from crossdraft.pipeline import connect
from crossdraft.rpc.generation_client import GenerationClient
from crossdraft.rpc.security import TlsFiles, trusting_credentials

HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"
MODEL, DRAFTER = "loadtest", "drafter"  # the names that a front of a test has for them
MISSING = "HTTP needs the extra `serve`: install crossdraft with it, or use gRPC (--over grpc, --server)"


@dataclass(frozen=True, eq=False)
class Stage:
    """Ways to have the same outputs made, under one delay."""

    delay_ms: float | None  # None: nothing is emulated
    ways: Mapping[str, Way]  # by name


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
        from crossdraft.loadtest.http_stream import HttpStreams
        from crossdraft.loadtest.over_http import OverHttp
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
