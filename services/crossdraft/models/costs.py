"""What a step costs, learned from the steps themselves. No clock, no torch."""

FADING = 0.98  # weight of a step against the one after it: the latest fifty count
DOUBLING = 8  # tokens that are taken to double a step's time, until steps of several sizes have been seen
DOUBT = 4.0  # tokens^2: steps must differ by more than this before they are trusted over DOUBLING
REACH = 2  # a step takes at most so many times the tokens of any lately


class StepCosts:
    """Seconds of a step as base + each * tokens, by least squares of relative errors, older steps fading.

    Relative, since noise grows with a step: a stall or one long prefill then weighs no more than a usual step. What a
    step far larger than all so far would take is not known (a device that waits for memory is flat at first), so
    `tokens` goes there by doubling.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0  # weighted sums
        self._largest = 1.0  # tokens of a step lately

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; one that took no time, or fed nothing, says nothing."""
        if seconds <= 0 or tokens < 1:
            return
        weight = seconds**-2
        self._weight = FADING * self._weight + weight
        self._tokens = FADING * self._tokens + weight * tokens
        self._squares = FADING * self._squares + weight * tokens**2
        self._seconds = FADING * self._seconds + weight * seconds
        self._products = FADING * self._products + weight * tokens * seconds
        self._largest = max(FADING * self._largest, float(tokens), 1.0)

    def seconds(self, tokens: int) -> float:
        """That a step of so many tokens takes; 0 before any was seen."""
        base, each = self._line()
        return base + each * tokens

    def tokens(self, seconds: float) -> int:
        """That a step of so many seconds can take."""
        base, each = self._line()
        reach = int(REACH * self._largest)
        return min(reach, int((seconds - base) / each)) if each else reach

    def _line(self) -> tuple[float, float]:
        """base and each, both 0 or more, in seconds."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = max(0.0, self._squares / self._weight - tokens**2)
        together = self._products / self._weight - tokens * seconds
        guess = seconds / (tokens + DOUBLING)
        each = (together + DOUBT * guess) / (spread + DOUBT)
        each = min(max(0.0, each), seconds / max(tokens, 1.0))
        return seconds - each * tokens, each
