"""Clients that a front has to bear, as one round of them: over HTTP and over gRPC."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2 as httpx

from crossdraft.client import GenerationRequest
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.generation import Generate, GenerationClient, encode_request

KEY = "a-key-that-nobody-guesses"
PROMPT = "The quick brown"
MALFORMED, CROWD = 1000, 200
SILENT = 2  # clients that stop reading
BETWEEN_LOOKS = 0.1  # seconds
MIB = 2**20
GENERATE = "/crossdraft.v1.Generation/Generate"
Statuses = Counter[str]


@dataclass(frozen=True)
class Http:
    """What bad clients of `serve http` do, and what they were answered."""

    address: str

    async def round(self) -> dict[str, Statuses]:
        """All of them, one kind after the other."""
        limits = httpx.Limits(max_connections=CROWD)
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"http://{self.address}"
        async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120) as client:
            wrong = {"Authorization": f"Bearer {KEY[::-1]}"}
            return {
                "wrong key": await counted([posted(client, body(), wrong) for _ in range(20)]),
                "too large": await counted([posted(client, body(prompt="x" * 5 * MIB)) for _ in range(3)]),
                "too long": await counted([posted(client, body(prompt="word " * 20_000)) for _ in range(3)]),
                "malformed": await in_hundreds([self._malformed(client, number) for number in range(MALFORMED)]),
                "silent": await self._silent(),
                "crowd": await counted([posted(client, body(max_tokens=4)) for _ in range(CROWD)]),
            }

    async def _malformed(self, client: httpx.AsyncClient, number: int) -> str:
        chance = random.Random(number)
        whole = json.dumps(body()).encode()
        json_type = {"content-type": "application/json"}
        match number % 6:
            case 0:
                return await sent(client, "POST", "/v1/completions", chance.randbytes(300), json_type)
            case 1:  # cut
                return await sent(client, "POST", "/v1/completions", whole[: chance.randrange(len(whole))], json_type)
            case 2:
                wrong = chance.choice([{"prompt": 5}, {"n": -1}, {"logit_bias": []}, {"speculative": {"k": "many"}}])
                return await posted(client, body() | wrong)
            case 3:
                path = chance.choice(["/v1/nothing", "/v1/models/none", "/%00", "/page/../keys"])
                return await sent(client, "GET", path, b"", {})
            case 4:
                return await posted(client, body(messages=[{"role": 5}]), path="/v1/chat/completions")
        no_http = [b"\x16\x03\x01\x00\xff" * 20, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"]
        return await self._raw(chance.choice(no_http))

    async def _raw(self, what: bytes) -> str:
        """Bytes that are no HTTP; the status is that of its reply."""
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(what)
        line = await reader.readline()
        writer.close()
        return line.split()[1].decode() if line else "closed"

    async def _silent(self) -> Statuses:
        """Streams of which nothing is read until the server has given them up."""
        asked = json.dumps(body(max_tokens=2000, stream=True, logprobs=20, speculative={"trace": True}))
        head = f"host: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
        request = f"POST /v1/completions HTTP/1.1\r\n{head}content-length: {len(asked)}\r\n\r\n{asked}".encode()
        return await counted([self._ended(request) for _ in range(SILENT)])

    async def _ended(self, request: bytes) -> str:
        host, _, port = self.address.rpartition(":")
        loop = asyncio.get_running_loop()
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # or the server's end holds megabytes
            one.setblocking(False)
            await loop.sock_connect(one, (host, int(port)))
            await loop.sock_sendall(one, request)
            taken = await loop.sock_recv(one, 1)  # the output has begun
            await idle(self.address)
            try:
                while piece := await loop.sock_recv(one, MIB):
                    taken += piece
            except ConnectionResetError:
                pass
        return "whole" if b"[DONE]" in taken else "given up"


@dataclass(frozen=True)
class Grpc:
    """The same of `serve grpc`."""

    address: str
    metrics: str

    async def round(self) -> dict[str, Statuses]:
        """All of them, one kind after the other."""
        async with GenerationClient(self.address, KEY) as client, GenerationClient(self.address, KEY[::-1]) as wrong:
            return {
                "wrong key": await counted([generated(wrong, asking(PROMPT)) for _ in range(20)]),
                "too large": await counted([generated(client, asking("x" * 5 * MIB)) for _ in range(3)]),
                "too long": await counted([generated(client, asking("word " * 20_000)) for _ in range(3)]),
                "malformed": await self._malformed(),
                "silent": await self._silent(),
                "crowd": await counted([generated(client, asking(PROMPT, max_tokens=4)) for _ in range(CROWD)]),
            }

    async def _malformed(self) -> Statuses:
        whole = encode_request(asking(PROMPT)).SerializeToString()
        async with grpc.aio.insecure_channel(self.address) as channel:

            async def ask(number: int) -> str:
                chance = random.Random(number)
                message = chance.choice([chance.randbytes(200), whole + b"\x48\x00", whole + b"\x1a\x02\xff\xfe", b""])
                method = chance.choice([GENERATE, GENERATE, GENERATE, "/crossdraft.v1.Generation/Forget"])
                return await code_of(channel.unary_stream(method)(message, metadata=METADATA, timeout=120))

            return await in_hundreds([ask(number) for number in range(MALFORMED)])

    async def _silent(self) -> Statuses:
        request = encode_request(asking(PROMPT, max_tokens=4000, ignore_eos=True, logprobs=20)).SerializeToString()
        async with AsyncExitStack() as stack:
            calls = []
            for _ in range(SILENT):
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(self.address, options=NARROW))
                calls.append(channel.unary_stream(GENERATE)(request, metadata=METADATA))
                await calls[-1].read()
            await idle(self.metrics)
            return await counted([code_of(call) for call in calls])


NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))  # or the client takes megabytes unread
METADATA = (("authorization", f"Bearer {KEY}"),)


def body(**changes: object) -> dict[str, object]:
    """A request to go on with the prompt."""
    return {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True} | changes


async def posted(
    client: httpx.AsyncClient,
    asked: dict[str, object],
    headers: dict[str, str] | None = None,
    path: str = "/v1/completions",
) -> str:
    """The status, and the error's code."""
    kind = {"content-type": "application/json"}
    return await sent(client, "POST", path, json.dumps(asked).encode(), kind | (headers or {}))


async def sent(client: httpx.AsyncClient, method: str, path: str, content: bytes, headers: dict[str, str]) -> str:
    """The same of any request."""
    response = await client.request(method, path, content=content, headers=headers)
    if response.status_code == 200:
        return "200"
    assert response.json()["error"]["message"]
    assert (response.status_code == 429) is ("retry-after" in response.headers)
    return f"{response.status_code} {response.json()['error']['code']}"


def asking(prompt: str, **settings: Any) -> Generate:
    return Generate(GenerationRequest(prompt, **settings))


async def generated(client: GenerationClient, asked: Generate) -> str:
    """OK, or the name of the error."""
    try:
        async for _ in client.generate(asked):
            pass
    except ServiceError as error:
        return type(error).__name__
    return "OK"


async def code_of(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> str:
    """With which status a call ends."""
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
                await asyncio.sleep(BETWEEN_LOOKS)


async def counted(asked: Sequence[Awaitable[str]]) -> Statuses:
    """What all at once were answered."""
    return Counter(await asyncio.gather(*asked))


async def in_hundreds(asked: Sequence[Awaitable[str]]) -> Statuses:
    """The same, a hundred at once."""
    found: Statuses = Counter()
    for begin in range(0, len(asked), 100):
        found += await counted(asked[begin : begin + 100])
    return found
