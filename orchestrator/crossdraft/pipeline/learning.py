"""How a governor learns what it knows.

Times are medians of the latest ones, so that a single stall does not count. Agreement is counted with forgetting.
Everything starts from a prior that weighs as much as a few observations.
"""

from crossdraft.pipeline.averages import Share, Times
from crossdraft.pipeline.estimates import PLACES, Estimates
from crossdraft.pipeline.governing import BranchSeen, Choice, DraftSeen, Judged, Observation, PassSeen
from crossdraft.pipeline.load import Load
from crossdraft.pipeline.pass_times import PassTimes, PlainTimes, Plane
from crossdraft.pipeline.workload import FURTHER

DOUBTED = 2  # times that are kept of a drafter that is tried again
MATCHES = 0.7  # of proposals that would be accepted, how many agree with a token that the target drew by itself
CARRIED = 40.0  # judged proposals that the estimates of an earlier generation weigh at most
HOPEFUL = 0.9  # acceptance of a drafter, as long as nothing speaks against it
HOPE = 4.0  # judged proposals that the hope weighs as much as


class Learner:
    """Turns observations into estimates.

    Args:
        before: what is believed at first.
        samples: the method's target draws by itself, so that agreement is the same whenever it is compared.
    """

    def __init__(self, before: Estimates, samples: bool = False) -> None:
        carried = min(1.0, CARRIED / before.judged) if before.judged else 0.0
        self.seen = 0  # observations of agreement and of passes
        self._before, self._samples = before, samples
        self._places = [Share(before.judged * carried / len(PLACES), share) for share in before.acceptance]
        self._all = Share(before.judged * carried, sum(before.acceptance) / len(PLACES))
        self._match = Share(min(before.compared, CARRIED), before.match)
        self._hit = Share(min(before.tried, CARRIED), before.branch_hit)
        self._worth = Share(min(before.judged, CARRIED), before.tokens_per_proposal)
        self._forwards = Times(before.token)
        self._gaps = Times(before.token)
        self._firsts = Times(0.0)
        self._with_branches = Times(0.0)
        self._trips = Times(before.drafter_trip)
        self._target_trips = Times(before.target_trip)
        self.load = Load(before.sessions, before.queue)
        node = before.pass_node / before.sessions
        base = before.pass_base - before.queue - node * (before.sessions - 1)
        self._passes = PassTimes(Plane(base + before.target_trip, node, before.slowed))
        self._plain = PlainTimes(before.plain if before.plain_passes else 0.0, before.sessions - 1)
        self._replies, self._pass_count = before.replies, before.passes
        self._behind = 0.0  # tokens that the target has drawn by itself and the draft has not caught up with
        self._choice = Choice(window=0)
        self._rests_at = 0.0  # seconds: when the drafter has done what it was asked before plain decoding began
        self.plain_seen = 0  # passes of plain decoding, the drafter at rest

    @property
    def known(self) -> bool:
        """Whether both services have been seen at work."""
        return self._replies > 0 and self._pass_count > 0

    def doubt(self) -> None:
        """What is known of the drafter may be out of date: what is seen next counts for more."""
        for times in (self._forwards, self._gaps, self._firsts, self._trips):
            times.forget(DOUBTED)
        for share in (self._all, self._match, *self._places):
            share.forget(CARRIED / 2)

    def begin(self, choice: Choice, now: float) -> None:
        """An epoch begins, run like this."""
        if self._choice.drafts and not choice.drafts:
            self._rests_at = now + self._trips.low() + (self._choice.window + 1) * self._forwards.median()
        self._choice = choice
        self._behind = 0.0

    def observe(self, seen: Observation, now: float) -> None:
        """Takes in what happened; `now` in seconds of the session's clock."""
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
        if not seen.proposals:
            return
        self._replies += 1
        extra = self._choice.branch_depth * self._choice.branch_width
        each = seen.seconds / seen.proposals
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
            self._gaps.add(seen.gap / seen.proposals)

    def _passed(self, seen: PassSeen, now: float) -> None:
        self.seen += 1
        self.load.saw(seen)
        if seen.asked:
            self._target_trips.add(seen.waited - seen.seconds - seen.queued)
        proposals = seen.tokens - 1 if seen.proposals is None else seen.proposals
        if not self._choice.drafts:
            if proposals or now - seen.waited < self._rests_at:
                return  # it left with a draft, or the drafter is still busy with one
            waited = seen.seconds + seen.queued if seen.asked else seen.waited
            self._plain.add(waited / seen.forwards, seen.others)
            self.plain_seen += seen.forwards
        self._pass_count += 1
        # What a pass would have taken: a round trip, and the forward without the queue.
        seconds = seen.waited - seen.queued if seen.asked else seen.waited / seen.forwards + self._target_trips.median()
        self._passes.add(proposals + seen.others, now - seconds, now)

    def _judged(self, seen: Judged) -> None:
        """The first proposals may only be compared with what the target has drawn before; the others were judged."""
        self.seen += 1
        if not (seen.tokens or self._behind or seen.refused):
            return  # nothing can be accepted now without a token: it has been told before
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
        """What is believed now."""
        before = sum(self._before.acceptance) / len(PLACES)
        # Far away, the target's own tokens may be all that is ever compared: they say something of the rest.
        hoped = Share(self._match.seen, min(1.0, self._match.mean(0, 0) / self._less)) if self._match.seen else Share()
        return self._believed(self._all.mean(hoped.mean(before, 8), HOPE))

    @property
    def hopeful(self) -> Estimates:
        """The same, where what has not been judged is taken to be good: comparisons with the target's own tokens say
        little of what a drafter would be worth if the target waited for it."""
        seen = Share(self._all.seen, self._all.mean(0, 0)) if self._all.seen else Share()
        if self._samples and self._match.seen:
            seen.add(self._match.held, self._match.seen)
        return self._believed(seen.mean(HOPEFUL, HOPE))

    @property
    def _less(self) -> float:
        return 1.0 if self._samples else MATCHES

    def _believed(self, common: float) -> Estimates:
        """Where acceptance is `common` over all places."""
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
            max(0.05, self._worth.mean(before.tokens_per_proposal, 4)),
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
