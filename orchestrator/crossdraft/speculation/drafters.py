"""Which of several drafters of one model a new output gets."""

from collections.abc import Mapping

from crossdraft.speculation.selection import EARNED, MARGIN

# Of the drafters that can serve an output, the default one first: how many times as fast as without a drafter its
# outputs were; 0: nothing was seen.
Gains = Mapping[str, float]


class DrafterChoice:
    """Which of several drafters of one model a new output gets.

    The one whose outputs are the fastest, by what its own controller has measured at this load. The others are tried in
    turn, each by one output at a time: at once what was not seen or seems as fast, and by EARNED of the outputs what is
    slower, so that no more than that is lost. Beside no drafter each controller bounds the loss by itself.
    """

    def __init__(self) -> None:
        self.latest = ""  # what most outputs get
        self._trials = 0.0  # of slower ones that may begin
        self._turns: dict[str, bool] = {}  # the one that was tried last is the last; whether an output is trying it

    def usual(self, gains: Gains) -> str:
        """The fastest; the one before where another one is hardly faster, and at first the default one."""
        before = self.latest if self.latest in gains else next(iter(gains))
        best = max(gains, key=lambda name: gains[name])
        self.latest = best if gains[best] > MARGIN * gains[before] else before
        return self.latest

    def begun(self, gains: Gains) -> tuple[str, bool]:
        """The drafter of a new output, of at least one; and whether this is a trial of it."""
        usual = self.usual(gains)
        self._turns = dict.fromkeys(gains, False) | self._turns
        self._trials = min(1.0, self._trials + EARNED)
        for name, busy in self._turns.items() if gains[usual] else ():
            if name in gains and name != usual and not busy:
                slower = 0 < gains[name] < gains[usual]
                if not slower or self._trials >= 1:
                    self._trials -= slower
                    del self._turns[name]
                    self._turns[name] = True
                    return name, True
        return usual, False

    def ended(self, name: str, trial: bool) -> None:
        """An output that began so is over."""
        if trial:
            self._turns[name] = False
