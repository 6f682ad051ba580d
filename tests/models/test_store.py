"""The memory of a store: taken when it is written, or all at once."""

import sys

import pytest
import torch

from crossdraft.models.names import NumberOutOfRangeError
from crossdraft.models.soaking import resident
from crossdraft.models.store import MIB, LayerShape, Store, available

SHAPES = [LayerShape(4, 16, 16)] * 4
PLACES = 32 * MIB // Store.place_bytes(SHAPES, torch.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_memory_is_taken_before_it_is_needed_where_that_is_asked_for() -> None:
    begin = resident()
    store = Store(SHAPES, PLACES, torch.float32, torch.device("cpu"))
    assert resident() - begin < 8
    store.populate()
    assert resident() - begin > 28
    assert not any(tensor.any() for tensor in (*store.keys, *store.values))


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    many = int(available()) * 2 * MIB // Store.place_bytes(SHAPES, torch.float32)
    with pytest.raises(NumberOutOfRangeError, match=r"lower the budget \(--cache-mib\)"):
        Store(SHAPES, many, torch.float32, torch.device("cpu")).populate()
    with pytest.raises(NumberOutOfRangeError, match=r"lower the budget \(--cache-mib\)"):
        Store(SHAPES, 1 << 50, torch.float32, torch.device("cpu"))
