"""Emulated models: steps that take as long as another device's would, and noise on the logits.

They take the place of the engine's step (`engine.served_model.Emulation`).
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import StepFunction
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.distributions import joined

LATEST = 8  # tokens that the noise depends on, besides the number of tokens before
WINDOWS = 1 << 16
SEED = 20251121
MOST_KNOWN = 4096  # sessions whose texts are told from those that are new


@dataclass(frozen=True)
class Pace:
    """A step of n tokens ends no sooner than base + each * n milliseconds after it began.

    n counts the tokens that each text grew by since the session's last result, and the nodes of its tree, over all
    sessions that share the step. A new text, be it a prompt or a session that was lost elsewhere, does not count: its
    first result costs base + each * (nodes of the tree), however many steps it took, and a step that completes no
    request takes as long as it takes. Raises ValueError: a number is negative or not finite."""

    base: float  # ms
    each: float  # ms for each token

    def __post_init__(self) -> None:
        if not all(number >= 0 and math.isfinite(number) for number in (self.base, self.each)):
            raise ValueError(f"a pace needs two numbers of milliseconds, 0 or more, got {self.base:g},{self.each:g}")

    @staticmethod
    def parsed(text: str) -> "Pace":
        """From A,B as on a command line; raises ValueError."""
        parts = text.split(",")
        try:
            base, each = map(float, parts)
        except ValueError as error:
            raise ValueError(f"a pace is A,B, two numbers of milliseconds such as 20,0.5, got {text}") from error
        return Pace(base, each)

    def __str__(self) -> str:
        return f"{self.base:g},{self.each:g}"

    def seconds(self, tokens: int) -> float:
        return (self.base + self.each * tokens) / 1000


@dataclass(frozen=True)
class Emulation:
    """How a service differs from its model. Raises ValueError: the noise is negative or not finite."""

    pace: Pace | None = None  # of its steps; None: as fast as they are
    logit_noise: float = 0.0  # standard deviation of noise on its logits

    def __post_init__(self) -> None:
        sigma = self.logit_noise
        if not 0 <= sigma < math.inf:
            raise ValueError(f"the noise on the logits needs a standard deviation of 0 or more, got {sigma:g}")

    @staticmethod
    def parsed(pace: str | None, logit_noise: float = 0.0) -> "Emulation":
        """As --pace and --logit-noise have them; raises ValueError."""
        return Emulation(None if pace is None else Pace.parsed(pace), logit_noise)

    def step_of(self, engine: Engine, columns: int) -> StepFunction:
        """The engine's step, noisy and paced where that is asked for."""
        step: StepFunction = engine.step
        if self.logit_noise:
            step = Noisy(self.logit_noise, columns, step, engine.device)
        return step if self.pace is None else Paced(self.pace, engine.remaining, step)

    @property
    def marks(self) -> dict[str, str | float]:
        """What a service's ready line says of it, so that results are labelled."""
        paced: dict[str, str | float] = {} if self.pace is None else {"paced": str(self.pace)}
        return paced | ({"logit_noise": self.logit_noise} if self.logit_noise else {})


class Noisy:
    """A step that adds Gaussian noise of standard deviation sigma to the logits: a drafter of any acceptance.

    The noise is a function of how many tokens come before and of the latest of them: the same node has the same
    logits whenever it is evaluated, in whatever session or tree, so this is a model like any other, and rows state its
    distributions truthfully. Each node takes its own window of one long random vector, a copy in place of V draws.

    The bundled target as its own drafter accepts, by `standard` at temperature 1 with rows of 64 ids (of all ids), 0.91
    (1.00) at sigma 0, 0.82 (0.86) at 0.5, 0.70 (0.73) at 1, 0.59 (0.61) at 1.5, 0.49 (0.51) at 2, 0.32 (0.33) at 3.
    """

    def __init__(self, sigma: float, columns: int, step: StepFunction, device: torch.device) -> None:
        drawn = np.random.default_rng(SEED).standard_normal(columns + WINDOWS - 1, dtype=np.float32)
        self._noise = torch.from_numpy(drawn).mul_(sigma).to(device)
        self._windows = self._noise.unfold(0, columns, 1)  # (WINDOWS, columns), a view
        self._step = step

    @torch.inference_mode()
    def __call__(self, scheduled: Sequence[ForwardRequest]) -> list[Tensor | None]:
        """The step's logits with noise; raises what it raises."""
        found = self._step(scheduled)
        noisy = [place for place, logits in enumerate(found) if logits is not None and logits.shape[0]]
        if noisy:
            parts = [logits for place in noisy if (logits := found[place]) is not None]
            windows = [window for place in noisy for window in _windows_of(scheduled[place])]
            noise = self._windows[torch.tensor(windows, device=self._noise.device)]
            added = (joined(parts) + noise).split([part.shape[0] for part in parts])
            for place, logits in zip(noisy, added, strict=True):
                found[place] = logits
        return found


def _windows_of(request: ForwardRequest) -> Iterator[int]:
    """Where the noise of each row that is asked for begins."""
    end, before, paths = request.context[-LATEST:], len(request.context), request.tree.paths()
    for row in request.rows():
        yield _window(before + len(paths[row]), (*end, *paths[row]))


def _window(count: int, tokens: tuple[int, ...]) -> int:
    """Where the noise begins after `count` tokens that end with `tokens`."""
    key = np.array((count, *tokens[-LATEST:]), dtype=np.int64).tobytes()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") % WINDOWS


class Paced:
    """A step that takes at least what its pace says; the rest is slept where it is called."""

    def __init__(
        self,
        pace: Pace,
        remaining: Callable[[ForwardRequest], int],  # as `Engine.remaining`
        step: StepFunction,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,  # in the model thread only: it stands for a device that is busy
    ) -> None:
        self._pace, self._remaining, self._step, self._now, self._sleep = pace, remaining, step, now, sleep
        self._known: OrderedDict[Hashable, int] = OrderedDict()  # tokens of a session's text at its last result

    def __call__(self, scheduled: Sequence[ForwardRequest]) -> list[Tensor | None]:
        """The step's results; raises what it raises."""
        began = self._now()
        tokens = sum(map(self._counted, scheduled))
        found = self._step(scheduled)
        for request, logits in zip(scheduled, found, strict=True):
            if logits is not None:
                self._remember(request)
        if tokens or any(logits is not None for logits in found):
            rest = began + self._pace.seconds(tokens) - self._now()
            if rest > 0:
                self._sleep(rest)
        return found

    def _counted(self, request: ForwardRequest) -> int:
        """Tokens of a scheduled request that the pace counts; those that it does not are computed first."""
        remaining = self._remaining(request)
        known = self._known.get(request.session)
        counted = len(request.tree) + (0 if known is None else max(1, len(request.context) - known))
        free = max(0, remaining - counted)
        return max(0, min(request.tokens, remaining) - free)

    def _remember(self, request: ForwardRequest) -> None:
        self._known[request.session] = len(request.context)
        self._known.move_to_end(request.session)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
