"""The device that a model runs on: by name, asynchronous transfers to it, and the time that its work takes."""

import math
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from crossdraft.engine.names import WrongOptionError

R = TypeVar("R")
Fetched = list[NDArray[np.float64]]
Fetching = Generator[Sequence[Tensor], Fetched, R]  # what is launched: asks for tensors on the host, makes its result
CONTAINER = Path("/sys/fs/cgroup")
CONTAINER_MEMORY = (  # of the two versions of control groups: the limit, what is taken, and of what it consists
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def device_of(name: str) -> torch.device:
    """The device as torch names it, or `auto`: CUDA if there is one. Raises WrongOptionError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # An unknown name, a build without that device, one that cannot hold a tensor, one that needs a package.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise WrongOptionError(
            f"--device must be auto, cpu or a device that torch sees here, got {name}: {error}".splitlines()[0]
        ) from error
    return device


def leave_out_cudnn(device: torch.device) -> None:
    """Disables cuDNN attention on CUDA, in the whole process.

    Torch prefers it on Hopper and Blackwell in 16 bits, where it plans anew for each size and stride that a thread has
    not had yet, for some tenths of a second; those of a prompt hardly ever come again.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def available_memory() -> float:
    """MiB of main memory that can be allocated now; infinite where the system does not say."""
    found = _numbers(Path("/proc/meminfo")).get("MemAvailable:", math.inf) / 1024
    for limit, used, cached in CONTAINER_MEMORY:  # a container that takes more than its limit is killed
        most, taken = (_numbers(CONTAINER / name).get("", math.inf) for name in (limit, used))
        if math.isfinite(most) and math.isfinite(taken):
            reclaimable = _numbers(CONTAINER / cached).get("inactive_file", 0.0)
            found = min(found, max(0.0, most - taken + reclaimable) / (1 << 20))
    return found


def _numbers(file: Path) -> dict[str, float]:
    """The number after each name of a file of the kernel's; a file that is a number has it without a name."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    named = [(words[0], words[1]) if len(words) > 1 else ("", words[0]) for words in lines if words]
    return {name: float(number) for name, number in named if number.isdecimal()}


def unused_memory(device: torch.device, utilization: float, ranks: int = 1) -> float:
    """MiB that a rank may still take: on CUDA up to this share of its device, else its part of half of what is free."""
    if device.type != "cuda":
        return least(available_memory() / 2 / ranks, device, ranks)
    free, total = torch.cuda.mem_get_info(device)
    return least((free - (1 - utilization) * total) / (1 << 20), device, ranks)


def least(number: float, device: torch.device, ranks: int) -> float:
    """The least number that any of a model's ranks gives: each calls this, so that what only one knows parts none."""
    if ranks == 1:
        return number
    shared = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    return float(shared)


def staged(numbers: Tensor, device: torch.device) -> Tensor:
    """The same numbers in pinned memory if the device is CUDA, so that the host need not wait for the copy.

    Torch's cache of pinned memory reuses a block only when the copies out of it are done: nothing overwrites what is
    still on its way.
    """
    return numbers.pin_memory() if device.type == "cuda" else numbers


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """The same numbers on a device, without waiting; those that are there already are not copied."""
    return staged(numbers, device).to(device, non_blocking=device.type == "cuda")


def on_host(tensors: Sequence[Tensor]) -> Fetched:
    """Tensors on the host, all in one copy, as float64, which holds ids exactly. RuntimeError: the device failed."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors]) if tensors else torch.empty(0)
    if flat.is_cuda:
        flat = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)  # waits for it
    numbers, shapes = flat.cpu().numpy(), [tensor.shape for tensor in tensors]
    ends = accumulate(shape.numel() for shape in shapes)
    return [numbers[end - shape.numel() : end].reshape(shape) for shape, end in zip(shapes, ends, strict=True)]


def finished(launched: Fetching[R], arrays: Fetched) -> R:
    """Its result, given what it has asked for; raises what that raises."""
    try:
        launched.send(arrays)
    except StopIteration as end:
        result: R = end.value
        return result
    raise AssertionError("what is launched asks for tensors once")


def fetched(launched: Fetching[R]) -> R:
    """The result of what is launched by itself; raises what that raises."""
    return finished(launched, on_host(next(launched)))


def state_bytes(states: Tensor | None) -> list[bytes]:
    """Hidden states (n, width) as they travel: of each its bfloat16 numbers, little-endian. Waits for the device."""
    if states is None:
        return []
    return [row.tobytes() for row in states.to(torch.bfloat16).view(torch.int16).cpu().numpy().astype("<i2")]


class DeviceTimer:
    """Measures from now until the device has finished what it was given before `end` is called.

    CUDA works asynchronously: events note both moments on the device, and reading `ended` waits for the second one.
    Other devices have finished when the call returns. It is the calling thread's stream that is measured.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.began = clock()
        self._clock, self._device = clock, device
        self._returned = self.began  # when the host had launched everything
        self._events: list[torch.cuda.Event] = []
        self._record()

    def end(self) -> None:
        self._returned = self._clock()
        self._record()

    @cached_property
    def ended(self) -> float:
        """When the device had finished, not before the host's launches ended. RuntimeError: the device failed."""
        if not self._events:
            return self._returned
        first, last = self._events
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return max(self._returned, self.began + milliseconds / 1000)

    def _record(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
