"""Columns of numbers as they travel, and the size of the vocabulary that the messages of `tests.golden` are of."""

from collections.abc import Sequence

import numpy as np

from crossdraft.rpc import codec
from crossdraft.v1 import common_pb2 as pb

SIZE = 300


def column(*listed: int) -> pb.Numbers:
    """Numbers as they travel."""
    return codec.encode_numbers(np.array(listed, dtype=np.int64))


def lists(counts: Sequence[int], *ids: int) -> pb.IdLists:
    """Lists of ids as they travel."""
    return pb.IdLists(counts=counts, ids=column(*ids))
