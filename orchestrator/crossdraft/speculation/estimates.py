"""What is measured: what steps take, and shares, as of draft tokens that were accepted; and what arms cost by that.

The model of costs only orders the arms and says what a trial may cost: what an arm brings is measured (`selection`).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from math import log2
from statistics import median
from typing import NamedTuple

from crossdraft.speculation.choice import Choice

LATEST = 9  # durations of which the lower third counts: five that are nobody's, such as captures, do not show
MEMORY = 200.0  # judged draft tokens after which one weighs 1/e: acceptance is known within 0.03
PRIOR, HOPED = 6.0, 0.75  # draft tokens that a prior weighs, and their acceptance
UNKNOWN_STEP = 0.2  # of a pass, that a draft token takes until it is known: drafters are made to be small
CROWDED = 0.2  # exponent: outputs that overlap get out of step; without it trials cost 64 outputs a tenth, simulated
BRANCHED = 0.2  # exponent: with n times the nodes of a chain, a tree misses n^-0.2 times as often, measured
CLEAR = 3.0  # standard deviations that are no chance: another text, or another drafter


class Times:
    """What steps take, by their size: the usual of the latest of each octave, and straight lines between these.

    Larger ones take no less: where they do, those that were seen last are right, as a machine may be busy for a while.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, float]]] = {}  # sizes and seconds; of what was added to last, last
        self._points: list[tuple[float, float]] = []  # usual ones, ascending; as long as nothing is added

    def add(self, seconds: float, size: float = 1.0) -> None:
        octave = round(log2(max(1.0, size)))
        self._seen[octave] = seen = self._seen.pop(octave, deque[tuple[float, float]](maxlen=LATEST))
        seen.append((size, max(0.0, seconds)))
        self._points = []

    @property
    def known(self) -> bool:
        return bool(self._seen)

    def seconds(self, size: float = 1.0) -> float:
        """Of a step of this size; 0 if none was seen."""
        if not self._points:  # of an octave that was seen twice nothing is known: both may have been stalls
            seen = [one for one in self._seen.values() if len(one) > 2] or [*self._seen.values()]
            for sizes, took in (zip(*one, strict=True) for one in reversed(seen)):
                middle, usual = median(sizes), sorted(took)[(len(took) - 1) // 3]
                usual = min([usual, *(known for larger, known in self._points if larger > middle)])
                usual = max([usual, *(known for less, known in self._points if less < middle)])
                self._points.append((middle, usual))
            self._points.sort()
        points = self._points
        if len(points) < 2:
            return points[0][1] if points else 0.0
        place = min(max(1, bisect_right(points, (size,))), len(points) - 1)
        (x, y), (x1, y1) = points[place - 1 : place + 1]
        slope = (y1 - y) / (x1 - x)
        return max(0.0, y1 + max(0.0, slope) * (size - x1) if size > x1 else y + slope * max(0.0, size - x))


class Share:
    """A mean of what is between 0 and 1, or of a ratio, counted with exponential discounting."""

    def __init__(self, held: float = 0.0, seen: float = 0.0, memory: float = MEMORY) -> None:
        self.held, self.seen, self._memory = held, seen, memory

    def add(self, held: float, seen: float) -> None:
        """Add observations, after discounting the earlier ones."""
        self.fade(seen)
        self.held, self.seen = self.held + held, self.seen + seen

    def fade(self, seen: float) -> None:
        """Discount the observations so far as if so many more had been made."""
        kept = max(0.0, 1 - seen / self._memory)
        self.held, self.seen = self.held * kept, self.seen * kept

    def mean(self, prior: float = HOPED, weight: float = PRIOR) -> float:
        """With a prior that counts as so many observations."""
        return (self.held + prior * weight) / (self.seen + weight)

    def factor(self, usual: float) -> float:
        """Times the usual probability that it is; 1 unless it is clear that it is another one."""
        expected = usual * self.seen
        clear = (self.held - expected) ** 2 > CLEAR**2 * (0.5 + expected * (1 - usual))
        return (self.held + 1) / (expected + 1) if clear else 1.0


class Round(NamedTuple):
    """What is expected of a pass and what is drafted for it, of each output."""

    tokens: float
    seconds: float


def like(times: Mapping[bool, Times], arm: Choice) -> Times:
    """Those of rounds or of overlapped arms, as this one is; until they are known those of the others."""
    return times[arm.overlap] if times[arm.overlap].known else times[not arm.overlap]


class Costs:
    """What the steps of a target and its drafters cost, in seconds."""

    def __init__(self) -> None:
        self.target = Times()  # by tokens of all sessions in a pass
        # Of a draft token, by nodes of all outputs; and from asking to the first reply, without its steps, by outputs.
        # Both for rounds and for overlapped arms (True), which draft beside passes, and wait for each other.
        self.steps, self.trips = ({overlap: Times() for overlap in (False, True)} for _ in range(2))

    def step(self, arm: Choice, drafting: float) -> float:
        """Of a draft token if so many outputs draft."""
        steps = like(self.steps, arm)
        return steps.seconds(drafting * arm.width) if steps.known else UNKNOWN_STEP * self.target.seconds(drafting)

    def arrival(self, arm: Choice, drafting: float, tokens: int) -> float:
        """From asking for so many draft tokens to their arrival, if so many outputs draft; of 0: the trip alone."""
        return like(self.trips, arm).seconds(drafting) + tokens * self.step(arm, drafting)

    def round(self, arm: Choice, outputs: float, drafting: float, chance: float, worth: float = 1.0) -> Round:
        """What is expected of an arm.

        Args:
            outputs: that share a pass.
            drafting: ... share the drafter.
            chance: that a draft token of a chain is accepted if all before it were.
            worth: target tokens of an accepted draft token.
        """
        depth, nodes = arm.max_draft_tokens, arm.tree_nodes
        chance = min(1 - 1e-9, 1 - (1 - chance) * (depth / nodes) ** BRANCHED if nodes else chance)

        def passed(drafted: float) -> Round:
            accepted = chance * (1 - chance**drafted) / (1 - chance)
            return Round(1 + worth * accepted, self.target.seconds(outputs * (1 + (nodes or drafted * worth))))

        if arm.overlap:
            epoch = self._overlapped(arm, passed, drafting, chance, worth)
            return epoch._replace(seconds=epoch.seconds * outputs**CROWDED)
        verified = passed(depth)
        return verified._replace(seconds=verified.seconds + (self.arrival(arm, drafting, depth) if depth else 0.0))

    def _overlapped(
        self, arm: Choice, passed: Callable[[float], Round], drafting: float, chance: float, worth: float
    ) -> Round:
        """A pass of an epoch, which lasts until a draft token is refused.

        Its first draft is waited for, or passes go on without one. Of those that may be ahead some are in a pass,
        others drafted during it, and others on their way.
        """
        depth, wait, step = arm.max_draft_tokens, arm.min_draft_tokens, self.step(arm, drafting)
        first, held = passed(wait).seconds, chance / (1 - chance)
        again, life = self.arrival(arm, drafting, max(1, wait)), 2 * first + self.arrival(arm, drafting, 0)
        ahead = max(1.0, wait, min(first / max(step, 1e-9), depth * first / max(life, 1e-9)))
        each = max(step, life / depth, passed(ahead).seconds / ahead)  # seconds of an accepted draft token
        alone = 0.0 if wait else again / max(first, 1e-9)
        more = held * chance**wait  # accepted in later passes
        passes = 1 + alone + more / ahead
        seconds = (1 + alone) * first + (again if wait else 0.0) + more * each
        return Round((1 + alone + worth * held) / passes, seconds / passes)
