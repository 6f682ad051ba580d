"""Values survive the wire; what means nothing is refused with a text that names the field."""

import dataclasses
from enum import Enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.rpc import codec, drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage
from crossdraft.v1 import common_pb2, drafter_pb2, target_pb2
from crossdraft.verification.exchange import OpenTarget, SamplingOptions
from crossdraft.verification.rows import Row
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


def row(**changes: object) -> common_pb2.Row:
    return common_pb2.Row(**{"ids": [1, 2], "probabilities": [0.5, 0.25], "tail": 0.25} | changes)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (row(ids=[1, SIZE]), "the vocabulary has 300 ids"),
        (row(ids=[1]), "1 ids but 2 probabilities"),
        (row(ids=[1, 1]), "not distinct"),
        (row(probabilities=[0.5, float("nan")]), "between 0 and 1"),
        (row(probabilities=[0.5, float("inf")]), "between 0 and 1"),
        (row(probabilities=[-0.5, 0.25]), "between 0 and 1"),
        (row(tail=float("nan")), "between 0 and 1"),
        (row(tail=0.3), "sums to 1.05"),
        (row(tail=0.0), "sums to 0.75"),
        (common_pb2.Row(), "sums to 0 "),
    ],
)
def test_what_is_no_distribution_is_refused(bad, complaint):
    reply = target_pb2.VerifyReply(fetched=target_pb2.RowFetched(number=1, row=bad))
    with pytest.raises(BadMessage, match=complaint):
        target_codec.decode_reply(reply, SIZE)


def opening(**changes: object) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(open=target_pb2.OpenTarget(**{"prompt": [1]} | changes))


def passing(**changes: object) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(next_pass=target_pb2.Pass(**{"number": 1} | changes))


def tree(tokens: list[int], parents: list[int]) -> target_pb2.TokenTree:
    return target_pb2.TokenTree(tokens=tokens, parents=parents)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (target_pb2.VerifyRequest(), "one of open, next_pass and fetch"),
        (opening(prompt=[]), "prompt is empty"),
        (opening(prompt=[SIZE]), "prompt has the id 300"),
        (opening(options=common_pb2.SamplingOptions(temperature=-1)), "temperature must be 0 or more"),
        (opening(options=common_pb2.SamplingOptions(top_p=0)), "top_p must be above 0"),
        (opening(options=common_pb2.SamplingOptions(logit_bias=[common_pb2.LogitBias(id=SIZE)])), "logit_bias has"),
        (passing(committed=[SIZE]), "committed has the id 300"),
        (passing(tree=tree([SIZE], [0])), "tree.tokens has the id 300"),
        (passing(tree=tree([1, 2], [0])), "2 tokens but 1 parents"),
        (passing(tree=tree([1], [1])), "parents must come first"),
        (passing(tree=tree([1], [0]), listed=[common_pb2.IdList()]), "listed has 1 lists; it needs none or 2"),
        (passing(listed=[common_pb2.IdList(ids=[SIZE])]), "listed has the id 300"),
    ],
)
def test_bad_requests_to_a_target_are_refused(bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        target_codec.decode_request(bad, SIZE)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (target_pb2.VerifyReply(), "one of opened, done and fetched"),
        (target_pb2.VerifyReply(done=target_pb2.PassDone(number=1)), "no nodes"),
        (target_pb2.VerifyReply(done=target_pb2.PassDone(nodes=[target_pb2.Node()])), "a row or a sample"),
        (
            target_pb2.VerifyReply(done=target_pb2.PassDone(nodes=[target_pb2.Node(row=row())], seconds=-1)),
            "seconds is -1",
        ),
        (
            target_pb2.VerifyReply(
                done=target_pb2.PassDone(nodes=[target_pb2.Node(sample=target_pb2.Sample(log_probability=0.5))])
            ),
            "log-probability 0.5",
        ),
    ],
)
def test_bad_replies_of_a_target_are_refused(bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        target_codec.decode_reply(bad, SIZE)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (drafter_pb2.DraftRequest(), "one of open, draft, advance and score"),
        (drafter_pb2.DraftRequest(open=drafter_pb2.OpenDrafter(audited=True)), "audited needs noise"),
        (drafter_pb2.DraftRequest(score=drafter_pb2.Score(strings=[b"a"])), "tokens must be between 1 and 64"),
        (drafter_pb2.DraftRequest(score=drafter_pb2.Score(strings=[b"a"], tokens=65)), "between 1 and 64, got 65"),
        (drafter_pb2.DraftRequest(score=drafter_pb2.Score(strings=[b"a", b""], tokens=1)), r"strings\[1\] is empty"),
        (drafter_pb2.DraftRequest(score=drafter_pb2.Score(strings=[b"\xff"], tokens=1)), r"strings\[0\] is not"),
        (drafter_pb2.DraftRequest(open=drafter_pb2.OpenDrafter(prompt=b"\xff")), "prompt is not the UTF-8"),
        (drafter_pb2.DraftRequest(open=drafter_pb2.OpenDrafter(prompt="中".encode())), r"U\+4E2D, which is no letter"),
        (drafter_pb2.DraftRequest(open=drafter_pb2.OpenDrafter(allowed={"ids": [SIZE]})), "allowed has the id"),
        (drafter_pb2.DraftRequest(draft=drafter_pb2.Draft(letters=b"\xed\xa0\x80", count=1)), "letters is not"),
        (drafter_pb2.DraftRequest(draft=drafter_pb2.Draft(letters=b"a")), "count must be between 1 and 64"),
        (drafter_pb2.DraftRequest(draft=drafter_pb2.Draft(letters=b"a", count=2**32 - 1)), "count must be between"),
    ],
)
def test_bad_requests_to_a_drafter_are_refused(bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        drafter_codec.decode_request(bad, SIZE)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (drafter_pb2.Proposal(token=1), "whose must be"),
        (drafter_pb2.Proposal(token=SIZE, whose=drafter_pb2.WHOSE_DRAFTER), "token has the id 300"),
        (drafter_pb2.Proposal(token=3, whose=drafter_pb2.WHOSE_DRAFTER, row=row()), "its own row cannot give"),
    ],
)
def test_bad_proposals_are_refused(bad, complaint):
    reply = drafter_pb2.DraftReply(drafted=drafter_pb2.Drafted(proposals=[bad]))
    with pytest.raises(BadMessage, match=complaint):
        drafter_codec.decode_reply(reply, SIZE)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (drafter_pb2.DraftReply(), "one of opened, drafted and scored"),
        (drafter_pb2.DraftReply(scored=drafter_pb2.Scored(probabilities=[1.5])), "not between 0 and 1"),
        (drafter_pb2.DraftReply(scored=drafter_pb2.Scored(probabilities=[float("nan")])), "not between 0 and 1"),
        (drafter_pb2.DraftReply(scored=drafter_pb2.Scored(seconds=-1)), "seconds is -1"),
    ],
)
def test_bad_replies_of_a_drafter_are_refused(bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        drafter_codec.decode_reply(bad, SIZE)


@given(st.binary(max_size=12))
def test_letters_are_what_was_meant_or_refused(raw):
    try:
        letters = codec.decode_letters(raw, "text")
    except BadMessage:
        return
    assert codec.encode_letters(letters) == raw


def test_rounding_of_a_row_is_that_of_float32():
    third = Row(np.array([4]), np.array([1 / 3]), 2 / 3)
    got = codec.decode_row(codec.encode_row(third), "row", None)
    assert got.probabilities[0] == float(np.float32(1 / 3)) != 1 / 3
