"""Which of several drafters of one target a new output gets.

The one whose outputs are the fastest, by what its own controller has measured at this load. The others are tried with
one output at a time, in turn, as far as an account can pay for it: it begins with CREDIT tokens and earns EARNED of all
that is emitted, and what an output has lost beside the fastest drafter is taken from it. Beside no drafter each
controller bounds the loss by itself (`contest`).
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from crossdraft.speculation.contest import CREDIT, EARNED, MARGIN


@dataclass(frozen=True)
class Gain:
    """What was seen of a drafter."""

    speed: float = 1.0  # of outputs, times that without a drafter
    seen: bool = False


Gains = Mapping[str, Gain]  # by the names of drafters, of those that can serve an output; the default one first


class DrafterChoice:
    """Decides for all outputs of a model."""

    def __init__(self) -> None:
        self._credit = CREDIT  # tokens
        self._usual: dict[Hashable, str] = {}  # by kind of request
        self._turns: deque[str] = deque()  # names, the one that was tried last is the last
        self._tried: set[str] = set()  # by an output under way

    def usual(self, kind: Hashable, gains: Gains) -> str:
        """The fastest; until one was seen, and where they are as fast, the one before, and at first the default one."""
        usual = self._usual.get(kind, "")
        if usual not in gains:
            usual = next(iter(gains))
        best = max((name for name in gains if gains[name].seen), key=lambda name: gains[name].speed, default=usual)
        if gains[best].speed > MARGIN * gains[usual].speed:
            usual = best
        self._usual[kind] = usual
        return usual

    def begun(self, kind: Hashable, gains: Gains) -> tuple[str, bool]:
        """The drafter of a new output, of at least one; and whether this is a trial of it."""
        usual = self.usual(kind, gains)
        self._turns.extend(name for name in gains if name not in self._turns)
        for name in self._turns if gains[usual].seen else ():
            if name in gains and name != usual and name not in self._tried and self._may_try(gains[name], gains[usual]):
                self._turns.remove(name)
                self._turns.append(name)
                self._tried.add(name)
                return name, True
        return usual, False

    def _may_try(self, tried: Gain, usual: Gain) -> bool:
        """Whether the account pays: for what is expected of CREDIT tokens, or where nothing was seen."""
        lost = max(0.0, 1 - tried.speed / usual.speed) if tried.seen else 0.0
        return self._credit > CREDIT * lost

    def ended(self, kind: Hashable, name: str, trial: bool, tokens: int, gains: Gains) -> None:
        """An output that began so has emitted so many tokens."""
        lost = 0.0
        if trial:
            self._tried.discard(name)
            lost = max(0.0, 1 - gains.get(name, Gain()).speed / gains[self.usual(kind, gains)].speed) if gains else 0.0
        self._credit = min(CREDIT, self._credit + (EARNED - lost) * tokens)
