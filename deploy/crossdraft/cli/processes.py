"""Services as processes of this command, which end when it does."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from crossdraft.cli.running import CommandFailed, UsageError
from crossdraft.config.engine import STARTED, EngineOptions

if TYPE_CHECKING:
    from crossdraft.rpc.clients import Patience

NOTE_SECONDS = 120.0  # between two notes that a service is still starting
END_SECONDS = 5.0  # between SIGTERM and SIGKILL
STDIN = 0  # file descriptor
MODEL, DRAFTER = "loadtest", "drafter"  # the names that a started server has for its models
MIN_OUTPUTS = 64  # --max-outputs of a started server, at least


_processes: dict[str, Process] = {}  # of services that became ready, by address


@dataclass(frozen=True)
class Wanted:
    """A service to start on loopback, on any free port."""

    role: str  # target or drafter
    model: str
    threads: int  # unless `engine` names a number
    more: tuple[str, ...] = ()  # options
    prefix: tuple[str, ...] = ()  # a command that runs it: on another host, on some cores
    engine: EngineOptions = STARTED

    def command(self) -> list[str]:
        """As it would be typed. It ends with its standard input, also if this process is killed."""
        options = ["--model", self.model, "--threads", str(self.threads), "--grace-seconds", "0", "--until-stdin-ends"]
        options += [*self.engine.arguments, *self.more]
        return [*self.prefix, sys.executable, "-m", "crossdraft.cli", "serve", self.role, *options]


@dataclass(frozen=True)
class HttpServer:
    """`crossdraft serve http`, with gRPC beside it, on any free ports."""

    target: str  # host:port
    drafter: str  # likewise; empty: none
    max_outputs: int
    role: str = "front"

    def command(self) -> list[str]:
        """The command line. The server ends with its standard input, so it does not outlive this process."""
        services = ["--target", self.target, "--model", MODEL]
        services += ["--drafter", f"{DRAFTER}={self.drafter}"] if self.drafter else []
        where = ["--port", "0", "--grpc-port", "0", "--max-outputs", str(self.max_outputs)]
        ends = ["--grace-seconds", "0", "--until-stdin-ends", "--log-level", "warning"]
        return [sys.executable, "-m", "crossdraft.cli", "serve", "http", *services, *where, *ends]


Startable = Wanted | HttpServer  # they print their address in a line of JSON, and end when their standard input does


@dataclass(frozen=True, eq=False)
class StartedProcess:
    """The process of a service, perhaps not ready yet."""

    wanted: Startable
    process: Process
    log: IO[bytes]  # what it writes on stderr

    async def ready(self) -> dict[str, str]:
        """Its ready line, once it listens; it is waited for as long as its process lives.

        Raises:
            UsageError, CommandFailed: it ended so; the text has the last line of its stderr.
        """
        assert self.process.stdout is not None
        reading = asyncio.ensure_future(self.process.stdout.readline())
        while not (await asyncio.wait([reading], timeout=NOTE_SECONDS))[0]:
            print(f"crossdraft: the {self.wanted.role} is still starting", file=sys.stderr)
        if not (line := reading.result()):
            wrong = await self.process.wait() == UsageError.exit_code  # then it is in what this command was given
            raise (UsageError if wrong else CommandFailed)(f"the {self.wanted.role} did not start: {self._last_line()}")
        return {name: str(value) for name, value in json.loads(line).items()}

    def _last_line(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", "replace").split("\n")
        return next(
            (line.removeprefix("crossdraft: ") for line in reversed(lines) if line.strip()), "it printed no error"
        )

    async def end(self) -> None:
        await ended(self.process, END_SECONDS)
        self.log.close()


@dataclass(frozen=True)
class Running:
    """A service that is ready."""

    address: str
    process_id: int
    ready: Mapping[str, str] = field(default_factory=dict)  # all of its ready line


@asynccontextmanager
async def running(wanted: Sequence[Startable]) -> AsyncIterator[list[Running]]:
    """Starts services side by side; ends them at the end of the block.

    Raises:
        CommandFailed: one of them does not start.
    """
    started: list[StartedProcess] = []
    try:
        for one in wanted:
            started.append(await _start(one))
        ready = [await one.ready() for one in started]
        _processes.update((line["address"], one.process) for one, line in zip(started, ready, strict=True))
        yield [Running(line["address"], one.process.pid, line) for one, line in zip(started, ready, strict=True)]
    finally:
        # Shielded, so that a second signal leaves no process behind.
        await asyncio.shield(asyncio.gather(*(one.end() for one in started)))


def patience(**seconds: float) -> "Patience":
    """Of clients of services that may be in this process or started by it: these are asked until they answer or end."""
    from crossdraft.rpc.clients import Patience
    from crossdraft.rpc.memory import serves

    def lives(address: str) -> bool:
        return serves(address) or (address in _processes and _processes[address].returncode is None)

    return Patience(**seconds, lives=lives)


async def _start(wanted: Startable) -> StartedProcess:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the service has ended
    return StartedProcess(wanted, await launched(wanted.command(), stderr=log), log)


async def launched(command: Sequence[str], **given: Any) -> Process:
    """A process in a process session of its own: Ctrl-C reaches this one alone, which then ends it."""
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True, **given)


async def ended(process: Process, seconds: float) -> int:
    """The status of a process, by SIGTERM, and by SIGKILL if it has not ended then."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        return await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        process.kill()
        return await process.wait()


def threads_each(count: int) -> int:
    return max(1, (os.cpu_count() or 1) // max(1, count))


def end_with_stdin() -> None:
    """Ends this process as SIGTERM does when its standard input ends."""
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def base_url(url: str, option: str = "--url") -> str:
    """The URL of a server without `/v1` and slashes at its end.

    Raises:
        UsageError: this is not http://HOST[:PORT][/PATH] or the same with https.
    """
    complaint = f"{option} must be such as http://127.0.0.1:8000, got {url}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except ValueError as error:
        raise UsageError(complaint) from error
    if not known or parts.query or parts.fragment:
        raise UsageError(complaint)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def check_addresses(option: str, given: str) -> None:
    """Raises UsageError unless it is host:port, or several with commas between."""
    for one in given.split(","):
        check_address(option, one.strip())


def check_address(option: str, address: str) -> None:
    """Raises UsageError unless it is host:port."""
    if not address:
        raise UsageError(f"{option} has an empty address: remove the extra comma")
    scheme, separator, _ = address.partition("://")
    if separator:
        raise UsageError(f"{option} must be HOST:PORT, without {scheme}://, got {address!r}")
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{option} must be HOST:PORT, such as 127.0.0.1:7001, got {address!r}")
