"""What a governor may lose by trying a drafter, so that nobody is slower than without one."""

from crossdraft.pipeline.estimates import FIRST_TRY
from crossdraft.pipeline.governing import Judged, Observation, PassSeen

REFILL = 0.015  # of the time
DEAREST = 2 * FIRST_TRY  # plain passes that a try may cost
OVERDRAWN = 2.0  # plain passes below which a drafter is put aside though it is expected to pay


class Allowance:
    """Counted in passes of plain decoding. An epoch with a drafter costs its duration less its tokens, each of which
    would have been a pass; time, and what a drafter gains, fill it up again, to what a first try may cost.

    Args:
        level: what is left of it by an earlier generation.
    """

    def __init__(self, level: float = FIRST_TRY) -> None:
        self.level = level
        self._since: float | None = None  # seconds: when the epoch began, or when it emitted its first token
        self._tokens = 0

    def observe(self, seen: Observation, now: float) -> None:
        """Counts tokens. A generation's first pass reads the prompt, and is left out."""
        if isinstance(seen, PassSeen) and self._since is None:
            self._since, self._tokens = now - seen.waited, 0
        if isinstance(seen, Judged):
            self._tokens += seen.tokens

    def over(self, drafted: bool, plain: float, now: float) -> None:
        """An epoch is over, with a drafter or without; a plain pass takes `plain` seconds.

        What an epoch loses beyond the dearest try, and a pass for each of its tokens, is a pause of the target's, or
        of the machine's: charged in full, ten seconds would put a drafter aside for as many minutes.
        """
        if self._since is None or not plain:
            return
        passes = (now - self._since) / plain
        spent = min(passes - self._tokens, DEAREST + self._tokens) if drafted else 0.0
        self.level = min(FIRST_TRY, self.level + REFILL * passes - spent)
        self._since, self._tokens = now, 0

    def covers(self, passes: float) -> bool:
        """Whether a try that may cost so much is affordable; a first one always is, unless it is far too dear."""
        return self.level >= min(passes, FIRST_TRY) and passes <= DEAREST

    @property
    def overdrawn(self) -> bool:
        """Whether what was expected to pay has lost too much."""
        return self.level < -OVERDRAWN
