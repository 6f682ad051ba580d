"""What bad clients leave behind in the processes that serve: nothing. What each of them is answered, tests/serving has.

Equal rounds come after one that warms up; what a process keeps, it would keep of each. What is only not yet given back
after one of them is gone after another.
"""

import asyncio
import gc
import json
import os
import random
import socket
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import httpx2 as httpx
import pytest

from crossdraft.client import GenerationRequest
from crossdraft.rpc.generation import Generate, encode_request
from tests.cli.conftest import serving
from tests.services.conftest import save
from tests.serving.test_grpc import SERVICE
from tests.serving.test_grpc import malformed as malformed_call
from tests.text.kinds import kind

KEY = "a-key-that-nobody-guesses"
PROMPT = "The quick brown"
MALFORMED, CROWD = 1000, 200
SILENT = 2  # clients that stop reading
MIB = 2**20
CONTEXT = 2048  # tokens
QUIET = ("--grace-seconds", 0, "--log-level", "error")
CACHE = ("--cache-mib", "16")  # a small part of what the processes have
PLACES = 16  # outputs at once
MOST_GROWTH = 24.0  # MiB of one process, from one round to the next; what is free there goes up and down by 20
MOST_FILES = 2  # likewise
LEAST_ROUNDS, ROUNDS = 3, 6  # the third is the last unless more is kept after it than after the second
STALLED = "6"  # seconds; more than a machine may stand still
# torch keeps what it has prepared for each shape of a batch, up to a bound that takes many rounds to reach.
FORGETFUL = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "LRU_CACHE_CAPACITY": "1"}
GENERATE = f"/{SERVICE}/Generate"
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))  # or the client takes megabytes unread
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Process:
    """One process of all."""

    id: int
    metrics: str  # host:port

    @property
    def kept(self) -> tuple[float, int]:
        """MiB in memory, and open files, sockets among them."""
        status = Path(f"/proc/{self.id}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        return resident / 1024, len(list(Path(f"/proc/{self.id}/fd").iterdir()))


@dataclass(frozen=True)
class Stack:
    """A front with both APIs, and the services behind it."""

    http: str
    grpc: str
    processes: dict[str, Process]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Target and drafter, and the front before them."""
    keys = tmp_path / "keys"
    keys.write_text(f"me {KEY}\n")
    addresses, processes = {}, {}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, FORGETFUL))
        for role, some in (("target", "gpt2"), ("drafter", "llama2")):
            (tmp_path / role).mkdir()
            folder = save(tmp_path / role, kind(some), CONTEXT)
            own = ("--model", folder, "--threads", 1, "--metrics-port", 0, *CACHE)
            process, ready = stack.enter_context(serving(role, *own, *QUIET))
            addresses[role], processes[role] = ready["address"], Process(process.pid, ready["metrics"])
        where = ("--target", addresses["target"], "--drafter", f"small={addresses['drafter']}")
        own = ("--model", "toy", "--api-keys", keys, "--max-outputs", PLACES, "--stalled-seconds", STALLED)
        front, ready = stack.enter_context(serving("http", "--port", 0, "--grpc-port", 0, *own, *where, *QUIET))
        processes["front"] = Process(front.pid, ready["address"])
        yield Stack(ready["address"], ready["grpc"], processes)


def body(**changes: object) -> dict[str, object]:
    """A request to go on with the prompt."""
    return {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True} | changes


async def over_http(address: str) -> dict[str, set[str]]:
    """How those of each kind were answered: status and the error's code."""
    limits, headers = httpx.Limits(max_connections=CROWD), {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"http://{address}", headers=headers, limits=limits, timeout=120) as client:
        wrong = {"Authorization": f"Bearer {KEY[::-1]}"}
        return {
            "wrong key": await answers([posted(client, body(), wrong) for _ in range(20)]),
            "too large": await answers([posted(client, body(prompt="x" * 5 * MIB)) for _ in range(3)]),
            "malformed": await answers([malformed(client, address, number) for number in range(MALFORMED)]),
            "silent": await answers([unread(address) for _ in range(SILENT)]),
            "crowd": await answers([posted(client, body(max_tokens=4)) for _ in range(CROWD)]),
        }


async def posted(client: httpx.AsyncClient, asked: object, headers: dict[str, str] | None = None) -> str:
    content = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    response = await client.post("/v1/completions", content=content, headers=JSON | (headers or {}))
    return "200" if response.status_code == 200 else f"{response.status_code} {response.json()['error']['code']}"


async def malformed(client: httpx.AsyncClient, address: str, number: int) -> str:
    chance = random.Random(number)
    whole = json.dumps(body()).encode()
    match number % 5:
        case 0:
            return await posted(client, chance.randbytes(300))
        case 1:
            return await posted(client, whole[: chance.randrange(len(whole))])
        case 2:
            wrong = chance.choice([{"prompt": 5}, {"n": -1}, {"logit_bias": []}, {"speculative": {"k": "many"}}])
            return await posted(client, body() | wrong)
        case 3:
            path = chance.choice(["/v1/nothing", "/v1/models/none", "/%00", "/page/../keys"])
            return f"{(await client.get(path)).status_code}"
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(chance.choice([b"\x16\x03\x01\x00\xff" * 20, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"]))  # no HTTP
    line = await reader.readline()
    writer.close()
    return line.split()[1].decode() if line else "400"


async def unread(address: str) -> str:
    """A stream of which nothing is read until the server has given it up."""
    asked = json.dumps(body(max_tokens=2000, stream=True, logprobs=20, speculative={"trace": True}))
    head = f"host: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # or the server's end holds megabytes
        one.setblocking(False)
        await loop.sock_connect(one, (host, int(port)))
        request = f"POST /v1/completions HTTP/1.1\r\n{head}content-length: {len(asked)}\r\n\r\n{asked}"
        await loop.sock_sendall(one, request.encode())
        taken = await loop.sock_recv(one, 1)  # the output has begun
        await idle(address)
        try:
            while piece := await loop.sock_recv(one, MIB):
                taken += piece
        except ConnectionResetError:
            pass
    return "whole" if b"[DONE]" in taken else "given up"


async def over_grpc(address: str, metrics: str) -> dict[str, set[str]]:
    """Likewise: the calls' statuses."""
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        narrow = [await stack.enter_async_context(grpc.aio.insecure_channel(address, NARROW)) for _ in range(SILENT)]

        def call(message: bytes, key: str = KEY, on: grpc.aio.Channel = channel, method: str = GENERATE) -> Any:
            return on.unary_stream(method)(message, metadata=(("authorization", f"Bearer {key}"),), timeout=300)

        whole = message_of(PROMPT, max_tokens=4)
        bad = [malformed_call(number) for number in range(MALFORMED) if number % 5 < 4]
        silent = [call(message_of(PROMPT, max_tokens=2000, ignore_eos=True, logprobs=20), on=one) for one in narrow]
        for one in silent:
            await one.read()
        await idle(metrics)
        return {
            "silent": await answers([code_of(one) for one in silent]),
            "wrong key": await answers([code_of(call(whole, KEY[::-1])) for _ in range(20)]),
            "too large": await answers([code_of(call(message_of("x" * 5 * MIB))) for _ in range(3)]),
            "malformed": await answers(
                [code_of(call(message, method=f"/{SERVICE}/{method}")) for method, message in bad]
            ),
            "crowd": await answers([code_of(call(whole)) for _ in range(CROWD)]),
        }


def message_of(prompt: str, **settings: Any) -> bytes:
    return encode_request(Generate(GenerationRequest(prompt, **settings))).SerializeToString()


async def code_of(call: "grpc.aio.UnaryStreamCall[bytes, bytes]") -> str:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def idle(*addresses: str) -> None:
    """Returns once no process with metrics at these addresses has a session or an output."""
    names = ("service_open_sessions{", "num_requests_running{", "num_requests_waiting{")
    begins = tuple(f"crossdraft_{name}" for name in names)
    async with asyncio.timeout(300), httpx.AsyncClient(timeout=120) as client:
        for address in addresses:
            busy = True
            while busy:
                lines = (await client.get(f"http://{address}/metrics")).text.splitlines()
                busy = any(float(line.split()[-1]) for line in lines if line.startswith(begins))
                await asyncio.sleep(0.1)


async def answers(asked: Sequence[Awaitable[str]]) -> set[str]:
    """What they were answered, a hundred or so at once."""
    crowds = [asked[begin : begin + CROWD] for begin in range(0, len(asked), CROWD)]
    return {one for crowd in crowds for one in await asyncio.gather(*crowd)}


def grown(kept: Sequence[dict[str, tuple[float, int]]]) -> list[str]:
    """The processes that have kept more MiB or files after each of the later rounds than after the second."""
    _, before, *later = kept
    return [
        name
        for name, (mebibytes, files) in before.items()
        if min(one[name][0] for one in later) > mebibytes + MOST_GROWTH
        or min(one[name][1] for one in later) > files + MOST_FILES
    ]


RIGHT = {
    "wrong key": {"401 invalid_api_key", "UNAUTHENTICATED"},
    "too large": {"413 request_too_large", "RESOURCE_EXHAUSTED"},
    "silent": {"given up", "CANCELLED"},
    "crowd": {"200", "429 overloaded", "OK", "RESOURCE_EXHAUSTED"},
}


@pytest.mark.full
async def test_bad_clients_leave_nothing(stack: Stack) -> None:
    kept: list[dict[str, tuple[float, int]]] = []  # after each round
    while len(kept) < LEAST_ROUNDS or (grown(kept) and len(kept) < ROUNDS):
        for answered in (await over_http(stack.http), await over_grpc(stack.grpc, stack.http)):
            assert all(one.startswith(("4", "INVALID_ARGUMENT")) for one in answered.pop("malformed"))
            assert all(found <= RIGHT[name] for name, found in answered.items()), answered
        await idle(*[one.metrics for one in stack.processes.values()])
        gc.collect()
        kept.append({name: one.kept for name, one in stack.processes.items()})
    assert grown(kept) == [], kept
