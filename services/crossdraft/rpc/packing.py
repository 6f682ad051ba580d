"""Whole numbers in bit fields, and lists of ids: both ways by a few numpy calls, whatever their number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from crossdraft.rpc.bounds import MOST_NUMBERS, check_most
from crossdraft.rpc.errors import BadMessage
from crossdraft.v1 import common_pb2 as pb
from crossdraft.verification.rows import NO_IDS, Ids, Probabilities

MOST_BITS = 32
LAST_ID = (1 << MOST_BITS) - 1  # that a field holds


def encode_numbers(values: Ids) -> pb.Numbers:
    """Numbers (n,), int64, 0 to 2^32 - 1, in as many bits as the largest needs."""
    bits = max(1, int(values.max()).bit_length()) if len(values) else 1
    fields = np.unpackbits(_bytes_of(values), axis=1, count=bits, bitorder="little")
    return pb.Numbers(count=len(values), bits=bits, data=np.packbits(fields, bitorder="little").tobytes())


def decode_numbers(message: pb.Numbers, name: str) -> Ids:
    """Numbers, shape (n,), int64; raises BadMessage unless there are as many bits as are needed."""
    count, bits = message.count, message.bits
    if not count:
        return NO_IDS
    if not 1 <= bits <= MOST_BITS or len(message.data) != (count * bits + 7) // 8:
        raise BadMessage(f"{name} has {len(message.data)} bytes, which are not {count} numbers of {bits} bits")
    check_most(count, MOST_NUMBERS, name)
    raw = np.frombuffer(message.data, dtype=np.uint8)
    fields = np.unpackbits(raw, count=count * bits, bitorder="little").reshape(count, bits)
    wide = np.zeros((count, 4), dtype=np.uint8)
    narrow = np.packbits(fields, axis=1, bitorder="little")
    wide[:, : narrow.shape[1]] = narrow
    return wide.view("<u4")[:, 0].astype(np.int64)


def encode_ids(ids: Ids | None) -> pb.Numbers | None:
    """A list of ids, which may be empty, or nothing."""
    return None if ids is None else encode_numbers(ids)


def decode_ids(message: pb.Numbers, name: str, vocabulary_size: int | None) -> Ids:
    """Token ids, shape (n,), int64; raises BadMessage if one is outside the vocabulary (where its size is known)."""
    return checked(decode_numbers(message, name), name, vocabulary_size)


def checked(ids: Ids, name: str, vocabulary_size: int | None) -> Ids:
    """The ids themselves; raises BadMessage if one is outside the vocabulary (where its size is known)."""
    if vocabulary_size is not None and ids.size and int(ids.max()) >= vocabulary_size:
        raise BadMessage(f"{name} has the id {int(ids.max())}, but the vocabulary has {vocabulary_size} ids")
    return ids


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists one after another."""

    counts: tuple[int, ...]  # the length of each
    ids: Ids  # shape (n,), n the sum of the counts

    @cached_property
    def owners(self) -> Ids:
        """Which list each id belongs to, shape (n,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def spans(self) -> Iterator[slice]:
        """Where each list is."""
        end = 0
        for count in self.counts:
            yield slice(end, end := end + count)

    def sums(self, values: NDArray[np.int64] | Probabilities) -> Probabilities:
        """Of the values of each list, shape (m,); `values` has shape (n,). Exact for integers below 2^53."""
        if len(self.counts) == 1:
            return np.array([values.sum()], dtype=np.float64)
        return np.bincount(self.owners, values, len(self.counts)).astype(np.float64, copy=False)

    def split(self) -> list[Ids]:
        """The lists."""
        return [self.ids[span] for span in self.spans]


def joined(lists: Sequence[Ids]) -> Lists:
    """Lists that are separate so far, at least one."""
    return Lists(tuple(map(len, lists)), lists[0] if len(lists) == 1 else np.concatenate(lists))


def encode_lists(lists: Lists) -> pb.IdLists:
    """Lists of ids."""
    return pb.IdLists(counts=lists.counts, ids=encode_numbers(lists.ids))


def decode_lists(message: pb.IdLists, name: str, vocabulary_size: int | None) -> Lists:
    """Lists of ids; raises BadMessage if there are more or fewer ids than they say, or ids outside the vocabulary."""
    lists = Lists(tuple(message.counts), decode_ids(message.ids, name, vocabulary_size))
    if sum(lists.counts) != len(lists.ids):
        raise BadMessage(f"{name} has {len(lists.ids)} ids for lists of {sum(lists.counts)}")
    return lists


def _bytes_of(values: Ids) -> NDArray[np.uint8]:
    """The four bytes of each, the lowest first: shape (n, 4)."""
    return values.astype("<u4").view(np.uint8).reshape(-1, 4)
