"""Who may ask over gRPC and how often, and clients that leave, wait, stop reading, or come in great numbers."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from crossdraft.client import Kind, Token
from crossdraft.config.api import RateOptions
from crossdraft.rpc import errors
from crossdraft.rpc.generation import Committed, GenerationClient
from crossdraft.serving.grpc_client import Client
from crossdraft.serving.limits import GenerationOptions, Keys
from tests.serving.fakes import ASKED, TOKENS, TOY, FakeBackend, serving

KEY = "alice-0123456789abcdef"


async def status_of(address: str, method: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await channel.unary_unary(f"/crossdraft.v1.Generation/{method}")(b"\x1a\x02Hi", metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_keys() -> None:
    outputs = FakeBackend()
    async with serving(outputs, GenerationOptions(Keys.of({"alice": KEY}))) as server:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", KEY),)):
            for method in ("Generate", "Models"):
                assert await status_of(server.address, method, metadata) is grpc.StatusCode.UNAUTHENTICATED
        assert outputs.requests == []
        async with GenerationClient(server.address, "wrong") as client:
            with pytest.raises(errors.KeyRefused, match=r"this API key is not known.*\(check the API key: --api-key"):
                await client.models()
        async with Client(server.address, KEY) as client:
            assert await client.models() == (TOY,)
            assert [token async for token in client.generate("Hello")] == list(TOKENS)


async def test_rates() -> None:
    options = GenerationOptions(Keys.of({"alice": KEY, "bob": KEY[::-1]}), RateOptions(rate=0.1, burst=2))
    async with (
        serving(FakeBackend(), options) as server,
        GenerationClient(server.address, KEY) as alice,
        GenerationClient(server.address, KEY[::-1]) as bob,
    ):
        assert [reply async for reply in alice.replies(ASKED)]
        await alice.models()
        with pytest.raises(errors.Overloaded, match="too many requests of this client") as raised:
            await alice.models()
        assert 500 < raised.value.after <= 600
        assert await bob.models()
    async with serving(FakeBackend(), GenerationOptions(rates=RateOptions(rate=0.1, burst=1))) as server:
        for expected in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED):  # another connection each
            assert await status_of(server.address, "Models", ()) is expected


async def test_a_client_that_leaves_gives_everything_back_at_once() -> None:
    outputs = FakeBackend(waits_after=2)
    async with serving(outputs) as server:
        async with GenerationClient(server.address) as client:
            generation = client.replies(ASKED)
            assert [type(await anext(generation)) for _ in range(2)] == [Committed] * 2
            await generation.aclose()
            await outputs.wait_running(0)
            other = client.replies(ASKED)
            assert [type(await anext(other)) for _ in range(2)] == [Committed] * 2
            await outputs.wait_running(1)
        await outputs.wait_running(0)  # the connection is closed
    assert outputs.yielded == 4


async def test_a_deadline_ends_both_sides() -> None:
    outputs = FakeBackend(waits_after=1)
    async with serving(outputs) as server, GenerationClient(server.address) as client:
        await client.models()  # it is connected
        replies: list[object] = []

        async def read() -> None:
            async for reply in client.replies(ASKED, deadline_seconds=0.5):
                replies.append(reply)

        with pytest.raises(errors.TimedOut, match="Deadline Exceeded"):
            await read()
        assert len(replies) <= 1  # none where the machine has taken all the time
        await outputs.wait_running(0)


async def test_a_server_that_says_nothing_is_given_up() -> None:
    outputs = FakeBackend(waits_after=0)
    async with serving(outputs) as server, GenerationClient(server.address, reply_seconds=0.2) as client:
        with pytest.raises(errors.TimedOut, match=r"no reply within 0\.2 s"):
            await anext(client.replies(ASKED))
        await outputs.wait_running(0)


async def rest_of(call: "grpc.aio.UnaryStreamCall[bytes, bytes]") -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_client_that_does_not_read_is_bounded_and_then_given_up() -> None:
    outputs = FakeBackend(tokens=[Token(1, "x", bytes(2**16), Kind.BONUS, None)] * 10_000)
    options = GenerationOptions(rates=RateOptions(stalled_seconds=0.2))
    async with serving(outputs, options) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream("/crossdraft.v1.Generation/Generate")(b"\x1a\x02Hi")
        await call.read()
        await outputs.wait_running(0)
        assert outputs.yielded < 1_000  # 64 MiB of 640
        async with Client(server.address) as client:  # others are served meanwhile
            assert await client.models() == (TOY,)
        with pytest.raises(grpc.aio.AioRpcError, match=r"nothing was read for 0\.2 s") as raised:
            await rest_of(call)
        assert raised.value.code() is grpc.StatusCode.CANCELLED


async def test_200_clients_at_once() -> None:
    outputs = FakeBackend(waits_after=2)
    async with serving(outputs) as server:

        async def ask(number: int) -> int:
            async with GenerationClient(server.address) as client:
                return len([reply async for reply in client.replies(replace(ASKED, id=f"r-{number}"))])

        asked = [asyncio.create_task(ask(number)) for number in range(200)]
        await outputs.wait_running(200)
        outputs.go_on.set()
        assert await asyncio.gather(*asked) == [len(TOKENS) + 1] * 200
    assert outputs.running == 0
    assert len({order.id for order in outputs.requests}) == 200
