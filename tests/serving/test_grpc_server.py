"""The port of Generation itself: health, reflection, its end, and what no client of ours would send."""

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from crossdraft.cli.serve import HttpAndGrpc
from crossdraft.client import GenerationRequest
from crossdraft.rpc.errors import CannotListen, TooLarge
from crossdraft.rpc.generation import Generate, GenerationClient, OutputEnded, encode_request
from crossdraft.rpc.server import Listening
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.grpc import GenerationServer
from crossdraft.types.messages import SamplingOptions
from tests.conftest import FULL
from tests.serving.fakes import ASKED, TOKENS, FakeBackend
from tests.serving.ports import free_port

SERVICE = "crossdraft.v1.Generation"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
Served = tuple[FakeBackend, str]
MALFORMED = 1000 if FULL else 100


@pytest.fixture
async def served() -> AsyncGenerator[Served, None]:
    outputs = FakeBackend()
    listening = Listening(limit=MessageLimit(1), grace_seconds=0)
    async with GenerationServer(outputs, listening) as server:
        yield outputs, server.address


async def test_a_server_that_ends_lets_outputs_go_on_for_its_grace() -> None:
    outputs = FakeBackend(waits_after=1)
    server = GenerationServer(outputs, Listening(grace_seconds=60))
    await server.start()
    async with GenerationClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        generation = client.replies(ASKED)
        await anext(generation)
        ending = asyncio.create_task(server.drain())
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        outputs.go_on.set()
        assert isinstance([reply async for reply in generation][-1], OutputEnded)
        await ending


async def test_a_server_that_ends_gives_up_what_takes_longer() -> None:
    outputs = FakeBackend(waits_after=1)
    server = GenerationServer(outputs, Listening(grace_seconds=0))
    await server.start()
    async with GenerationClient(server.address) as client:
        generation = client.replies(ASKED)
        await anext(generation)
        await server.drain()
        await outputs.wait_running(0)


def generated_by_reflection(address: str) -> list[str]:
    """Asks for an output with nothing but what the server says of itself."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) >= {SERVICE, "grpc.health.v1.Health"}
        pool = DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = channel.unary_stream(f"/{SERVICE}/Generate", request.SerializeToString, reply.FromString)
        replies = list(call(request(text="Hello", model="toy"), timeout=60))
    assert [one.WhichOneof("reply") for one in replies] == ["token"] * len(TOKENS) + ["ended"]
    return [one.token.text for one in replies]


async def test_reflection_is_enough_for_a_client(served: Served) -> None:
    texts = await asyncio.to_thread(generated_by_reflection, served[1])
    assert "".join(texts) == "Heé"


async def test_a_big_prompt_is_refused_before_it_is_read(served: Served) -> None:
    outputs, address = served
    async with GenerationClient(address) as client:
        with pytest.raises(TooLarge, match="larger than max"):
            await anext(client.replies(Generate(GenerationRequest("x" * 2**20))))
        assert outputs.requests == []
        assert [reply async for reply in client.replies(ASKED)]


def malformed(number: int) -> tuple[str, bytes]:
    """A method and what is sent to it; the same number gives the same."""
    chance = random.Random(number)
    whole = encode_request(
        Generate(
            GenerationRequest("Hello", options=SamplingOptions(0.5, logit_bias=((1, 1.0),)), stop=("x",), seed=3),
            "id",
            "toy",
        )
    ).SerializeToString()
    match number % 5:
        case 0:
            return "Generate", chance.randbytes(chance.randrange(200))
        case 1:  # cut
            return "Generate", whole[: chance.randrange(len(whole))] + b"\x1a\xff"
        case 2:  # a prompt that is not UTF-8, or is none
            return "Generate", chance.choice([b"\x1a\x02\xff\xfe", b"", b"\x22\x00", b"\x2a\x00"])
        case 3:  # a value out of its range
            field = chance.choice([b"\x48\x00", b"\xc8\x01\x00", b"\xa0\x01\x07", b"\x7a\x00", b"\x0a\x01 "])
            return "Generate", whole + field
        case _:
            return chance.choice(["Forget", "generate", "Verify"]), whole


async def test_malformed_requests_leave_nothing_behind(served: Served) -> None:
    outputs, address = served
    async with grpc.aio.insecure_channel(address) as channel:

        async def ask(method: str, message: bytes) -> grpc.StatusCode:
            call = channel.unary_stream(f"/{SERVICE}/{method}")(message, timeout=60)
            try:
                return grpc.StatusCode.OK if [reply async for reply in call] else grpc.StatusCode.UNKNOWN
            except grpc.aio.AioRpcError as error:
                return error.code()

        await ask(*malformed(0))
        gc.collect()
        before = len(asyncio.all_tasks())
        for begin in range(0, MALFORMED, 100):
            codes = await asyncio.gather(*(ask(*malformed(number)) for number in range(begin, begin + 100)))
            assert set(codes) <= REFUSED, Counter(codes)
        gc.collect()
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - the server may be about to end the last ones
                await asyncio.sleep(0)
    assert (outputs.running, outputs.requests) == (0, [])
    async with GenerationClient(address) as client:
        assert isinstance([reply async for reply in client.replies(ASKED)][-1], OutputEnded)


async def test_servers_begin_and_end_together() -> None:
    first, second = (GenerationServer(FakeBackend(), Listening(port=free_port(), grace_seconds=0)) for _ in range(2))
    async with HttpAndGrpc(first, second) as both:
        line = json.loads(both.ready_line())
        assert (line["address"], line["grpc"]) == (first.address, second.address)
        taken = Listening(port=int(first.address.rpartition(":")[2]), grace_seconds=0)
        third = GenerationServer(FakeBackend(), Listening(port=free_port(), grace_seconds=0))
        with pytest.raises(CannotListen):
            await HttpAndGrpc(GenerationServer(FakeBackend(), taken), third).start()
        free = Listening(port=int(third.address.rpartition(":")[2]), grace_seconds=0)
        async with GenerationServer(FakeBackend(), free):  # the third one has ended again
            pass
    async with GenerationServer(FakeBackend(), taken):
        pass
