"""Running means of a governor's: of probabilities and of times."""

from collections import deque
from statistics import median

MEMORY = 200.0  # judged proposals after which an observation weighs 1/e
KEPT = 15  # times of one kind that are kept


class Share:
    """A probability, counted with forgetting."""

    def __init__(self, seen: float = 0.0, share: float = 0.0) -> None:
        self.seen = seen
        self.held = seen * share

    def add(self, held: float, seen: float) -> None:
        """So many more, after what was there has been forgotten a little."""
        kept = max(0.0, 1 - seen / MEMORY)
        self.seen, self.held = self.seen * kept + seen, self.held * kept + held

    def forget(self, most: float) -> None:
        """What was seen weighs as so many observations at most."""
        kept = min(1.0, most / self.seen) if self.seen else 1.0
        self.seen, self.held = self.seen * kept, self.held * kept

    def mean(self, prior: float, weight: float) -> float:
        """The probability, where the prior counts as so many observations."""
        return (self.held + prior * weight) / (self.seen + weight)


class Times:
    """The latest times of one kind, in seconds."""

    def __init__(self, before: float, kept: int = KEPT) -> None:
        self._latest: deque[float] = deque([before] if before > 0 else [], maxlen=kept)

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, seconds: float) -> None:
        self._latest.append(max(0.0, seconds))

    def forget(self, kept: int) -> None:
        """All but the latest so many."""
        while len(self._latest) > kept:
            self._latest.popleft()

    def median(self) -> float:
        """0 before there is any."""
        return median(self._latest) if self._latest else 0.0

    def low(self) -> float:
        """What a quarter of them is below: without waits for other things."""
        return sorted(self._latest)[len(self._latest) // 4] if self._latest else 0.0
