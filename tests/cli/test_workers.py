"""`crossdraft serve http --workers` and `serve grpc --workers`: processes that share a port, die, return and end."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import openai
import pytest

from crossdraft.cli.workers import Worker, Workers, reserved
from crossdraft.rpc.errors import CannotListen
from tests.cli.conftest import COMMAND, Cli
from tests.rpc.clock import HANGS

STREAMS = 20  # that they all reach the same of two workers happens once in 500,000 runs
FEW = 4
TOKENS = 40


@dataclass
class Supervised:
    """A command that serves with several workers."""

    process: "subprocess.Popen[str]"
    ready: dict[str, Any]
    told: bool = False  # to end

    def end(self) -> None:
        """Tells it to, once: a second signal would kill it where it has drained and is just exiting."""
        if not self.told:
            self.told = True
            self.process.send_signal(signal.SIGTERM)

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    def logged(self, pattern: str) -> "re.Match[str]":
        """The first line of its log from now on in which this is found."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it ended and never logged {pattern}")


@contextmanager
def supervised(kind: str, target: str, *options: object, status: int = 0) -> Iterator[Supervised]:
    """A server with two workers; it is ended with the block, and must end with this status."""
    own = ("--target", target, "--model", "toy", "--port", "0", "--workers", "2", "--log-level", "warning")
    command = [*COMMAND, "serve", kind, *own, *map(str, options)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        server = Supervised(process, json.loads(process.stdout.readline() or "{}"))
        try:
            yield server
        finally:
            server.end()
            _, log = process.communicate()
    assert (process.returncode, "Traceback" in log) == (status, False), log


def client(server: Supervised) -> openai.OpenAI:
    """With connections of its own."""
    return openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0, timeout=120)


def begun(server: Supervised) -> tuple[openai.OpenAI, Any, str]:
    """A stream on a connection of its own, and what came with its first chunk."""
    own = client(server)
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


def successes(address: str) -> float:
    """Outputs that ended well, of all workers."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("crossdraft_request_success_total{"))


def test_one_that_is_killed_comes_back_while_streams_of_the_other_go_on_and_all_are_drained(slow: str) -> None:
    with supervised("http", slow, "--max-outputs", 2 * STREAMS, "--grace-seconds", 120) as server:
        first, second = server.ready["workers"]
        streams = [begun(server) for _ in range(STREAMS)]
        os.kill(first, signal.SIGKILL)
        texts = [rest(stream, text) for _, stream, text in streams]
        whole = [text for text in texts if text is not None]
        assert whole
        assert len(set(whole)) == 1  # greedy, of one prompt
        assert server.logged(r"worker (\d+) died with status -9")[1] == str(first)
        assert server.logged(r"worker \d+ serves in the place of (\d+)")[1] == str(first)
        assert server.ready["workers"] == [first, second]
        again = [begun(server) for _ in range(FEW)]
        assert [rest(stream, text) for _, stream, text in again] == [whole[0]] * FEW
        # One that was killed may have counted an output whose last bytes never left it.
        assert len(whole) + FEW <= successes(server.address) <= STREAMS + FEW
        last = [begun(server) for _ in range(FEW)]
        server.end()  # all are drained
        assert [rest(stream, text) for _, stream, text in last] == [whole[0]] * FEW
        for own, *_ in (*streams, *again, *last):
            own.close()


def test_grpc_with_metrics_of_all_and_workers_that_do_not_end_well(cli: Cli, slow: str) -> None:
    with supervised("grpc", slow, "--metrics-port", 0, "--grace-seconds", 120, status=1) as server:
        made = [cli("generate", "--server", server.address, "--max-tokens", 4, "Say") for _ in range(4)]
        assert [one.code for one in made] == [0] * 4
        assert successes(server.ready["metrics"]) == 4
        for process in server.ready["workers"]:
            os.kill(process, signal.SIGSTOP)
        server.end()
        assert server.process.poll() is None  # it waits for them
        for process in server.ready["workers"]:
            os.kill(process, signal.SIGKILL)


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
