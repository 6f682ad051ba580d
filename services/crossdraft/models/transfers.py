"""Numbers on their way to a device, without anybody waiting for them."""

import torch
from torch import Tensor


def staged(numbers: Tensor, device: torch.device) -> Tensor:
    """The same numbers in memory that CUDA can read while the host goes on; anywhere else they stay where they are.

    Such memory comes from a cache of torch's that gives none of it again before the copies out of it are done, so that
    nothing overwrites what is still on its way.
    """
    return numbers.pin_memory() if device.type == "cuda" else numbers


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """The same numbers on a device; those that are there already are not copied."""
    return staged(numbers, device).to(device, non_blocking=device.type == "cuda")
