"""Outputs over gRPC, made by nothing: what is asked for arrives, what is made comes back, what is left is given up."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from crossdraft.pipeline import GenerationRequest, Kind, Overlap, Reason, RequestError, SamplingOptions, Token
from crossdraft.pipeline.chat import Chat, Message
from crossdraft.rpc import errors
from crossdraft.rpc.endpoint import Listening
from crossdraft.rpc.generation import Generate, Generated, GenerationEnded
from crossdraft.rpc.generation_client import GenerationClient
from crossdraft.serving.client import Client, RemoteGeneration
from crossdraft.serving.generation import GenerationOptions, GenerationServer, serve_generation
from crossdraft.serving.keys import Keys
from crossdraft.serving.orders import OverloadedError
from crossdraft.serving.rates import RateLimit
from tests.serving.fakes import TOKENS, TOY, FakeOutputs, figures

KEY = "alice-0123456789abcdef"
ASKED = Generate("Hello", id="r-1", model="toy")
LISTENING = Listening(grace_seconds=0)
Served = tuple[FakeOutputs, str]


@asynccontextmanager
async def serving(outputs: FakeOutputs, options: GenerationOptions | None = None) -> AsyncIterator[GenerationServer]:
    async with serve_generation(outputs, LISTENING, options) as server:
        yield server


@pytest.fixture
async def served() -> AsyncGenerator[Served, None]:
    outputs = FakeOutputs()
    async with serving(outputs) as server:
        yield outputs, server.address


async def test_tokens_and_the_end_come_as_they_were_made(served: Served) -> None:
    _, address = served
    async with Client(address) as client, client.generate("Hello") as generation:
        tokens = [token async for token in generation]
        assert tokens == list(TOKENS)
        assert (generation.text, generation.ids) == ("Heé", [5, 9, 7, 0])
        assert (generation.reason, generation.statistics) == (Reason.STOP, figures(4))
        assert generation.milliseconds == sorted(generation.milliseconds)
        assert generation.id


async def test_log_probabilities_and_their_rivals() -> None:
    top = ((7, b"\xff", -0.1), (5, b"He", -2.5))
    tokens = [replace(TOKENS[0], top=top), TOKENS[2]]
    outputs = FakeOutputs(tokens=tokens)
    async with serving(outputs) as server, Client(server.address) as client:
        assert [token async for token in client.generate("Hello", method="seeded", logprobs=2)] == tokens
    assert outputs.orders[0].request.logprobs == 2


async def test_models(served: Served) -> None:
    _, address = served
    async with Client(address) as client:
        assert await client.models() == (TOY,)


EVERYTHING = GenerationRequest(
    (5, 6),
    method="seeded",
    k=3,
    max_tokens=7,
    options=SamplingOptions(0.5, 4, 0.75, 0.25, 1.5, -0.5, ((3, -2.0), (4, 8.0))),
    drafter_temperature=0.0,
    row_width=9,
    head=8,
    seed=2**64 - 1,
    choice=2,
    ignore_eos=True,
    stop=("one", "zwö"),
    allow_inexact=True,
    audit=True,
    overlap=Overlap.ON,
    window=6,
    wait=0,
    branches=0,
    branch_width=2,
    paths=1,
    speculation=True,
    committed=(1, 2),
    logprobs=0,
)


@pytest.mark.parametrize(
    "request_",
    [
        EVERYTHING,
        GenerationRequest("Zwölf\x00"),
        GenerationRequest(Chat((Message("system", ""), Message("user", "Hi")))),
        GenerationRequest("x", seed=0, overlap=Overlap.OFF),
    ],
    ids=lambda request: type(request.prompt).__name__,
)
async def test_a_request_arrives_as_it_was_asked(served: Served, request_: GenerationRequest) -> None:
    outputs, address = served
    async with Client(address) as client:
        async for _ in client.run(request_, "toy", "small", "my-id"):
            pass
    (order,) = outputs.orders
    assert (order.id, order.model, order.drafter) == ("my-id", "toy", "small")
    assert order.request == request_


async def test_what_is_left_out_is_the_default(served: Served) -> None:
    outputs, address = served
    async with GenerationClient(address) as client:
        assert [reply async for reply in client.generate(Generate("Hello"))]
        assert [reply async for reply in client.generate(Generate("Hello", drafter=""))]
    first, plain = outputs.orders
    assert (first.model, first.drafter, plain.drafter) == ("toy", None, "")
    assert first.request == GenerationRequest("Hello")
    assert first.id != plain.id


async def test_ids_of_requests(served: Served) -> None:
    outputs, address = served
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_stream("/crossdraft.v1.Generation/Generate")
        call = method(b"\x1a\x02Hi", metadata=(("x-request-id", "from-metadata"),))
        assert await call.initial_metadata() == grpc.aio.Metadata(("x-request-id", "from-metadata"))
        assert [reply async for reply in call]
    assert [order.id for order in outputs.orders] == ["from-metadata"]
    async with GenerationClient(address) as client:
        replies = [reply async for reply in client.generate(ASKED)]
        assert isinstance(replies[-1], GenerationEnded)
        assert replies[-1].id == "r-1"
        with pytest.raises(errors.BadRequest, match="a request's id"):
            await anext(client.generate(replace(ASKED, id="two words")))


async def read(generation: RemoteGeneration, into: list[Token]) -> None:
    async for token in generation:
        into.append(token)


@pytest.mark.parametrize("made", [[], list(TOKENS[:1])])
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (RequestError("k must be smaller"), RequestError, "k must be smaller"),
        (OverloadedError("64 outputs are being made", 2.5), errors.Overloaded, "64 outputs"),
        (errors.Unreachable("target at 10.0.0.1:7: gone"), errors.Unreachable, "no target can make"),
        (errors.Full("target at 10.0.0.1:7: full"), errors.Overloaded, "as many sessions as they take"),
        (errors.TooLarge("target at 10.0.0.1:7: 9 MiB"), errors.TooLarge, "the prompt is too large"),
        (errors.TimedOut("target at 10.0.0.1:7: slow"), errors.Unreachable, "no target can make"),
        (errors.NotAllowed("target at 10.0.0.1:7: who are you"), errors.Unreachable, "no target can make"),
        (errors.ProtocolBroken("target at 10.0.0.1:7: twice"), errors.Unreachable, "no target can make"),
        (errors.ContextTooLong("the context is full"), errors.ContextTooLong, "the context is full"),
    ],
)
async def test_what_goes_wrong_is_said(made: list[Token], fault: Exception, error: type[Exception], text: str) -> None:
    outputs = FakeOutputs(fault=fault, fault_after=len(made))
    got: list[Token] = []
    async with serving(outputs) as server, Client(server.address) as client:
        generation = client.generate("Hello")
        with pytest.raises(error, match=text) as raised:
            await read(generation, got)
    assert got == made
    assert outputs.running == 0
    assert "10.0.0.1" not in str(raised.value)
    if isinstance(fault, OverloadedError):
        assert isinstance(raised.value, errors.Overloaded)
        assert raised.value.after == fault.after


async def test_unknown_models(served: Served) -> None:
    _, address = served
    async with GenerationClient(address) as client:
        with pytest.raises(errors.NameUnknown, match="there is no model 'other'; there is toy"):
            await anext(client.generate(replace(ASKED, model="other")))


async def test_a_model_must_be_named_where_there_are_several_or_none() -> None:
    outputs = FakeOutputs(served=(TOY, replace(TOY, name="second")))
    async with serving(outputs) as server, GenerationClient(server.address) as client:
        with pytest.raises(errors.BadRequest, match="name the model; there are toy, second"):
            await anext(client.generate(Generate("Hello")))
        assert isinstance(await anext(client.generate(Generate("Hello", model="second"))), Generated)
        outputs.served = ()
        with pytest.raises(errors.Unreachable, match="no model can be served now"):
            await anext(client.generate(Generate("Hello")))


async def status_of(address: str, method: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await channel.unary_unary(f"/crossdraft.v1.Generation/{method}")(b"\x1a\x02Hi", metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_keys() -> None:
    outputs = FakeOutputs()
    async with serving(outputs, GenerationOptions(Keys.of({"alice": KEY}))) as server:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", KEY),)):
            for method in ("Generate", "Models"):
                assert await status_of(server.address, method, metadata) is grpc.StatusCode.UNAUTHENTICATED
        assert outputs.orders == []
        async with GenerationClient(server.address, "wrong") as client:
            with pytest.raises(errors.KeyRefused, match=r"this API key is not known.*\(check the API key\)"):
                await client.models()
        async with Client(server.address, KEY) as client:
            assert await client.models() == (TOY,)
            assert [token async for token in client.generate("Hello")] == list(TOKENS)


async def test_rates() -> None:
    options = GenerationOptions(Keys.of({"alice": KEY, "bob": KEY[::-1]}), RateLimit(per_minute=1, burst=2))
    async with (
        serving(FakeOutputs(), options) as server,
        GenerationClient(server.address, KEY) as alice,
        GenerationClient(server.address, KEY[::-1]) as bob,
    ):
        assert [reply async for reply in alice.generate(ASKED)]
        await alice.models()
        with pytest.raises(errors.Overloaded, match="too many requests of this client") as raised:
            await alice.models()
        assert 50 < raised.value.after <= 60
        assert await bob.models()
    async with serving(FakeOutputs(), GenerationOptions(rate=RateLimit(1, 1))) as server:
        for expected in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED):  # another connection each
            assert await status_of(server.address, "Models", ()) is expected


async def test_a_client_that_leaves_gives_everything_back_at_once() -> None:
    outputs = FakeOutputs(waits_after=2)
    async with serving(outputs) as server:
        async with GenerationClient(server.address) as client:
            generation = client.generate(ASKED)
            assert isinstance(await anext(generation), Generated)
            await generation.aclose()
            await outputs.wait_running(0)
            other = client.generate(ASKED)
            assert isinstance(await anext(other), Generated)
            await outputs.wait_running(1)
        await outputs.wait_running(0)  # the connection is closed
    assert outputs.yielded == 4


async def test_a_deadline_ends_both_sides() -> None:
    outputs = FakeOutputs(waits_after=1)
    async with serving(outputs) as server, GenerationClient(server.address) as client:
        generation = client.generate(ASKED, deadline_seconds=0.3)
        assert isinstance(await anext(generation), Generated)
        with pytest.raises(errors.TimedOut, match="Deadline Exceeded"):
            await anext(generation)
        await outputs.wait_running(0)


async def test_a_server_that_says_nothing_is_given_up() -> None:
    outputs = FakeOutputs(waits_after=0)
    async with serving(outputs) as server, GenerationClient(server.address, reply_seconds=0.2) as client:
        with pytest.raises(errors.TimedOut, match=r"no reply within 0\.2 s"):
            await anext(client.generate(ASKED))
        await outputs.wait_running(0)


async def rest_of(call: "grpc.aio.UnaryStreamCall[bytes, bytes]") -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_client_that_does_not_read_is_bounded_and_then_given_up() -> None:
    outputs = FakeOutputs(tokens=[Token(1, "x", bytes(2**16), Kind.BONUS, None)] * 10_000)
    options = GenerationOptions(stalled_seconds=0.2)
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
    outputs = FakeOutputs(waits_after=2)
    async with serving(outputs) as server:

        async def ask(number: int) -> int:
            async with GenerationClient(server.address) as client:
                return len([reply async for reply in client.generate(replace(ASKED, id=f"r-{number}"))])

        asked = [asyncio.create_task(ask(number)) for number in range(200)]
        await outputs.wait_running(200)
        outputs.go_on.set()
        assert await asyncio.gather(*asked) == [len(TOKENS) + 1] * 200
    assert outputs.running == 0
    assert len({order.id for order in outputs.orders}) == 200


@pytest.mark.parametrize("setting", ["explain", "record"])
async def test_what_stays_with_the_server_is_refused(served: Served, setting: str, tmp_path) -> None:
    value = tmp_path / "file" if setting == "record" else True
    async with Client(served[1]) as client:
        with pytest.raises(RequestError, match=f"{setting} is not for a server"):
            client.generate("Hello", **{setting: value})


@pytest.mark.parametrize(
    "change",
    [
        {"k": 2**40},
        {"prompt": (-1,)},
        {"prompt": "\udc80"},
        {"overlap": "maybe"},
        {"seed": -1},
        {"prompt": ()},
        {"k": 0},
        {"paths": 999},
        {"method": "guess"},
    ],
    ids=lambda change: "-".join(change),
)
async def test_a_request_that_means_nothing(served: Served, change: dict[str, object]) -> None:
    async with GenerationClient(served[1]) as client:
        with pytest.raises(errors.BadRequest):
            await anext(client.generate(replace(ASKED, **change)))


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan")])
def test_options_are_checked(bad: float) -> None:
    with pytest.raises(ValueError, match="stalled_seconds must be above 0"):
        GenerationOptions(stalled_seconds=bad)
