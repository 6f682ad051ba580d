"""What asks for too much is refused before anything is made of it."""

import pytest

from crossdraft.rpc import codec, drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage
from crossdraft.session.resolution import NODES_BESIDE_THE_DRAFT
from crossdraft.types.messages import MOST_DRAFT_TOKENS
from crossdraft.types.request import MOST_PATHS, WIDEST
from crossdraft.v1 import common_pb2, drafter_pb2, target_pb2
from crossdraft.verification.prefixes import LARGEST_QUESTION
from tests.rpc.values import SIZE


def opening(**changes: object) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(open=target_pb2.OpenTarget(**{"prompt": [1]} | changes))


def numbers(count: int, bits: int = 1) -> common_pb2.Numbers:
    return common_pb2.Numbers(count=count, bits=bits, data=bytes((count * bits + 7) // 8))


@pytest.mark.parametrize(
    ("much", "complaint"),
    [
        (opening(head=2**32 - 1), f"head has {2**32 - 1}; at most {target_codec.MAX_HEAD}"),
        (opening(prompt=[1] * (codec.MAX_IDS + 1)), f"prompt has {codec.MAX_IDS + 1}"),
        (opening(options={"logit_bias": [{}] * (codec.MAX_BIASES + 1)}), "options.logit_bias has 65537"),
        (
            target_pb2.VerifyRequest(next_pass={"number": 1, "tree": {"tokens": [1] * (target_codec.MAX_NODES + 1)}}),
            "tree.tokens has 1089; at most 1088 are taken",
        ),
        (
            target_pb2.VerifyRequest(fetch={"number": 1, "listed": numbers(codec.MAX_NUMBERS + 1)}),
            f"listed has {codec.MAX_NUMBERS + 1}; at most",
        ),
    ],
)
def test_requests_to_a_target(much: target_pb2.VerifyRequest, complaint: str) -> None:
    with pytest.raises(BadMessage, match=complaint):
        target_codec.decode_request(much, SIZE)


@pytest.mark.parametrize(
    ("much", "complaint"),
    [
        (drafter_pb2.DraftRequest(open={"row_width": drafter_codec.MAX_ROW_WIDTH + 1}), "row_width has 65537"),
        (drafter_pb2.DraftRequest(open={"allowed": numbers(codec.MAX_NUMBERS + 1)}), "allowed has"),
        (
            drafter_pb2.DraftRequest(score={"strings": [b"a"] * (drafter_codec.MAX_STRINGS + 1), "tokens": 1}),
            "strings has 4097",
        ),
        (
            drafter_pb2.DraftRequest(score={"strings": [b"a" * (drafter_codec.MAX_STRING + 1)], "tokens": 1}),
            "the longest of strings has 65537",
        ),
    ],
)
def test_requests_to_a_drafter(much: drafter_pb2.DraftRequest, complaint: str) -> None:
    with pytest.raises(BadMessage, match=complaint):
        drafter_codec.decode_request(much, SIZE)


def test_replies_of_a_drafter() -> None:
    branches = [{"number": 1, "letters": b"a", "tokens": [1]}] * (drafter_codec.MAX_BRANCHES + 1)
    with pytest.raises(BadMessage, match="branches has 4097"):
        drafter_codec.decode_reply(drafter_pb2.DraftReply(drafted={"branches": branches}), SIZE)


def test_the_bounds_leave_room_for_what_an_orchestrator_asks() -> None:
    assert target_codec.MAX_NODES >= MOST_PATHS * MOST_DRAFT_TOKENS + NODES_BESIDE_THE_DRAFT
    assert target_codec.MAX_HEAD >= WIDEST
    assert drafter_codec.MAX_ROW_WIDTH >= WIDEST
    assert drafter_codec.MAX_STRINGS >= LARGEST_QUESTION
