"""Numbers and rows: what travels is what arrives, and what is no distribution is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.rpc import codec
from crossdraft.rpc.codec import GRID, LEADING, MAX_BITS
from crossdraft.rpc.errors import BadMessage
from crossdraft.types.rows import NO_IDS, Row
from crossdraft.v1 import common_pb2 as pb
from tests.rpc import values
from tests.rpc.values import SIZE

STEP = 1 / GRID


def numbers(*listed: int) -> pb.Numbers:
    return codec.encode_numbers(np.array(listed, dtype=np.int64))


def travelled(*rows: Row) -> list[Row]:
    raw = codec.encode_rows(rows).SerializeToString()
    return codec.decode_rows(pb.Rows.FromString(raw), "rows", None)


@given(st.lists(st.integers(0, 2**MAX_BITS - 1) | st.integers(0, 9), max_size=40))
def test_numbers_survive_in_as_few_bits_as_the_largest_needs(listed):
    message = numbers(*listed)
    assert codec.decode_numbers(pb.Numbers.FromString(message.SerializeToString()), "numbers").tolist() == listed
    if listed:
        assert len(message.data) == -(-len(listed) * max(1, max(listed).bit_length()) // 8)


@given(st.lists(values.rows(), min_size=1, max_size=6))
def test_rows_on_the_grid_survive_bit_by_bit(sent):
    got = travelled(*sent)
    assert [row.ids.tolist() for row in got] == [row.ids.tolist() for row in sent]
    assert [row.probabilities.tolist() for row in got] == [row.probabilities.tolist() for row in sent]
    assert [row.tail for row in got] == [row.tail for row in sent]


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


def test_the_order_of_ids_is_kept():
    row = Row(np.array([7, 3, 9, 1]), np.array([0.25, 0.25, 0.25, 0.25]))
    assert travelled(row)[0].ids.tolist() == [7, 3, 9, 1]


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
    ids = pb.IdLists(counts=[2, 1], ids=numbers(1, 2, 1))
    return pb.Rows(**{"ids": ids, "large": numbers(GRID // 2, 3, GRID)} | changes)


def lists(counts: list[int], *ids: int) -> pb.IdLists:
    return pb.IdLists(counts=counts, ids=numbers(*ids))


def test_what_the_bad_ones_are_made_from_is_good():
    assert [row.tail for row in codec.decode_rows(rows(), "rows", SIZE)] == [0.5 - 3 * STEP, 0.0]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (rows(ids=lists([2, 1], 1, SIZE, 1)), "rows.ids has the id 300"),
        (rows(ids=lists([2, 1], 1, 1, 1)), "not distinct"),
        (rows(ids=lists([2, 2], 1, 2, 1)), "3 ids for lists of 4"),
        (rows(ids=lists([3], 1, 2, 1)), "not distinct"),
        (rows(large=numbers(5, 5)), "3 ids, but 2 large and 0 small"),
        (rows(small=numbers(5)), "3 ids, but 3 large and 1 small"),
        (rows(large=numbers(GRID, 1, GRID)), "sums to 1"),
        (rows(large=numbers(5, 5, 3 * GRID)), "sums to 3"),
        (rows(large={"count": 3, "bits": 40, "data": bytes(15)}), "not 3 numbers of 40 bits"),
    ],
)
def test_rows_that_mean_nothing_are_refused(bad, complaint):
    with pytest.raises(BadMessage, match=complaint):
        codec.decode_rows(bad, "rows", SIZE)


@given(values.whole_rows())
def test_whole_rows_survive(row):
    raw = codec.encode_whole(row).SerializeToString()
    got = codec.decode_whole(pb.WholeRow.FromString(raw), "whole", SIZE)
    assert (got.ids.tolist(), got.probabilities.tolist(), got.tail) == (
        row.ids.tolist(),
        row.probabilities.tolist(),
        0.0,
    )


def whole(ids: tuple[int, ...], *probabilities: float) -> pb.WholeRow:
    return pb.WholeRow(ids=numbers(*ids), probabilities=np.array(probabilities, dtype="<f4").tobytes())


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


def test_no_list_is_not_an_empty_one():
    assert codec.encode_ids(None) is None
    assert codec.encode_ids(NO_IDS) is not None
