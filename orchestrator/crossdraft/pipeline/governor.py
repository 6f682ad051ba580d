"""The governor: decides how each epoch is run from what has been measured.

A generation begins with an overlapped draft for which the target never waits: that costs next to nothing whatever the
drafter is like. Once both services have been seen at work, forecasts decide. A drafter with which nothing is faster
than plain decoding is put aside and tried again later and later. What decides is times, and what has been revealed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossdraft.pipeline.estimates import Estimates, Learner
from crossdraft.pipeline.governing import (
    PLAIN,
    Choice,
    DrafterSeen,
    Observation,
    StallSeen,
)
from crossdraft.pipeline.search import Limits, Ranking, Rated, rank, rate

FIRST_JUDGED = 6.0  # proposals that must have been judged or compared before a forecast decides
SWITCH = 1.02  # another way is taken if it is expected to be so much faster
STAYS = 1.005  # ... than plain decoding, for a drafter to be used on
NOTICEABLE = 0.06  # relative change of an estimate after which choices are made again
PERIOD = 40  # observations between two looks at the estimates, at most
FIRST_INTERVAL = 0.25  # seconds between two trials of a drafter that was put aside; they double
LAST_INTERVAL = 8.0
TRIAL_PASSES = 32  # ... and never fewer than so many passes
HOPE = 1.05  # a drafter put aside is tried soon again if the best way with it has become so much faster
TRIAL_PATIENCE = 2.0  # passes that a round waits for a drafter that is not known to answer
FIRST_PATIENCE = 0.05  # seconds; the same before the first pass
STALL_SHARE = 0.02  # of the time, that the target may stand idle in vain


@dataclass(frozen=True)
class Decision:
    """What a choice rests on."""

    choice: Choice
    estimates: Estimates
    ranking: Ranking

    @property
    def rival(self) -> float:
        """The expected speed of the best way with a drafter, relative to plain decoding."""
        return max(self.ranking.rounds.speed, self.ranking.hurried.speed) / self.ranking.plain.speed


def choose(estimates: Estimates, limits: Limits, running: Choice | None = None) -> Decision:
    """The way that is expected to be fastest; `running` stays unless another one is noticeably better.

    Raises ValueError if the estimates know nothing of one of the services.
    """
    workload = estimates.workload(limits.samples, limits.targets)
    ranking = rank(workload, limits)
    best = ranking.best
    if running is not None and running.drafts and running != best.choice:
        stays = rate(workload, running)
        best = best if best.speed > SWITCH * stays.speed else stays
    least = STAYS if running is not None and running.drafts else SWITCH
    best = best if best.speed > least * ranking.plain.speed else ranking.plain
    decision = Decision(best.choice, estimates, ranking)
    return replace(decision, choice=replace(best.choice, reason=_reason(best, decision)))


def _reason(best: Rated, decision: Decision) -> str:
    if not best.choice.drafts:
        return f"plain decoding: with the drafter {decision.rival:.2f} of its speed expected"
    way = "overlapped" if best.choice.overlap else "lock-step"
    return f"{way}: {best.speed / decision.ranking.plain.speed:.2f} times plain decoding expected"


class Adaptive:
    """Learns from a session, and decides how its epochs are run.

    Args:
        before: estimates of an earlier generation with the same services, or none.
        limits: what may be chosen.
    """

    waits_for_drafter = False

    def __init__(self, before: Estimates | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._learner = Learner(before or Estimates(), self.limits.samples)
        self._decision: Decision | None = None
        self._there = True
        self._look = 0  # number of observations at which the estimates are looked at next
        self._period = 8
        self._calm_until = 0.0  # the target waits for nothing before
        self._trial_at: float | None = None  # of a drafter that was put aside
        self._interval = FIRST_INTERVAL
        self._trials = 0

    @property
    def estimates(self) -> Estimates:
        """What is believed now; seeds the governor of the next generation."""
        return self._learner.estimates

    def observe(self, seen: Observation, now: float) -> None:
        """Takes in what happened."""
        self._learner.observe(seen)
        match seen:
            case StallSeen(seconds):
                self._calm_until = max(self._calm_until, now) + seconds / STALL_SHARE
            case DrafterSeen(there):
                self._there = there

    def choose(self, now: float) -> Choice:
        """How the next epoch is run."""
        choice = self._choice(now)
        self._learner.begin(choice)
        return choice

    def _choice(self, now: float) -> Choice:
        if not self._there:
            return PLAIN
        if self._learner.seen >= self._look:
            self._think()
        decision = self._decision
        if self.limits.rounds_only and now < self._calm_until:
            return PLAIN
        if decision is None:
            return self._trial("getting to know the drafter")
        if not decision.choice.drafts:
            return self._aside(decision, now)
        self._trial_at = None
        if decision.choice.patience > 0 and now < self._calm_until:
            hurried = decision.ranking.hurried
            return hurried.choice if hurried.speed > decision.ranking.plain.speed else decision.choice
        return decision.choice

    def _think(self) -> None:
        """Looks at the estimates, and decides anew if they have changed."""
        self._look = self._learner.seen + self._period
        estimates = self._learner.estimates
        if not estimates.known or estimates.judged + estimates.compared < FIRST_JUDGED:
            self._look = self._learner.seen + 1
            return
        self._period = min(PERIOD, 2 * self._period)
        before = self._decision
        if before is None:
            self._decision = choose(estimates, self.limits)
        elif changed(before.estimates, estimates):
            self._decision = choose(estimates, self.limits, before.choice)
            if self._decision.rival > HOPE * before.rival:
                self._interval = FIRST_INTERVAL

    def _aside(self, decision: Decision, now: float) -> Choice:
        """Plain decoding, and a trial now and then."""
        least = TRIAL_PASSES / decision.ranking.plain.speed
        if self._trial_at is None:
            self._interval = FIRST_INTERVAL
            # Put aside by an earlier generation: short ones would never try it again.
            inherited = self._learner.seen == 0 and not self.limits.rounds_only
            self._trial_at = now if inherited else now + max(self._interval, least)
        if now < self._trial_at:
            return decision.choice
        self._interval = min(2 * self._interval, LAST_INTERVAL)
        self._trial_at = now + max(self._interval, least)
        self._look = 0
        self._trials += 1
        self._learner.doubt()
        return self._trial("trying a drafter that was put aside")

    def _trial(self, reason: str) -> Choice:
        if self.limits.rounds_only:
            patience = TRIAL_PATIENCE * self._learner.estimates.pass_base or FIRST_PATIENCE
            return Choice(1, wait=1, overlap=False, patience=patience, reason=reason)
        return Choice(min(2, self.limits.window), patience=0.0, reason=reason)

    def explain(self) -> Sequence[str]:
        """What is believed and decided, in lines for people."""
        known = self.estimates
        lines = [
            f"acceptance {', '.join(f'{share:.2f}' for share in known.acceptance)} by place "
            f"({known.judged:.0f} proposals judged), after the target's own tokens {known.match:.2f}",
            f"drafter: {1e3 * known.token:.2f} ms a proposal, round trip {1e3 * known.drafter_trip:.2f} ms "
            f"({known.replies} replies), {known.tokens_per_proposal:.2f} tokens a proposal",
            f"target: {1e3 * known.pass_base:.2f} ms a pass and {1e3 * known.pass_node:.3f} ms a proposal, round trip "
            f"{1e3 * known.target_trip:.2f} ms ({known.passes} passes)",
            f"prepared continuations: {known.branch_hit:.2f} hit ({known.tried:.0f} tried), a further token costs "
            f"{known.slope:.2f} of a forward",
        ]
        if self._decision is None:
            return [*lines, "nothing decided yet: too little has been seen"]
        ranking = self._decision.ranking
        for name, rated in (
            ("plain decoding", ranking.plain),
            ("lock-step", ranking.rounds),
            ("overlapped, never waiting", ranking.hurried),
            ("best", ranking.best),
        ):
            lines.append(f"{name}: {rated.speed:.1f} tokens/s expected {_settings(rated.choice)}")
        return [*lines, f"decided: {self._decision.choice.reason}; {self._trials} trials of a drafter put aside"]


def _settings(choice: Choice) -> str:
    if not choice.drafts:
        return ""
    if not choice.overlap:
        return f"with K = {choice.window}"
    branches = f", branches {choice.branch_depth} x {choice.branch_width}" if choice.branch_depth else ""
    patience = f", patience {1e3 * choice.patience:.1f} ms"
    return f"with window {choice.window}, wait {choice.wait}{patience}{branches}{', speculating' * choice.speculate}"


def changed(before: Estimates, after: Estimates) -> bool:
    """Whether estimates differ enough to choose anew."""
    shares = [(before.match, after.match), (before.branch_hit, after.branch_hit)]
    shares += list(zip(before.acceptance, after.acceptance, strict=True))
    costs = [
        (before.token, after.token),
        (before.pass_base, after.pass_base),
        (before.tokens_per_proposal, after.tokens_per_proposal),
        (1 + before.slope, 1 + after.slope),
    ]
    pass_seconds = after.pass_base + after.target_trip
    trips = abs(before.drafter_trip - after.drafter_trip) + abs(before.target_trip - after.target_trip)
    nodes = abs(before.pass_node - after.pass_node) * 8
    return (
        any(abs(old - new) > NOTICEABLE / 2 for old, new in shares)
        or any(abs(old - new) > NOTICEABLE * max(old, new) for old, new in costs)
        or trips + nodes > NOTICEABLE * pass_seconds
    )
