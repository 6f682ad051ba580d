"""What clients and Generation say survives the wire, and what means nothing is refused."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.rpc import codec, generation
from crossdraft.rpc.errors import BadMessage, BadRequest
from crossdraft.rpc.generation import Committed, Generate
from crossdraft.session.models import with_defaults
from crossdraft.types.messages import SamplingDefaults, SamplingOptions
from crossdraft.types.output import Token
from crossdraft.types.request import Chat, GenerationRequest, Message, Overlap
from crossdraft.types.statistics import Counts, Kind, LaneFigures, Statistics, Times, statistics_of
from crossdraft.v1 import generation_pb2 as pb

TEXTS = st.text(max_size=8)
IDS = st.tuples() | st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
COUNTS = st.integers(0, 2**32 - 1)
MESSAGES = st.builds(Message, TEXTS.filter(bool), TEXTS)
NONE = statistics_of("", 0, 0, Counts(), Times(0.0, 0.0, 0.0, 0.0, 0, 0))
PROMPTS = TEXTS.filter(bool) | IDS.filter(bool) | st.lists(MESSAGES, min_size=1, max_size=3).map(tuple).map(Chat)
FEW = st.integers(1, 16)
REQUESTS = st.builds(
    GenerationRequest,
    PROMPTS,
    options=st.builds(SamplingOptions, st.floats(0, 9), st.integers(0, 9), st.floats(0.1, 1)),
    method=st.none() | TEXTS,
    drafter_temperature=st.none() | st.floats(0, 9),
    seed=st.none() | st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    stop=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
    bad_words=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
    committed=IDS,
    stop_token_ids=IDS,
    truncate_prompt_tokens=st.sampled_from([None, -1, 7]),
    prompt_logprobs=st.none() | st.integers(0, 20),
    cache_salt=TEXTS,
    overlap=st.sampled_from([Overlap.AUTO, Overlap.ON]),
    max_draft_tokens=st.none() | st.integers(16, 64),
    logprobs=st.none() | st.integers(0, 20),
    **dict.fromkeys(("min_draft_tokens", "branches", "branch_width"), st.none() | FEW),
    **dict.fromkeys(("num_speculative_tokens", "max_tokens", "paths", "head", "row_width"), FEW),
    **dict.fromkeys(
        ("ignore_eos", "include_stop_str_in_output", "allow_inexact", "audit", "speculation"), st.booleans()
    ),
)


@given(st.builds(Generate, REQUESTS, id=TEXTS, model=TEXTS, drafter=st.none() | TEXTS, together=st.booleans()))
def test_requests(asked: Generate) -> None:
    sent = generation.encode_request(asked).SerializeToString()
    assert generation.decode_request(pb.GenerateRequest.FromString(sent)) == asked


def test_what_is_left_out_is_told_from_what_is_the_default() -> None:
    usual = SamplingOptions(1.0, 0, 1.0, 0.0, 1.0)
    own = SamplingDefaults(0.5, 20, 0.8, 0.1, 1.05, 700)
    for options, tokens, due in (
        ({"options": usual, "max_tokens": 128}, 128, usual),
        ({}, 700, SamplingOptions(0.5, 20, 0.8, 0.1, 1.05)),
        (
            {"options": SamplingOptions(top_p=1.0, presence_penalty=1.0)},
            700,
            replace(own.fill(SamplingOptions()), top_p=1.0, presence_penalty=1.0),
        ),
    ):
        sent = generation.encode_request(Generate(GenerationRequest("x", **options))).SerializeToString()
        got = with_defaults(generation.decode_request(pb.GenerateRequest.FromString(sent)).request, own)
        assert (got.options, got.max_tokens) == (due, tokens)


def names(kind: type) -> set[str]:
    return {one.name for one in fields(kind)}


def test_every_field_has_its_place() -> None:
    asked = (names(GenerationRequest) | names(Generate)) - {"prompt", "request", "explain", "record", "authorization"}
    assert set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {"text", "ids", "chat"} == asked
    assert set(pb.Statistics.DESCRIPTOR.fields_by_name) == names(Statistics)
    lane = (names(LaneFigures) - {"address", "trips"}) | {"trip_counts", "trip_seconds", "queued_seconds"}
    assert set(pb.Lane.DESCRIPTOR.fields_by_name) == lane


TOKENS = st.builds(
    Token,
    COUNTS,
    TEXTS,
    st.binary(max_size=4),
    st.sampled_from(Kind),
    st.none() | st.floats(-99, 0),
    st.lists(st.tuples(COUNTS, st.binary(max_size=4), st.floats(-99, 0)), max_size=3).map(tuple),
)


@given(st.builds(Committed, st.lists(TOKENS, min_size=1, max_size=3).map(tuple), st.floats(0, 1e6)))
def test_tokens(tokens: Committed) -> None:
    sent = generation.encode_reply(tokens).SerializeToString()
    assert generation.decode_reply(pb.GenerateReply.FromString(sent)) == tokens


def test_who_does_not_know_of_several_tokens_in_a_reply_does_not_ask_for_them() -> None:
    assert not generation.decode_request(pb.GenerateRequest(text="x")).together


NO_PROMPT = "there is no prompt; give text, ids or a chat"
REQUESTED, REPLIED = generation.decode_request, generation.decode_reply


@pytest.mark.parametrize(
    ("decode", "message", "error", "complaint"),
    [
        *((REQUESTED, one, BadMessage, NO_PROMPT) for one in ({}, {"ids": {}}, {"chat": {}})),
        (REQUESTED, {"text": "x", "overlap": 7}, BadMessage, "overlap has the value 7; known are AUTO, ON, OFF"),
        (
            REQUESTED,
            {"text": "x", "options": {"temperature": -1}},
            BadMessage,
            "options: temperature must be 0 or more",
        ),
        (REPLIED, {"token": {"id": 1}}, BadMessage, r"token\.kind is not set"),
        (REPLIED, {"ended": {}}, BadMessage, r"ended\.reason is not set"),
        (REPLIED, {}, BadMessage, "one of prompt, token and ended"),
        (REQUESTED, {"text": "x", "num_speculative_tokens": 65}, BadRequest, "must be between 1 and 64, got 65"),
        (REQUESTED, {"text": "x", "overlap": 2, "max_draft_tokens": 3}, BadRequest, "has no effect with overlap off"),
    ],
)
def test_what_means_nothing_or_cannot_be_is_refused(decode, message, error, complaint):
    kind = pb.GenerateRequest if decode is REQUESTED else pb.GenerateReply
    with pytest.raises(error, match=complaint):
        decode(kind(**message))


@pytest.mark.parametrize("request_", [GenerationRequest("x", max_tokens=2**32), GenerationRequest((2**32,))])
def test_what_does_not_fit_its_field(request_: GenerationRequest) -> None:
    with pytest.raises(ValueError, match=r"."):
        generation.encode_request(Generate(request_))


def test_defaults_of_sampling_are_unset_and_what_truncates_is_the_drafters_too() -> None:
    sent = {one.name for one, _ in codec.encode_options(SamplingOptions()).ListFields()}
    assert sent == {"temperature", "top_p", "repetition_penalty"}  # as older services have these
    whole = SamplingOptions(
        0.5, 7, 0.9, 0.1, 1.2, 0.3, 0.4, min_tokens=5, logit_bias=((1, 2.0),), allowed_token_ids=(1,), end_ids=(3,)
    )
    assert whole.of_drafter == SamplingOptions(0.5, 7, 0.9, 0.1)
