"""Values survive the wire."""

import dataclasses
from enum import Enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.rpc import codec, drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage
from crossdraft.text.letters import Letters
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Draft, Drafted, FetchRow, OpenTarget, SamplingOptions
from crossdraft.types.rows import Whose
from crossdraft.v1 import common_pb2, drafter_pb2, target_pb2
from tests.rpc import values
from tests.rpc.values import SIZE


def plain(value: object) -> object:
    """A value as nested lists, which compare by content; enums and numbers as they are."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Enum) or not dataclasses.is_dataclass(value):
        return [plain(part) for part in value] if isinstance(value, tuple) else value
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    return [type(value).__name__, *(plain(getattr(value, name)) for name in fields)]


@given(values.target_requests)
def test_requests_to_a_target_survive_the_wire(request_sent):
    raw = target_codec.encode_request(request_sent).SerializeToString()
    got = target_codec.decode_request(target_pb2.VerifyRequest.FromString(raw), SIZE)
    assert plain(got) == plain(request_sent)


@given(values.target_replies)
def test_replies_of_a_target_survive_the_wire(reply):
    raw = target_codec.encode_reply(reply).SerializeToString()
    assert plain(target_codec.decode_reply(target_pb2.VerifyReply.FromString(raw), SIZE)) == plain(reply)


@given(values.drafter_requests)
def test_requests_to_a_drafter_survive_the_wire(request_sent):
    raw = drafter_codec.encode_request(request_sent).SerializeToString()
    got = drafter_codec.decode_request(drafter_pb2.DraftRequest.FromString(raw), SIZE)
    assert plain(got) == plain(request_sent)


@given(values.drafter_replies)
def test_replies_of_a_drafter_survive_the_wire(reply):
    raw = drafter_codec.encode_reply(reply).SerializeToString()
    assert plain(drafter_codec.decode_reply(drafter_pb2.DraftReply.FromString(raw), SIZE)) == plain(reply)


@given(values.descriptions)
def test_descriptions_survive_the_wire(description):
    raw = codec.encode_description(description).SerializeToString()
    assert codec.decode_description(common_pb2.Description.FromString(raw)) == description


def test_unset_options_are_the_defaults():
    opening = target_codec.decode_request(target_pb2.VerifyRequest(open=target_pb2.OpenTarget(prompt=[1])), SIZE)
    assert opening == OpenTarget((1,), SamplingOptions(), None)


def test_what_an_older_peer_leaves_unset_means_that_nothing_of_it_is_wanted():
    asked = drafter_codec.decode_request(drafter_pb2.DraftRequest(open=drafter_pb2.OpenDrafter()), SIZE)
    assert (asked.redistribute, asked.audited) == ("", False)
    told = common_pb2.Description(tokenizer_json="{}", vocabulary_size=SIZE, context=4, fingerprint="f")
    assert codec.decode_description(told).affinity == ""
    assert not codec.decode_description(told).copies


@given(st.binary(max_size=12))
def test_letters_are_what_was_meant_or_refused(raw):
    try:
        letters = codec.decode_letters(raw, "text")
    except BadMessage:
        return
    assert codec.encode_letters(letters) == raw


def test_ids_of_the_target_are_left_to_those_who_know_them():
    reply = drafter_pb2.Drafted(
        tokens=[SIZE], target_ids=True, branches=[drafter_pb2.Branch(number=1, letters=b"a", tokens=[SIZE])]
    )
    got = drafter_codec.decode_reply(drafter_pb2.DraftReply(drafted=reply), SIZE)
    assert isinstance(got, Drafted)
    assert (got.draft_tokens[0].token, got.draft_tokens[0].whose, got.branches[0].tokens) == (
        SIZE,
        Whose.TARGET,
        (SIZE,),
    )


def test_drafts_without_the_newer_fields_are_whole_and_have_no_branches():
    asked = drafter_codec.decode_request(drafter_pb2.DraftRequest(draft=drafter_pb2.Draft(letters=b"a", count=5)), SIZE)
    assert asked == Draft(0, 0, Letters("a"), 5, MOST_DRAFT_TOKENS, branch_depth=0, branch_width=1, adopt=0)


def test_a_duration_longer_than_a_message_holds_is_the_longest():
    raw = drafter_codec.encode_reply(Drafted(1, (), 1e9))
    got = drafter_codec.decode_reply(raw, SIZE)
    assert isinstance(got, Drafted)
    assert got.seconds == pytest.approx(2**32 / 1e6, abs=1e-5)


def test_a_fetch_with_no_ids_listed_is_not_one_of_the_whole_row():
    for listed in (None, np.array([], dtype=np.int64)):
        raw = target_codec.encode_request(FetchRow(1, 0, listed)).SerializeToString()
        got = target_codec.decode_request(target_pb2.VerifyRequest.FromString(raw), SIZE)
        assert isinstance(got, FetchRow)
        assert (got.listed is None) == (listed is None)
