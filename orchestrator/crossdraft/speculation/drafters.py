"""Which of several drafters of one target a new output gets.

The one whose outputs are the fastest, by what its own controller has measured at this load. The others are tried with
one output at a time, in turn, as far as an account can pay for it: it begins with CREDIT tokens and earns EARNED of all
that is emitted, and what an output has lost beside the fastest drafter is taken from it. Beside no drafter each
controller bounds the loss by itself (`contest`).
"""

from collections import deque
from collections.abc import Hashable, Mapping

from crossdraft.speculation.contest import CREDIT, EARNED, MARGIN

# Of the drafters that can serve an output, the default one first: how many times as fast as without a drafter its
# outputs were; 0: nothing was seen.
Gains = Mapping[str, float]


class DrafterChoice:
    """Decides for all outputs of a model."""

    def __init__(self) -> None:
        self._credit = CREDIT  # tokens
        self._usual: dict[Hashable, str] = {}  # by kind of request
        self._turns: deque[str] = deque()  # names, the one that was tried last is the last
        self._tried: set[str] = set()  # by an output under way

    def usual(self, kind: Hashable, gains: Gains) -> str:
        """The fastest; until one was seen, and where they are as fast, the one before, and at first the default one."""
        usual, best = self._usual.get(kind, ""), max(gains, key=lambda name: gains[name])
        usual = usual if usual in gains else next(iter(gains))
        usual = self._usual[kind] = best if gains[best] > MARGIN * gains[usual] else usual
        return usual

    def begun(self, kind: Hashable, gains: Gains) -> tuple[str, bool]:
        """The drafter of a new output, of at least one; and whether this is a trial of it."""
        usual = self.usual(kind, gains)
        self._turns.extend(name for name in gains if name not in self._turns)
        for name in self._turns if gains[usual] else ():
            waits = name not in gains or name == usual or name in self._tried
            if not waits and self._credit > CREDIT * _lost(gains[name], gains[usual]):
                self._turns.remove(name)
                self._turns.append(name)
                self._tried.add(name)
                return name, True
        return usual, False

    def ended(self, kind: Hashable, name: str, trial: bool, tokens: int, gains: Gains) -> None:
        """An output that began so has emitted so many tokens."""
        lost = _lost(gains[name], gains[self.usual(kind, gains)]) if trial and name in gains else 0.0
        if trial:
            self._tried.discard(name)
        self._credit = min(CREDIT, self._credit + (EARNED - lost) * tokens)


def _lost(gain: float, usual: float) -> float:
    """Of each token; nothing is known to be lost with a drafter that was not seen."""
    return max(0.0, 1 - gain / usual) if gain else 0.0
