"""Outputs over gRPC, made by nothing: requests and replies, keys and rates, clients that leave, health, and the end."""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from crossdraft.cli.serve import HttpAndGrpc
from crossdraft.client import GenerationRequest, Kind, Overlap, Reason, RequestError, Token
from crossdraft.config.api import RateOptions
from crossdraft.rpc import errors
from crossdraft.rpc import generation as wire
from crossdraft.rpc.generation import Committed, Generate, GenerationClient, OutputEnded
from crossdraft.rpc.server import Listening
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.grpc_client import Client, RemoteGeneration
from crossdraft.serving.limits import GenerationOptions, Keys, scope_of
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.request import Chat, Message, PromptTooLongError
from crossdraft.types.statistics import LaneFigures, Trips
from tests.conftest import FULL
from tests.rpc.clock import until
from tests.serving.fakes import ASKED, TOKENS, TOY, FakeBackend, figures, serving
from tests.serving.ports import free_port

KEY = "alice-0123456789abcdef"
SERVICE = "crossdraft.v1.Generation"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
MALFORMED = 1000 if FULL else 100
HELLO = Generate(GenerationRequest("Hello"))


@pytest.fixture
async def address(outputs: FakeBackend) -> AsyncGenerator[str, None]:
    async with GenerationServer(outputs, Listening(limit=MessageLimit(1), grace_seconds=0)) as server:
        yield server.address


@pytest.fixture
async def client(address: str) -> AsyncGenerator[Client, None]:
    async with Client(address) as connected:
        yield connected


async def test_tokens_and_the_end_come_as_they_were_made(client: Client) -> None:
    async with client.generate("Hello") as generation:
        tokens = [token async for token in generation]
        assert (tokens, generation.text, generation.ids) == (list(TOKENS), "Heé", [5, 9, 7, 0])
        assert (generation.reason, generation.statistics) == (Reason.STOP, figures(4))
        assert generation.milliseconds == sorted(generation.milliseconds)
        assert generation.id


@pytest.mark.parametrize(("together", "sizes"), [(True, [3, 1]), (False, [1, 1, 1, 1])])
async def test_tokens_of_one_pass_are_one_message_for_clients_that_know_of_it(outputs, client, together, sizes):
    outputs.together = 3
    *replies, ended = [reply async for reply in client.replies(replace(ASKED, together=together))]
    generated = [reply for reply in replies if isinstance(reply, Committed)]
    assert [len(reply.tokens) for reply in generated] == sizes
    assert [token for reply in generated for token in reply.tokens] == list(TOKENS)
    assert isinstance(ended, OutputEnded)


async def test_model_and_drafter_may_be_named_beside_the_settings(outputs: FakeBackend, client: Client) -> None:
    async with client.generate("Hello", model="toy", drafter="small", name="r-7", k=3) as generation:
        assert await generation.together()
    (request,) = outputs.requests
    assert (request.model, request.drafter, request.id) == ("toy", "small", "r-7")
    assert request.generation.num_speculative_tokens == 3


async def test_a_client_may_have_the_tokens_of_one_pass_at_once(outputs: FakeBackend, client: Client) -> None:
    outputs.together = 3
    generation = client.generate("Hello")
    assert [list(await generation.together()) for _ in range(3)] == [list(TOKENS[:3]), list(TOKENS[3:]), []]
    assert (generation.text, len(generation.milliseconds)) == ("Heé", 4)


async def test_log_probabilities_and_their_rivals(outputs: FakeBackend, client: Client) -> None:
    top = ((7, b"\xff", -0.1), (5, b"He", -2.5))
    outputs.tokens = [replace(TOKENS[0], top=top, names=((5, "<s>"), (6, "</s>"))), TOKENS[2]]
    assert [token async for token in client.generate("Hello", method="seeded", logprobs=2)] == outputs.tokens
    assert outputs.requests[0].generation.logprobs == 2


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest((5, 6), method="seeded", seed=2**64 - 1, stop=("zwö",), committed=(1, 2)),
        GenerationRequest("Zwölf\x00"),
        GenerationRequest("", add_special_tokens=False),
        GenerationRequest(Chat((Message("system", ""), Message("user", "Hi")))),
        GenerationRequest(Chat((Message("user", "Hi"),), False, True, '{"a": 1}')),
        GenerationRequest("x", seed=0, overlap=Overlap.OFF),
    ],
    ids=lambda request: type(request.prompt).__name__,
)
async def test_a_request_arrives_as_it_was_asked(outputs, client, request_):
    async for _ in client.run(request_, "toy", "small", "my-id"):
        pass
    (order,) = outputs.requests
    assert (order.id, order.model, order.drafter) == ("my-id", "toy", "small")
    assert order.generation == replace(request_, cache_salt=scope_of(None, request_.cache_salt, Keys()))


async def test_what_is_left_out_is_the_default(outputs: FakeBackend, client: Client) -> None:
    assert [reply async for reply in client.replies(HELLO)]
    for plainly in ("none", ""):
        assert [reply async for reply in client.replies(replace(HELLO, drafter=plainly))]
    first, named, plain = outputs.requests
    assert (first.model, first.drafter, named.drafter, plain.drafter) == ("toy", None, "", "")
    assert first.generation == GenerationRequest("Hello", cache_salt=scope_of(None, "", Keys()))
    assert first.id != plain.id


async def test_ids_of_requests(outputs: FakeBackend, address: str, client: Client) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_stream("/crossdraft.v1.Generation/Generate")
        call = method(b"\x1a\x02Hi", metadata=(("x-request-id", "from-metadata"),))
        assert await call.initial_metadata() == grpc.aio.Metadata(("x-request-id", "from-metadata"))
        assert [reply async for reply in call]
    assert [order.id for order in outputs.requests] == ["from-metadata"]
    replies = [reply async for reply in client.replies(ASKED)]
    assert (type(replies[-1]), replies[-1].id) == (OutputEnded, "r-1")
    with pytest.raises(errors.BadRequest, match="a request's id"):
        await anext(client.replies(replace(ASKED, id="two words")))


async def read(generation: RemoteGeneration, into: list[Token]) -> None:
    async for token in generation:
        into.append(token)


@pytest.mark.parametrize("made", [[], list(TOKENS[:1])])
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (RequestError("k must be smaller"), RequestError, "k must be smaller"),
        (PromptTooLongError("the prompt has 9 tokens"), errors.ContextTooLong, "the prompt has 9 tokens"),
        (errors.Overloaded("64 outputs are being made", 2.5), errors.Overloaded, "64 outputs"),
        (errors.Unreachable("target at 10.0.0.1:7: gone"), errors.Unreachable, "no target can make"),
        (errors.Full("target at 10.0.0.1:7: full"), errors.Overloaded, "at their limit of sessions"),
        (errors.TooLarge("target at 10.0.0.1:7: 9 MiB"), errors.TooLarge, "the prompt is too large"),
        (errors.TimedOut("target at 10.0.0.1:7: slow"), errors.Unreachable, "no target can make"),
        (errors.BadRequest("target at 10.0.0.1:7: no such id"), RequestError, "target: no such id"),
        (errors.ContextTooLong("target at 10.0.0.1:7: full"), errors.ContextTooLong, "target: full"),
        (errors.ContextTooLong("the context is full"), errors.ContextTooLong, "the context is full"),
    ],
)
async def test_what_goes_wrong_is_said(outputs, client, made, fault, error, text):
    outputs.fault, outputs.fault_after = fault, len(made)
    got: list[Token] = []
    with pytest.raises(error, match=text) as raised:
        await read(client.generate("Hello"), got)
    assert (got, outputs.running) == (made, 0)
    assert "10.0.0.1" not in str(raised.value)
    assert not isinstance(fault, errors.Overloaded) or raised.value.after == fault.after


async def test_a_model_must_be_named_where_there_are_several(outputs: FakeBackend, client: Client) -> None:
    outputs.served = (TOY, replace(TOY, name="second"))
    with pytest.raises(errors.BadRequest, match="name the model; there are toy, second"):
        await anext(client.replies(HELLO))
    with pytest.raises(errors.NameUnknown, match="there is no model 'other'; there is toy"):
        await anext(client.replies(replace(ASKED, model="other")))
    assert isinstance(await anext(client.replies(replace(HELLO, model="second"))), Committed)
    outputs.served, outputs.fault = (TOY, replace(TOY, name="other", root="toy")), errors.Unreachable("10.0.0.1")
    with pytest.raises(errors.Unreachable, match="no target can make this output now"):
        await anext(client.replies(HELLO))
    assert outputs.requests[-1].model == "toy"


@pytest.mark.parametrize("setting", ["explain", "record"])
async def test_what_cannot_be_done_there_is_not_sent(outputs, client, setting, tmp_path):
    value = tmp_path / "file" if setting == "record" else True
    with pytest.raises(RequestError, match=f"{setting} is not for a server"):
        client.generate("Hello", **{setting: value})
    for settings in ({"method": "guess"}, {"method": "tokentiming"}):
        with pytest.raises(RequestError, match=r"unknown method|allow_inexact"):
            client.generate("Hello", **settings)
    with pytest.raises(errors.BadRequest, match=r"^model: "):  # it does not fit its field
        await anext(client.replies(Generate(GenerationRequest("x"), model=5)))  # type: ignore[arg-type]
    assert outputs.requests == []


def test_lanes_are_sent_without_where_services_are() -> None:
    lane = LaneFigures("target", "10.0.0.1:7001", 1, 2, Trips((3, 4), 0.5, 0.25), "unreachable", 0.1, 0.2, 0.9, 0.3)
    given = replace(figures(4), lanes=(lane,), drafter_lost="drafter at 10.0.0.1:7001: gone")
    sent = wire.encode_reply(OutputEnded(Reason.STOP, given, "r-1"))
    assert b"10.0.0.1" not in sent.SerializeToString()
    shown = replace(given, lanes=(replace(lane, address=""),), drafter_lost="drafter: gone")
    assert wire.decode_reply(sent) == OutputEnded(Reason.STOP, shown, "r-1")


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
        with pytest.raises(ValueError, match="has visible ASCII characters only"):
            GenerationClient(server.address, "é" * 16)
        async with Client(server.address, f" {KEY}\n") as client:  # as of a file
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


async def test_a_client_that_leaves_gives_everything_back_at_once(outputs: FakeBackend, client: Client) -> None:
    outputs.waits_after = 2
    generation = client.replies(ASKED)
    assert [type(await anext(generation)) for _ in range(2)] == [Committed] * 2
    await generation.aclose()
    await outputs.wait_running(0)
    other = client.replies(ASKED)
    assert [type(await anext(other)) for _ in range(2)] == [Committed] * 2
    await outputs.wait_running(1)
    await client.close()
    await outputs.wait_running(0)
    assert outputs.yielded == 4


async def test_a_deadline_ends_both_sides(outputs: FakeBackend, client: Client) -> None:
    outputs.waits_after = 1
    await client.models()  # it is connected
    replies: list[object] = []

    async def ask() -> None:
        async for reply in client.replies(ASKED, deadline_seconds=0.5):
            replies.append(reply)

    with pytest.raises(errors.TimedOut, match="Deadline Exceeded"):
        await ask()
    assert len(replies) <= 1  # none where the machine has taken all the time
    await outputs.wait_running(0)


async def test_a_server_that_says_nothing_is_given_up(outputs: FakeBackend, address: str) -> None:
    outputs.waits_after = 0
    async with GenerationClient(address, reply_seconds=0.2) as client:
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
        call = channel.unary_stream(f"/{SERVICE}/Generate")(b"\x1a\x02Hi")
        await call.read()
        await outputs.wait_running(0)
        assert outputs.yielded < 1_000  # 64 MiB of 640
        async with Client(server.address) as client:  # others are served meanwhile
            assert await client.models() == (TOY,)
        with pytest.raises(grpc.aio.AioRpcError, match=r"nothing was read for 0\.2 s") as raised:
            await rest_of(call)
        assert raised.value.code() is grpc.StatusCode.CANCELLED


async def test_200_clients_at_once(outputs: FakeBackend, address: str) -> None:
    outputs.waits_after = 2

    async def ask(number: int) -> int:
        async with GenerationClient(address) as client:
            return len([reply async for reply in client.replies(replace(ASKED, id=f"r-{number}"))])

    asked = [asyncio.create_task(ask(number)) for number in range(200)]
    await outputs.wait_running(200)
    outputs.go_on.set()
    assert await asyncio.gather(*asked) == [len(TOKENS) + 1] * 200
    assert outputs.running == 0
    assert len({order.id for order in outputs.requests}) == 200


@pytest.mark.parametrize("grace", [0, 60])
async def test_a_server_that_ends_lets_outputs_go_on_for_its_grace(grace: float) -> None:
    outputs = FakeBackend(waits_after=1)
    server = GenerationServer(outputs, Listening(grace_seconds=grace))
    await server.start()
    async with GenerationClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        generation = client.replies(ASKED)
        await anext(generation)
        ending = asyncio.create_task(server.drain())
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        if grace:
            outputs.go_on.set()
            assert isinstance([reply async for reply in generation][-1], OutputEnded)
        await ending
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


async def test_reflection_is_enough_for_a_client(address: str) -> None:
    assert "".join(await asyncio.to_thread(generated_by_reflection, address)) == "Heé"


async def test_a_big_prompt_is_refused_before_it_is_read(outputs: FakeBackend, client: Client) -> None:
    with pytest.raises(errors.TooLarge, match="larger than max"):
        await anext(client.replies(Generate(GenerationRequest("x" * 2**20))))
    assert outputs.requests == []
    assert [reply async for reply in client.replies(ASKED)]


def malformed(number: int) -> tuple[str, bytes]:
    """A method and what is sent to it; the same number gives the same."""
    chance = random.Random(number)
    options = SamplingOptions(0.5, logit_bias=((1, 1.0),))
    request = GenerationRequest("Hello", options=options, stop=("x",), seed=3)
    whole = wire.encode_request(Generate(request, "id", "toy")).SerializeToString()
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


async def test_malformed_requests_leave_nothing_behind(outputs: FakeBackend, address: str) -> None:
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
        await until(lambda: len(asyncio.all_tasks()) <= before)  # the server may be about to end the last ones
    assert (outputs.running, outputs.requests) == (0, [])
    async with GenerationClient(address) as client:
        assert isinstance([reply async for reply in client.replies(ASKED)][-1], OutputEnded)


async def test_servers_begin_and_end_together() -> None:
    first, second = (GenerationServer(FakeBackend(), Listening(port=free_port(), grace_seconds=0)) for _ in range(2))
    async with HttpAndGrpc(first, second) as both:
        assert {"address": first.address, "grpc": second.address}.items() <= both.ready().items()
        taken = Listening(port=int(first.address.rpartition(":")[2]), grace_seconds=0)
        third = GenerationServer(FakeBackend(), Listening(port=free_port(), grace_seconds=0))
        with pytest.raises(errors.CannotListen):
            await HttpAndGrpc(GenerationServer(FakeBackend(), taken), third).start()
        free = Listening(port=int(third.address.rpartition(":")[2]), grace_seconds=0)
        async with GenerationServer(FakeBackend(), free):  # the third one has ended again
            pass
    async with GenerationServer(FakeBackend(), taken):
        pass
