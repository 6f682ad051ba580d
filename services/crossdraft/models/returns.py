"""When sessions that were answered ask again. No clock: times are told, in seconds of any one clock."""

from collections.abc import Hashable
from dataclasses import dataclass

# As TCP learns round trips (RFC 6298): a smoothed mean, and a smoothed deviation from it.
GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
STRAY = (
    2  # times as late as anybody was waited for: a later return counts as one that late, since it may be the only one
)
LEAST = 0.001  # seconds; ... and no return is a stray before
DEVIATIONS = 3  # beyond the mean: a session that is later than this is not waited for any more


@dataclass
class _Gap:
    """Between an answer and the next question."""

    mean: float  # seconds
    deviation: float  # seconds
    answered: float | None = None  # when, if there was no question since

    @property
    def longest(self) -> float:
        return self.mean + DEVIATIONS * self.deviation


class Returns:
    """Sessions, and how soon each comes back."""

    def __init__(self) -> None:
        self._gaps: dict[Hashable, _Gap] = {}
        self._answered: dict[Hashable, float] = {}  # sessions that never came back yet
        self._usual: _Gap | None = None  # of all: what is expected of a session that never came back yet

    def answered(self, session: Hashable, now: float) -> None:
        """It knows what it asked for."""
        if session in self._gaps:
            self._gaps[session].answered = now
        else:
            self._answered[session] = now

    def asked(self, session: Hashable, now: float) -> None:
        """It asks for more."""
        known = self._gaps.get(session)
        answered = self._answered.pop(session, None) if known is None else known.answered
        if answered is None:
            return
        gap = max(0.0, now - answered)
        self._usual = _learned(self._usual, gap)
        self._gaps[session] = _learned(known, gap)

    def over(self, session: Hashable) -> None:
        """It never comes back."""
        self._gaps.pop(session, None)
        self._answered.pop(session, None)

    def expected(self, now: float) -> dict[Hashable, float]:
        """Seconds until a session should be back at the latest; without those that are late already."""
        found = {session: gap.answered + gap.longest for session, gap in self._gaps.items() if gap.answered is not None}
        if self._usual is not None:
            found |= {session: answered + self._usual.longest for session, answered in self._answered.items()}
        return {session: at - now for session, at in found.items() if at > now}


def _learned(before: _Gap | None, gap: float) -> _Gap:
    if before is None:
        return _Gap(gap, gap / 2)
    gap = min(gap, STRAY * max(before.longest, LEAST))
    deviation = before.deviation + DEVIATION_GAIN * (abs(gap - before.mean) - before.deviation)
    return _Gap(before.mean + GAIN * (gap - before.mean), deviation)
