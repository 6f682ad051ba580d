"""How many sessions share a target, and what that costs each of them.

A forward costs the more the more tokens it feeds, whoever they are for. A session that asks for proposals to be
verified makes it dearer for all that share it, and so do the others, who are governed alike. So ways of running are
compared as if all that share the target chose the same: of n sessions each proposal then costs every one of them n
tokens more. Judged by its own tokens alone each would go on speculating where together they lose by it.
"""

from collections import deque
from statistics import fmean, median

from crossdraft.pipeline.governing import PassSeen

KEPT = 16  # passes, or tokens of runs
MOST_TURNS = 8.0  # forwards of others before one's own that are counted at most


class Load:
    """What the latest passes say of it.

    Args:
        sessions: that share the target, as it is believed at first.
        queue: seconds that a pass waits for the model, likewise.
    """

    def __init__(self, sessions: float = 1.0, queue: float = 0.0) -> None:
        self._sessions = deque([sessions], maxlen=KEPT)
        self._queues = deque([queue], maxlen=KEPT)

    def saw(self, seen: PassSeen) -> None:
        """A pass, or tokens of a run; a run is queued for its tokens only where others have forwards of their own."""
        each, queued = seen.seconds / seen.forwards, seen.queued / seen.forwards
        turns = min(MOST_TURNS, queued / each) if each > 0 else 0.0
        self._sessions.append(max(1.0, seen.sessions * (1 + turns) if seen.sessions > 1 else 1 + turns))
        if seen.asked:
            self._queues.append(queued)

    @property
    def sessions(self) -> float:
        """That share the target, this one included: those in its forwards, and those whose forwards it waits for."""
        return fmean(self._sessions)

    @property
    def others(self) -> float:
        """The same without this one."""
        return self.sessions - 1

    @property
    def queue(self) -> float:
        """Seconds that a pass waits for the model."""
        return median(self._queues)
