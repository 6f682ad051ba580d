"""Processes that a command starts: services, which end with it, and workers that share a port, die, return and end."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from crossdraft.cli import processes
from crossdraft.cli.processes import Wanted, running
from crossdraft.cli.running import CommandFailed, Interrupted, UsageError, run_to_end
from crossdraft.cli.workers import Worker, Workers, reserved
from crossdraft.config.engine import EngineOptions
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.errors import CannotListen
from tests.cli.conftest import Cli, metric, serving
from tests.rpc.clock import HANGS, until

READY = """
import json, os, signal
print(json.dumps({"address": str(os.getpid())}), flush=True)
signal.pause()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + READY


@dataclass(frozen=True)
class Program(Wanted):
    """In place of a service: a program whose address is its process id."""

    program: str = READY

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


def wanted(program: str = READY, role: str = "target") -> Program:
    return Program(role, "", 1, program=program)


def alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "typed", "captured"),
    [
        ({}, (), None),
        ({"cuda_graph_sizes": (1, 8)}, ("--cuda-graph-sizes", "1,8"), (1, 8)),
        ({"cuda_graph_sizes": (1,), "enforce_eager": True}, ("--enforce-eager", "--cuda-graph-sizes", "1"), ()),
    ],
)
def test_sizes_of_graphs_reach_a_model(given: dict[str, Any], typed: tuple[str, ...], captured: object) -> None:
    options = EngineOptions(**given)
    assert options.arguments == typed
    assert ModelOptions.of("bundled:target", options).graph_sizes == captured


async def test_they_run_for_the_time_of_the_block() -> None:
    async with running([wanted(), wanted(role="drafter")]) as found:
        assert [alive(one.address) for one in found] == [True, True]
    assert [alive(one.address) for one in found] == [False, False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_them(number: signal.Signals) -> None:
    started: list[str] = []

    async def work() -> None:
        async with running([wanted(), wanted()]) as found:
            started.extend(one.address for one in found)
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()

    with pytest.raises(Interrupted) as raised:
        run_to_end(work())
    assert raised.value.number == number
    assert [alive(address) for address in started] == [False, False]


def test_a_signal_that_is_ignored_as_by_nohup_stays_so() -> None:
    async def work() -> None:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run_to_end(work())
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_one_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_SECONDS", 0.05)
    async with running([wanted(STUBBORN)]) as (found,):
        pass
    assert not alive(found.address)


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ("import sys; sys.exit('noise\\ncrossdraft: the reason')", CommandFailed, "the reason"),
        ("import sys; print('crossdraft: the reason', file=sys.stderr); sys.exit(2)", UsageError, "the reason"),
        ("pass", CommandFailed, "it printed no error"),
    ],
)
async def test_one_that_does_not_start_is_quoted_and_ends_the_others(tmp_path, program, error, said) -> None:
    """What is wrong with its options is wrong usage here, too."""
    note = tmp_path / "note"
    first = f"import os; open({str(note)!r}, 'w').write(str(os.getpid()))\n{READY}"
    with pytest.raises(error, match=f"the drafter did not start: {said}"):
        async with running([wanted(first), wanted(program, "drafter")]):
            raise AssertionError("it cannot have started")
    assert not alive(note.read_text())


async def test_one_that_is_slow_is_waited_for_and_asked_while_it_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    noted = tmp_path / "noted"
    monkeypatch.setattr(processes, "NOTE_SECONDS", 0.001)
    monkeypatch.setattr(processes, "print", lambda text, file: noted.write_text(text), raising=False)
    assert not processes.patience().lives("1")
    slow = f"import os\nwhile not os.path.exists({str(noted)!r}): pass\n{READY}"
    async with running([wanted(slow)]) as (found,):
        assert processes.patience(target_seconds=7.0).target_seconds == 7
        assert processes.patience().lives(found.address)
        os.kill(found.process_id, signal.SIGKILL)
        await until(lambda: not processes.patience().lives(found.address))
    assert "the target is still starting" in noted.read_text()


STREAMS = 20  # that they all reach the same of two workers happens once in 500,000 runs
FEW = 4
TOKENS = 40


Supervised = tuple["subprocess.Popen[str]", dict[str, Any]]  # the process, and its ready line


def supervised(kind: str, target: str, *options: object, status: int = 0) -> AbstractContextManager[Supervised]:
    """A server with two workers; it is ended with the block, and must end with this status."""
    own = ("--target", target, "--model", "toy", "--port", 0, "--workers", 2, "--log-level", "warning")
    return serving(kind, *own, *options, status=status)


def logged(process: "subprocess.Popen[str]", pattern: str) -> "re.Match[str]":
    """The first line of its log from now on in which this is found."""
    return next(found for line in process.stderr if (found := re.search(pattern, line)))


def begun(address: str) -> tuple[openai.OpenAI, Any, str]:
    """A stream on a connection of its own, and what came with its first chunk."""
    own = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=120)
    stream = own.completions.create(
        model="toy", prompt="Say", max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return own, stream, next(stream).choices[0].text


def rest(stream: Any, text: str) -> str | None:
    """The whole text of a stream that was begun; None if it broke off."""
    try:
        for chunk in stream:
            text += chunk.choices[0].text
    except (openai.APIError, httpx.HTTPError):
        return None
    return text


def test_one_that_is_killed_comes_back_while_streams_of_the_other_go_on_and_all_are_drained(slow: str) -> None:
    with supervised("http", slow, "--max-outputs", 2 * STREAMS, "--grace-seconds", 120) as (process, ready):
        (first, _), address = ready["workers"], ready["address"]
        streams = [begun(address) for _ in range(STREAMS)]
        os.kill(first, signal.SIGKILL)
        texts = [rest(stream, text) for _, stream, text in streams]
        whole = [text for text in texts if text is not None]
        assert whole
        assert len(set(whole)) == 1  # greedy, of one prompt
        assert logged(process, r"worker (\d+) died with status -9")[1] == str(first)
        assert logged(process, r"worker \d+ serves in the place of (\d+)")[1] == str(first)
        again = [begun(address) for _ in range(FEW)]
        assert [rest(stream, text) for _, stream, text in again] == [whole[0]] * FEW
        # One that was killed may have counted an output whose last bytes never left it.
        assert len(whole) + FEW <= metric(address, "request_success_total") <= STREAMS + FEW
        last = [begun(address) for _ in range(FEW)]
        process.terminate()  # all are drained
        assert [rest(stream, text) for _, stream, text in last] == [whole[0]] * FEW
        for own, *_ in (*streams, *again, *last):
            own.close()
        process.wait()  # or the signal at the end of the block would be a second one, which kills it


def test_grpc_with_metrics_of_all_and_workers_that_do_not_end_well(cli: Cli, slow: str) -> None:
    with supervised("grpc", slow, "--metrics-port", 0, "--grace-seconds", 120, status=1) as (process, ready):
        made = [cli("generate", "--server", ready["address"], "--max-tokens", 4, "Say") for _ in range(4)]
        assert [one.code for one in made] == [0] * 4
        assert metric(ready["metrics"], "request_success_total") == 4
        for worker in ready["workers"]:
            os.kill(worker, signal.SIGSTOP)
        process.terminate()
        assert process.poll() is None  # it waits for them
        for worker in ready["workers"]:
            os.kill(worker, signal.SIGKILL)
        process.wait()


async def test_a_worker_may_print_before_and_after_its_ready_line() -> None:
    """Libraries do. Where nobody reads, the worker stops as soon as the pipe is full."""
    printing = r"print('hello\n{\"ready\": true}', flush=True); print('x' * 2**22)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", printing, stdout=asyncio.subprocess.PIPE)
    worker = Worker(process)
    try:
        assert await Workers(1, "127.0.0.1", {}, 10.0, (), {}, print)._readiness(worker) is None
        assert worker.ready == {"ready": True}
        assert await asyncio.wait_for(process.wait(), HANGS) == 0
    finally:
        if process.returncode is None:
            process.kill()


def test_what_cannot_be_served(cli: Cli) -> None:
    pair = ("--target", "127.0.0.1:9", "--model", "toy")
    cli("serve", "http", *pair, "--workers", 0).failed("--workers must be at least 1, got 0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cli("serve", "grpc", *pair, "--workers", 2, "--port", port).failed("choose another port", code=1)


def test_a_reserved_port_is_for_those_who_share_it() -> None:
    with reserved("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with socket.create_server(("127.0.0.1", port), reuse_port=True), pytest.raises(CannotListen):
            reserved("127.0.0.1", port)
