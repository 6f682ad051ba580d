"""Services as processes of this command, which end when it does."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from crossdraft.cli.running import CommandFailed, UsageError
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.config.fields import fault_of_address

if TYPE_CHECKING:
    from crossdraft.rpc.links import Patience

NOTE_SECONDS = 120.0  # between two notes that a service is still starting
END_SECONDS = 5.0  # between SIGTERM and SIGKILL
STDIN = 0  # file descriptor
MODEL, DRAFTER = "loadtest", "drafter"  # the names that a started server has for its models
MIN_OUTPUTS = 64  # --max-outputs of a started server, at least
_processes: dict[str, Process] = {}  # of services that became ready, by address


@dataclass(frozen=True)
class Wanted:
    """A server to start on loopback, on any free port. It prints its address in a line of JSON."""

    role: str  # target, drafter or http
    model: str
    threads: int  # unless `engine` names a number; 0: none is named
    more: tuple[str, ...] = ()  # options
    prefix: tuple[str, ...] = ()  # a command that runs it: on another host, on some cores
    engine: EngineOptions = STARTED

    def command(self) -> list[str]:
        """As it would be typed. It ends with its standard input, also if this process is killed."""
        options = ["--model", self.model, *(("--threads", str(self.threads)) if self.threads else ())]
        options += ["--grace-seconds", "0", "--until-stdin-ends", *self.engine.arguments, *self.more]
        return [*self.prefix, sys.executable, "-m", "crossdraft", "serve", self.role, *options]


def http_server(target: str, drafter: str = "", max_outputs: int = 0) -> Wanted:
    """`crossdraft serve http` over services at these addresses; without a drafter if that is empty."""
    drafters = ("--drafter", f"{DRAFTER}={drafter}") if drafter else ()
    most = "--max-outputs", str(max(MIN_OUTPUTS, max_outputs))
    options = ("--target", target, *drafters, "--port", "0", "--grpc-port", "0", *most, "--log-level", "warning")
    return Wanted("http", MODEL, 0, options, engine=EngineOptions())


@dataclass(frozen=True)
class Running:
    """A service that is ready."""

    address: str
    process_id: int
    ready: Mapping[str, str] = field(default_factory=dict)  # all of its ready line


@asynccontextmanager
async def running(wanted: Sequence[Wanted]) -> AsyncIterator[list[Running]]:
    """Starts servers side by side; ends them at the end of the block. Raises UsageError, CommandFailed: one of them
    does not start; the text has the last line of its stderr."""
    started: list[tuple[str, Process, IO[bytes]]] = []
    try:
        for one in wanted:
            log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the server has ended
            started.append((one.role, await launched(one.command(), stderr=log), log))
        found = []
        for role, process, said in started:
            line = await _ready(role, process, said)
            _processes[line["address"]] = process
            found.append(Running(line["address"], process.pid, line))
        yield found
    finally:
        # Shielded, so that a second signal leaves no process behind.
        await asyncio.shield(asyncio.gather(*(ended(process, END_SECONDS) for _, process, _ in started)))
        for *_, said in started:
            said.close()


async def _ready(role: str, process: Process, log: IO[bytes]) -> dict[str, str]:
    """The ready line of a process that has begun, once it listens; it is waited for as long as the process lives."""
    assert process.stdout is not None
    reading = asyncio.ensure_future(process.stdout.readline())
    while not (await asyncio.wait([reading], timeout=NOTE_SECONDS))[0]:
        print(f"crossdraft: the {role} is still starting", file=sys.stderr)
    if line := reading.result():
        return {name: str(value) for name, value in json.loads(line).items()}
    kind = UsageError if await process.wait() == UsageError.exit_code else CommandFailed  # as this command would
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "it printed no error")
    raise kind(f"the {role} did not start: {said.removeprefix('crossdraft: ')}")


def patience(**seconds: float) -> "Patience":
    """Of clients of services that may be in this process or started by it: these are asked until they answer or end."""
    from crossdraft.rpc.links import Patience
    from crossdraft.rpc.memory import serves

    def lives(address: str) -> bool:
        return serves(address) or (address in _processes and _processes[address].returncode is None)

    return Patience(**seconds, lives=lives)


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
    """Without `/v1` and slashes at its end. Raises UsageError unless it is http(s)://HOST[:PORT][/PATH]."""
    complaint = f"{option} must be such as http://127.0.0.1:8000, got {url}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except ValueError as error:
        raise UsageError(complaint) from error
    if not known or parts.query or parts.fragment:
        raise UsageError(complaint)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def checked_addresses(option: str, given: Iterable[str]) -> tuple[str, ...]:
    """Each once. Raises UsageError unless all are host:port."""
    found = tuple(dict.fromkeys(one.strip() for one in given))
    for one in found:
        check_address(option, one)
    return found


def check_address(option: str, address: str) -> None:
    """Raises UsageError unless it is host:port."""
    if not address:
        raise UsageError(f"{option} has an empty address: remove the extra comma")
    if fault := fault_of_address(address):
        raise UsageError(f"{option} {fault}")
