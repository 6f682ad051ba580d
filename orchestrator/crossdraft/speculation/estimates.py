"""What is measured: what steps take, and shares, such as of draft tokens that were accepted."""

from bisect import bisect_right
from collections import deque
from math import log2
from statistics import median

LATEST = 9  # durations of which the lower third counts: five that are nobody's, such as captures, do not show
MEMORY = 200.0  # judged draft tokens after which one weighs 1/e: acceptance is known within 0.03
PRIOR, HOPED = 6.0, 0.75  # draft tokens that a prior weighs, and their acceptance
CLEAR = 3.0  # standard deviations that are no chance: another text, or another drafter


class Times:
    """What steps take, by their size: the usual of the latest of each octave, and straight lines between these."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, float]]] = {}  # sizes and seconds
        self._points: list[tuple[float, float]] = []  # usual ones, ascending; as long as nothing is added

    def add(self, seconds: float, size: float = 1.0) -> None:
        self._seen.setdefault(round(log2(max(1.0, size))), deque(maxlen=LATEST)).append((size, max(0.0, seconds)))
        self._points = []

    @property
    def known(self) -> bool:
        return bool(self._seen)

    def seconds(self, size: float = 1.0) -> float:
        """Of a step of this size; 0 if none was seen."""
        if not self._points:  # of an octave that was seen twice nothing is known: both may have been stalls
            seen = [one for one in self._seen.values() if len(one) > 2] or self._seen.values()
            columns = (tuple(zip(*one, strict=True)) for one in seen)
            self._points = sorted((median(sizes), sorted(took)[(len(took) - 1) // 3]) for sizes, took in columns)
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
