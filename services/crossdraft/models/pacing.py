"""Steps that take their time: a device that this machine has not, emulated by sleeping. No torch."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from crossdraft.models.feeds import Share, Work

Logits = TypeVar("Logits")
MOST_KNOWN = 4096  # sessions whose texts are told from those that are new


@dataclass(frozen=True)
class Pace:
    """A step of n tokens ends no sooner than base + each * n milliseconds after it began.

    n counts what the step feeds: the tokens that the text went on with since the session's last answer and the nodes of
    its tree, over all sessions that share the step. A text of which no pass was answered here, be it a prompt or a
    session that was lost elsewhere, does not count: its first answer costs base + each * (nodes of the tree), however
    many steps it took, and a step that only feeds such texts and answers nobody takes as long as it takes.

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
    """A step that takes at least what its pace says; the rest is slept where it is called."""

    def __init__(
        self,
        pace: Pace,
        engine: Counting,
        step: Callable[[Sequence[Share]], list[Logits | None]],
        clock: Clock = Clock(),
    ) -> None:
        self._pace, self._engine, self._step, self._clock = pace, engine, step, clock
        self._known: OrderedDict[Hashable, int] = OrderedDict()  # tokens of a session's text at its last answer

    def __call__(self, shares: Sequence[Share]) -> list[Logits | None]:
        """What the step gives; raises what it raises."""
        began = self._clock.now()
        tokens = sum(map(self._paid, shares))
        found = self._step(shares)
        for share, logits in zip(shares, found, strict=True):
            if logits is not None:
                self._remember(share.work)
        if tokens or any(logits is not None for logits in found):
            rest = began + self._pace.seconds(tokens) - self._clock.now()
            if rest > 0:
                self._clock.sleep(rest)
        return found

    def _paid(self, share: Share) -> int:
        """Tokens of a share that count: those that do not are fed first."""
        work, due = share.work, self._engine.due(share.work)
        known = self._known.get(work.session)
        counted = len(work.tree) + (0 if known is None else max(1, len(work.context) - known))
        free = max(0, due - counted)
        return max(0, min(share.tokens, due) - free)

    def _remember(self, work: Work) -> None:
        self._known[work.session] = len(work.context)
        self._known.move_to_end(work.session)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
