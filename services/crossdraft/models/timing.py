"""Clocks of devices, what a model's forwards take, and what its weights alone take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedModel

from crossdraft.models.forwards import Forwards
from crossdraft.models.support import embedding_weight

TURNS = 10  # of a measurement of bandwidth
MATRIX = 1 << 30  # bytes of its matrix, which no cache must hold
AT_ONCE = 8  # products that another device than a CPU does in a turn: to launch one, and to wait, takes time as well


@dataclass(eq=False)
class Inside:
    """Seconds in a model."""

    seconds: float = 0.0


@contextmanager
def spent_in(forwards: Forwards, clock: Callable[[], float]) -> Iterator[Inside]:
    """Counts the seconds that its forwards take in the block; hooks of the model see nothing of those captured."""
    inside, before = Inside(), forwards.inside

    @contextmanager
    def counted() -> Iterator[None]:
        began = clock()
        yield
        inside.seconds += clock() - began

    forwards.inside = counted
    try:
        yield inside
    finally:
        forwards.inside = before


@dataclass(frozen=True)
class Floor:
    """What no pass of a model can be faster than on a device that reads all weights for it."""

    weights: int  # bytes that a forward reads: all but the embedding's
    bandwidth: float  # bytes a second of a matrix times a vector, of which memory sees every number once

    @property
    def seconds(self) -> float:
        """Of a pass."""
        return self.weights / self.bandwidth


def floor_of(model: PreTrainedModel, size: int = MATRIX) -> Floor:
    """Measures the bandwidth with a matrix of `size` bytes; the best of some turns."""
    embedding = embedding_weight(model)
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embedding
    everything = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    weights = everything - (0 if tied else embedding.numel() * embedding.itemsize)
    columns = 4096
    rows = max(1, size // (columns * model.dtype.itemsize))
    matrix = torch.ones(rows, columns, dtype=model.dtype, device=embedding.device)
    vector = torch.ones(columns, dtype=model.dtype, device=embedding.device)
    clock, times = clock_of(embedding.device), list[float]()
    products = 1 if embedding.device.type == "cpu" else AT_ONCE
    for _ in range(TURNS):
        began = clock()
        for _ in range(products):
            torch.mv(matrix, vector)
        times.append((clock() - began) / products)
    return Floor(weights, matrix.numel() * matrix.itemsize / min(times))


def described(name: str) -> str:
    """What the device of a name is, and the versions of what drives it."""
    device = torch.device(name)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type != "cuda":
        return f"{device}; {versions}"
    found = torch.cuda.get_device_properties(device)
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"{found.name}, {found.total_memory >> 20} MiB; {versions}, {cuda}"


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds of this thread's processor time on a CPU; elsewhere of the clock, once the device has done its work."""
    if device.type == "cpu":
        return time.thread_time
    if device.type == "cuda":

        def after_cuda() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return after_cuda
    return time.perf_counter
