"""The command, and a pair of services, in this process."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import pytest

from crossdraft.cli.app import main
from crossdraft.client import discovery
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.server import Listening, Serving
from crossdraft.target.service import ServeTarget, target_server
from tests.rpc.unhurried import unhurry
from tests.services.conftest import drafter_folder, one_thread, target_folder, unhurried

__all__ = ["drafter_folder", "one_thread", "target_folder", "unhurried"]
COMMAND = [sys.executable, "-m", "crossdraft.cli"]
AT_ONCE = Listening(grace_seconds=0)
Pair = dict[str, str]  # addresses by role


@pytest.fixture(autouse=True)
def others_awaited(unhurried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service is done without because the machine stands still for seconds."""
    monkeypatch.setattr(discovery, "OTHERS_SECONDS", Patience().describe_seconds)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its output as lines of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    def failed(self, complaint: str, code: int = 2) -> None:
        """Asserts that it ended with this code, printed nothing, and said this."""
        assert (self.code, self.out) == (code, "")
        assert complaint in self.err


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs the command in this process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def run(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@contextmanager
def serving(role: str, folder: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A service's process and its ready line; it is ended with the block."""
    # Nobody reads what it logs of sessions while they run: a pipe that is full would stop the service.
    quiet = () if "--log-level" in options else ("--log-level", "warning")
    own = ("--model", str(folder), "--threads", "1", "--grace-seconds", "0", *quiet)
    command = [*COMMAND, "serve", role, *own, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.terminate()


@contextmanager
def in_a_thread(target: Callable[[], Awaitable[Serving]], drafter: Callable[[], Awaitable[Serving]]) -> Iterator[Pair]:
    """Addresses of a target and a drafter that run in a thread of this process for the time of the block."""
    ready: SimpleQueue[Pair] = SimpleQueue()
    over = Event()

    async def serve() -> None:
        async with await target() as first, await drafter() as second:
            ready.put({"target": first.address, "drafter": second.address})
            await asyncio.to_thread(over.wait)

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield ready.get(timeout=300)
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="session")
def addresses(target_folder: Path, drafter_folder: Path) -> Iterator[Pair]:
    """Of a running target and a running drafter with different vocabularies."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        unhurry(patch)
        found = stack.enter_context(
            in_a_thread(
                lambda: target_server(ServeTarget(ModelOptions(str(target_folder), threads=1), AT_ONCE)),
                lambda: drafter_server(ServeDrafter(ModelOptions(str(drafter_folder), threads=1), AT_ONCE)),
            )
        )
        patch.undo()
        yield found


@pytest.fixture(scope="session")
def target(addresses: Pair) -> str:
    """The address of the target."""
    return addresses["target"]


@pytest.fixture(scope="session")
def pair(addresses: Pair) -> tuple[str, ...]:
    """The options that name the running pair."""
    return "--target", addresses["target"], "--drafter", addresses["drafter"]
