"""Running means of a governor's: of probabilities, of times, of times that depend on a size."""

from collections import deque
from statistics import median

MEMORY = 200.0  # judged proposals after which an observation weighs 1/e
KEPT = 15  # times of one kind that are kept
PASSES_KEPT = 31  # ... of passes of about one size
ENOUGH = 3  # times whose median can be relied on
NODE_COST = 0.02  # of a node in a pass, as a share of a plain one, until it is known


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


class PassTimes:
    """Seconds of passes over the tokens that they fed: a line through the medians of sizes."""

    SIZES = (1, 2, 4, 7, 12, 20, 40)  # where ranges of sizes begin

    def __init__(self, base: float, node: float) -> None:
        self._base, self._node = base, node
        self._latest: dict[int, deque[tuple[int, float]]] = {}

    def add(self, tokens: int, seconds: float) -> None:
        size = max(begin for begin in self.SIZES if begin <= max(1, tokens))
        self._latest.setdefault(size, deque(maxlen=PASSES_KEPT)).append((tokens, seconds))

    def line(self) -> tuple[float, float]:
        """Seconds of a pass of one token, and of each further one; the prior of the latter weighs as some spread."""
        if not self._latest:
            return self._base, self._node
        points = [
            (len(latest), sum(tokens for tokens, _ in latest) / len(latest) - 1, median(time for _, time in latest))
            for latest in self._latest.values()
        ]
        points = [point for point in points if point[0] >= ENOUGH] or points
        total = sum(count for count, _, _ in points)
        nodes = sum(count * x for count, x, _ in points) / total
        seconds = sum(count * y for count, _, y in points) / total
        spread = sum(count * (x - nodes) ** 2 for count, x, _ in points)
        together = sum(count * (x - nodes) * (y - seconds) for count, x, y in points)
        prior = self._node or NODE_COST * seconds
        node = max(0.0, (together + 4 * prior) / (spread + 4))
        return max(seconds - node * nodes, 0.1 * seconds), node
