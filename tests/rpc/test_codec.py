"""Messages survive the wire, rows keep their bits, and what asks for too much is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.rpc import codec, frames
from crossdraft.rpc.codec import GRID, LEADING, MAX_BITS
from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.session.resolution import NODES_BESIDE_THE_DRAFT
from crossdraft.text.letters import Letters
from crossdraft.types.messages import (
    MOST_DRAFT_TOKENS,
    Description,
    Draft,
    Drafted,
    OpenTarget,
    SamplingDefaults,
    SamplingOptions,
)
from crossdraft.types.request import MOST_PATHS, WIDEST
from crossdraft.types.rows import Row, Whose
from crossdraft.v1 import common_pb2, drafter_pb2, target_pb2
from crossdraft.v1 import common_pb2 as pb
from crossdraft.verification.prefixes import MAX_ASKED
from tests.rpc.values import SIZE, column, lists


def one_of(decode: Any, frame: Any) -> Any:
    """The only message of a frame."""
    ((_, message),) = decode(frame.SerializeToString(), SIZE)
    if isinstance(message, BadMessage):
        raise message
    return message


def asked_of_target(**message: object) -> Any:
    return one_of(TARGET.requests.decode, target_pb2.VerifyRequests(requests=[message]))


def asked_of_drafter(**message: object) -> Any:
    return one_of(DRAFTER.requests.decode, drafter_pb2.DraftRequests(requests=[message]))


def told_by_drafter(**message: object) -> Any:
    return one_of(DRAFTER.replies.decode, drafter_pb2.DraftReplies(replies=[message]))


def test_unset_options_are_the_defaults():
    opening = asked_of_target(open={"prompt": [1]})
    assert opening == OpenTarget((1,), SamplingOptions(), None)


def test_what_an_older_peer_leaves_unset_means_that_nothing_of_it_is_wanted():
    asked = asked_of_drafter(open={})
    assert (asked.redistribute, asked.audited) == ("", False)
    told = common_pb2.Description(tokenizer_json="{}", vocabulary_size=SIZE, context=4, fingerprint="f")
    assert codec.decode_description(told).affinity == ""
    assert not codec.decode_description(told).copies


def test_a_targets_own_settings_survive_and_those_that_cannot_be_are_refused():
    for own in (SamplingDefaults(), SamplingDefaults(0.0, 0, 0.5, 0.0, 1.1, 7, 9)):
        about = Description("m", "{}", (), (), SIZE, 4, "f", defaults=own)
        assert codec.decode_description(codec.encode_description(about)).defaults == own
    message = codec.encode_description(about)
    message.defaults.top_p = 2
    with pytest.raises(BadMessage, match="defaults: top_p must be above 0"):
        codec.decode_description(message)


@given(st.binary(max_size=12))
def test_letters_are_what_was_meant_or_refused(raw):
    try:
        letters = codec.decode_letters(raw, "text")
    except BadMessage:
        return
    assert letters.encode() == raw


def test_ids_of_the_target_are_left_to_those_who_know_them():
    reply = drafter_pb2.Drafted(
        tokens=[SIZE], target_ids=True, branches=[drafter_pb2.Branch(number=1, letters=b"a", tokens=[SIZE])]
    )
    got = told_by_drafter(drafted=reply)
    assert (got.draft_tokens[0].token, got.draft_tokens[0].whose, got.branches[0].tokens) == (
        SIZE,
        Whose.TARGET,
        (SIZE,),
    )


def test_drafts_without_the_newer_fields_are_whole_and_have_no_branches():
    asked = asked_of_drafter(draft={"letters": b"a", "count": 5})
    assert asked == Draft(0, 0, Letters("a"), 5, MOST_DRAFT_TOKENS, branch_depth=0, branch_width=1, adopt=0)


def test_a_duration_longer_than_a_message_holds_is_the_longest():
    ((_, got),) = DRAFTER.replies.decode(DRAFTER.replies.encode([(1, Drafted(1, (), 1e9))]), SIZE)
    assert got.seconds == pytest.approx(2**32 / 1e6, abs=1e-5)


STEP = 1 / GRID


def travelled(*rows: Row) -> list[Row]:
    raw = codec.encode_rows(rows).SerializeToString()
    return codec.decode_rows(pb.Rows.FromString(raw), "rows", None)


@given(st.lists(st.integers(0, 2**MAX_BITS - 1) | st.integers(0, 9), max_size=40))
def test_numbers_survive_in_as_few_bytes_as_the_largest_needs(listed):
    message = column(*listed)
    assert codec.decode_numbers(pb.Numbers.FromString(message.SerializeToString()), "numbers").tolist() == listed
    if listed:
        assert len(message.data) == len(listed) * max(1, -(-max(listed).bit_length() // 8))


@given(st.lists(st.floats(1e-12, 1), min_size=1, max_size=40), st.floats(0, 1), st.booleans())
def test_other_rows_are_rounded_and_stay_whole_or_keep_a_tail(weights, rest, whole):
    total = sum(weights) + (0 if whole else rest)
    row = Row(np.arange(len(weights)), np.array(weights) / total, 0.0 if whole else rest / total)
    (got,) = travelled(row)
    assert got.whole == row.whole
    assert got.probabilities.sum() + got.tail == 1  # exactly
    moved = np.abs(got.probabilities - row.probabilities)
    more = np.flatnonzero(moved > STEP / 2)
    assert len(more) <= 1  # it takes what rounding leaves, and is as large as any
    assert (row.probabilities[more] >= row.probabilities.max() - STEP).all()
    assert (moved[more] <= STEP * (2 + len(weights) / 2)).all()


def test_a_probability_does_not_depend_on_what_else_is_listed():
    rng = np.random.default_rng(0)
    distribution = np.sort(rng.pareto(1.0, 5000))[::-1] / 1.0
    distribution /= distribution.sum()
    head, more = np.arange(64), np.array([900, 70, 4000])
    short = Row(head, distribution[:64], float(distribution[64:].sum()))
    listed = Row(
        np.append(head, more),
        np.append(distribution[:64], distribution[more]),
        float(distribution[64:].sum() - distribution[more].sum()),
    )
    got = travelled(short, listed)
    assert got[0].probabilities.tolist() == got[1].probabilities[:64].tolist()
    assert got[0].tail == pytest.approx(got[1].tail + got[1].probabilities[64:].sum(), abs=1e-15)


def test_rows_of_every_length_come_one_after_another():
    lengths = (0, 1, LEADING - 1, LEADING, LEADING + 1, 40, 0)
    sent = [Row(np.arange(count), np.full(count, 2.0**-10), 1 - count * 2.0**-10) for count in lengths]
    got = travelled(*sent)
    assert [len(row.ids) for row in got] == list(lengths)
    assert [row.tail for row in got] == [row.tail for row in sent]


@pytest.mark.parametrize(
    "bad",
    [
        Row(np.array([1]), np.array([0.5])),
        Row(np.array([1]), np.array([0.5]), 0.6),
        Row(np.array([1, 2]), np.array([1.5, -0.5])),
        Row(np.array([1]), np.array([np.nan])),
        Row(np.array([1]), np.array([0.5]), np.nan),
        Row(np.array([1]), np.array([np.inf])),
    ],
)
def test_what_is_no_distribution_is_not_sent(bad):
    with pytest.raises(ValueError, match="rows must be distributions"):
        codec.encode_rows([Row.certain(3), bad])


def rows(**changes: object) -> pb.Rows:
    ids = pb.IdLists(counts=[2, 1], ids=column(1, 2, 1))
    return pb.Rows(**{"ids": ids, "large": column(GRID // 2, 3, GRID)} | changes)


def test_what_the_bad_ones_are_made_from_is_good():
    assert [row.tail for row in codec.decode_rows(rows(), "rows", SIZE)] == [0.5 - 3 * STEP, 0.0]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (rows(ids=lists([2, 1], 1, SIZE, 1)), "rows.ids has the id 300"),
        (rows(ids=lists([2, 1], 1, 1, 1)), "not distinct"),
        (rows(ids=lists([2, 2], 1, 2, 1)), "3 ids for lists of 4"),
        (rows(ids=lists([3], 1, 2, 1)), "not distinct"),
        (rows(large=column(5, 5)), "3 ids, but 2 large and 0 small"),
        (rows(small=column(5)), "3 ids, but 3 large and 1 small"),
        (rows(large=column(GRID, 1, GRID)), "sums to 1"),
        (rows(large=column(5, 5, 3 * GRID)), "sums to 3"),
        (rows(large={"count": 3, "size": 5, "data": bytes(15)}), "not 3 numbers of 5"),
    ],
)
def test_rows_that_mean_nothing_are_refused(bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        codec.decode_rows(bad, "rows", SIZE)


def whole(ids: tuple[int, ...], *probabilities: float) -> pb.WholeRow:
    return pb.WholeRow(ids=column(*ids), probabilities=np.array(probabilities, dtype="<f4").tobytes())


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (whole((1, SIZE), 0.5, 0.5), "the vocabulary has 300 ids"),
        (whole((1,), 0.5, 0.5), "1 ids but 8 bytes"),
        (whole((1, 1), 0.5, 0.5), "not distinct"),
        (whole((1, 2), 0.5, float("nan")), "between 0 and 1"),
        (whole((1, 2), 0.5, float("inf")), "between 0 and 1"),
        (whole((1, 2), 1.5, -0.5), "between 0 and 1"),
        (whole((1, 2), 0.5, 0.25), "sums to 0.75"),
        (pb.WholeRow(), "sums to 0;"),
    ],
)
def test_whole_rows_that_are_no_distribution_are_refused(bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        codec.decode_whole(bad, "whole", SIZE)


def test_the_bounds_leave_room_for_what_an_orchestrator_asks() -> None:
    assert codec.MAX_NODES >= MOST_PATHS * MOST_DRAFT_TOKENS + NODES_BESIDE_THE_DRAFT
    assert frames.MAX_HEAD >= WIDEST
    assert frames.MAX_ROW_WIDTH >= WIDEST
    assert frames.MAX_STRINGS >= MAX_ASKED


def test_options_of_a_later_version_are_refused():
    later = pb.SamplingOptions(temperature=0.5).SerializeToString() + b"\xf8\x01\x05"  # field 31, a number
    with pytest.raises(BadMessage, match=r"\[31\].*update the service"):
        codec.decode_options(pb.SamplingOptions.FromString(later), 100)
