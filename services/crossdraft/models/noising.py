"""Noise on a model's logits: a drafter of any acceptance, made of one that agrees with the target."""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from crossdraft.models.feeds import Share, Work

LATEST = 8  # tokens that the noise depends on, besides the number of tokens before
WINDOWS = 1 << 16
SEED = 20251121


class Noisy:
    """A step whose logits have Gaussian noise of mean 0, before anything else is done with them.

    The noise is a function of how many tokens come before and of the latest of them: the same node has the same
    logits whenever it is evaluated, in whatever session or tree, so this is a model like any other, and rows state its
    laws truthfully. Each node takes its own window of one long vector that was drawn beforehand, a copy in place of V
    draws.

    The bundled target as its own drafter accepts, by `standard` at temperature 1 with rows of 64 ids (of all ids), 0.91
    (1.00) at sigma 0, 0.82 (0.86) at 0.5, 0.70 (0.73) at 1, 0.59 (0.61) at 1.5, 0.49 (0.51) at 2, 0.32 (0.33) at 3.

    Args:
        sigma: standard deviation, of logits at temperature 1.
        columns: of the logits.
        step: whose logits they are.
        device: where they are.

    Raises:
        ValueError: sigma is negative or not finite.
    """

    def __init__(
        self,
        sigma: float,
        columns: int,
        step: Callable[[Sequence[Share]], list[Tensor | None]],
        device: torch.device,
    ) -> None:
        check_sigma(sigma)
        drawn = np.random.default_rng(SEED).standard_normal(columns + WINDOWS - 1, dtype=np.float32)
        self._noise = torch.from_numpy(drawn).mul_(sigma).to(device)
        self._windows = self._noise.unfold(0, columns, 1)  # (WINDOWS, columns), a view
        self._step = step

    @torch.inference_mode()
    def __call__(self, shares: Sequence[Share]) -> list[Tensor | None]:
        """Logits for each share as the step gives them, and noise; raises what it raises."""
        return [
            logits if logits is None or not len(logits) else logits + self._of(share.work)
            for share, logits in zip(shares, self._step(shares), strict=True)
        ]

    def _of(self, work: Work) -> Tensor:
        """Shape (rows, columns)."""
        end, before = work.context[-LATEST:], len(work.context)
        every = list(work.tree.paths()) if work.rows() else []
        return torch.stack(
            [self._windows[_window(before + len(p), (*end, *p))] for p in map(every.__getitem__, work.rows())]
        )


def check_sigma(sigma: float) -> None:
    """Raises ValueError unless it is a standard deviation."""
    if not 0 <= sigma < math.inf:
        raise ValueError(f"the noise on the logits needs a standard deviation of 0 or more, got {sigma:g}")


def _window(count: int, tokens: tuple[int, ...]) -> int:
    """Where the noise begins after `count` tokens that end with `tokens`."""
    key = np.array((count, *tokens[-LATEST:]), dtype=np.int64).tobytes()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") % WINDOWS
