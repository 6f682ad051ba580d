"""Services as processes of this command, which end when it does."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from crossdraft.console.options import COMMAS, option
from crossdraft.console.running import CommandFailed, UsageError

if TYPE_CHECKING:
    from crossdraft.engine.kv_cache import MemoryShare
    from crossdraft.engine.served_model import ModelOptions
    from crossdraft.rpc.clients import Patience

NOTE_SECONDS = 120.0  # between two notes that a service is still starting
END_SECONDS = 5.0  # between SIGTERM and SIGKILL
DEFAULT_DRAFTER = "drafter-b"
STDIN = 0  # file descriptor
MODEL, DRAFTER = "loadtest", "drafter"  # the names that a started server has for its models
MIN_OUTPUTS = 64  # --max-outputs of a started server, at least


@dataclass(frozen=True)
class ModelNames:
    """The target and the drafter that a command starts if it is given no address, as `--model` has them."""

    target: str = "bundled:target"
    drafter: str = f"bundled:{DEFAULT_DRAFTER}"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """With what services run their models, but which models; those that a command starts have them all alike."""

    dtype: str = option("auto", "auto, float32, bfloat16 or float16.")
    quantization: str | None = option(
        None, "int8: weights become 8-bit integers when they are loaded (needs torchao).", metavar="METHOD"
    )
    device: str = option("auto", "auto (CUDA if there is one, else cpu), or a torch device, such as cuda:0.")
    cache_mib: int | None = option(
        None,
        "Size of the KV cache in MiB, allocated at start. By default what --gpu-memory-utilization leaves, on a CPU "
        "half of the free memory, but no more than all sessions can use.",
        envvar="CROSSDRAFT_CACHE_MIB",
        show_envvar=True,
    )
    gpu_memory_utilization: float = option(0.9, "Without --cache-mib: share of a GPU's memory that may be in use.")
    enable_prefix_caching: bool = option(
        True,
        "Reuse the KV cache of a session for another one that begins with the same text.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    )
    enforce_eager: bool = option(False, "Do not compile the model, nor use CUDA graphs.", "--enforce-eager")
    cuda_graph_sizes: tuple[int, ...] = option(
        (),
        "Tokens of the forwards that are captured as CUDA graphs at start, to which others are rounded up; "
        f"{COMMAS}. By default 1, 2, 4, 8, 16, 24, … up to what a step computes, as memory allows.",
        metavar="TOKENS",
    )
    max_model_len: int | None = option(
        None, "Max tokens of a session; by default the model's context length, or what the KV cache holds."
    )
    threads: int | None = option(None, "Threads of torch; by default torch decides.")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.", "--trust-remote-code")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those that are not the default, as they would be typed."""
        changed = [(one.name, getattr(self, one.name)) for one in fields(self)]
        changed = [(name, value) for name, value in changed if value != getattr(EngineOptions, name, None)]
        return tuple(text for name, value in changed for text in _typed(name.replace("_", "-"), value))

    def model_options(self, name: str, budget: "int | MemoryShare", **more: Any) -> "ModelOptions":
        """Of a model that runs in this process; `budget` of its KV cache unless `cache_mib` is set."""
        from crossdraft.engine.served_model import ModelOptions

        return ModelOptions(
            name,
            self.dtype,
            self.device,
            budget if self.cache_mib is None else self.cache_mib,
            self.max_model_len,
            self.trust_remote_code,
            self.threads,
            reuse=self.enable_prefix_caching,
            eager=self.enforce_eager,
            graph_sizes=self.cuda_graph_sizes or None,
            quantization=self.quantization,
            **more,
        )


def _typed(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (f"--{'' if value else 'no-'}{name}",)
    return f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


STARTED = EngineOptions(cache_mib=512)  # of services that a command starts for itself
DEMO = EngineOptions(device="cpu", cache_mib=256, threads=1)  # a thread for each model: alike on every machine
_processes: dict[str, asyncio.subprocess.Process] = {}  # of services that became ready, by address


class Startable(Protocol):
    """A server's command line. It prints its address in a line of JSON, and ends when its standard input does."""

    @property
    def role(self) -> str:
        """What error texts call it."""
        ...

    def command(self) -> list[str]:
        """As it would be typed."""
        ...


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


@dataclass(frozen=True, eq=False)
class StartedProcess:
    """The process of a service, perhaps not ready yet."""

    wanted: Startable
    process: asyncio.subprocess.Process
    log: IO[bytes]  # what it writes on stderr

    async def ready(self) -> dict[str, str]:
        """Its ready line, once it listens; it is waited for as long as its process lives.

        Raises:
            CommandFailed: it ended; the text has the last line of its stderr.
        """
        assert self.process.stdout is not None
        reading = asyncio.ensure_future(self.process.stdout.readline())
        while not (await asyncio.wait([reading], timeout=NOTE_SECONDS))[0]:
            print(f"crossdraft: the {self.wanted.role} is still starting", file=sys.stderr)
        if not (line := reading.result()):
            raise CommandFailed(f"the {self.wanted.role} did not start: {self._last_line()}")
        return {name: str(value) for name, value in json.loads(line).items()}

    def _last_line(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", "replace").split("\n")
        return next(
            (line.removeprefix("crossdraft: ") for line in reversed(lines) if line.strip()), "it printed no error"
        )

    async def end(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), END_SECONDS)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
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
    pipe = asyncio.subprocess.PIPE
    # In a process session of its own: Ctrl-C reaches this process alone, which then ends the service.
    process = await asyncio.create_subprocess_exec(
        *wanted.command(), stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
    )
    return StartedProcess(wanted, process, log)


def threads_each(count: int) -> int:
    return max(1, (os.cpu_count() or 1) // max(1, count))


def end_with_stdin() -> None:
    """Ends this process as SIGTERM does when its standard input ends."""
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


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
