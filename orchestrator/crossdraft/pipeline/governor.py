"""The governor: decides how each epoch is run from what has been measured.

A generation begins with an overlapped draft for which the target never waits: that costs next to nothing whatever the
drafter is like. Once both services have been seen at work, forecasts decide. Where little is known of the drafter and
it might be worth much, the governor tries what would be best if it were good; what that may lose against plain
decoding is bounded. A drafter with which nothing is faster than plain decoding is put aside and tried again later and
later. What decides is times, and what has been revealed.
"""

from collections.abc import Sequence
from dataclasses import replace

from crossdraft.pipeline.allowance import Allowance
from crossdraft.pipeline.beliefs import believed
from crossdraft.pipeline.deciding import Decision, changed, choose
from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.governing import LONG_RUN, PLAIN, Choice, DrafterSeen, Observation, StallSeen, Told
from crossdraft.pipeline.learning import Learner
from crossdraft.pipeline.search import Limits, loss, tried

PERIOD = 40  # observations between two looks at the estimates, at most
FIRST_INTERVAL = 0.25  # seconds between two trials of a drafter that was put aside; they double
LAST_INTERVAL = 8.0
TRIAL_PASSES = 32  # ... and never fewer than so many passes
RECOVERED = 1.05  # a drafter put aside is tried soon again if the best way with it has become so much faster
TRIAL_PATIENCE = 2.0  # passes that a round waits for a drafter that is not known to answer
GLANCE = 6  # proposals of a first epoch: while they hold, it goes on
FIRST_PATIENCE = 0.05  # seconds; the same before the first pass
STALL_SHARE = 0.5  # of the time, that the target may stand idle in vain
HOPED = 1.1  # a way is tried that would be so much faster if the drafter were good
SURE = 40.0  # judged proposals that leave nothing to hope for
MEASURED = 3  # plain passes that must have been seen where plain decoding may be the better way
NEAR = 1.6  # times plain decoding that a way must be faster to do without
REMEASURED = 160  # passes after which plain ones are measured again
FIRST_RUN = 4  # tokens that the target draws by itself before the choice is looked at again; it doubles
FOLLOWED = 64  # plain tokens after which nobody's news are waited for any more
CROWDED = 1.6  # times as many sessions on the target, or as few, after which choices are made again


class Adaptive:
    """Learns from a session, and decides how its epochs are run.

    Args:
        before: estimates of an earlier generation with the same services, or none.
        limits: what may be chosen.
        follows: another output with the same services is the one to try what is not known; this one is told of it.
    """

    waits_for_drafter = False

    def __init__(self, before: Estimates | None = None, limits: Limits | None = None, follows: bool = False) -> None:
        self.limits = limits or Limits()
        before = before or Estimates()
        self._learner = Learner(before, self.limits.samples)
        self._allowance = Allowance(before.allowance)
        self._decision: Decision | None = None
        self._hope: Decision | None = None  # if the drafter were good; None: enough is known of it
        self._running = replace(PLAIN, run=FIRST_RUN // 2)
        self._there = True
        self.follows = follows
        self._asked = False  # an epoch of this generation has had a drafter
        self._look = 0  # number of observations at which the estimates are looked at next
        self._period = 8
        self._calm_until = 0.0  # the target waits for nothing before
        self._trial_at = before.trial_at or None  # seconds: of a drafter that was put aside
        self._interval = before.interval or FIRST_INTERVAL
        self._trials = self._tries = 0
        self._measured = 0  # plain passes that are to be seen
        self._measured_at = 0  # observations: when they were last due

    @property
    def estimates(self) -> Estimates:
        """What is believed now; seeds the governor of the next generation."""
        known, level = self._learner.estimates, self._allowance.level
        return replace(known, allowance=level, trial_at=self._trial_at or 0.0, interval=self._interval)

    def observe(self, seen: Observation, now: float) -> None:
        """Takes in what happened."""
        self._learner.observe(seen, now)
        self._allowance.observe(seen, now)
        match seen:
            case StallSeen(seconds):
                self._calm_until = max(self._calm_until, now) + seconds / STALL_SHARE
            case DrafterSeen(there):
                self._there = there
            case Told():
                self._take_over(seen, now)

    def choose(self, now: float) -> Choice:
        """How the next epoch is run."""
        if self._decision is not None:
            self._allowance.over(self._running.drafts, self._decision.estimates.plain, now)
        choice = self._choice(now)
        self._running = choice if choice.drafts else replace(choice, run=self._run(now))
        self._asked = self._asked or choice.drafts
        self._learner.begin(self._running, now)
        return self._running

    def _choice(self, now: float) -> Choice:
        if not self._there:
            return PLAIN
        if self.follows and not self._learner.known and self._learner.plain_seen < FOLLOWED:
            return replace(PLAIN, reason="another output is getting to know the drafter")
        if self._learner.seen >= self._look or self._crowded:
            self._think()
        decision = self._decision
        if self.limits.rounds_only and now < self._calm_until:
            return PLAIN
        if decision is None:
            return self._first("getting to know the drafter", GLANCE)
        attempt = self._attempt(decision, now)
        if attempt is not None:
            return attempt
        if not decision.choice.drafts or self._allowance.overdrawn:
            return self._aside(decision, now)
        self._trial_at = None
        if self._plain_due(decision):
            return replace(PLAIN, reason="measuring plain decoding")
        if decision.choice.patience > 0 and now < self._calm_until:
            hurried = decision.ranking.hurried
            if hurried.speed > decision.ranking.plain.speed:
                return replace(hurried.choice, reason="overlapped, never waiting: the drafter has just been too late")
        return decision.choice

    def _run(self, now: float) -> int:
        """Tokens of a plain epoch: the longer the longer plain decoding goes on, up to the next trial of a drafter.

        A trial that is due, but has to wait for what it may lose to be earned, shortens nothing.
        """
        run = FIRST_RUN if self._running.drafts else min(LONG_RUN, 2 * self._running.run)
        decision = self._decision
        if self.follows or not self._there or decision is None:
            return run
        if self._trial_at is not None and now < self._trial_at:
            run = min(run, 1 + int((self._trial_at - now) * decision.ranking.plain.speed))
        return run

    @property
    def _crowded(self) -> bool:
        """Whether many more sessions share the target than when the decision was made, or many fewer."""
        if self._decision is None:
            return False
        before, after = self._decision.estimates.sessions, self._learner.load.sessions
        return max(before, after) > CROWDED * min(before, after)

    @property
    def knows(self) -> bool:
        """Whether there is something that others may begin with: a decision, and nothing that is to be tried first."""
        return self._decision is not None and (self._hope is None or not self._promises(self._hope, self._decision))

    @property
    def drafts(self) -> bool:
        """Whether a way with the drafter is expected to be the fastest."""
        return self._decision is not None and self._decision.choice.drafts

    def _take_over(self, told: Told, now: float) -> None:
        """What another output has learnt counts, unless this one sees for itself what the drafter is worth."""
        self.follows = self.follows and not told.leads
        known = told.estimates
        if not known.known:
            return
        self._trial_at, self._interval = known.trial_at or None, known.interval or FIRST_INTERVAL
        self._allowance.level = min(self._allowance.level, known.allowance)
        if not self.drafts:
            self._learner = Learner(known, self.limits.samples)
            self._learner.begin(self._running, now)
            self._decision, self._hope, self._look = None, None, 0
            self._measured = self._measured_at = 0

    def _think(self) -> None:
        """Looks at the estimates, and decides anew if they have changed."""
        self._look = self._learner.seen + self._period
        estimates = self._learner.estimates
        if not estimates.known:
            self._look = self._learner.seen + 1
            return
        self._period = min(PERIOD, 2 * self._period)
        before = self._decision
        if before is not None and not changed(before.estimates, estimates):
            return
        self._decision = choose(estimates, self.limits, before.choice if before else None)
        hopeful = estimates.judged < SURE
        self._hope = choose(self._learner.hopeful, self.limits) if hopeful else None
        if before is not None and self._decision.rival > RECOVERED * before.rival:
            self._interval = FIRST_INTERVAL

    def _attempt(self, decision: Decision, now: float) -> Choice | None:
        """What would be best if the drafter were good, where it would be much better and a failure is affordable."""
        hope = self._hope
        if self.follows or hope is None or now < self._calm_until or not self._promises(hope, decision):
            return None
        workload = hope.estimates.workload(self.limits.samples)
        choice = tried(workload, hope.choice)
        if not self._allowance.covers(loss(workload, choice)):
            return None
        self._tries += 1
        self._look = 0
        reason = f"trying a drafter of which little is known: up to {hope.gain:.2f} times plain decoding hoped for"
        return replace(choice, reason=reason)

    @staticmethod
    def _promises(hope: Decision, decision: Decision) -> bool:
        """Whether a way is worth a try that would be the best if the drafter were good."""
        return hope.best.speed >= HOPED * decision.best.speed

    def _plain_due(self, decision: Decision) -> bool:
        """Whether plain decoding is to be measured, as it might be the better way."""
        seen, passes = self._learner.plain_seen, self._learner.seen
        if decision.gain < NEAR and seen >= self._measured:
            missing = MEASURED - self._learner.estimates.plain_passes
            self._measured = seen + (max(0, missing) or int(passes > self._measured_at + REMEASURED))
        if seen >= self._measured:
            return False
        self._measured_at, self._look = passes, 0
        return True

    def _aside(self, decision: Decision, now: float) -> Choice:
        """Plain decoding, and a trial now and then."""
        reason = decision.choice.reason if not decision.choice.drafts else "it has lost too much"
        plain = replace(decision.ranking.plain.choice, reason=reason)
        if self.follows:
            return plain
        least = TRIAL_PASSES / decision.ranking.plain.speed
        if self._trial_at is None:
            self._interval = FIRST_INTERVAL
            # Put aside by an earlier generation: short ones would never try it again.
            inherited = not (self._asked or self.limits.rounds_only)
            self._trial_at = now if inherited else now + max(self._interval, least)
        if now < self._trial_at or not self._allowance.covers(1.0):
            return plain
        self._interval = min(2 * self._interval, LAST_INTERVAL)
        self._trial_at = now + max(self._interval, least)
        self._look = 0
        self._trials += 1
        self._learner.doubt()
        return self._first("trying a drafter that was put aside")

    def _first(self, reason: str, window: int = 2) -> Choice:
        """Little is asked of a drafter that may not answer."""
        if self.limits.rounds_only:
            patience = TRIAL_PATIENCE * self._learner.estimates.pass_base or FIRST_PATIENCE
            return Choice(1, wait=1, overlap=False, patience=patience, reason=reason)
        return Choice(min(window, self.limits.window), patience=0.0, reason=reason)

    def explain(self) -> Sequence[str]:
        """What is believed and decided, in lines for people."""
        tried_ = f"{self._tries} tries in the hope of more, {self._trials} of a drafter put aside"
        left = f"{self._allowance.level:.1f} plain passes may be lost by further ones"
        return [*believed(self.estimates, self._decision), f"{tried_}; {left}"]
