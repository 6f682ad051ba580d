"""The memory of a store: taken when it is written, or all at once."""

import subprocess
import sys

import pytest
import torch

from crossdraft.engine.kv_store import MIB, LayerShape, Store, available
from crossdraft.engine.names import NumberOutOfRangeError
from tests.test_layout import REPOSITORY

SHAPES = [LayerShape(4, 16, 16)] * 4
PLACES = 32 * MIB // Store.place_bytes(SHAPES, torch.float32)

TAKEN = """
from crossdraft.bench.memory import resident
from tests.models.test_store import new
begin = resident()
store = new()
print(resident() - begin)
store.populate()
print(resident() - begin)
print(any(tensor.any() for tensor in (*store.keys, *store.values)))
"""


def new(places: int = PLACES) -> Store:
    return Store(SHAPES, places, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_memory_is_taken_before_it_is_needed_where_that_is_asked_for() -> None:
    # In a process of its own: one that has freed memory before may be given that again, and so not grow.
    command = [sys.executable, "-c", TAKEN]
    printed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
    assert float(printed[0]) < 8
    assert float(printed[1]) > 28
    assert printed[2] == "False"


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    many = int(available()) * 2 * MIB // Store.place_bytes(SHAPES, torch.float32)
    with pytest.raises(NumberOutOfRangeError, match=r"lower the budget \(--cache-mib\)"):
        new(many).populate()
    with pytest.raises(NumberOutOfRangeError, match=r"lower the budget \(--cache-mib\)"):
        new(1 << 50)
