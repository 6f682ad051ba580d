"""The examples of clients, run against a server."""

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.client import SamplingOptions
from crossdraft.rpc.errors import Overloaded
from crossdraft.rpc.server import Listening
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.http import make_app
from crossdraft.serving.http.server import HttpServer
from crossdraft.serving.limits import GenerationOptions, Keys
from crossdraft.types.messages import LeftOut
from tests.serving.fakes import TOY, FakeBackend

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
JAVASCRIPT = EXAMPLES / "javascript"
KEY = "alice-0123456789abcdef"
ASKED = ("Hello", "--key", KEY, "--seed", str(2**64 - 1), "--temperature", "0.5", "--max-tokens", "9")
NODE = shutil.which("node")
LANGUAGES = [
    pytest.param((sys.executable, str(EXAMPLES / "generate.py")), id="python"),
    pytest.param(
        (NODE or "node", str(JAVASCRIPT / "generate.js")),
        id="javascript",
        marks=pytest.mark.skipif(
            NODE is None or not (JAVASCRIPT / "node_modules").exists(),
            reason="needs node, and `npm ci` in deploy/examples/javascript",
        ),
    ),
]


async def test_the_failover_of_the_documents_has_the_whole_text_from_another_front() -> None:
    said = (EXAMPLES.parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
    code = said.partition("```python\n")[2].partition("```")[0]
    model = replace(TOY, name="crossdraft-bundled")
    cut, whole = FakeBackend(served=(model,), waits_after=1), FakeBackend(served=(model,))
    async with AsyncExitStack() as stack:
        servers = [HttpServer(make_app(one), Listening(grace_seconds=0)) for one in (cut, whole)]
        for number, server in enumerate(servers):
            await stack.enter_async_context(server)
            code = code.replace(f"192.168.1.{10 + number}:8000", server.address)
        pipe = asyncio.subprocess.PIPE
        line = (sys.executable, "-c", f"{code}\nprint(text)")
        process = await asyncio.create_subprocess_exec(*line, stdout=pipe, stderr=pipe)
        await cut.wait_running(1)
        await servers[0].drain()
        out, err = await process.communicate()
    assert (process.returncode, out.decode()) == (0, "Heé\n"), err.decode()
    (first,), (again,) = cut.requests, whole.requests
    assert first.id == again.id == "order-7"
    assert first.generation.seed == again.generation.seed == 7


async def run(command: tuple[str, ...], outputs: FakeBackend, *arguments: str) -> tuple[int | None, str, str]:
    """The example's exit code, output and errors, against a server of these outputs."""
    options = GenerationOptions(Keys.of({"alice": KEY}))
    async with GenerationServer(outputs, Listening(grace_seconds=0), options) as server:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, server.address, *arguments, stdout=pipe, stderr=pipe)
        async with asyncio.timeout(300):
            out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("command", LANGUAGES)
async def test_text_comes_out(command: tuple[str, ...]) -> None:
    outputs = FakeBackend()
    code, out, err = await run(command, outputs, *ASKED)
    assert (code, out.partition("\n")[0]) == (0, "Heé"), err
    assert "4 tokens" in out + err
    (order,) = outputs.requests
    assert (order.generation.prompt, order.generation.seed, order.generation.max_tokens) == ("Hello", 2**64 - 1, 9)
    assert order.generation.options == SamplingOptions(0.5)
    code, _, err = await run(command, outputs, *ASKED[:3])
    assert code == 0, err
    assert isinstance(outputs.requests[-1].generation.options.temperature, LeftOut)


@pytest.mark.parametrize("command", LANGUAGES)
@pytest.mark.parametrize(
    ("key", "complaint"), [(KEY, "ask again after 2"), pytest.param("wrong", "not known", marks=pytest.mark.full)]
)
async def test_errors_are_said(command: tuple[str, ...], key: str, complaint: str) -> None:
    outputs = FakeBackend(fault=Overloaded("no room", 2.5))
    code, out, err = await run(command, outputs, "Hello", "--key", key)
    assert (code, out) == (1, "")
    assert complaint in err
