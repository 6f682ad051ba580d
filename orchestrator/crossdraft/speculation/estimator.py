"""Turns a session's observations into estimates.

Times are medians of the latest ones, so that a single stall does not count. Acceptance is counted with exponential
discounting. Every estimate starts from a prior that weighs as much as a few observations.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from crossdraft.speculation.choice import (
    FURTHER,
    PLACES,
    BranchSeen,
    Choice,
    DraftSeen,
    Estimates,
    Judged,
    Observation,
    PassSeen,
)

DOUBTED = 2  # times that are kept of a drafter that is tried again
MATCHES = 0.7  # share of acceptable draft tokens that equal a token which the target drew by itself
CARRIED = 40.0  # judged draft tokens that the estimates of an earlier generation weigh at most
HOPEFUL = 0.9  # optimistic prior of a drafter's acceptance
HOPE = 4.0  # judged draft tokens that the prior of acceptance weighs


class Learner:
    """Turns observations into estimates.

    Args:
        before: the first estimates.
        samples: the method's target draws by itself, so that acceptance does not depend on when it is compared.
    """

    def __init__(self, before: Estimates, samples: bool = False) -> None:
        carried = min(1.0, CARRIED / before.judged) if before.judged else 0.0
        self.seen = 0  # observations of judged draft tokens and of passes
        self._before, self._samples = before, samples
        self._places = [Share(before.judged * carried / len(PLACES), share) for share in before.acceptance]
        self._all = Share(before.judged * carried, sum(before.acceptance) / len(PLACES))
        self._match = Share(min(before.compared, CARRIED), before.match)
        self._hit = Share(min(before.tried, CARRIED), before.branch_hit)
        self._worth = Share(min(before.judged, CARRIED), before.tokens_per_draft_token)
        self._forwards = LatestTimes(before.token)
        self._gaps = LatestTimes(before.token)
        self._firsts = LatestTimes(0.0)
        self._with_branches = LatestTimes(0.0)
        self._trips = LatestTimes(before.drafter_trip)
        self._target_trips = LatestTimes(before.target_trip)
        self.load = Load(before.sessions, before.queue)
        node = before.pass_node / before.sessions
        base = before.pass_base - before.queue - node * (before.sessions - 1)
        self._passes = PassTimes(Plane(base + before.target_trip, node, before.slowed))
        self._plain = PlainTimes(before.plain if before.plain_passes else 0.0, before.sessions - 1)
        self._replies, self._pass_count = before.replies, before.passes
        self._behind = 0.0  # tokens drawn by the target itself that the draft has not caught up with
        self._choice = Choice(max_draft_tokens=0)
        self._rests_at = 0.0  # seconds: when the drafter has finished what was asked before plain decoding began
        self.plain_seen = 0  # passes of plain decoding while the drafter was idle

    @property
    def known(self) -> bool:
        """Whether both services have been observed."""
        return self._replies > 0 and self._pass_count > 0

    def doubt(self) -> None:
        """Discount what is known of the drafter, which may be out of date."""
        for times in (self._forwards, self._gaps, self._firsts, self._trips):
            times.forget(DOUBTED)
        for share in (self._all, self._match, *self._places):
            share.forget(CARRIED / 2)

    def begin(self, choice: Choice, now: float) -> None:
        """An epoch with this choice begins."""
        if self._choice.drafts and not choice.drafts:
            self._rests_at = now + self._trips.low() + (self._choice.max_draft_tokens + 1) * self._forwards.median()
        self._choice = choice
        self._behind = 0.0

    def observe(self, seen: Observation, now: float) -> None:
        """Learn from an observation; `now` in seconds of the session's clock."""
        match seen:
            case DraftSeen():
                came = now - self._trips.low() / 2
                self._passes.worked(came - seen.seconds, came)
                self._drafted(seen)
            case PassSeen():
                self._passed(seen, now)
            case Judged():
                self._judged(seen)
            case BranchSeen(hit):
                missed = (not hit) / FURTHER ** (self._choice.branch_width - 1)
                self._hit.add(1 - missed, 1)

    def _drafted(self, seen: DraftSeen) -> None:
        if not seen.draft_tokens:
            return
        self._replies += 1
        extra = self._choice.branch_depth * self._choice.branch_width
        each = seen.seconds / seen.draft_tokens
        if seen.waited is not None:
            self._trips.add(seen.waited - seen.seconds)
            if self._choice.overlap:
                self._firsts.add(each)
                return  # it has read what was committed as well
        if extra:
            if not self._forwards.median():
                self._firsts.add(each / (1 + self._before.slope * extra))
            else:
                self._with_branches.add((each / self._forwards.median() - 1) / extra)
            return
        self._forwards.add(each)
        if seen.gap is not None:
            self._gaps.add(seen.gap / seen.draft_tokens)

    def _passed(self, seen: PassSeen, now: float) -> None:
        self.seen += 1
        self.load.saw(seen)
        if seen.asked:
            self._target_trips.add(seen.waited - seen.seconds - seen.queued)
        draft_tokens = seen.tokens - 1 if seen.draft_tokens is None else seen.draft_tokens
        if not self._choice.drafts:
            if draft_tokens or now - seen.waited < self._rests_at:
                return  # it left with a draft, or the drafter is still busy with one
            waited = seen.seconds + seen.queued if seen.asked else seen.waited
            self._plain.add(waited / seen.forwards, seen.others)
            self.plain_seen += seen.forwards
        self._pass_count += 1
        # What a pass would have taken: a round trip, and the forward without the queue.
        seconds = seen.waited - seen.queued if seen.asked else seen.waited / seen.forwards + self._target_trips.median()
        self._passes.add(draft_tokens + seen.others, now - seconds, now)

    def _judged(self, seen: Judged) -> None:
        """While the draft is behind, its tokens are compared with the target's own; the others were judged."""
        self.seen += 1
        if not (seen.tokens or self._behind or seen.refused):
            return  # nothing can be accepted without a token: this was reported before
        compared, place = 0, seen.first
        worth = max(0.2, self._worth.mean(1.0, 4))
        while self._behind > 0 and compared < seen.accepted:
            compared += 1
            self._behind = max(0.0, self._behind - worth)
        if compared:
            self._match.add(compared, compared)
        judged = seen.accepted - compared
        for offset in range(compared, seen.accepted):
            self._place(place + offset, 1.0)
        if seen.refused and self._behind > 0:
            self._match.add(0, 1)
        elif seen.refused:
            self._place(place + seen.accepted, 0.0)
        if judged:
            corrected = seen.refused and self._behind == 0
            self._worth.add(max(0, seen.tokens - seen.settled - corrected), judged)
        self._behind = 0.0 if seen.refused else self._behind + seen.settled

    def _place(self, place: int, held: float) -> None:
        self._all.add(held, 1)
        self._places[max(i for i, begin in enumerate(PLACES) if begin <= place)].add(held, 1)

    @property
    def estimates(self) -> Estimates:
        """The estimates now."""
        before = sum(self._before.acceptance) / len(PLACES)
        # With a distant drafter the target's own tokens may be all that is ever compared.
        hoped = Share(self._match.seen, min(1.0, self._match.mean(0, 0) / self._less)) if self._match.seen else Share()
        return self._estimates(self._all.mean(hoped.mean(before, 8), HOPE))

    @property
    def hopeful(self) -> Estimates:
        """The estimates with an optimistic prior for acceptance: comparisons with the target's own tokens say little
        of what the drafter would be worth if the target waited for it."""
        seen = Share(self._all.seen, self._all.mean(0, 0)) if self._all.seen else Share()
        if self._samples and self._match.seen:
            seen.add(self._match.held, self._match.seen)
        return self._estimates(seen.mean(HOPEFUL, HOPE))

    @property
    def _less(self) -> float:
        return 1.0 if self._samples else MATCHES

    def _estimates(self, common: float) -> Estimates:
        """The estimates if acceptance is `common` on average over all places."""
        before = self._before
        before_common = sum(before.acceptance) / len(PLACES)
        plane, load = self._passes.plane(), self.load
        trip = min(self._target_trips.median(), 0.9 * plane.base)
        beside = plane.node * load.others  # a token for each of the others
        plain = (self._plain.median(plane.node) or plane.base - trip) + beside
        base = max(plane.base - trip + beside, plain) + load.queue  # no pass costs less than a plain one
        return Estimates(
            tuple(
                share.mean(min(1.0, max(0.0, common + was - before_common)), 12)
                for share, was in zip(self._places, before.acceptance, strict=True)
            ),
            self._match.mean(self._less * common, 20 if self._samples else 5),
            max(self._forwards.median(), self._gaps.low()) or self._firsts.low(),
            self._with_branches.median() if len(self._with_branches) > 2 else before.slope,
            self._trips.low(),
            base,
            plane.node * load.sessions,
            trip,
            min(1.0, max(0.0, self._hit.mean(before.branch_hit, 5))),
            max(0.05, self._worth.mean(before.tokens_per_draft_token, 4)),
            self._all.seen,
            self._match.seen,
            self._replies,
            self._pass_count,
            self._hit.seen,
            plain,
            before.plain_passes + self.plain_seen,
            plane.slowed,
            before.allowance,
            load.sessions,
            load.queue,
        )


MEMORY = 200.0  # judged draft tokens after which an observation weighs 1/e
KEPT = 15  # times of one kind that are kept


class Share:
    """A probability, counted with exponential discounting."""

    def __init__(self, seen: float = 0.0, share: float = 0.0) -> None:
        self.seen = seen
        self.held = seen * share

    def add(self, held: float, seen: float) -> None:
        """Add observations, after discounting the earlier ones."""
        kept = max(0.0, 1 - seen / MEMORY)
        self.seen, self.held = self.seen * kept + seen, self.held * kept + held

    def forget(self, most: float) -> None:
        """Limit the weight of past observations."""
        kept = min(1.0, most / self.seen) if self.seen else 1.0
        self.seen, self.held = self.seen * kept, self.held * kept

    def mean(self, prior: float, weight: float) -> float:
        """The probability, with a prior that counts as `weight` observations."""
        return (self.held + prior * weight) / (self.seen + weight)


class LatestTimes:
    """The latest times of one kind, in seconds."""

    def __init__(self, before: float, kept: int = KEPT) -> None:
        self._latest: deque[float] = deque([before] if before > 0 else [], maxlen=kept)

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, seconds: float) -> None:
        self._latest.append(max(0.0, seconds))

    def forget(self, kept: int) -> None:
        """Drop all but the latest."""
        while len(self._latest) > kept:
            self._latest.popleft()

    def median(self) -> float:
        """0 before there is any."""
        return median(self._latest) if self._latest else 0.0

    def low(self) -> float:
        """The lower quartile: without waits for other work."""
        return sorted(self._latest)[len(self._latest) // 4] if self._latest else 0.0


# The load of a target that several sessions share.
#
# A forward costs more the more tokens it feeds, whichever session they belong to, and the other sessions are controlled
# alike. So choices are compared as if all n sessions made the same: each draft token then costs every one of them n
# tokens. If each counted only its own tokens, all would go on speculating where together they lose.

PASSES_KEPT = 16  # passes, or tokens of runs
MOST_TURNS = 8.0  # forwards of others before one's own that are counted at most


class Load:
    """The load as the latest passes show it.

    Args:
        sessions: first estimate of the sessions that share the target.
        queue: first estimate of the seconds that a pass waits for the model.
    """

    def __init__(self, sessions: float = 1.0, queue: float = 0.0) -> None:
        self._sessions = deque([sessions], maxlen=PASSES_KEPT)
        self._queues = deque([queue], maxlen=PASSES_KEPT)

    def saw(self, seen: PassSeen) -> None:
        """A pass, or tokens of a run; a run waits in the queue only if others have forwards of their own."""
        each, queued = seen.seconds / seen.forwards, seen.queued / seen.forwards
        turns = min(MOST_TURNS, queued / each) if each > 0 else 0.0
        self._sessions.append(max(1.0, seen.sessions * (1 + turns) if seen.sessions > 1 else 1 + turns))
        if seen.asked:
            self._queues.append(queued)

    @property
    def sessions(self) -> float:
        """Sessions that share the target: those in its forwards, this one included, and those it waits for."""
        return fmean(self._sessions)

    @property
    def others(self) -> float:
        """Sessions that share the target, without this one."""
        return self.sessions - 1

    @property
    def queue(self) -> float:
        """Seconds that a pass waits for the model."""
        return median(self._queues)


# The duration of passes, by least squares over medians:
# seconds = base + node * (draft tokens) + slowed * (seconds that the drafter worked meanwhile).
# The last term is for a machine that both models share. Tokens of other sessions count as draft tokens.

PLANE_KEPT = 31  # passes of about one kind
ENOUGH = 3  # passes whose median can be relied on
NODE_COST = 0.02  # of a draft token in a pass, as a share of a plain one, until it is known
REPLIES = 64  # of the drafter that are remembered
MOST_SLOWED = 0.6
TOKEN_RANGES = (0, 1, 3, 6, 11, 19, 39, 80, 160, 320, 640)  # where ranges of draft tokens begin
WORK_RANGES = (0.0, 0.15, 0.4, 0.7)  # where ranges of the share of time in which the drafter worked begin
NODE_PRIOR = 4.0  # squared draft tokens that the prior of a draft token's cost weighs
CERTAIN = 1e6  # the weight of a prior that stays as it is
SLOWED_PRIOR = 0.3  # squared passes that the prior of what the drafter costs weighs


@dataclass(frozen=True)
class Timed:
    """A pass that has returned."""

    draft_tokens: int
    begin: float  # seconds
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Plane:
    """The fitted duration of a pass."""

    base: float  # seconds without draft tokens while the drafter is idle
    node: float  # ... more for each draft token
    slowed: float  # ... more for each second that the drafter works meanwhile


class PassTimes:
    """The latest passes of each kind, and when the drafter worked.

    Args:
        before: the prior.
    """

    def __init__(self, before: Plane) -> None:
        self._before = before
        self._works: deque[tuple[float, float]] = deque(maxlen=REPLIES)  # (begin, end), in seconds
        self._latest: Timed | None = None  # a reply on its way may still report work beside it
        self._kinds: dict[tuple[int, int], deque[tuple[int, float, float]]] = {}

    def worked(self, begin: float, end: float) -> None:
        """The drafter has run forwards."""
        self._works.append((begin, end))

    def add(self, draft_tokens: int, begin: float, end: float) -> None:
        """A pass has returned."""
        if self._latest is not None:
            self._keep(self._latest)
        self._latest = Timed(max(0, draft_tokens), begin, end)

    def plane(self) -> Plane:
        """The fit. Where the passes do not determine its terms, the prior does."""
        points = self._points()
        if not points:
            return self._before
        counts, draft_tokens, beside, seconds = np.array(points).T
        scale = float(np.average(seconds, weights=counts))
        design = np.stack([np.ones_like(draft_tokens), draft_tokens, beside / scale], axis=1)
        alone = scale / (1 + NODE_COST * float(np.average(draft_tokens, weights=counts)))
        known = np.array([0.0, self._before.node or NODE_COST * alone, self._before.slowed * scale])
        enough = min(counts[beside < 0.2 * seconds].sum(), counts[beside > 0.2 * seconds].sum()) >= ENOUGH
        weights = np.diag([0.0, NODE_PRIOR, SLOWED_PRIOR if enough else CERTAIN])
        base, node, slowed = np.linalg.solve(
            design.T @ (counts[:, None] * design) + weights, design.T @ (counts * seconds) + weights @ known
        ).tolist()
        node, slowed = max(0.0, node), min(MOST_SLOWED, max(0.0, slowed / scale))
        base = float(np.average(seconds - node * draft_tokens - slowed * beside, weights=counts))
        return Plane(max(base, 0.1 * scale), node, slowed)

    def _points(self) -> list[tuple[int, float, float, float]]:
        """By kind: number of passes, mean draft tokens, mean seconds of work beside them, median seconds."""
        kinds = list(self._kinds.values())
        if not kinds and self._latest is not None:
            kinds = [deque([self._seen(self._latest)])]
        points = [
            (
                len(kind),
                fmean(draft_tokens for draft_tokens, _, _ in kind),
                fmean(beside for _, beside, _ in kind),
                median(seconds for _, _, seconds in kind),
            )
            for kind in kinds
        ]
        return [point for point in points if point[0] >= ENOUGH] or points

    def _keep(self, timed: Timed) -> None:
        draft_tokens, beside, seconds = self._seen(timed)
        size = max(place for place, begin in enumerate(TOKEN_RANGES) if begin <= draft_tokens)
        share = max(place for place, begin in enumerate(WORK_RANGES) if begin * seconds <= beside)
        self._kinds.setdefault((size, share), deque(maxlen=PLANE_KEPT)).append((draft_tokens, beside, seconds))

    def _seen(self, timed: Timed) -> tuple[int, float, float]:
        while self._works and self._works[0][1] < timed.begin - timed.seconds:
            self._works.popleft()  # nor will it have been beside the next ones
        beside = sum(max(0.0, min(end, timed.end) - max(begin, timed.begin)) for begin, end in self._works)
        return timed.draft_tokens, min(beside, timed.seconds), timed.seconds


class PlainTimes:
    """The duration of the latest tokens of plain decoding, without a round trip.

    Args:
        seconds: first estimate for a token; 0: none.
        others: tokens of other sessions in the same forward.
    """

    def __init__(self, seconds: float, others: float) -> None:
        self._latest: deque[tuple[float, float]] = deque([(seconds, others)] if seconds > 0 else [], maxlen=PLANE_KEPT)

    def add(self, seconds: float, others: float) -> None:
        """A token, or the mean of some."""
        self._latest.append((seconds, others))

    def median(self, node: float) -> float:
        """Seconds of a token alone in its forward, if each other token costs `node`; 0 before there is any."""
        return max(0.0, median(seconds - node * others for seconds, others in self._latest)) if self._latest else 0.0
