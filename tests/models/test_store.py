"""The memory of a store: taken when it is written, or all at once."""

import sys

import pytest
import torch

from crossdraft.models.soaking import resident
from crossdraft.models.store import MIB, LayerShape, Store

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
