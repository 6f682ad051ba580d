"""Steps that take their time: a device that this machine has not, emulated by sleeping. No torch."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from crossdraft.models.feeds import Work

Logits = TypeVar("Logits")


@dataclass(frozen=True)
class Pace:
    """A step of n tokens ends no sooner than base + each * n milliseconds after it began.

    n counts what the step feeds: the tokens that the text went on with since the session's last step and the nodes of
    its tree, over all sessions that share the step. A text of which the service holds nothing, be it a prompt or a
    session that was lost elsewhere, does not count: its first step costs base + each * (nodes of the tree).

    Raises:
        ValueError: a number is negative or not finite.
    """

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
        """That a step of so many tokens takes at least."""
        return (self.base + self.each * tokens) / 1000


class Counting(Protocol):
    """What knows the tokens of a step."""

    def due(self, work: Work) -> int:
        """Tokens that would be fed for a request now."""
        ...


@dataclass(frozen=True)
class Clock:
    """Seconds that pass while a thread sleeps."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep  # the model thread only: it stands for a device that is busy


class Paced(Generic[Logits]):
    """A forward that takes at least what its pace says; the rest is slept where it is called."""

    def __init__(
        self,
        pace: Pace,
        engine: Counting,
        forward: Callable[[Sequence[Work]], Logits],
        clock: Clock = Clock(),
    ) -> None:
        self._pace, self._engine, self._forward, self._clock = pace, engine, forward, clock

    def __call__(self, requests: Sequence[Work]) -> Logits:
        """What the forward gives; raises what it raises."""
        began = self._clock.now()
        seconds = self._pace.seconds(sum(map(self._engine.due, requests)))
        logits = self._forward(requests)
        rest = began + seconds - self._clock.now()
        if rest > 0:
            self._clock.sleep(rest)
        return logits
