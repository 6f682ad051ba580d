"""One controller for all targets of one model and their drafters decides for all outputs of an orchestrator.

All outputs use one arm, the one that has brought the most tokens a second at about this load (`contest`), so that what
is measured is what it brings when all use it. An output whose draft tokens clearly fare otherwise decides for itself,
by its own acceptance. Everything depends on times and on revealed draft tokens only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log2

from crossdraft.speculation.arms import NO_DRAFTER, Arm, Costs, Limits, Round, Times
from crossdraft.speculation.choice import (
    ASIDE,
    LONG_RUN,
    PLAIN,
    Choice,
    DrafterSeen,
    DraftSeen,
    Ended,
    Judged,
    Observation,
    PassSeen,
    StallSeen,
    Started,
)
from crossdraft.speculation.contest import Account, Contest, Guesses
from crossdraft.speculation.estimates import Acceptance, Fared

PATIENCE, FIRST_PATIENCE = 3.0, 0.05  # times the expected wait that a pass waits at most; seconds, where none is known
SHORT_RUN = 8  # tokens of a plain run while a trial may be near; two of them are an overlapped epoch's until its review
CHUNK = 4  # draft tokens of a reply at most, three replies a pass: each is work for the event loop
ASIDE_FOR = 128  # tokens until a drafter is asked again that cannot go on with a text
RECENTLY = 24.0, 60.0  # judged draft tokens, of all and of one output, that are compared with usual ones
PLAINLY = 3.0  # windows without a drafter after which one that was never tried counts as of no use
MOST_LIKELY = 0.7  # probability that a draft's next tokens are reached with which it goes on whatever they cost
SILENT, EMPTY = 5.0, 4  # seconds, and drafts in a row, without a draft token: a drafter is then shown as of no use

Kind = tuple[str | None, float, float | None]  # of requests: method and both temperatures


class TargetController:
    """Learns from all outputs on a target, and decides for all of them."""

    def __init__(self) -> None:
        self.costs, self.account = Costs(), Account()
        self.outputs: dict[OutputController, None] = {}  # under way, in their order
        self.contest = Contest(self.account)  # of the load and most outputs' limits
        self._arms: Sequence[Arm] = (NO_DRAFTER,)  # of the contest
        self.contests: dict[tuple[int, Limits], Contest] = {}
        self._load = 0  # binary logarithm of the outputs
        self._limits: Counter[Limits] = Counter()  # of outputs
        self._others = Times()  # outputs of other orchestrators in a pass, in place of seconds
        self._acceptance: dict[Kind, Acceptance] = {}
        self._recent = Fared(RECENTLY[0])
        self._pass = (0, 0, 0.0)  # sessions, tokens and seconds of the latest pass
        # The running round: when it began in seconds, what was emitted and how many passes returned, of which outputs,
        # and whether all used one arm before.
        self._began: float | None = None
        self._tokens = self._passes = 0.0
        self._sharing: Sequence[OutputController] = ()
        self._pure = False
        self.pace = Times()  # seconds of a token of each output
        self._asked: dict[OutputController, float] = {}  # who waits for draft tokens, and since when in seconds
        self._empty = 0  # drafts in a row without any draft token

    def output(self, kind: Kind, limits: Limits) -> "OutputController":
        """The controller of a new output."""
        method, temperature, drafting = kind
        kind = method, round(temperature, 1), drafting and round(drafting, 1)  # draft tokens fare alike within a tenth
        return OutputController(self, limits, self._acceptance.setdefault(kind, Acceptance()), temperature == 0)

    # What outputs report.

    def begun(self, output: "OutputController") -> None:
        self.outputs[output] = None
        self._limits[output.limits] += 1
        self._choose_contest()

    def ended(self, output: "OutputController") -> None:
        if output in self.outputs:
            del self.outputs[output]
            self._limits[output.limits] -= 1
            self._limits = +self._limits  # only of those that are under way
        self._asked.pop(output, None)
        if not self.outputs:
            self._began = None  # the time until the next one is nobody's

    def asked(self, output: "OutputController", now: float) -> None:
        self._asked.setdefault(output, now)

    def answered(self, output: "OutputController", drafted: int | None = None) -> None:
        """An output waits for nothing any more, perhaps because so many draft tokens came."""
        self._asked.pop(output, None)
        if drafted is not None:
            self._empty = 0 if drafted else self._empty + 1

    def passed(self, seen: PassSeen, shares: bool, now: float) -> None:
        """A pass of any output returned, or some tokens of a run; when all had one a round is over."""
        self._others.add(max(0.0, seen.sessions - self._own))
        if (seen.sessions, seen.fed, seen.seconds) != self._pass:  # else another output in it has told of it
            self._pass = seen.sessions, seen.fed, seen.seconds
            self.costs.target.add(seen.seconds / seen.forwards, max(seen.fed, seen.sessions))
        self._passes += seen.forwards * shares
        if self._began is None or (now > self._began and self._passes >= max(1, len(self._sharing))):
            self._end_round(now)

    def emitted(self, tokens: int) -> None:
        self._tokens += tokens

    def judged(self, accepted: int, chances: Sequence[float]) -> None:
        """Draft tokens of an output were judged, each of which had this chance."""
        self._recent.add(accepted, chances)
        seen = self._recent.accepted
        if seen.seen >= RECENTLY[0] / 3 and self._recent.factor != 1:  # all fare otherwise than they did
            for acceptance in _acceptances(self.outputs):
                acceptance.reset(seen.held, seen.seen)
            self._recent, self._pure = Fared(RECENTLY[0]), False
            self.contest.interrupt()

    def _end_round(self, now: float) -> None:
        contest, arm, number = self.contest, self.contest.current, len(self._sharing)
        if self._began is not None and number and self._tokens:
            seconds, tokens = now - self._began, self._tokens / number
            self.pace.add(seconds / tokens)
            contest.add(seconds, tokens, self._pure, self.guesses(self._sharing, self._arms), number)
            if not arm.depth and self._pure:
                self.costs.handling.add(seconds / tokens - self.costs.target.seconds(self.load), number)
                for acceptance in _acceptances(self._sharing):
                    acceptance.fade(2 * tokens)
        self._choose_contest()
        sharing = self._sharing = [one for one in self.outputs if one.shares]
        if self.contest.current != arm:
            for one in self.outputs:
                one.settled = False
        self._pure = sum(not one.settled for one in sharing) <= len(sharing) // 10
        self._began, self._tokens, self._passes = now, 0.0, 0.0

    # What is decided.

    @property
    def _own(self) -> float:
        """Outputs of this orchestrator that share a target."""
        return len(self.outputs) / max((limits.targets for limits in self._limits), default=1)

    @property
    def load(self) -> float:
        """Outputs that share a target, those of other orchestrators included."""
        return max(1.0, self._own + self._others.seconds())

    def _choose_contest(self) -> None:
        """That of the load and of most outputs' limits; what another load has shown is a guess for a new one."""
        if not self._limits:
            return
        if abs(log2(self.load) - self._load) > 0.7:
            self._load = round(log2(self.load))
        key = self._load, self._limits.most_common(1)[0][0]
        self._arms = key[1].arms
        if key not in self.contests:
            like = [one for one in self.contests if one[1] == key[1]]
            nearest = min(like, key=lambda one: abs(one[0] - key[0]), default=None)
            self.contests[key] = Contest(self.account) if nearest is None else self.contests[nearest].at_another_load()
        if self.contests[key] is not self.contest:
            self.contest.end_trial()
            self.contest, self._pure = self.contests[key], False

    def guesses(
        self, outputs: Sequence["OutputController"], arms: Sequence[Arm], factor: float = 1.0, load: float = 0.0
    ) -> Guesses:
        """What is expected of each arm, on average over these outputs, now or at another load."""
        drafting, load = load or len(self.outputs), load or self.load
        found = [
            {arm: self.costs.round(arm, load, drafting, one.chances(factor), one.worth.mean(1.0)) for arm in arms}
            for one in _acceptances(outputs)
        ]
        if len(found) == 1:
            return found[0]
        return {arm: Round.mean([one[arm] for one in found]) for arm in arms}

    def idle(self, now: float) -> str:
        """Why nothing is drafted now with a drafter that is there, for people; empty if it is, or that is not known."""
        if now - min(self._asked.values(), default=now) > SILENT:
            return "does not answer"
        if self._empty >= EMPTY:
            return "drafts nothing: it cannot go on with these texts"
        paused = not self.contest.current.depth and any(arm.depth for arm in self.contest.records)
        return "paused: outputs are faster without it; tried again now and then" if paused else ""


def _acceptances(outputs: Iterable["OutputController"]) -> Iterable[Acceptance]:
    """Each once."""
    return {id(one.acceptance): one.acceptance for one in outputs}.values()


class OutputController:
    """Decides how the epochs of one output are run, as a part of its target's controller."""

    waits_for_drafter = False

    def __init__(self, target: TargetController, limits: Limits, acceptance: Acceptance, greedy: bool) -> None:
        self.target, self.limits, self.acceptance = target, limits, acceptance
        self._greedy = greedy  # then a tree that ends by confidence is faster; at temperature 0.8 it was not
        self.settled = True  # it has begun to use the arm of all
        self._arm = NO_DRAFTER  # of the running epoch
        self._fared = Fared(RECENTLY[1])
        self._alone = False  # it has decided for itself
        self._there = True  # its drafter
        self._why = ""  # ... could not go on, the last time that it could not
        self._aside = 0  # tokens until it is asked again
        self._drafted = 0  # draft tokens of the running epoch
        self._behind = 0  # tokens drawn by the target itself that the draft has not caught up with
        self._in_run = False  # the latest pass was the target's own
        self._run = 1  # tokens of the latest plain run

    @property
    def shares(self) -> bool:
        """Whether it uses the arm of all."""
        return self._there and not self._aside and not self._alone

    def observe(self, seen: Observation, now: float) -> None:
        """Learn from an observation; `now` in seconds of the session's clock."""
        match seen:
            case PassSeen():
                self._in_run = not seen.asked
                self.target.passed(seen, self.shares, now)
            case DraftSeen():
                self._answered(seen)
            case Judged():
                self._judged(seen)
            case StallSeen():
                self.settled = True
            case DrafterSeen(there):
                self._there = there
                if not there:
                    self._arm = NO_DRAFTER
                    self.target.answered(self)
            case Started():
                self.target.begun(self)
            case Ended():
                self.target.ended(self)

    def _answered(self, seen: DraftSeen) -> None:
        target, costs, overlap = self.target, self.target.costs, self._arm.overlap
        self._drafted += seen.draft_tokens
        self._aside, self._why = ASIDE_FOR if seen.aside and not self._drafted else 0, seen.aside
        target.answered(self, None if self.limits.copies else seen.draft_tokens)
        if seen.draft_tokens:
            drafting = sum(one._arm.depth > 0 for one in target.outputs)
            costs.steps[overlap].add(seen.seconds / seen.draft_tokens, drafting * self._arm.width)
        if seen.waited is not None:
            costs.trips[overlap].add(seen.waited - seen.seconds - seen.queued, len(target.outputs))

    def _judged(self, seen: Judged) -> None:
        """What was emitted, and how draft tokens fared; while the draft is behind they are compared, and not judged."""
        self._aside -= min(self._aside, seen.tokens)
        if self.shares:
            self.target.emitted(seen.tokens)
        if not self._arm.depth or self._drafted:
            self.settled = True
        if not self._arm.depth:
            self._fared.fade(seen.tokens / 2)
        compared = min(self._behind, seen.accepted)
        self._behind -= compared
        accepted, refused, first = seen.accepted - compared, seen.refused and not self._behind, seen.first + compared
        if accepted or refused:
            usual = self.acceptance.chances()
            chances = [usual[min(place, len(usual) - 1)] for place in range(first, first + accepted + refused)]
            self._fared.add(accepted, chances)
            self.target.judged(accepted, chances)
            self.acceptance.add(first, accepted, refused)
            if accepted:
                self.acceptance.worth.add(max(0, seen.tokens - seen.settled - refused), accepted)
        drafting = self._arm.depth > 0 and not self._in_run  # what follows a run is chosen before its end
        self._behind = 0 if seen.refused else self._behind + seen.settled * drafting

    def gain(self, load: float) -> float:
        """Times as fast as without a drafter that outputs like this one were at about this load; 0: none was seen."""
        arms, contests = self.limits.arms, self.target.contests.items()
        near = {abs(at - log2(load)): one for (at, limits), one in contests if limits.arms == arms}
        contest = near[min(near)] if near else self.target.contest
        seen = [arm for arm in arms if contest.windows(arm)]
        if not any(arm.depth for arm in seen) and contest.windows(NO_DRAFTER) < PLAINLY:
            return 0.0
        guesses = self.target.guesses([self], self.limits.arms, load=load)
        speeds = [contest.speed(arm, guesses) for arm in (NO_DRAFTER, *seen)]
        return max(speeds) / speeds[0]

    def explain(self) -> Sequence[str]:
        """What was decided from last, as lines of text: costs, and what each arm is thought to bring."""
        target, contest = self.target, self.target.contest
        costs = target.costs
        if not costs.target.known:
            return ["nothing is known yet"]
        guesses, load = target.guesses([self], self.limits.arms), target.load
        lines = [
            f"a pass of {load:.0f} outputs takes {1e3 * guesses[NO_DRAFTER].seconds:.3g} ms; "
            f"{self.acceptance.mean:.0%} of draft tokens are accepted",
            f"{'':34}{'expected':>12}{'measured':>12}{'tokens/s of all outputs':>26}",
        ]
        for arm, guess in guesses.items():
            seen = contest.windows(arm)
            measured = f"{load * contest.speed(arm, guesses):.1f}" if seen else "not tried"
            lines.append(f"{arm!s:34}{load * guess.speed:12.1f}{measured:>12}")
        return [*lines, f"in use: {contest.current}; trials may cost {max(0, target.account.credit):.0f} tokens more"]

    def choose(self, now: float) -> Choice:
        """How the next epoch is run."""
        choice = self.review(now)
        self._behind = self._drafted = 0
        if choice.drafts:
            self.target.asked(self, now)
        return choice

    def wants_drafter(self, now: float) -> bool:
        """Whether its next choice may be to draft."""
        return not self.target.costs.target.known or self.target.contest.current.depth > 0

    def review(self, now: float) -> Choice:
        """How the running epoch goes on."""
        target = self.target
        arm, reason = self._best()
        if self._aside:
            arm, reason = NO_DRAFTER, ASIDE.format(self._why)
        self.settled = self.settled and arm == self._arm
        self._arm = arm
        if arm.depth:
            self._run = SHORT_RUN // 2
            return self._choice(arm, reason)
        target.answered(self)
        self._run = min(SHORT_RUN if target.account.credit > 0 else LONG_RUN, 2 * self._run)
        return replace(PLAIN, run=self._run, reason=reason)

    def _best(self) -> tuple[Arm, str]:
        """The arm of all, or its own where its draft tokens fare otherwise; and why, in words."""
        target, contest, arm = self.target, self.target.contest, self.target.contest.current
        if not target.costs.target.known:
            return NO_DRAFTER, "the first tokens show what a pass takes"
        differs = len(target.outputs) > 1 and self._fared.factor != 1
        self._alone = differs or arm not in self.limits.arms
        if self._alone:
            guesses = target.guesses([self], self.limits.arms, self._fared.factor if differs else 1.0)
            arm = max(guesses, key=lambda one: contest.speed(one, guesses))
            return arm, f"{arm}: its draft tokens fare {'better' if self._fared.factor > 1 else 'worse'} than usual"
        if contest.trial is not None:
            return arm, f"trying {arm}"
        return arm, f"{arm}: the fastest so far"

    def _choice(self, arm: Arm, reason: str) -> Choice:
        costs, limits, many = self.target.costs, self.limits, len(self.target.outputs)
        known = any(times.known for times in costs.steps.values())
        chunk = CHUNK
        if arm.overlap:
            chunk = max(
                1, min(CHUNK, int(costs.target.seconds(self.target.load) / 3 / max(costs.step(arm, many), 1e-6)))
            )
        wait = arm.wait + chunk if arm.overlap else arm.depth
        patience = PATIENCE * costs.arrival(arm, many, wait) if known else FIRST_PATIENCE
        if not arm.overlap:
            worth = costs.step(arm, many) / max(self.target.pace.seconds(), 1e-9)  # tokens of the time of a step
            least = min(MOST_LIKELY, worth) if arm.nodes and known and self._greedy else 0.0
            return Choice(
                arm.depth, arm.depth, False, patience, tree_nodes=arm.nodes, least_likely=least, reason=reason
            )
        return Choice(
            arm.depth,
            arm.wait,
            patience=patience if arm.wait else 0.0,
            branch_depth=limits.branch_depth,
            branch_width=limits.branch_width,
            chunk=chunk,
            speculate=limits.targets > 1,
            review_after=2 * SHORT_RUN,
            reason=reason,
        )
