"""What a link does to what passes through it."""

import random
from dataclasses import dataclass

MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Shape:
    """Delays of a link, and whether it is cut.

    Raises:
        ValueError: a value is out of its range.
    """

    there_ms: float = 0.0  # to the host, one way
    back_ms: float = 0.0  # from the host, one way
    jitter_ms: float = 0.0  # each delay is drawn evenly from delay ± jitter, and what was sent first arrives first
    cut: bool = False  # nothing passes, and nobody is told

    def __post_init__(self) -> None:
        if not (0 <= self.there_ms <= 60_000 and 0 <= self.back_ms <= 60_000 and 0 <= self.jitter_ms <= 60_000):
            raise ValueError(f"delays and jitter must be between 0 and 60,000 ms, got {self}")


class Lane:
    """One direction of travel: when what enters now may leave, in order."""

    def __init__(self) -> None:
        self._rng = random.Random(0)  # of the jitter; the same in every run
        self._last = 0.0  # seconds of the clock

    def due(self, now: float, delay_ms: float, jitter_ms: float) -> float:
        """Seconds of the clock that `now` is from, never before what entered earlier."""
        jitter = self._rng.uniform(-jitter_ms, jitter_ms) if jitter_ms else 0.0
        self._last = max(self._last, now + max(0.0, delay_ms + jitter) / MILLISECONDS)
        return self._last
