"""Outputs over gRPC, made by nothing: what is asked for arrives, what is made comes back, what is left is given up."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import grpc
import pytest

from crossdraft.client import GenerationRequest, Overlap, Reason, RequestError, Token
from crossdraft.rpc import errors
from crossdraft.rpc.generation import Committed, Generate, GenerationClient, OutputEnded, decode_reply, encode_reply
from crossdraft.serving.backend import OverloadedError
from crossdraft.serving.grpc_client import Client, RemoteGeneration
from crossdraft.serving.limits import Keys, scope_of
from crossdraft.types.request import Chat, Message, PromptTooLongError
from crossdraft.types.statistics import LaneFigures, Trips
from tests.serving.fakes import ASKED, TOKENS, TOY, FakeBackend, figures, serving

Served = tuple[FakeBackend, str]


@pytest.fixture
async def served() -> AsyncGenerator[Served, None]:
    outputs = FakeBackend()
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


@pytest.mark.parametrize(("together", "sizes"), [(True, [3, 1]), (False, [1, 1, 1, 1])])
async def test_tokens_of_one_pass_are_one_message_for_clients_that_know_of_it(together: bool, sizes: list[int]) -> None:
    async with serving(FakeBackend(together=3)) as server, GenerationClient(server.address) as client:
        *replies, ended = [reply async for reply in client.replies(replace(ASKED, together=together))]
    generated = [reply for reply in replies if isinstance(reply, Committed)]
    assert [len(reply.tokens) for reply in generated] == sizes
    assert [token for reply in generated for token in reply.tokens] == list(TOKENS)
    assert isinstance(ended, OutputEnded)


async def test_a_client_may_have_the_tokens_of_one_pass_at_once() -> None:
    async with serving(FakeBackend(together=3)) as server, Client(server.address) as client:
        generation = client.generate("Hello")
        assert [list(await generation.together()) for _ in range(3)] == [list(TOKENS[:3]), list(TOKENS[3:]), []]
        assert (generation.text, len(generation.milliseconds)) == ("Heé", 4)


async def test_log_probabilities_and_their_rivals() -> None:
    top = ((7, b"\xff", -0.1), (5, b"He", -2.5))
    tokens = [replace(TOKENS[0], top=top, names=((5, "<s>"), (6, "</s>"))), TOKENS[2]]
    outputs = FakeBackend(tokens=tokens)
    async with serving(outputs) as server, Client(server.address) as client:
        assert [token async for token in client.generate("Hello", method="seeded", logprobs=2)] == tokens
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
async def test_a_request_arrives_as_it_was_asked(served: Served, request_: GenerationRequest) -> None:
    outputs, address = served
    async with Client(address) as client:
        async for _ in client.run(request_, "toy", "small", "my-id"):
            pass
    (order,) = outputs.requests
    assert (order.id, order.model, order.drafter) == ("my-id", "toy", "small")
    assert order.generation == replace(request_, cache_salt=scope_of(None, request_.cache_salt, Keys()))


async def test_what_is_left_out_is_the_default(served: Served) -> None:
    outputs, address = served
    async with GenerationClient(address) as client:
        assert [reply async for reply in client.replies(Generate(GenerationRequest("Hello")))]
        assert [reply async for reply in client.replies(Generate(GenerationRequest("Hello"), drafter=""))]
    first, plain = outputs.requests
    assert (first.model, first.drafter, plain.drafter) == ("toy", None, "")
    assert first.generation == GenerationRequest("Hello", cache_salt=scope_of(None, "", Keys()))
    assert first.id != plain.id


async def test_ids_of_requests(served: Served) -> None:
    outputs, address = served
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_stream("/crossdraft.v1.Generation/Generate")
        call = method(b"\x1a\x02Hi", metadata=(("x-request-id", "from-metadata"),))
        assert await call.initial_metadata() == grpc.aio.Metadata(("x-request-id", "from-metadata"))
        assert [reply async for reply in call]
    assert [order.id for order in outputs.requests] == ["from-metadata"]
    async with GenerationClient(address) as client:
        replies = [reply async for reply in client.replies(ASKED)]
        assert isinstance(replies[-1], OutputEnded)
        assert replies[-1].id == "r-1"
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
        (OverloadedError("64 outputs are being made", 2.5), errors.Overloaded, "64 outputs"),
        (errors.Unreachable("target at 10.0.0.1:7: gone"), errors.Unreachable, "no target can make"),
        (errors.Full("target at 10.0.0.1:7: full"), errors.Overloaded, "at their limit of sessions"),
        (errors.TooLarge("target at 10.0.0.1:7: 9 MiB"), errors.TooLarge, "the prompt is too large"),
        (errors.TimedOut("target at 10.0.0.1:7: slow"), errors.Unreachable, "no target can make"),
        (errors.BadRequest("target at 10.0.0.1:7: no such id"), RequestError, "target: no such id"),
        (errors.ContextTooLong("target at 10.0.0.1:7: full"), errors.ContextTooLong, "target: full"),
        (errors.ContextTooLong("the context is full"), errors.ContextTooLong, "the context is full"),
    ],
)
async def test_what_goes_wrong_is_said(made: list[Token], fault: Exception, error: type[Exception], text: str) -> None:
    outputs = FakeBackend(fault=fault, fault_after=len(made))
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


async def test_a_model_must_be_named_where_there_are_several() -> None:
    outputs = FakeBackend(served=(TOY, replace(TOY, name="second")))
    async with serving(outputs) as server, GenerationClient(server.address) as client:
        with pytest.raises(errors.BadRequest, match="name the model; there are toy, second"):
            await anext(client.replies(Generate(GenerationRequest("Hello"))))
        with pytest.raises(errors.NameUnknown, match="there is no model 'other'; there is toy"):
            await anext(client.replies(replace(ASKED, model="other")))
        assert isinstance(await anext(client.replies(Generate(GenerationRequest("Hello"), model="second"))), Committed)
        outputs.served, outputs.fault = (TOY, replace(TOY, name="other", root="toy")), errors.Unreachable("10.0.0.1")
        with pytest.raises(errors.Unreachable, match="no target can make this output now"):
            await anext(client.replies(Generate(GenerationRequest("Hello"))))
        assert outputs.requests[-1].model == "toy"


@pytest.mark.parametrize("setting", ["explain", "record"])
async def test_what_stays_with_the_server_is_refused(served: Served, setting: str, tmp_path) -> None:
    value = tmp_path / "file" if setting == "record" else True
    async with Client(served[1]) as client:
        with pytest.raises(RequestError, match=f"{setting} is not for a server"):
            client.generate("Hello", **{setting: value})


async def test_a_method_that_cannot_be_used_is_refused_before_anything_is_sent() -> None:
    async with Client("127.0.0.1:1") as client:  # where nothing listens
        for settings in ({"method": "guess"}, {"method": "tokentiming"}):
            with pytest.raises(RequestError, match=r"unknown method|allow_inexact"):
                client.generate("Hello", **settings)


async def test_a_value_that_does_not_fit_its_field_is_not_sent(served: Served) -> None:
    async with GenerationClient(served[1]) as client:
        with pytest.raises(errors.BadRequest):
            await anext(client.replies(Generate(GenerationRequest("x", max_tokens=2**40))))


def test_lanes_are_sent_without_where_services_are() -> None:
    lane = LaneFigures("target", "10.0.0.1:7001", 1, 2, Trips((3, 4), 0.5, 0.25), "unreachable", 0.1, 0.2, 0.9, 0.3)
    given = replace(figures(4), lanes=(lane,), drafter_lost="drafter at 10.0.0.1:7001: gone")
    ended = OutputEnded(Reason.STOP, given, "r-1")
    sent = encode_reply(ended)
    assert b"10.0.0.1" not in sent.SerializeToString()
    arrived = decode_reply(sent)
    statistics = replace(given, lanes=(replace(lane, address=""),), drafter_lost="drafter: gone")
    assert arrived == replace(ended, statistics=statistics)
