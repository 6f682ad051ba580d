"""What the law of sampled outputs rests on in vLLM, checked where it runs, and mended where it is broken.

vLLM divides the logits at each draft position by its request's temperature. `expand_batch_to_tokens` spreads the
temperatures (and top-k and top-p) of requests over positions. Where a kernel writes to a copy of its output, as that of
the CPU build does for floats, the temperatures are whatever the memory held before: what is accepted then no longer
follows the target's distribution. Greedy requests do not use it.
"""

import logging
from collections.abc import Callable
from enum import Enum
from itertools import product
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger(__name__)

NAME = "expand_batch_to_tokens"
Expand = Callable[..., torch.Tensor]
# Values of requests, and how many draft tokens each has: an empty draft, several, and values to be replaced.
CASES: tuple[tuple[tuple[float, ...], tuple[int, ...]], ...] = (
    ((0.7,), (1,)),
    ((0.5, 0.0, 1.25), (2, 3, 1)),
    ((0.0, 0.9, 0.3, 2.0), (0, 4, 0, 2)),
)


class Sampling(Enum):
    """Whether sampled requests are exact with drafts."""

    RIGHT = "right"
    MENDED = "mended"  # by this module
    BROKEN = "broken"  # and it cannot be mended here


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """What `expand_batch_to_tokens` is to do: each request's value in x (requests,) as often as it has draft tokens,
    with `replace_to` in place of `replace_from`: (num_tokens,), of the dtype of x.

    `cu_num_tokens`: shape (requests,), integers: draft tokens up to each request, it included.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def is_right(function: Expand, device: torch.device) -> bool:
    """Whether a function does what `expand` does, for temperatures (float32) and top-k (int32) on this device."""
    for dtype, (values, counts) in product((torch.float32, torch.int32), CASES):
        x = (torch.tensor(values, device=device) * (1 if dtype.is_floating_point else 100)).to(dtype)
        ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
        total = sum(counts)
        # Memory that was just freed is used again: what is not written must not look right by chance.
        poison = torch.full((total,), float("nan"), device=device)
        del poison
        found = function(x, ends, total, replace_from=0, replace_to=1)
        wanted = [value or 1 for value, count in zip(x.tolist(), counts, strict=True) for _ in range(count)]
        if found.shape != (total,) or found.tolist() != wanted:
            return False
    return True


def ensure_exact(rejection_sampler: ModuleType | Any, device: torch.device) -> Sampling:
    """Check the function in vLLM's module of the rejection sampler, and replace it there if it is wrong."""
    function: Expand | None = getattr(rejection_sampler, NAME, None)
    if function is None:
        return Sampling.BROKEN
    if is_right(function, device):
        return Sampling.RIGHT
    if not is_right(expand, device):
        return Sampling.BROKEN
    setattr(rejection_sampler, NAME, expand)
    log.warning(
        "vLLM's %s does not write its result for floats on %s, so that requests with a temperature above 0 would not "
        "follow the model's distribution with drafts of any kind; crossdraft has replaced it in this process",
        NAME,
        device,
    )
    return Sampling.MENDED
