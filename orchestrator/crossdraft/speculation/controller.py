"""One controller for all targets of one model and their drafters decides for all outputs of an orchestrator.

All outputs use one arm, the one that has brought the most tokens a second at about this load (`contest`), so that what
is measured is what it brings when all use it. An output whose draft tokens clearly fare otherwise decides for itself,
by its own acceptance. Everything depends on times and on revealed draft tokens only.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import log2
from statistics import fmean

from crossdraft.speculation.arms import Costs, Round
from crossdraft.speculation.choice import (
    ASIDE,
    LONG_RUN,
    PLAIN,
    Choice,
    Controller,
    DrafterSeen,
    DraftSeen,
    Ended,
    Judged,
    Observation,
    PassSeen,
    StallSeen,
    Started,
)
from crossdraft.speculation.contest import CREDIT, Account, Contest, Guesses
from crossdraft.speculation.estimates import Acceptance, Fared, Times

PATIENCE = 3.0  # times the expected wait that a pass waits at most
SHORT_RUN = 4  # tokens of a plain run while a trial may be near; four are an overlapped epoch's until its review
CHUNK = 4  # draft tokens of a reply at most, three replies a pass: each is work for the event loop
ASIDE_FOR = 128  # tokens until a drafter is asked again that cannot go on with a text
RECENT = 40.0  # judged draft tokens, of all or of one output, that are compared with usual ones
MOST_LIKELY = 0.7  # probability that a draft's next tokens are reached with which it goes on whatever they cost
SILENT = 5.0  # seconds without a draft token after which a drafter is shown as of no use

Kind = tuple[str | None, float, float | None]  # of requests: method and both temperatures
Arms = Sequence[Choice]


class TargetController:
    """Learns from all outputs on a target, and decides for all of them."""

    def __init__(self) -> None:
        self.costs, self.account = Costs(), Account()
        self.outputs: dict[OutputController, None] = {}  # under way, in their order
        self.contest = Contest(self.account, (PLAIN,))  # of the load and most outputs' arms
        self.contests: dict[tuple[int, Arms], Contest] = {}  # by the binary logarithm of the load
        self.speed = 1.0  # tokens a second of each output, as of the latest round
        self._octave = 0
        self._others = Times()  # outputs of other orchestrators in a pass, in place of seconds
        self._acceptance: dict[Kind, Acceptance] = {}
        self._recent = Fared(RECENT)
        self._pass = (0, 0, 0.0)  # sessions, tokens and seconds of the latest pass
        # The running round: when it began in seconds, what was emitted and how many passes returned, of which outputs,
        # and whether all used one arm before.
        self._began: float | None = None
        self._tokens = self._passes = 0.0
        self._sharing: Sequence[OutputController] = ()
        self._pure = False

    def output(self, kind: Kind, arms: Arms, targets: int = 1) -> "OutputController":
        """The controller of a new output.

        Args:
            arms: of `arms_for`.
            targets: that outputs like this one are spread over.
        """
        method, temperature, drafting = kind
        kind = method, round(temperature, 1), drafting and round(drafting, 1)  # draft tokens fare alike within a tenth
        acceptance = self._acceptance.setdefault(kind, Acceptance())
        return OutputController(self, arms, acceptance, targets, temperature == 0)

    # What outputs report.

    def begun(self, output: "OutputController") -> None:
        self.outputs[output] = None
        self._choose_contest()

    def ended(self, output: "OutputController") -> None:
        self.outputs.pop(output, None)
        if not self.outputs:
            self._began = None  # the time until the next one is nobody's

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
        if seen.seen >= RECENT / 3 and self._recent.factor != 1:  # all fare otherwise than they did
            for acceptance in {one.acceptance for one in self.outputs}:
                acceptance.reset(seen.held, seen.seen)
            self._recent, self._pure = Fared(RECENT), False
            self.contest.interrupt()

    def _end_round(self, now: float) -> None:
        contest, number = self.contest, len(self._sharing)
        if self._began is not None and number and self._tokens:
            arm, guesses = contest.current, self.guesses(self._sharing, [*contest.records])
            seconds, tokens = now - self._began, self._tokens / number
            contest.add(seconds, tokens, self._pure, guesses, number)
            self.speed = contest.speeds(guesses)[contest.current]
            if not arm.drafts and self._pure:
                self.costs.handling.add(seconds / tokens - self.costs.target.seconds(self.load), number)
                for acceptance in {one.acceptance for one in self._sharing}:
                    acceptance.fade(2 * tokens)
        self._choose_contest()
        sharing = self._sharing = [one for one in self.outputs if one.shares]
        late = sum(one.used != self.contest.current for one in sharing)
        self._began, self._tokens, self._passes, self._pure = now, 0.0, 0.0, late <= len(sharing) // 10

    # What is decided.

    @property
    def _own(self) -> float:
        """Outputs of this orchestrator that share a target."""
        return len(self.outputs) / max((one.targets for one in self.outputs), default=1)

    @property
    def load(self) -> float:
        """Outputs that share a target, those of other orchestrators included."""
        return max(1.0, self._own + self._others.seconds())

    def _choose_contest(self) -> None:
        """That of the load and of most outputs' arms; what another load has shown is a guess for a new one."""
        if not self.outputs:
            return
        if abs(log2(self.load) - self._octave) > 0.7:
            self._octave = round(log2(self.load))
        numbers = Counter(id(one.arms) for one in self.outputs)  # `arms_for` makes each once
        key = self._octave, max((one.arms for one in self.outputs), key=lambda arms: numbers[id(arms)])
        if key not in self.contests:
            self.contests[key] = Contest(self.account, key[1], self.nearest(key[1], self._octave))
        if self.contests[key] is not self.contest:
            self.contest.end_trial()
            self.contest, self._pure = self.contests[key], False

    def nearest(self, arms: Arms, octave: float) -> Contest | None:
        """The contest of these arms at the nearest load."""
        like = [key for key in self.contests if key[1] == arms]
        return self.contests[min(like, key=lambda one: abs(one[0] - octave))] if like else None

    def guesses(
        self, outputs: Sequence["OutputController"], arms: Arms, factor: float = 1.0, load: float = 0.0
    ) -> Guesses:
        """What is expected of each arm, on average over these outputs, now or at another load."""
        drafting, load = load or len(self.outputs), load or self.load
        of = [(one.chances(factor), one.worth.mean(1.0)) for one in {one.acceptance for one in outputs}]
        found = {arm: [self.costs.round(arm, load, drafting, *one) for one in of] for arm in arms}
        return {arm: Round(*map(fmean, zip(*rounds, strict=True))) for arm, rounds in found.items()}

    def idle(self, now: float) -> str:
        """Why nothing is drafted now with a drafter that is there, for people; empty if it is, or that is not known."""
        if any(one.asked is not None and now - one.asked > SILENT for one in self.outputs):
            return "drafts nothing: it does not answer, or cannot go on with these texts"
        tried = any(one.windows for arm, one in self.contest.records.items() if arm.drafts)
        paused = tried and not self.contest.current.drafts
        return "paused: outputs are faster without it; tried again now and then" if paused else ""


class OutputController(Controller):
    """Decides how the epochs of one output are run, as a part of its target's controller."""

    waits_for_drafter = False

    def __init__(
        self, target: TargetController, arms: Arms, acceptance: Acceptance, targets: int, greedy: bool
    ) -> None:
        self.target, self.arms, self.acceptance, self.targets = target, arms, acceptance, targets
        self._greedy = greedy  # then a tree that ends by confidence is faster; at temperature 0.8 it was not
        self.used = PLAIN  # the arm of the latest tokens
        self.asked: float | None = None  # seconds: since when the drafter owes it draft tokens
        self._arm = PLAIN  # of the running epoch
        self._fared = Fared(RECENT)
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
        match seen:
            case PassSeen():
                self._in_run = not seen.asked
                self.target.passed(seen, self.shares, now)
            case DraftSeen():
                self._answered(seen)
            case Judged():
                self._judged(seen)
            case StallSeen():
                self.used = self._arm
            case DrafterSeen(there):
                self._there = there
                self._arm, self.asked = (self._arm, self.asked) if there else (PLAIN, None)
            case Started():
                self.target.begun(self)
            case Ended():
                self.target.ended(self)

    def _answered(self, seen: DraftSeen) -> None:
        target, costs, overlap = self.target, self.target.costs, self._arm.overlap
        self._drafted += seen.draft_tokens
        self._aside, self._why = ASIDE_FOR if seen.aside and not self._drafted else 0, seen.aside
        if seen.draft_tokens:
            self.asked = None
            drafting = sum(one._arm.drafts for one in target.outputs)
            costs.steps[overlap].add(seen.seconds / seen.draft_tokens, drafting * self._arm.width)
        if seen.waited is not None and self.used == self._arm:  # at first the drafter has others' drafts to end
            costs.trips[overlap].add(seen.waited - seen.seconds - seen.queued, len(target.outputs))

    def _judged(self, seen: Judged) -> None:
        """What was emitted, and how draft tokens fared; while the draft is behind they are compared, and not judged."""
        self._aside -= min(self._aside, seen.tokens)
        if self.shares:
            self.target.emitted(seen.tokens)
        if not self._arm.drafts or self._drafted:
            self.used = self._arm
        if not self._arm.drafts:
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
        drafting = self._arm.drafts and not self._in_run  # what follows a run is chosen before its end
        self._behind = 0 if seen.refused else self._behind + seen.settled * drafting

    def gain(self, load: float) -> float:
        """Times as fast as without a drafter that outputs like this one were at about this load; 0: none was seen."""
        contest = self.target.nearest(self.arms, log2(load))
        seen = [] if contest is None else [arm for arm in self.arms if contest.records[arm].windows]
        if contest is None or len(seen) < 2:
            return 0.0
        speeds = contest.speeds(self.target.guesses([self], self.arms, load=load))
        return max(speeds[arm] for arm in seen) / speeds[PLAIN]

    def explain(self) -> Sequence[str]:
        """What was decided from last, as lines of text: costs, and what each arm is thought to bring."""
        target, contest = self.target, self.target.contest
        if not target.costs.target.known:
            return ["nothing is known yet"]
        guesses, load = target.guesses([self], self.arms), target.load
        lines = [
            f"a pass of {load:.0f} outputs takes {1e3 * guesses[PLAIN].seconds:.3g} ms; "
            f"{self.acceptance.mean:.0%} of draft tokens are accepted",
            f"{'':44}{'expected':>12}{'measured':>12}{'tokens/s of all outputs':>26}",
        ]
        for arm, speed in contest.speeds(guesses).items():
            seen = arm in contest.records and contest.records[arm].windows
            expected, measured = load * guesses[arm].tokens / guesses[arm].seconds, f"{load * speed:.1f}"
            lines.append(f"{arm.settings:44}{expected:12.1f}{measured if seen else 'not tried':>12}")
        credit = max(0.0, target.account.credit - CREDIT / 2)
        return [*lines, f"in use: {contest.current.settings}; trials may cost {credit:.0f} tokens more"]

    def wants_drafter(self, now: float) -> bool:
        """Whether its next choice may be to draft."""
        return not self.target.costs.target.known or self.target.contest.current.drafts

    def choose(self, now: float) -> Choice:
        choice = self.review(now)
        self._behind = self._drafted = 0
        self.asked = None if not choice.drafts else now if self.asked is None else self.asked
        return choice

    def review(self, now: float) -> Choice:
        arm, reason = self._best()
        if self._aside:
            arm, reason = PLAIN, ASIDE.format(self._why)
        self._arm = arm
        if arm.drafts:
            self._run = 1
            return self._choice(arm, reason)
        contest, paid = self.target.contest, self.target.account.credit > 0
        most = (SHORT_RUN if contest.records[contest.usual].windows else 2) if paid else LONG_RUN
        self._run = min(most, 2 * self._run)
        return replace(PLAIN, run=self._run, reason=reason)

    def _best(self) -> tuple[Choice, str]:
        """The arm of all, or its own where its draft tokens fare otherwise; and why, in words."""
        target, contest, arm = self.target, self.target.contest, self.target.contest.current
        if not target.costs.target.known:
            return PLAIN, "the first tokens show what a pass takes"
        factor = self._fared.factor if len(target.outputs) > 1 else 1.0
        self._alone = factor != 1 or arm not in self.arms
        if self._alone:
            speeds = contest.speeds(target.guesses([self], self.arms, factor))
            arm = max(speeds, key=lambda one: speeds[one])
            return arm, f"its draft tokens fare {'better' if factor > 1 else 'worse'} than usual"
        return arm, "it is tried" if contest.trial is not None else "the fastest so far"

    def _choice(self, arm: Choice, reason: str) -> Choice:
        """An arm, with what suits the costs."""
        costs, many = self.target.costs, len(self.target.outputs)
        step = max(costs.step(arm, many), 1e-6)
        chunk = max(1, min(CHUNK, int(costs.target.seconds(self.target.load) / 3 / step))) if arm.overlap else 1
        due = arm.min_draft_tokens + (chunk if arm.overlap else 0)
        patience = PATIENCE * costs.arrival(arm, many, due)
        if arm.overlap:
            patience = patience if arm.min_draft_tokens else 0.0
            return replace(arm, patience=patience, chunk=chunk, review_after=4 * SHORT_RUN, reason=reason)
        worth = step * self.target.speed  # tokens of the time of a step
        least = min(MOST_LIKELY, worth) if arm.tree_nodes and self._greedy else 0.0
        return replace(arm, patience=patience, least_likely=least, reason=reason)
