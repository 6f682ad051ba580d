"""What passes take, over the proposals that they cover and over what the drafter works meanwhile.

On a machine that both models share, a pass is slower while the drafter runs forwards. Its seconds are taken to be
base + node * proposals + slowed * (seconds that the drafter worked meanwhile), fitted to medians. Tokens of other
sessions in the same forward count as proposals: they cost as much.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

KEPT = 31  # passes of about one kind
ENOUGH = 3  # passes whose median can be relied on
NODE_COST = 0.02  # of a proposal in a pass, as a share of a plain one, until it is known
REPLIES = 64  # of the drafter that are remembered
MOST_SLOWED = 0.6
SIZES = (0, 1, 3, 6, 11, 19, 39, 80, 160, 320, 640)  # where ranges of proposals begin
SHARES = (0.0, 0.15, 0.4, 0.7)  # ... of shares of the time in which the drafter worked
NODE_PRIOR = 4.0  # squared proposals that the prior of a proposal's cost weighs
CERTAIN = 1e6  # the weight of a prior that stays as it is
SLOWED_PRIOR = 0.3  # squared passes that the prior of what the drafter costs weighs


@dataclass(frozen=True)
class Timed:
    """A pass that has returned."""

    proposals: int
    begin: float  # seconds
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Plane:
    """What a pass takes."""

    base: float  # seconds over no proposals, the drafter at rest
    node: float  # ... more for each proposal
    slowed: float  # ... more for each second that the drafter works meanwhile


class PassTimes:
    """The latest passes of each kind, and when the drafter worked.

    Args:
        before: what is believed at first.
    """

    def __init__(self, before: Plane) -> None:
        self._before = before
        self._works: deque[tuple[float, float]] = deque(maxlen=REPLIES)  # (begin, end), in seconds
        self._latest: Timed | None = None  # a reply on its way may still tell of work beside it
        self._kinds: dict[tuple[int, int], deque[tuple[int, float, float]]] = {}

    def worked(self, begin: float, end: float) -> None:
        """The drafter has run forwards."""
        self._works.append((begin, end))

    def add(self, proposals: int, begin: float, end: float) -> None:
        """A pass has returned."""
        if self._latest is not None:
            self._keep(self._latest)
        self._latest = Timed(max(0, proposals), begin, end)

    def plane(self) -> Plane:
        """The fit. Where passes do not tell its parts from each other, what was believed before decides."""
        points = self._points()
        if not points:
            return self._before
        counts, proposals, beside, seconds = np.array(points).T
        scale = float(np.average(seconds, weights=counts))
        design = np.stack([np.ones_like(proposals), proposals, beside / scale], axis=1)
        alone = scale / (1 + NODE_COST * float(np.average(proposals, weights=counts)))
        known = np.array([0.0, self._before.node or NODE_COST * alone, self._before.slowed * scale])
        enough = min(counts[beside < 0.2 * seconds].sum(), counts[beside > 0.2 * seconds].sum()) >= ENOUGH
        weights = np.diag([0.0, NODE_PRIOR, SLOWED_PRIOR if enough else CERTAIN])
        base, node, slowed = np.linalg.solve(
            design.T @ (counts[:, None] * design) + weights, design.T @ (counts * seconds) + weights @ known
        ).tolist()
        node, slowed = max(0.0, node), min(MOST_SLOWED, max(0.0, slowed / scale))
        base = float(np.average(seconds - node * proposals - slowed * beside, weights=counts))
        return Plane(max(base, 0.1 * scale), node, slowed)

    def _points(self) -> list[tuple[int, float, float, float]]:
        """How many passes of a kind, their mean proposals and work beside them, and their median seconds."""
        kinds = list(self._kinds.values())
        if not kinds and self._latest is not None:
            kinds = [deque([self._seen(self._latest)])]
        points = [
            (
                len(kind),
                fmean(proposals for proposals, _, _ in kind),
                fmean(beside for _, beside, _ in kind),
                median(seconds for _, _, seconds in kind),
            )
            for kind in kinds
        ]
        return [point for point in points if point[0] >= ENOUGH] or points

    def _keep(self, timed: Timed) -> None:
        proposals, beside, seconds = self._seen(timed)
        size = max(place for place, begin in enumerate(SIZES) if begin <= proposals)
        share = max(place for place, begin in enumerate(SHARES) if begin * seconds <= beside)
        self._kinds.setdefault((size, share), deque(maxlen=KEPT)).append((proposals, beside, seconds))

    def _seen(self, timed: Timed) -> tuple[int, float, float]:
        while self._works and self._works[0][1] < timed.begin - timed.seconds:
            self._works.popleft()  # nor will it have been beside the next ones
        beside = sum(max(0.0, min(end, timed.end) - max(begin, timed.begin)) for begin, end in self._works)
        return timed.proposals, min(beside, timed.seconds), timed.seconds


class PlainTimes:
    """What the latest tokens of plain decoding took, without a round trip.

    Args:
        seconds: of a token, as it is believed at first; 0: nothing is.
        others: tokens of other sessions beside it.
    """

    def __init__(self, seconds: float, others: float) -> None:
        self._latest: deque[tuple[float, float]] = deque([(seconds, others)] if seconds > 0 else [], maxlen=KEPT)

    def add(self, seconds: float, others: float) -> None:
        """A token, or the mean of some."""
        self._latest.append((seconds, others))

    def median(self, node: float) -> float:
        """Seconds of a token with none beside it, where each other one costs `node` more; 0 before there is any."""
        return max(0.0, median(seconds - node * others for seconds, others in self._latest)) if self._latest else 0.0
