"""One controller for all targets of one model and their drafters decides for all outputs of an orchestrator.

All outputs use one arm, the one that has brought the most tokens a second at about this load (`selection`): so what is
measured is what it brings when all use it. An output whose draft tokens clearly fare otherwise decides for itself,
by its own acceptance. Everything depends on times and on revealed draft tokens only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log2
from statistics import fmean

from crossdraft.speculation.choice import (
    ASIDE,
    LONG_RUN,
    PLAIN,
    Choice,
    Controller,
    DraftSeen,
    Judged,
    Lifecycle,
    Observation,
    PassSeen,
)
from crossdraft.speculation.estimates import HOPED, MEMORY, PRIOR, Costs, Round, Share, Times
from crossdraft.speculation.selection import CREDIT, STALL, ArmSelection, Guesses, LossBudget

REVIEWED = 16  # tokens after which an overlapped epoch is reviewed: each message is work for the event loop
MANY = 8  # outputs whose single draft tokens keep the event loop busy: then a reply has two, half as much work
RECENT = MEMORY / 5  # judged draft tokens, of all or of one output, that are compared with usual ones
SILENT = 5.0  # seconds without a draft token after which a drafter is shown as of no use

Kind = tuple[str | None, float, float | None]  # of requests: method and both temperatures
Arms = Sequence[Choice]


class Fares:
    """How draft tokens of one kind of request fare."""

    def __init__(self) -> None:
        self.acceptance = Share()
        self.worth = Share(PRIOR, PRIOR)  # target tokens of an accepted draft token
        self.gained = defaultdict[int, Share](Share)  # tokens for each of no drafter, by load as `selections`


@dataclass
class RunningRound:
    """The passes in which each output has its turn."""

    began: float | None = None  # seconds; None: no output is under way
    number: int = 0  # outputs with a first token
    sharing: Sequence["OutputController"] = ()  # ... that use the arm of all
    each: int = 1  # tokens of each in a pass, at most
    pure: bool = False  # all used that arm before
    passes: int = 0  # that returned, of the outputs that share the arm
    tokens: int = 0  # emitted
    reading: float = 0.0  # seconds that went into prompts


class TargetController:
    """Learns from all outputs on a target, and decides for all of them."""

    def __init__(self) -> None:
        self.costs, self.budget = Costs(), LossBudget()
        self.outputs: dict[OutputController, None] = {}  # under way, in their order
        self.arms: Arms = (PLAIN,)  # of most outputs
        self.selection = ArmSelection(self.budget, PLAIN)  # of the load
        self.selections = {0: self.selection}  # by its binary logarithm
        self.speed = 1.0  # tokens a second of each output, as of the latest round
        self.octave = 0  # binary logarithm of the load, about
        self._others = Times()  # outputs of other orchestrators in a pass, in place of seconds
        self._fares: dict[Kind, Fares] = {}
        self._recent = Share(memory=RECENT)
        self._pass = (0, 0)  # sessions and tokens of the latest pass
        self._told: set[OutputController] = set()  # of it
        self._round = RunningRound()

    def output(self, kind: Kind, arms: Arms, targets: int = 1) -> "OutputController":
        """The controller of a new output.

        Args:
            arms: of `arms_for`.
            targets: that outputs like this one are spread over.
        """
        method, temperature, drafting = kind
        kind = method, round(temperature, 1), drafting and round(drafting, 1)  # draft tokens fare alike within a tenth
        fares = self._fares.setdefault(kind, Fares())
        return OutputController(self, arms, fares, targets, temperature == 0)

    # What outputs report.

    def begun(self, output: "OutputController") -> None:
        self.outputs[output] = None
        self._choose_selection()

    def ended(self, output: "OutputController") -> None:
        self.outputs.pop(output, None)
        self._told.discard(output)
        if not self.outputs:
            self._round = RunningRound()  # the time until the next one is nobody's

    def passed(self, output: "OutputController", seen: PassSeen, now: float) -> None:
        """A pass of an output returned, or some tokens of a run; when all had one a round is over."""
        if (seen.sessions, seen.fed) != self._pass or output in self._told:  # else another one has told of this pass
            self._pass, self._told = (seen.sessions, seen.fed), set()
            self._learn(seen)
        self._told.add(output)
        running = self._round
        running.passes += seen.forwards * output.shares
        over = running.tokens and running.passes >= max(1, len(running.sharing))
        if running.began is None or (now > running.began and over):
            self._end_round(now)

    def _learn(self, seen: PassSeen) -> None:
        """What a pass took, and how much of that is a prompt's."""
        self._others.add(max(0.0, seen.sessions - self._own))
        arm, fed, most = self.selection.current, max(seen.fed, seen.sessions), seen.sessions * self._round.each
        if not (self._round.pure and arm.overlap):  # on one device drafts slow these passes down
            self.costs.target.add(seen.seconds / seen.forwards, fed)
        if fed > most:  # a prompt is read, too: that is nobody's, but how much slower it is beside drafts
            known = self._round.pure and not arm.drafts
            usual = seen.seconds if known else min(seen.seconds, self.costs.target.seconds(fed))
            self._round.reading += max(0.0, usual - self.costs.target.seconds(most))

    def emitted(self, tokens: int) -> None:
        self._round.tokens += tokens

    def judged(self, accepted: int, seen: int, usual: float) -> None:
        """Draft tokens of an output were judged, each of which had this chance."""
        recent = self._recent
        recent.add(accepted, seen)
        if recent.seen >= RECENT / 3 and recent.factor(usual) != 1:  # all fare otherwise than they did
            for fares in {one.fares for one in self.outputs}:
                fares.acceptance = Share(recent.held, recent.seen)
            self._recent, self._round.pure = Share(memory=RECENT), False

    def _end_round(self, now: float) -> None:
        selection, arm, over = self.selection, self.selection.current, self._round
        if over.began is not None and over.sharing:
            guesses = self.guesses(over.sharing, {PLAIN, arm, selection.usual})
            tokens = over.tokens / over.number
            seconds = max(0.0, now - over.began - over.reading)
            weight = over.pure * seconds / max(1e-9, seconds + over.reading)  # the more went into prompts the less
            self._compare(tokens, min(seconds, STALL * guesses[arm].seconds))
            if selection.add(seconds, tokens, weight, guesses, over.number):
                selection.decide(self.guesses(over.sharing, {*self.arms, arm, selection.usual}))
            if not arm.drafts and over.pure:
                for fares in {one.fares for one in over.sharing}:
                    fares.acceptance.fade(2 * tokens * (fares.acceptance.mean() < HOPED))
            self.speed = selection.speed(arm, guesses[arm])
        self._choose_selection()
        arm, sharing = self.selection.current, [one for one in self.outputs if one.shares]
        number = sum(one.under_way for one in self.outputs)
        late = sum(one.used != arm for one in sharing) + len(self.outputs) - number
        each = max(1 + (used.tree_nodes or used.max_draft_tokens) for used in (arm, *(one.used for one in sharing)))
        self._round = RunningRound(now, number, sharing, each, late <= len(sharing) // 10)

    def _compare(self, tokens: float, seconds: float) -> None:
        """What a round brought to each output that it has, with what no drafter would have in so many seconds."""
        records = self.selection.records
        for fares in {one.fares for one in self._round.sharing} if PLAIN in records and len(records) > 1 else ():
            fares.gained[self.octave].add(tokens, seconds * records[PLAIN].ratio)

    # What is decided.

    @property
    def _own(self) -> float:
        """Outputs of this orchestrator that share a target."""
        return len(self.outputs) / max((one.targets for one in self.outputs), default=1)

    @property
    def load(self) -> float:
        """Outputs that share a target, those of other orchestrators included."""
        return max(1.0, self._own + self._others.seconds())

    def _choose_selection(self) -> None:
        """That of the load, among the arms of most outputs."""
        if not self.outputs:
            return
        numbers = Counter(id(one.arms) for one in self.outputs)  # `arms_for` makes each once
        arms = max((one.arms for one in self.outputs), key=lambda arms: numbers[id(arms)])
        if abs(log2(self.load) - self.octave) > 0.7:
            self.octave = round(log2(self.load))
        selection = self.selections.setdefault(self.octave, ArmSelection(self.budget, PLAIN))
        if selection is not self.selection or arms != self.arms:
            self.selection, self.arms, self._round.pure = selection, arms, False
            tried = any(map(selection.seen, (arm for arm in arms if arm.drafts)))
            selection.resume(arms, selection.usual if tried else self._nearest(arms))

    def _nearest(self, arms: Arms) -> Choice:
        """The arm in use at the nearest load at which drafts are, if it is expected to pay at this one, too."""
        drafting = [octave for octave, one in self.selections.items() if one.usual.drafts and one.usual in arms]
        if not drafting:
            return PLAIN
        near = self.selections[min(drafting, key=lambda octave: abs(octave - self.octave))]
        plain, guess = self.guesses(list(self.outputs), (PLAIN, near.usual)).values()
        return near.usual if near.speeds({near.usual: guess})[near.usual] * plain.seconds > plain.tokens else PLAIN

    def guesses(
        self, outputs: Sequence["OutputController"], arms: Iterable[Choice], factor: float = 1.0, load: float = 0.0
    ) -> Guesses:
        """What is expected of each arm, on average over these outputs, now or at another load."""
        drafting, load = load or len(self.outputs), load or self.load
        of = [(min(1.0, factor * one.acceptance.mean()), one.worth.mean(1.0)) for one in {one.fares for one in outputs}]
        found = {arm: [self.costs.round(arm, load, drafting, *one) for one in of] for arm in arms}
        return {arm: Round(*map(fmean, zip(*rounds, strict=True))) for arm, rounds in found.items()}

    def idle(self, now: float) -> str:
        """Why nothing is drafted now with a drafter that is there, for people; empty if it is, or that is not known."""
        if any(one.asked is not None and now - one.asked > SILENT for one in self.outputs):
            return "drafts nothing: it does not answer, or cannot go on with these texts"
        tried = any(map(self.selection.seen, (arm for arm in self.arms if arm.drafts)))
        paused = tried and not self.selection.current.drafts
        return "paused: outputs are faster without it; tried again now and then" if paused else ""


class OutputController(Controller):
    """Decides how the epochs of one output are run, as a part of its target's controller."""

    waits_for_drafter = False

    def __init__(self, target: TargetController, arms: Arms, fares: Fares, targets: int, greedy: bool) -> None:
        self.target, self.arms, self.fares, self.targets = target, arms, fares, targets
        self._greedy = greedy  # then a tree that ends by confidence is faster; at temperature 0.8 it was not
        self.used = PLAIN  # the arm of the latest tokens
        self.asked: float | None = None  # seconds: since when the drafter owes it draft tokens
        self._arm = PLAIN  # of the running epoch
        self._fared = Share(memory=RECENT)
        self.under_way = False  # its first token is there
        self._alone = False  # it has decided for itself
        self._there = True  # its drafter
        self._why = ""  # ... could not go on, the last time that it could not
        self._aside = 0  # tokens until it is asked again
        self._drafted = 0  # draft tokens of the running epoch
        self._behind = 0  # tokens that the target drew before their draft tokens came: compared with them, not judged

    @property
    def shares(self) -> bool:
        """Whether it uses the arm of all."""
        return self._there and self.under_way and not self._aside and not self._alone

    def observe(self, seen: Observation, now: float) -> None:
        match seen:
            case PassSeen():
                self.target.passed(self, seen, now)
            case DraftSeen():
                self._answered(seen)
            case Judged():
                self._judged(seen)
            case Lifecycle.DRAFTER_CAME:
                self._there = True
            case Lifecycle.DRAFTER_WENT:
                self._there, self._arm, self.asked = False, PLAIN, None
            case Lifecycle.STARTED:
                self.target.begun(self)
            case Lifecycle.ENDED:
                self.target.ended(self)

    def _answered(self, seen: DraftSeen) -> None:
        outputs, costs = self.target.outputs, self.target.costs
        self._drafted += seen.draft_tokens
        self._aside, self._why = 4 * LONG_RUN if seen.aside and not self._drafted else 0, seen.aside
        if seen.draft_tokens:
            self.asked = None
            drafting = sum(one._arm.drafts for one in outputs)
            costs.steps[self._arm.overlap].add(seen.seconds / seen.draft_tokens, drafting * self._arm.width)
        if seen.waited is not None and self.used == self._arm:  # at first the drafter has others' drafts to end
            costs.trips[self._arm.overlap].add(seen.waited - seen.seconds - seen.queued, len(outputs))

    def _judged(self, seen: Judged) -> None:
        """What was emitted, and how draft tokens fared."""
        if self._aside:  # as fast as without a drafter
            self.fares.gained[self.target.octave].add(seen.tokens, seen.tokens)
        self._aside -= min(self._aside, seen.tokens)
        self.under_way = self.under_way or seen.tokens > 0
        self.target.emitted(seen.tokens)
        if not self._arm.drafts or self._drafted:
            self.used = self._arm
        if not self._arm.drafts:
            self._fared.fade(seen.tokens / 2)
        compared = min(self._behind, seen.accepted)  # with the target's own draws: not by the method's chance
        self._behind -= compared
        accepted, refused = seen.accepted - compared, seen.refused and not self._behind
        if judged := accepted + refused:
            self._fared.add(accepted, judged)
            self.target.judged(accepted, judged, self.fares.acceptance.mean())
            self.fares.acceptance.add(accepted, judged)
        if accepted:
            self.fares.worth.add(max(0, seen.tokens - seen.settled - refused), accepted)
        self._behind = 0 if seen.refused else self._behind + seen.settled * self._arm.drafts

    def gain(self, load: float) -> float:
        """Times as fast as without a drafter that outputs like this one were at about this load; 0: none was seen."""
        octave = min(self.target.selections, key=lambda octave: abs(octave - log2(load)))
        selection = self.target.selections[octave]
        seen = list(filter(selection.seen, self.arms))
        if len(seen) < 2:
            return float(self.fares.gained[octave].seen > 0)  # it can draft nothing of such texts
        speeds = selection.speeds(self.target.guesses([self], self.arms, load=load))
        best = max(speeds[arm] for arm in seen) / speeds[PLAIN]  # where it is used: outputs do not always use it
        return self.fares.gained[octave].mean(best, RECENT)

    def explain(self) -> Sequence[str]:
        """What was decided from last, as lines of text: costs, and what each arm is thought to bring."""
        target, selection = self.target, self.target.selection
        if not target.costs.target.known:
            return ["nothing is known yet"]
        guesses, load = target.guesses([self], self.arms), target.load
        speeds, credit = selection.speeds(guesses), max(0.0, target.budget.credit - CREDIT / 2)
        lines = [
            f"a pass of {load:.0f} output{'s' * (round(load) != 1)} takes {1e3 * guesses[PLAIN].seconds:.3g} ms; "
            f"{self.fares.acceptance.mean():.0%} of draft tokens are accepted",
            f"{'':44}{'expected':>12}{'measured':>12}{'tokens/s of all outputs':>26}",
        ]
        ordered = sorted(speeds, key=lambda arm: (selection.seen(arm) > 0, speeds[arm]), reverse=True)
        for arm in ordered:
            expected, measured = load * guesses[arm].tokens / guesses[arm].seconds, f"{load * speeds[arm]:.1f}"
            lines.append(f"{arm.settings:44}{expected:12.1f}{measured if selection.seen(arm) else 'not tried':>12}")
        trial = "on trial" if selection.trial is not None else "in use"
        return [*lines, f"{trial}: {selection.current.settings}; trials may cost {credit:.0f} tokens more"]

    def wants_drafter(self, now: float) -> bool:
        """Whether its next choice may be to draft, as all others do."""
        wanted = self.target.selection.current.drafts or not self.target.costs.target.known
        return wanted and self._there and not (self._alone or self._aside)

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
        return self._choice(arm, reason) if arm.drafts else replace(PLAIN, reason=reason)

    def _best(self) -> tuple[Choice, str]:
        """The arm of all, or its own where its draft tokens fare otherwise; and why, in words."""
        target, selection, arm = self.target, self.target.selection, self.target.selection.current
        if not target.costs.target.known:
            return PLAIN, "the first tokens show what a pass takes"
        factor = self._fared.factor(self.fares.acceptance.mean()) if len(target.outputs) > 1 else 1.0
        self._alone = factor != 1 or arm not in self.arms
        if not self._alone:
            return arm, "tried, as it may be faster" if selection.trial is not None else "the fastest so far"
        speeds = selection.speeds(target.guesses([self], self.arms, factor))
        fares = f"its draft tokens fare {'better' if factor > 1 else 'worse'} than usual"
        return max(speeds, key=lambda one: speeds[one]), fares

    def _choice(self, arm: Choice, reason: str) -> Choice:
        """An arm, with what suits the costs."""
        costs, many, wait = self.target.costs, len(self.target.outputs), arm.min_draft_tokens
        tree = arm.tree_nodes and self._greedy  # ends where a step costs more tokens than it brings
        likely = min(1.0, costs.step(arm, many) * self.target.speed) if tree else 0.0
        chunk, review = (1 + (many > MANY), REVIEWED) if arm.overlap else (1, 0)
        waits = STALL * costs.arrival(arm, many, wait + chunk) if wait else 0.0
        return replace(arm, patience=waits, least_likely=likely, chunk=chunk, review_after=review, reason=reason)
