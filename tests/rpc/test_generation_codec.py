"""What clients and Generation say survives the wire, and what means nothing is refused."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.rpc import generation
from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.generation import Generate, Generated, GenerationEnded, Served, Turn
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.statistics import Kind
from crossdraft.v1 import generation_pb2 as pb

TEXTS = st.text(max_size=8)
IDS = st.tuples() | st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
COUNTS = st.integers(0, 2**32 - 1)
PROMPTS = (
    TEXTS.filter(bool) | IDS.filter(bool) | st.lists(st.builds(Turn, TEXTS, TEXTS), min_size=1, max_size=3).map(tuple)
)
MAYBE = {name: st.none() | COUNTS for name in ("k", "max_tokens", "logprobs", "window", "wait", "paths", "head")}
REQUESTS = st.builds(
    Generate,
    PROMPTS,
    id=TEXTS,
    model=TEXTS,
    drafter=st.none() | TEXTS,
    options=st.none() | st.builds(SamplingOptions, st.floats(0, 9), st.integers(0, 9), st.floats(0.1, 1)),
    method=st.none() | TEXTS,
    drafter_temperature=st.none() | st.floats(0, 9),
    seed=st.none() | st.integers(0, 2**64 - 1),
    choice=st.none() | st.integers(1, 9),
    ignore_eos=st.sampled_from([None, True]),
    stop=st.lists(TEXTS, max_size=3).map(tuple),
    committed=IDS,
    overlap=st.sampled_from(["auto", "on", "off"]),
    **MAYBE,
)


@given(REQUESTS)
def test_requests(request_: Generate) -> None:
    sent = generation.encode_request(request_).SerializeToString()
    assert generation.decode_request(pb.GenerateRequest.FromString(sent)) == request_


def test_every_field_of_a_request_has_its_place() -> None:
    names = {one.name for one in fields(Generate)} - {"prompt"}
    assert set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {"text", "ids", "chat"} == names


TOKENS = st.builds(
    Generated,
    COUNTS,
    st.binary(max_size=4),
    TEXTS,
    st.sampled_from(Kind),
    st.none() | st.floats(-99, 0),
    st.lists(st.tuples(COUNTS, st.binary(max_size=4), st.floats(-99, 0)), max_size=3).map(tuple),
    st.floats(0, 1e6),
)


@given(TOKENS)
def test_tokens(token: Generated) -> None:
    sent = generation.encode_reply(token).SerializeToString()
    assert generation.decode_reply(pb.GenerateReply.FromString(sent)) == token


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "failed"])
def test_ends(reason: str) -> None:
    figures = {"method": "slem", "tokens": 3, "seconds": 0.5, "accepted_at": (2, 1), "bytes_sent": 2**40}
    sent = generation.encode_reply(GenerationEnded("r", reason, figures)).SerializeToString()
    arrived = generation.decode_reply(pb.GenerateReply.FromString(sent))
    assert isinstance(arrived, GenerationEnded)
    assert (arrived.id, arrived.reason) == ("r", reason)
    assert {name: arrived.figures[name] for name in figures} == figures
    assert set(arrived.figures) == set(pb.Statistics.DESCRIPTOR.fields_by_name)


def test_models() -> None:
    models = (Served("a", 7, 64, ("x", "y"), ("slem",), True), Served("b", 0, 1, (), (), False))
    assert (
        generation.decode_models(pb.ModelsReply.FromString(generation.encode_models(models).SerializeToString()))
        == models
    )


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(),
        pb.GenerateRequest(text=""),
        pb.GenerateRequest(ids=pb.PromptIds()),
        pb.GenerateRequest(chat=pb.Chat()),
    ],
)
def test_a_prompt_is_needed(message: pb.GenerateRequest) -> None:
    with pytest.raises(BadMessage, match="there is no prompt; give text, ids or a chat"):
        generation.decode_request(message)


def test_values_that_mean_nothing() -> None:
    with pytest.raises(BadMessage, match="overlap has the value 7; known are AUTO, ON, OFF"):
        generation.decode_request(pb.GenerateRequest.FromString(b"\x1a\x01x\xa0\x01\x07"))
    with pytest.raises(BadMessage, match="options: temperature must be 0 or more"):
        generation.decode_request(pb.GenerateRequest(text="x", options={"temperature": -1}))
    with pytest.raises(BadMessage, match=r"token\.kind is not set"):
        generation.decode_reply(pb.GenerateReply(token=pb.Token(id=1)))
    with pytest.raises(BadMessage, match="one of token and ended"):
        generation.decode_reply(pb.GenerateReply())


@pytest.mark.parametrize(
    "request_",
    [
        Generate("x", k=-1),
        Generate("x", seed=2**64),
        Generate("x", overlap="maybe"),
        Generate((2**32,)),
        Generate("\ud800"),
    ],
)
def test_what_does_not_fit_its_field(request_: Generate) -> None:
    with pytest.raises(ValueError, match=r"."):
        generation.encode_request(request_)
