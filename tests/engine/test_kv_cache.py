"""The memory of the KV cache: how much it is, and when it is taken."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crossdraft.engine import device
from crossdraft.engine.device import available_memory
from crossdraft.engine.kv_cache import MIB, WHAT_IS_THERE, CachePlan, KVCache, LayerShape, MemoryShare, WindowedLayers
from crossdraft.engine.names import NumberOutOfRangeError
from crossdraft.engine.served_model import ModelOptions
from tests.test_layout import REPOSITORY

SHAPES = [LayerShape(4, 16, 16)] * 4
TAKEN = """
import os, torch
from crossdraft.engine.kv_cache import MIB, KVCache, LayerShape
shapes = [LayerShape(1, 64, 64)]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
begin = resident()
cache = KVCache(shapes, [32 * MIB // KVCache.slot_bytes(shapes, torch.float32)], torch.float32, torch.device("cpu"))
print(resident() - begin)
cache.populate(16)
print(resident() - begin)
cache.populate()
print(resident() - begin)
print(any(tensor.any() for tensor in (*cache.keys, *cache.values)))
"""


def new(slots: int) -> KVCache:
    return KVCache(SHAPES, [slots], torch.float32, torch.device("cpu"))


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_memory_is_taken_before_it_is_needed_where_that_is_asked_for() -> None:
    # In a process of its own: one that has freed memory before may be given that again, and so not grow.
    command = [sys.executable, "-c", TAKEN]
    printed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
    assert float(printed[0]) < 8
    assert 12 < float(printed[1]) < 24
    assert float(printed[2]) > 28
    assert printed[3] == "False"


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    many = int(available_memory()) * 2 * MIB // KVCache.slot_bytes(SHAPES, torch.float32)
    with pytest.raises(NumberOutOfRangeError, match=r"left: set --cache-mib to \d+ or less|set a smaller --cache-mib"):
        new(many).populate()
    with pytest.raises(NumberOutOfRangeError, match="set a smaller --cache-mib"):
        new(1 << 50)


LLAMA_8B = 2 * 32 * 8 * 128 * 2  # bytes of a token in Llama-3.1-8B, bfloat16: keys and values of 32 layers
CONTEXT = 131_072


@pytest.mark.parametrize(
    ("budget", "unused", "planned"),
    [
        (512, math.inf, CachePlan(4096, 4096)),
        (MemoryShare(), 56_000.0, CachePlan(448_000, CONTEXT)),  # what 0.9 of a GPU of 80 GiB leaves
        (MemoryShare(), 5_600.0, CachePlan(44_800, 32_768)),  # ... of 24 GiB
        (MemoryShare(sessions=1), 56_000.0, CachePlan(CONTEXT, CONTEXT)),
        (MemoryShare(), math.inf, CachePlan(4096, 4096)),  # the system does not say
    ],
)
def test_a_model_of_real_size_gets_the_context_that_fits(
    budget: int | MemoryShare, unused: float, planned: CachePlan
) -> None:
    assert CachePlan.of(LLAMA_8B, budget, unused, CONTEXT, asked=False) == planned


@pytest.mark.parametrize("asked", [True, False])
def test_what_does_not_fit_says_which_numbers_do(asked: bool) -> None:
    mib = 512 if asked else 7
    with pytest.raises(NumberOutOfRangeError) as raised:
        CachePlan.of(LLAMA_8B, mib, math.inf, CONTEXT, asked)
    said = str(raised.value)
    lengths, sizes = (re.findall(rf"set --{name} to (\d+)", said) for name in ("max-model-len", "cache-mib"))
    assert (lengths, sizes) == ((["4096"], ["16384"]) if asked else ([], ["8"]))
    for length in map(int, lengths):
        assert CachePlan.of(LLAMA_8B, mib, math.inf, length, asked).length == length
    assert CachePlan.of(LLAMA_8B, int(sizes[0]), math.inf, CONTEXT, asked).length == (CONTEXT if asked else 64)


@pytest.mark.parametrize("names", device.CONTAINER_MEMORY)
def test_a_container_has_the_memory_that_it_is_limited_to(
    names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CONTAINER", tmp_path)
    free = available_memory()
    written = (f"{8 * MIB}\n", f"{6 * MIB}\n", f"anon {5 * MIB}\ninactive_file {MIB}\n")
    for name, text in zip(names, written, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory() == 3.0 < free
    (tmp_path / names[0]).write_text("max\n")
    assert available_memory() > 3.0


def test_caches_of_two_models_on_a_device_hold_about_as_many_tokens():
    """Of weights that are there already; the cache of the second takes what the first has left."""
    small, share, unused = LLAMA_8B // 11, MemoryShare(0.9, 1 << 20), 50_000.0
    first = CachePlan.of(small, replace(share, beside=LLAMA_8B), unused, CONTEXT, asked=False)
    second = CachePlan.of(LLAMA_8B, share, unused - first.slots * small / MIB, CONTEXT, asked=False)
    assert first.slots == pytest.approx(second.slots, rel=0.01)
    windowed = WindowedLayers(small, 1024)
    kept = CachePlan.of(small, replace(share, beside=LLAMA_8B), unused, CONTEXT, False, windowed)
    taken = kept.slots * small + kept.window_slots * small
    assert taken / MIB == pytest.approx(unused * 2 * small / (2 * small + LLAMA_8B), rel=0.01)


def test_a_share_is_left_on_the_same_device_only():
    options = ModelOptions("bundled:target", device="cpu")
    assert options.beside(torch.device("cpu"), 77).budget == replace(WHAT_IS_THERE, beside=77)
    assert options.beside(torch.device("meta"), 77) == options
    assert replace(options, budget=64).beside(torch.device("cpu"), 77).budget == 64
