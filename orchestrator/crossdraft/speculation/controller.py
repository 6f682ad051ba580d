"""The adaptive controller: decides from measurements how each epoch is run.

A generation begins with an overlapped draft that the target never waits for, which costs next to nothing with any
drafter. Once both services have been observed, forecasts decide. Where little is known of a drafter that might be worth
much, the controller tries what would be best if the drafter were good; an exploration budget bounds what that may lose
against plain decoding. A drafter with which nothing is faster than plain decoding is given up and tried again at
growing intervals. All decisions depend on times and on revealed draft tokens only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from crossdraft.speculation.choice import (
    FIRST_TRY,
    LONG_RUN,
    PLAIN,
    Choice,
    DrafterSeen,
    Estimates,
    Judged,
    Observation,
    PassSeen,
    StallSeen,
    Told,
    Workload,
)
from crossdraft.speculation.cost_model import forecast
from crossdraft.speculation.estimator import Learner
from crossdraft.speculation.simulator import simulate
from crossdraft.types.messages import MOST_DRAFT_TOKENS

PERIOD = 40  # observations between two looks at the estimates, at most
FIRST_INTERVAL = 0.25  # seconds between two trials of a drafter that was given up; they double
LAST_INTERVAL = 8.0
TRIAL_PASSES = 32  # ... and never fewer than so many passes
RECOVERED = 1.05  # a drafter that was given up is tried soon again if the best choice with it is so much faster
TRIAL_PATIENCE = 2.0  # passes that a round waits for a drafter that may not answer
GLANCE = 6  # draft tokens of a first epoch, which goes on while they are accepted
FIRST_PATIENCE = 0.05  # seconds; the same before the first pass
STALL_SHARE = 0.5  # of the time, that the target may stand idle in vain
HOPED = 1.1  # a choice is tried that would be so much faster if the drafter were good
SURE = 40.0  # judged draft tokens after which the optimistic estimate is not used any more
MEASURED = 3  # plain passes to observe where plain decoding may be faster
NEAR = 1.6  # speed relative to plain decoding above which plain passes need not be measured
REMEASURED = 160  # passes after which plain ones are measured again
FIRST_RUN = 4  # tokens that the target draws by itself before the choice is looked at again; it doubles
FOLLOWED = 64  # plain tokens after which a follower stops waiting for shared estimates
CROWDED = 1.6  # factor by which the sessions on the target must change for choices to be made again


@dataclass(frozen=True)
class Rated:
    """A choice and its expected speed."""

    choice: Choice
    speed: float  # tokens a second


@dataclass(frozen=True)
class Ranking:
    """The best of each kind."""

    plain: Rated
    rounds: Rated  # lock-step
    hurried: Rated  # overlapped, and the target never waits
    best: Rated  # of all


@dataclass(frozen=True)
class Selection:
    """The choice for given estimates, and the forecasts behind it."""

    choice: Choice
    estimates: Estimates
    ranking: Ranking
    best: Rated  # what was chosen, with its expected speed

    @property
    def gain(self) -> float:
        """The expected speed of what was chosen, relative to plain decoding."""
        return self.best.speed / self.ranking.plain.speed

    @property
    def rival(self) -> float:
        """The expected speed of the best choice with a drafter, relative to plain decoding."""
        return max(self.ranking.rounds.speed, self.ranking.hurried.speed) / self.ranking.plain.speed


@dataclass(frozen=True)
class Limits:
    """What may be chosen.

    Raises:
        ValueError: a number is out of its range.
    """

    rounds_only: bool = False  # lock-step, for methods that must know the number of draft tokens beforehand
    samples: bool = False  # the method's target draws by itself
    max_draft_tokens: int = 32  # beyond those revealed
    min_draft_tokens: int | None = None  # fixed; None: the controller decides
    branch_depth: int | None = None  # fixed, 0: no branches; None: the controller decides
    branch_width: int | None = None  # fixed; None: the controller decides
    targets: int = 1  # with several, passes may overlap

    def __post_init__(self) -> None:
        most, least = self.max_draft_tokens, self.min_draft_tokens or 0
        if not (1 <= most <= MOST_DRAFT_TOKENS and 0 <= least <= most and self.targets >= 1):
            raise ValueError(
                f"1 <= max_draft_tokens <= {MOST_DRAFT_TOKENS}, 0 <= min_draft_tokens <= max_draft_tokens and "
                f"targets >= 1 must hold: got {self}"
            )


class Adaptive:
    """Learns from one session, and decides how its epochs are run.

    Args:
        before: estimates of an earlier generation with the same services, or none.
        limits: what may be chosen.
        follows: another output explores the services; this one waits for its estimates (`shared`).
    """

    waits_for_drafter = False

    def __init__(self, before: Estimates | None = None, limits: Limits | None = None, follows: bool = False) -> None:
        self.limits = limits or Limits()
        before = before or Estimates()
        self._learner = Learner(before, self.limits.samples)
        self._budget = ExplorationBudget(before.allowance)
        self._decision: Selection | None = None
        self._hope: Selection | None = None  # if the drafter were good; None: enough is known of it
        self._running = replace(PLAIN, run=FIRST_RUN // 2)
        self._there = True
        self.follows = follows
        self._asked = False  # an epoch of this generation has had a drafter
        self._look = 0  # number of observations at which the estimates are compared next
        self._period = 8
        self._calm_until = 0.0  # seconds: until then the target does not wait for draft tokens
        self._trial_at = before.trial_at or None  # seconds: next trial of a drafter that was given up
        self._interval = before.interval or FIRST_INTERVAL
        self._trials = self._tries = 0
        self._measured = 0  # plain passes to be observed
        self._measured_at = 0  # observations: when measuring was last due

    @property
    def estimates(self) -> Estimates:
        """The estimates now, with which the controller of the next generation begins."""
        known, level = self._learner.estimates, self._budget.level
        return replace(known, allowance=level, trial_at=self._trial_at or 0.0, interval=self._interval)

    def observe(self, seen: Observation, now: float) -> None:
        """Learn from an observation."""
        self._learner.observe(seen, now)
        self._budget.observe(seen, now)
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
            self._budget.over(self._running.drafts, self._decision.estimates.plain, now)
        choice = self._choice(now)
        self._running = choice if choice.drafts else replace(choice, run=self._run(now))
        self._asked = self._asked or choice.drafts
        self._learner.begin(self._running, now)
        return self._running

    def _choice(self, now: float) -> Choice:
        if not self._there:
            return PLAIN
        if self.follows and not self._learner.known and self._learner.plain_seen < FOLLOWED:
            return replace(PLAIN, reason="another output is measuring the drafter")
        if self._learner.seen >= self._look or self._crowded:
            self._think()
        decision = self._decision
        if self.limits.rounds_only and now < self._calm_until:
            return PLAIN
        if decision is None:
            return self._first("measuring the drafter", GLANCE)
        attempt = self._attempt(decision, now)
        if attempt is not None:
            return attempt
        if not decision.choice.drafts or self._budget.overdrawn:
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
        """Tokens of a plain epoch: doubles while plain decoding goes on, but ends at the next trial of a drafter.

        A trial that is due but not yet affordable does not shorten it.
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
        """Whether many more or many fewer sessions share the target than when the decision was made."""
        if self._decision is None:
            return False
        before, after = self._decision.estimates.sessions, self._learner.load.sessions
        return max(before, after) > CROWDED * min(before, after)

    @property
    def knows(self) -> bool:
        """Whether others can use its estimates: it has decided, and nothing is to be tried first."""
        return self._decision is not None and (self._hope is None or not self._promises(self._hope, self._decision))

    @property
    def drafts(self) -> bool:
        """Whether a choice with the drafter is expected to be the fastest."""
        return self._decision is not None and self._decision.choice.drafts

    def _take_over(self, told: Told, now: float) -> None:
        """Take over shared estimates, unless this output drafts and so measures the drafter itself."""
        self.follows = self.follows and not told.leads
        known = told.estimates
        if not known.known:
            return
        self._trial_at, self._interval = known.trial_at or None, known.interval or FIRST_INTERVAL
        self._budget.level = min(self._budget.level, known.allowance)
        if not self.drafts:
            self._learner = Learner(known, self.limits.samples)
            self._learner.begin(self._running, now)
            self._decision, self._hope, self._look = None, None, 0
            self._measured = self._measured_at = 0

    def _think(self) -> None:
        """Decide again if the estimates have changed noticeably."""
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

    def _attempt(self, decision: Selection, now: float) -> Choice | None:
        """The best choice if the drafter were good, if that is much faster and a failure is affordable."""
        hope = self._hope
        if self.follows or hope is None or now < self._calm_until or not self._promises(hope, decision):
            return None
        workload = hope.estimates.workload(self.limits.samples)
        choice = tried(workload, hope.choice)
        if not self._budget.covers(loss(workload, choice)):
            return None
        self._tries += 1
        self._look = 0
        reason = f"trying a drafter of which little is known: up to {hope.gain:.2f} times plain decoding hoped for"
        return replace(choice, reason=reason)

    @staticmethod
    def _promises(hope: Selection, decision: Selection) -> bool:
        """Whether the best choice for a good drafter is worth a try."""
        return hope.best.speed >= HOPED * decision.best.speed

    def _plain_due(self, decision: Selection) -> bool:
        """Whether plain decoding is to be measured because it might be faster."""
        seen, passes = self._learner.plain_seen, self._learner.seen
        if decision.gain < NEAR and seen >= self._measured:
            missing = MEASURED - self._learner.estimates.plain_passes
            self._measured = seen + (max(0, missing) or int(passes > self._measured_at + REMEASURED))
        if seen >= self._measured:
            return False
        self._measured_at, self._look = passes, 0
        return True

    def _aside(self, decision: Selection, now: float) -> Choice:
        """Plain decoding, with a trial of the drafter now and then."""
        reason = decision.choice.reason if not decision.choice.drafts else "it has lost too much"
        plain = replace(decision.ranking.plain.choice, reason=reason)
        if self.follows:
            return plain
        least = TRIAL_PASSES / decision.ranking.plain.speed
        if self._trial_at is None:
            self._interval = FIRST_INTERVAL
            # If an earlier generation gave it up, try it at once: short generations would never try it again.
            inherited = not (self._asked or self.limits.rounds_only)
            self._trial_at = now if inherited else now + max(self._interval, least)
        if now < self._trial_at or not self._budget.covers(1.0):
            return plain
        self._interval = min(2 * self._interval, LAST_INTERVAL)
        self._trial_at = now + max(self._interval, least)
        self._look = 0
        self._trials += 1
        self._learner.doubt()
        return self._first("trying a drafter that was given up")

    def _first(self, reason: str, window: int = 2) -> Choice:
        """A cautious choice for a drafter that may not answer."""
        if self.limits.rounds_only:
            patience = TRIAL_PATIENCE * self._learner.estimates.pass_base or FIRST_PATIENCE
            return Choice(1, min_draft_tokens=1, overlap=False, patience=patience, reason=reason)
        return Choice(min(window, self.limits.max_draft_tokens), patience=0.0, reason=reason)

    def explain(self) -> Sequence[str]:
        """Estimates and decision, as lines of text."""
        tried_ = f"{self._tries} exploratory epochs, {self._trials} with a drafter that was given up"
        left = f"{self._budget.level:.1f} plain passes may be lost by further ones"
        return [*explanation(self.estimates, self._decision), f"{tried_}; {left}"]


SWITCH = 1.02  # the choice changes if another one is expected to be so much faster
STAYS = 1.005  # a drafter in use stays in use if that is so much faster than plain decoding
RANKINGS = 32  # that are cached, some 10 ms of work each: outputs with shared estimates need the same one
NOTICEABLE = 0.06  # relative change of an estimate after which choices are made again


def rank(workload: Workload, limits: Limits) -> Ranking:
    """The best choices within the limits, by a coarse search and refinement of about 30 forecasts."""
    plain = rate(workload, PLAIN)
    if workload.token >= workload.tokens_per_draft_token * workload.plain_seconds or bound(workload) <= plain.speed:
        return _hopeless(workload, plain)
    rounds = _best(workload, (_round(workload, size) for size in SIZES if size <= limits.max_draft_tokens))
    if limits.rounds_only:
        return Ranking(plain, rounds, plain, max(plain, rounds, key=_speed))
    coarse = sorted({min(size, limits.max_draft_tokens) for size in COARSE})
    hurried = _best(workload, (Choice(size, patience=0.0) for size in coarse))
    hurried = _finer(workload, hurried, limits)
    patient = _best(workload, _waiting(workload, hurried.choice.max_draft_tokens, limits))
    patient = _finer(workload, patient, limits)
    overlapped = patient if limits.min_draft_tokens is not None else max(hurried, patient, key=_speed)
    if limits.branch_depth != 0:
        overlapped = max(overlapped, _branched(workload, overlapped.choice, limits), key=_speed)
        hurried = max(hurried, _branched(workload, hurried.choice, limits), key=_speed)
    if overlapped.speed > max(plain, rounds, key=_speed).speed:
        overlapped = _chunked(workload, overlapped)
    if limits.targets > 1:
        overlapped = _speculated(workload, overlapped)
    return Ranking(plain, rounds, hurried, max(plain, rounds, overlapped, key=_speed))


_ranked = lru_cache(maxsize=RANKINGS)(rank)


def choose(estimates: Estimates, limits: Limits, running: Choice | None = None) -> Selection:
    """The choice that is expected to be fastest; `running` stays unless another one is noticeably faster.

    Raises:
        ValueError: one of the services has not been observed.
    """
    workload = estimates.workload(limits.samples, limits.targets)
    ranking = _ranked(workload, limits)
    best = ranking.best
    if running is not None and running.drafts and running != best.choice:
        stays = rate(workload, running)
        best = best if best.speed > SWITCH * stays.speed else stays
    least = STAYS if running is not None and running.drafts else SWITCH
    best = best if best.speed > least * ranking.plain.speed else ranking.plain
    decision = Selection(best.choice, estimates, ranking, best)
    return replace(decision, choice=replace(best.choice, reason=_reason(best, decision)))


def _reason(best: Rated, decision: Selection) -> str:
    if not best.choice.drafts:
        return f"plain decoding: with the drafter {decision.rival:.2f} of its speed expected"
    way = "overlapped" if best.choice.overlap else "lock-step"
    return f"{way}: {best.speed / decision.ranking.plain.speed:.2f} times plain decoding expected"


def changed(before: Estimates, after: Estimates) -> bool:
    """Whether estimates differ enough to choose again."""
    shares = [(before.match, after.match), (before.branch_hit, after.branch_hit)]
    shares += list(zip(before.acceptance, after.acceptance, strict=True))
    costs = [
        (before.token, after.token),
        (before.pass_base, after.pass_base),
        (before.tokens_per_draft_token, after.tokens_per_draft_token),
        (1 + before.slope, 1 + after.slope),
        (1 + before.slowed, 1 + after.slowed),
        (before.plain, after.plain),
        (before.sessions, after.sessions),
    ]
    pass_seconds = after.pass_base + after.target_trip
    trips = abs(before.drafter_trip - after.drafter_trip) + abs(before.target_trip - after.target_trip)
    nodes = abs(before.pass_node - after.pass_node) * 8
    return (
        any(abs(old - new) > NOTICEABLE / 2 for old, new in shares)
        or any(abs(old - new) > NOTICEABLE * max(old, new) for old, new in costs)
        or trips + nodes > NOTICEABLE * pass_seconds
    )


SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # windows and rounds that are tried
COARSE = (4, 12, 32)  # windows that are tried first
WAITS = (0, 1, 2, 3, 4, 6, 8)
BRANCHES = ((2, 1), (4, 1), (8, 1), (4, 2))  # depths and widths
CHUNK = 4  # draft tokens of a reply at most
SHARE = 1 / 6  # of a pass that drafting one reply may take
CHEAP = 0.99  # of the speed, that replies of several draft tokens must keep
SCALES = (1.0, 0.94, 1.06)  # of a forward's duration for which they must, as a reply may just miss the end of a pass
MARGIN = 1.3  # of patience over the time that draft tokens are expected to take
TRIED = 300  # tokens of a simulation, where there is no forecast
FEW = 8  # draft tokens asked of a drafter of which little is known
WORTH = 1.03  # speed-up that a second target must bring to be used


def _hopeless(workload: Workload, plain: Rated) -> Ranking:
    """The ranking for a drafter that cannot pay: it writes no faster than the target by itself, or its draft tokens
    cost more in a pass than they save, however soon they come."""
    rounds = rate(workload, _round(workload, 1))
    return Ranking(plain, rounds, rate(workload, Choice(1, patience=0.0)), plain)


def bound(workload: Workload) -> float:
    """Upper bound of the tokens per second with the drafter: the best number of draft tokens is always there at once,
    and each is accepted with the highest probability of any place."""
    often = max(*workload.acceptance, workload.match)
    best, alive, accepted = 0.0, 1.0, 0.0
    for draft_tokens in range(1, MOST_DRAFT_TOKENS + 1):
        alive *= often
        accepted += alive
        best = max(best, (1 + accepted * workload.tokens_per_draft_token) / workload.pass_seconds(draft_tokens))
    return best


def rate(workload: Workload, choice: Choice) -> Rated:
    """A choice with its forecast."""
    return Rated(choice, forecast(workload, choice).speed)


def patience_for(workload: Workload, wait: int, round_: bool = False) -> float:
    """Seconds in which so many draft tokens come after a refusal, with a margin."""
    return MARGIN * (workload.drafter_trip + (wait + (0 if round_ else 1)) * workload.token) + 0.1 * workload.pass_base


def tried(workload: Workload, choice: Choice) -> Choice:
    """The choice with few draft tokens, one per reply, and no branches, for a drafter of which little is known."""
    wait = min(choice.min_draft_tokens, FEW)
    meanwhile = int((workload.drafter_trip + 2 * workload.plain_seconds) / workload.token) if workload.token else FEW
    window = min(choice.max_draft_tokens, (1 + choice.overlap) * FEW, max(2, wait + meanwhile))
    patience = choice.patience and min(choice.patience, patience_for(workload, wait, not choice.overlap))
    few = replace(choice, max_draft_tokens=window, min_draft_tokens=wait, patience=patience)
    return replace(few, branch_depth=0, chunk=1, speculate=False)


def loss(workload: Workload, choice: Choice) -> float:
    """Plain passes that an epoch loses if its first draft token is refused: its cost less the one token it gives."""
    waits = choice.patience and workload.drafter_trip + max(1, choice.min_draft_tokens) * workload.token
    most = choice.max_draft_tokens
    draft_tokens = min(most, choice.min_draft_tokens + 1) if choice.overlap else most
    passing = workload.pass_seconds(draft_tokens) * (workload.contention if choice.overlap else 1.0)
    return (min(waits, choice.patience) + passing) / workload.plain_seconds - 1


def _speed(rated: Rated) -> float:
    return rated.speed


def _best(workload: Workload, choices: Iterable[Choice]) -> Rated:
    return max((rate(workload, choice) for choice in choices), key=_speed)


def _round(workload: Workload, size: int) -> Choice:
    return Choice(size, min_draft_tokens=size, overlap=False, patience=patience_for(workload, size, round_=True))


def _waiting(workload: Workload, window: int, limits: Limits) -> Iterable[Choice]:
    """Choices with this window where the target waits for draft tokens, before a pass or with a row at hand."""
    if limits.min_draft_tokens is not None:
        wait = limits.min_draft_tokens
        yield Choice(max(window, wait), wait, patience=patience_for(workload, wait))
        return
    yield Choice(window, patience=MARGIN * 1.5 * workload.token)
    for wait in WAITS:
        if wait <= window:
            yield Choice(window, wait, patience=patience_for(workload, wait))


def _finer(workload: Workload, rated: Rated, limits: Limits) -> Rated:
    """Move to the next larger or smaller window while that is faster, or smaller and as fast."""
    while True:
        window, choice = rated.choice.max_draft_tokens, rated.choice
        below = max((size for size in SIZES if size < window), default=window)
        above = min((size for size in SIZES if size > window), default=window)
        least, most = choice.min_draft_tokens, limits.max_draft_tokens
        near = [size for size in (below, above) if least <= size <= most and size != window]
        if not near:
            return rated
        better = _best(workload, (replace(choice, max_draft_tokens=size) for size in near))
        if better.speed <= rated.speed * (1.002 if better.choice.max_draft_tokens > window else 0.999):
            return rated
        rated = better


def _branched(workload: Workload, choice: Choice, limits: Limits) -> Rated:
    """The choice with prepared continuations."""
    depths = BRANCHES if limits.branch_depth is None else [(limits.branch_depth, width) for width in (1, 2)]
    wanted = {(depth, limits.branch_width or width) for depth, width in depths}
    patience = choice.patience and MARGIN * workload.slope * max(depth * width for depth, width in wanted)
    more = patience * workload.token * (choice.min_draft_tokens + 1)
    return _best(
        workload,
        (
            replace(choice, branch_depth=depth, branch_width=width, patience=choice.patience + more)
            for depth, width in wanted
        ),
    )


def _chunked(workload: Workload, rated: Rated) -> Rated:
    """The choice with as many draft tokens per reply as cost no speed: each message costs processor time."""
    choice, forward = rated.choice, workload.forward(rated.choice)
    most = min(CHUNK, int(SHARE * workload.pass_seconds(0) / forward)) if forward else CHUNK
    scaled = [replace(workload, token=scale * workload.token) for scale in SCALES]
    for chunk in range(most, 1, -1):
        patience = choice.patience and choice.patience + MARGIN * (chunk - 1) * forward
        chunked = rate(workload, replace(choice, chunk=chunk, patience=patience))
        if all(rate(one, chunked.choice).speed >= CHEAP * rate(one, choice).speed for one in scaled):
            return chunked
    return rated


def _speculated(workload: Workload, rated: Rated) -> Rated:
    """The choice with overlapping passes on several targets, if a simulation with a fixed seed says that it pays."""
    alone = replace(workload, targets=1)
    speeds = [
        simulate(one, choice, TRIED, np.random.default_rng(0)).speed
        for one, choice in ((alone, rated.choice), (workload, replace(rated.choice, speculate=True)))
    ]
    gain = speeds[1] / speeds[0]
    return Rated(replace(rated.choice, speculate=True), rated.speed * gain) if gain > WORTH else rated


REFILL = 0.015  # of the time
DEAREST = 2 * FIRST_TRY  # plain passes that a try may cost
OVERDRAWN = 2.0  # plain passes of debt at which a drafter is given up though it is expected to pay


class ExplorationBudget:
    """Bounds what trying a drafter may lose against plain decoding, in plain passes.

    An epoch with a drafter costs its duration less its tokens, each of which would have been a plain pass. Time, and
    what a drafter gains, refill the budget up to the cost of a first try.

    Args:
        level: what an earlier generation left.
    """

    def __init__(self, level: float = FIRST_TRY) -> None:
        self.level = level
        self._since: float | None = None  # seconds: when the epoch began, or when it emitted its first token
        self._tokens = 0

    def observe(self, seen: Observation, now: float) -> None:
        """Count tokens. A generation's first pass reads the prompt and is left out."""
        if isinstance(seen, PassSeen) and self._since is None:
            self._since, self._tokens = now - seen.waited, 0
        if isinstance(seen, Judged):
            self._tokens += seen.tokens

    def over(self, drafted: bool, plain: float, now: float) -> None:
        """An epoch is over, with a drafter or without; a plain pass takes `plain` seconds.

        At most DEAREST and one pass per token are charged. What is lost beyond that is a pause of the target or of the
        machine: charged in full, a pause of ten seconds would ban the drafter for as many minutes.
        """
        if self._since is None or not plain:
            return
        passes = (now - self._since) / plain
        spent = min(passes - self._tokens, DEAREST + self._tokens) if drafted else 0.0
        self.level = min(FIRST_TRY, self.level + REFILL * passes - spent)
        self._since, self._tokens = now, 0

    def covers(self, passes: float) -> bool:
        """Whether a try that may cost so much is affordable. With a full budget every try up to DEAREST is."""
        return self.level >= min(passes, FIRST_TRY) and passes <= DEAREST

    @property
    def overdrawn(self) -> bool:
        """Whether a drafter that was expected to pay has lost too much."""
        return self.level < -OVERDRAWN


def explanation(known: Estimates, decision: Selection | None) -> Sequence[str]:
    """Estimates, the best choice of each kind, and the decision, as lines of text."""
    lines = [
        f"acceptance {', '.join(f'{share:.2f}' for share in known.acceptance)} by position "
        f"({known.judged:.0f} draft tokens verified), after the target's own tokens {known.match:.2f} "
        f"({known.compared:.0f} compared)",
        f"drafter: {1e3 * known.token:.2f} ms a draft token, round trip {1e3 * known.drafter_trip:.2f} ms "
        f"({known.replies} replies), {known.tokens_per_draft_token:.2f} tokens a draft token",
        f"target: {1e3 * known.pass_base:.2f} ms a pass and {1e3 * known.pass_node:.3f} ms a draft token, round trip "
        f"{1e3 * known.target_trip:.2f} ms ({known.passes} passes), while the drafter works "
        f"{1 / (1 - known.slowed):.2f} times as long; a plain token {1e3 * known.plain:.2f} ms; "
        f"{known.sessions:.1f} sessions share it, {1e3 * known.queue:.2f} ms in its queue",
        f"prepared continuations: {known.branch_hit:.2f} hit ({known.tried:.0f} tried), a further token costs "
        f"{known.slope:.2f} of a forward",
    ]
    if decision is None:
        return [*lines, "nothing decided yet: too little has been seen"]
    ranking = decision.ranking
    for name, rated in (
        ("plain decoding", ranking.plain),
        ("lock-step", ranking.rounds),
        ("overlapped, never waiting", ranking.hurried),
        ("best", ranking.best),
    ):
        lines.append(f"{name}: {rated.speed:.1f} tokens/s expected {_settings(rated.choice)}")
    return [*lines, f"decided: {decision.choice.reason}"]


def _settings(choice: Choice) -> str:
    if not choice.drafts:
        return ""
    if not choice.overlap:
        return f"with K = {choice.max_draft_tokens}"
    branches = f", branches {choice.branch_depth} x {choice.branch_width}" if choice.branch_depth else ""
    patience = f", patience {1e3 * choice.patience:.1f} ms"
    replies = f", replies of {choice.chunk}{', speculating' * choice.speculate}"
    range_ = f"max_draft_tokens {choice.max_draft_tokens}, min_draft_tokens {choice.min_draft_tokens}"
    return f"with {range_}{patience}{branches}{replies}"
