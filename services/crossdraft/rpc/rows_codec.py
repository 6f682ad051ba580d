"""Protobuf to domain values and back: rows.

Rows travel as multiples of 2^-24, several in one message as columns. Those of a drafter are on this grid already, since
it draws from what it sends; those of a target are rounded here, before anything is decided by them, which moves the
law by at most 3e-8 an id.
"""

from collections.abc import Sequence

import numpy as np

from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.packing import (
    MOST_BITS,
    Lists,
    decode_ids,
    decode_lists,
    decode_numbers,
    encode_lists,
    encode_numbers,
    joined,
)
from crossdraft.v1 import common_pb2 as pb
from crossdraft.verification.rows import Ids, Probabilities, Row

GRID = 1 << 24  # steps that a probability of one has
LEADING = 8  # ids of each row that may be much more probable than the others
SUM_TOLERANCE = 1e-4  # of a row's sum; float32 rounding of any row stays below it


def encode_rows(rows: Sequence[Row]) -> pb.Rows:
    """Rows, at least one; their probabilities are rounded to the grid, and a row is whole afterwards if it was before.

    Raises:
        ValueError: one is no distribution.
    """
    lists = joined([row.ids for row in rows])
    steps = _steps(np.concatenate([row.probabilities for row in rows]), lists, np.array([row.tail for row in rows]))
    large, small = _parted(steps, lists)
    return pb.Rows(ids=encode_lists(lists), large=encode_numbers(large), small=encode_numbers(small))


def decode_rows(message: pb.Rows, name: str, vocabulary_size: int | None) -> list[Row]:
    """Rows with exactly the probabilities that were sent.

    Raises:
        BadMessage: numbers are missing, ids repeat in a row, or one has more than there is.
    """
    lists = decode_lists(message.ids, f"{name}.ids", vocabulary_size)
    if not _distinct(lists):
        raise BadMessage(f"{name}.ids are not distinct")
    large, small = decode_numbers(message.large, f"{name}.large"), decode_numbers(message.small, f"{name}.small")
    if len(large) != sum(min(count, LEADING) for count in lists.counts) or len(large) + len(small) != len(lists.ids):
        raise BadMessage(
            f"{name} has {len(lists.ids)} ids, but {len(large)} large and {len(small)} small probabilities"
        )
    steps = _together(large, small, lists)
    tails = ((GRID - lists.sums(steps)) / GRID).tolist()
    if tails and min(tails) < 0:
        raise BadMessage(f"{name} has a row that sums to {1 - min(tails):.6g}; at most 1 is possible")
    probabilities = steps / GRID
    return [Row(lists.ids[at], probabilities[at], tail) for at, tail in zip(lists.spans, tails, strict=True)]


def encode_whole(row: Row) -> pb.WholeRow:
    """A whole row; its probabilities are rounded to float32."""
    return pb.WholeRow(ids=encode_numbers(row.ids), probabilities=row.probabilities.astype("<f4").tobytes())


def decode_whole(message: pb.WholeRow, name: str, vocabulary_size: int | None) -> Row:
    """A whole row with exactly the float32 probabilities that were sent.

    Raises:
        BadMessage: lengths differ, ids repeat, or it is no distribution.
    """
    ids = decode_ids(message.ids, f"{name}.ids", vocabulary_size)
    if len(message.probabilities) != 4 * len(ids):
        raise BadMessage(f"{name} has {len(ids)} ids but {len(message.probabilities)} bytes of probabilities")
    if len(np.unique(ids)) != len(ids):
        raise BadMessage(f"{name}.ids are not distinct")
    probabilities = np.frombuffer(message.probabilities, dtype="<f4").astype(np.float64)
    check_distribution(probabilities, name)
    return Row(ids, probabilities)


def check_distribution(masses: Probabilities, name: str) -> None:
    """Raises BadMessage unless all masses are in [0, 1] and sum to one within SUM_TOLERANCE."""
    if not bool(np.all((masses >= 0) & (masses <= 1))):  # false for NaN as well
        raise BadMessage(f"{name} has a probability that is not between 0 and 1")
    total = float(masses.sum())
    if abs(total - 1) > SUM_TOLERANCE:
        raise BadMessage(f"{name} sums to {total:.6g}; it must be 1 within {SUM_TOLERANCE}")


def _steps(probabilities: Probabilities, lists: Lists, tails: Probabilities) -> Ids:
    """Probabilities in steps. The largest of a row takes what rounding leaves: a whole row must sum to one, and a tail
    must have a step at least. The others depend on nothing else that is listed: they are the same in every reply."""
    totals = lists.sums(probabilities) + tails
    if not (bool(np.all(np.abs(totals - 1) <= SUM_TOLERANCE)) and not bool((probabilities < 0).any())):
        raise ValueError(f"rows must be distributions; with their tails they sum to {totals.tolist()}")
    steps = np.rint(probabilities * GRID).astype(np.int64)
    left = (GRID - lists.sums(steps)).astype(np.int64)
    left = np.where(tails == 0, left, np.minimum(left - 1, 0))
    if left.any():
        for span, rest in zip(lists.spans, left.tolist(), strict=True):
            if rest:
                steps[span.start + int(steps[span].argmax())] += rest
    return steps


def _distinct(lists: Lists) -> bool:
    """Whether no list has an id twice."""
    ids = np.sort(lists.ids if len(lists.counts) == 1 else (lists.owners << MOST_BITS) | lists.ids)
    return not bool((ids[1:] == ids[:-1]).any())


def _parted(steps: Ids, lists: Lists) -> tuple[Ids, Ids]:
    """What belongs to the first ids of the rows, and what to the others."""
    if len(lists.counts) == 1:
        return steps[:LEADING], steps[LEADING:]
    leading = _leading(lists)
    return steps[leading], steps[~leading]


def _together(large: Ids, small: Ids, lists: Lists) -> Ids:
    """The reverse."""
    if len(lists.counts) == 1:
        return np.concatenate((large, small))
    leading = _leading(lists)
    steps = np.empty(len(leading), dtype=np.int64)
    steps[leading], steps[~leading] = large, small
    return steps


def _leading(lists: Lists) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether an id is among the first of its row, shape (n,)."""
    leading = np.zeros(len(lists.ids), dtype=np.bool_)
    for span in lists.spans:
        leading[span.start : min(span.start + LEADING, span.stop)] = True
    return leading
