"""One controller for all targets of one model and their drafters decides for all outputs of an orchestrator.

What a draft token is worth depends on who else is in the pass. So the choice is the one that gives the most tokens a
second to all outputs together if all make it: draft tokens in the order of their chance to be accepted, as long as the
next one brings more than it costs target and drafter. Texts differ: where the draft tokens of an output clearly fare
better or worse than usual, it is decided for it as if those of all outputs did.

It begins by drafting. Forecasts are corrected by what each mode has really brought at that load, and such a correction
fades while its mode is not in use, so that every mode is tried again. Where no way of drafting is faster than plain
decoding, one output at a time tries the drafter, once in EXPLORED tokens. This shows how its draft tokens fare, but not
what they would cost in lock-step rounds, where the target waits for the drafter and leaves it the processors. So
sometimes all outputs together try rounds, if rounds would pay at a part of the cost that is forecast; the slower they
have turned out, the more seldom. In the same way, while all draft, all together try plain decoding.

Everything depends on times and on revealed draft tokens only.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, log2
from typing import Any

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
from crossdraft.speculation.estimates import (
    CERTAIN,
    OUTLIER,
    Acceptance,
    Estimates,
    Fared,
    FittedCost,
    Kind,
    Recent,
    Share,
)
from crossdraft.speculation.forecast import MATCHES, Conditions, forecast
from crossdraft.speculation.policy import (
    MOST_EXPECTED_WAITS,
    REVIEWED,
    SIZES,
    Limits,
    Mode,
    Policy,
    Rated,
    Trial,
    explanation,
    overlapped,
    rounds,
    trees,
)

FIRST = 8  # draft tokens of the first epochs, beside which the target goes on: enough to see how they fare
FIRST_PATIENCE = 0.05  # seconds, where nothing is known of a drafter and only lock-step is possible
ASKING = 0.1  # of plain decoding, that asking a drafter which finds nothing to copy may cost
EXPLORED = 128  # tokens of each output between trials of a drafter that does not pay; one costs an output a third pass
TRIAL = 16.0  # tokens of each output that a trial by all takes: two rounds
TRIALS = 4.0  # ... times as many after which one ends that not all could join
BUDGET = 0.02  # of all tokens, that trials by all cost if forecasts are right: with 0.01 what pays is found late
FIRST_BUDGET = 0.1  # ... while there never was a round
LEAST_LOST = 0.25  # of its tokens, that a trial is taken to cost at least
PROMISING = 3.0  # part of what a drafter's steps seem to cost, or of plain decoding, that they may cost when all do it
MARGIN = 1.07  # a drafter has to promise so much more than plain decoding, and another mode than the present one
FAR = 1.25  # ... before TRUSTED tokens were emitted in it: what it brings must be seen first
TRUSTED = 64.0  # tokens that a forecast weighs against what its mode has really brought, with one output
HELD = 4.0  # ... times as many that what a mode has brought weighs at most: a fifth is the forecast's
FADED = 4000.0  # tokens of each output after which what a mode brought that is not in use weighs 1/e
IN_STEP = 0.75  # exponent: twice as many outputs are seen in step, and tell less each
NEARLY_ALL = 0.9  # of the outputs that use a mode: what fewer do says little of what it would bring if all did
WIDER = 2.0  # times the widest pass seen that more outputs may be: what their pass costs is seen before they draft
NARROW = 4  # reports of each output after which no wider pass is waited for: several targets share the outputs
AS_MANY = 2.0  # times the outputs that draft, up or down, until a reply comes: what it cost is then of about as many
SAME_LOAD = 1.25  # times the outputs that a policy was made for, up or down: draft tokens cost about the same
GROWN = 8  # part more observations, of those a policy rests on, after which it is made again: estimates have moved
RENEWED = 64.0  # observations of each output, after which it is made again in any case: some 20 epochs
POLICIES = 32  # made in a second at most, at some 3 ms of the event loop each; half of them for those that have one
KINDS = 32  # of requests whose acceptance is kept apart, or as many as outputs: the one not asked for longest goes
EMPTY = 4  # drafts in a row without a draft token, of any output, after which a drafter is shown as of no use
ROUNDED = 1  # digits after the point by which temperatures are told apart: draft tokens fare alike within a tenth


class TargetController:
    """Learns from all outputs on a target, and decides for all of them.

    Args:
        before: what another controller of the same services had learned.
    """

    def __init__(self, before: Estimates | None = None) -> None:
        before = before or Estimates()
        self.target, self.drafter = FittedCost(before.target), FittedCost(before.drafter)
        self.rounds = FittedCost(before.rounds)
        self.target_trip = Recent(before.target_trip or None)
        self._drafter_trips = {0: Recent(before.drafter_trip or None)}  # by load
        self._acceptance = {kind: Acceptance(state) for kind, state in before.acceptance}
        # Tokens that were brought, of those that were forecast, by mode and load: a step that costs more than was
        # forecast with many outputs says nothing of one.
        self._brought: defaultdict[tuple[Mode, int], Share] = defaultdict(Share)
        self._outputs: dict[OutputController, Mode] = {}  # under way
        self._undrafted: set[Controller] = set()  # outputs under way that never draft
        self._using: Counter[Mode] = Counter()  # outputs
        self._others = Recent()  # outputs of other orchestrators in a pass
        self._policies: dict[tuple[Kind, Limits, float], Policy] = {}  # the latest made last
        self._made: deque[float] = deque(maxlen=POLICIES)  # seconds: when the latest were
        self._seen = 0  # observations
        self._pass = (0, 0)  # sessions and tokens of the latest pass
        self._told: set[Controller] = set()  # who told of it
        self._widest = max(1.0, before.widest)  # sessions of the widest pass
        self._narrow = 0  # reports of passes that were not wide enough to decide
        self._targets = 1  # that share the outputs
        # Who has asked the drafter since it answered anybody, and when in seconds.
        self._waiting: dict[OutputController, float] = {}
        self._emitted = 0.0  # tokens of all outputs
        self.empty = 0  # drafts in a row without any draft token
        self._untried = 0.0  # tokens of each output since a drafter that does not pay was tried
        self._trial: Trial | None = None  # the latest
        self._tried_at: dict[int, float] = {}  # by load: tokens of all outputs at the latest trial, or when it came
        self._due = inf  # as the latest policy has it
        self._measuring: dict[Kind, OutputController] = {}  # that try a drafter: nothing is known, or it does not pay

    @property
    def estimates(self) -> Estimates:
        """What it has learned."""
        return Estimates(
            self.target.cost,
            self.drafter.cost,
            self.rounds.cost,
            self.target_trip.value,
            self.drafter_trip.value,
            tuple((kind, acceptance.state) for kind, acceptance in self._acceptance.items()),
            self._widest,
        )

    def output(self, kind: Kind, limits: Limits) -> "OutputController":
        """The controller of a new output."""
        method, temperature, drafting = kind
        kind = method, round(temperature, ROUNDED), drafting and round(drafting, ROUNDED)
        acceptance = self._acceptance.pop(kind, None) or Acceptance()
        self._acceptance[kind] = acceptance
        self._limit(self._acceptance)
        self._targets = limits.targets
        return OutputController(self, kind, limits, acceptance)

    def _limit(self, kept: dict[Any, Any]) -> None:
        """Forget the oldest of more than KINDS; as many as outputs are under way may be in use."""
        while len(kept) > max(KINDS, len(self._outputs)):
            del kept[next(iter(kept))]

    # What outputs report.

    def passed(self, seen: PassSeen, output: Controller) -> None:
        """A pass of any output, or some tokens of a run. Each output that was in it tells of it, and one is enough."""
        self._seen += 1
        self._others.add(max(0.0, seen.sessions - self._own))
        if (seen.sessions, seen.fed) != self._pass or output in self._told:
            self._pass = seen.sessions, seen.fed
            self._told.clear()
            self.target.add(seen.seconds / seen.forwards, seen.sessions, max(0, seen.fed - seen.sessions))
        self._told.add(output)
        self._widest = max(self._widest, seen.sessions)
        if self._too_many:
            self._narrow += 1
            if self._narrow > NARROW * self.outputs:
                self._widest, self._narrow = self.outputs, 0
        if seen.asked:
            self.target_trip.add(max(0.0, seen.waited - seen.seconds - seen.queued))

    @property
    def drafting(self) -> int:
        """Outputs that share the drafter."""
        return max(1, len(self._outputs) - self._using[Mode.PLAIN])

    def drafted(self, seen: DraftSeen, width: int = 0, shared: float = 0.0) -> None:
        """A reply of the drafter to any output.

        Args:
            width: nodes that each step expanded of a round that was waited for as a whole; 0: it was no round.
            shared: outputs that shared the drafter when this was asked; 0: as many as now.
        """
        self._seen += 1
        self._waiting.clear()
        drafting = self.drafting
        if seen.draft_tokens and 1 / AS_MANY <= (shared or drafting) / drafting <= AS_MANY:
            cost, tokens = (self.rounds, drafting * (width - 1)) if width else (self.drafter, 0)
            cost.add(seen.seconds / seen.draft_tokens, drafting, tokens, seen.draft_tokens / drafting)
        if seen.waited is not None:
            self.drafter_trip.add(max(0.0, seen.waited - seen.seconds - seen.queued))

    def emitted(self, tokens: float) -> None:
        """An output has emitted tokens."""
        self._emitted += tokens
        self._untried += tokens / self.outputs

    def brought(self, mode: Mode, tokens: float, forecast: float) -> None:
        """An output has emitted so many tokens in a mode in which so many were forecast."""
        if self._using[mode] < NEARLY_ALL * len(self._outputs):
            return
        used = self._share(mode)
        kept = max(0.0, 1 - forecast / (FADED * self.outputs))
        for other in self._brought.values():
            if other is not used:
                other.limit(kept * other.seen)
        used.held, used.seen = used.held + tokens, used.seen + forecast
        used.limit(HELD * self.trusted)
        if (trial := self._under_way) and trial.mode is mode:
            trial.left -= tokens
            if trial.left <= 0:  # what all have seen counts, however short it was
                used.held, used.seen = used.held * HELD * self.trusted / used.seen, HELD * self.trusted

    @property
    def _load(self) -> int:
        """About how many outputs there are: twice as many are another load."""
        return round(log2(self.outputs))

    def _share(self, mode: Mode) -> Share:
        """What a mode has brought at about this load."""
        return self._brought[mode, self._load]

    @property
    def drafter_trip(self) -> Recent:
        """Round trips to the drafter at about this load: what waits behind many outputs does not behind one."""
        load = self._load
        if load not in self._drafter_trips:
            nearest = min(self._drafter_trips, key=lambda other: abs(other - load))
            self._drafter_trips[load] = Recent(self._drafter_trips[nearest].value or None)
        return self._drafter_trips[load]

    @property
    def _under_way(self) -> Trial | None:
        trial = self._trial
        if trial is None or trial.load != self._load:
            return None
        return trial if trial.left > 0 and self._emitted < trial.until else None

    def begun(self, output: "OutputController", mode: Mode) -> None:
        """An output begins an epoch."""
        self._forget(output)
        self._outputs[output] = mode
        self._using[mode] += 1

    def ended(self, output: "OutputController") -> None:
        """An output is over."""
        self._forget(output)
        self._told.discard(output)
        self.waits_no_more(output)
        if self._measuring.get(output.kind) is output:
            del self._measuring[output.kind]

    def undrafted(self, output: Controller, under_way: bool) -> None:
        """An output that never drafts begins or is over."""
        self._told.discard(output)
        (self._undrafted.add if under_way else self._undrafted.discard)(output)

    def _forget(self, output: "OutputController") -> None:
        mode = self._outputs.pop(output, None)
        if mode is not None:
            self._using[mode] -= 1

    def waits_no_more(self, output: "OutputController") -> None:
        """An output's drafter is gone, or the output is over."""
        self._waiting.pop(output, None)

    def asked(self, output: "OutputController", at: float) -> None:
        """The drafter is asked for draft tokens now, or when a run will be over."""
        self._waiting.setdefault(output, at)

    def stopped(self, output: "OutputController", now: float) -> None:
        """An output wants no draft tokens any more. That none come says nothing then, unless they were overdue."""
        if not self._overdue(self._waiting.get(output, now), now):
            self.waits_no_more(output)

    # What is decided.

    @property
    def known(self) -> bool:
        """Whether both services have been seen at work."""
        return self.target.known and (self.drafter.known or self.rounds.known)

    @property
    def outputs(self) -> float:
        """Outputs that share a target, those of other orchestrators included."""
        return max(1.0, self._own + self._others.value)

    @property
    def _own(self) -> float:
        """Outputs of this orchestrator that share a target."""
        return (len(self._outputs) + len(self._undrafted)) / self._targets

    @property
    def _too_many(self) -> bool:
        """Whether there are so many outputs that what a pass of them costs would be a guess."""
        return self.outputs > WIDER * self._widest

    @property
    def trusted(self) -> float:
        """Tokens of all outputs that a forecast weighs."""
        return TRUSTED * float(self.outputs**IN_STEP)

    def silent(self, now: float) -> bool:
        """Whether the drafter does not answer."""
        return self._overdue(min(self._waiting.values(), default=now), now)

    def idle(self, now: float) -> str:
        """Why nothing is drafted now with a drafter that is there, for people; empty if it is, or that is not known."""
        if self.silent(now):
            return "does not answer"
        if self.empty >= EMPTY:
            return "drafts nothing: it cannot go on with these texts"
        latest = next(reversed(self._policies.values()), None)
        if latest is None or latest.trial is not None or latest.best.choice.drafts:
            return ""
        return "paused: no draft token raises the speed; tried again now and then"

    def _overdue(self, since: float, now: float) -> bool:
        longest = FIRST * self.target.cost.seconds(self.outputs) + MOST_EXPECTED_WAITS * self.drafter_trip.value
        return self.target.known and now - since > longest

    def may_try(self) -> int:
        """Tokens of an output until a drafter that does not pay may be tried; 0: now."""
        return max(0, int(EXPLORED - self._untried))

    def longest_run(self) -> int:
        """Tokens of a plain run at most: of several outputs one ends soon, and tries a drafter when that is due."""
        if len(self._outputs) == 1 and self._under_way is None:
            return max(FIRST, self.may_try())
        trial = self._under_way  # all are to begin it together, and to end it
        left = trial.left if trial is not None else self._due - self._emitted
        return int(min(LONG_RUN, max(FIRST, left / self.outputs)))

    def tried(self) -> None:
        """It is tried now."""
        self._untried = 0.0

    def measures(self, output: "OutputController") -> bool:
        """Whether this output tries a drafter of which nothing is known, or that does not pay: only one does."""
        measuring = self._measuring.get(output.kind)
        if measuring not in self._outputs or not measuring.usable or measuring.settled:
            measuring = self._measuring[output.kind] = output
        return measuring is output

    def policy(self, output: "OutputController", now: float) -> Policy | None:
        """What outputs like this one are to do now; None: too little is known."""
        key = output.kind, output.limits, output.fared.factor
        before = self._policies.get(key)
        latest = before or output.latest
        if before is not None and not 1 / SAME_LOAD < before.conditions.outputs / self.outputs < SAME_LOAD:
            before = None
        if before is not None:
            known = self._seen - before.seen < min(before.seen / GROWN, RENEWED * self.outputs)
            if known and before.trial is self._under_way and self._emitted < before.due:
                return before
        if not (self.known and output.acceptance.tested) or self._too_many:
            return None
        most = POLICIES if latest is None else POLICIES // 2
        if len(self._made) >= most and now - self._made[-most] < 1:
            return latest
        self._made.append(now)
        self._policies.pop(key, None)
        self._policies[key] = policy = self._decide(output, before)
        self._limit(self._policies)
        return policy

    def conditions(self, acceptance: Acceptance, samples: bool, fared: float) -> Conditions:
        """What forecasts depend on now, where so many times as many draft tokens are accepted."""
        return Conditions(
            [min(CERTAIN, fared * chance) for chance in acceptance.chances()],
            self.outputs,
            self.target.cost,
            self.drafter.cost if self.drafter.known else self.rounds.cost,
            max(1, len(self._outputs)),  # as its cost is fitted: what others have it do is in the cost
            self.target_trip.value,
            self.drafter_trip.value,
            acceptance.tokens_each,
            samples,
            self.rounds.cost if self.rounds.known else None,
        )

    def _decide(self, output: "OutputController", before: Policy | None) -> Policy:
        given, limits = output.conditions, output.limits
        policy = self._usual(given, output, before)
        rounds_tried, worth = self._worth_trying(given, limits, policy)
        self._due, now = self._trial_due(policy, worth), self._emitted
        if self._under_way is None and now >= self._due:
            mode = Mode.of(worth[0].choice)
            self._trial = Trial(mode, self._load, TRIAL * self.outputs, now + TRIALS * TRIAL * self.outputs)
            self._tried_at[self._load], self._due = now, inf
        trial = self._under_way
        if trial is None:  # when all use a new mode, and what it has brought weighs as much as the forecast
            looked_at = policy.until + LONG_RUN * self.outputs if policy.until > now else inf
            return replace(policy, due=min(self._due, looked_at))
        tried = policy.rated[Mode.PLAIN] if trial.mode is Mode.PLAIN else rounds_tried
        rated = {**policy.rated, Mode.of(tried.choice): tried}
        return replace(policy, best=tried, rated=rated, until=trial.until, trial=trial)

    def _worth_trying(self, given: Conditions, limits: Limits, policy: Policy) -> tuple[Rated, Sequence[Rated]]:
        """Short rounds; and which of these and plain decoding might be faster than what all do, the least seen first.

        What overlapped drafting costs is seen whenever one output tries it beside others' plain decoding.
        """
        cheap = given if self.rounds.known else replace(given, drafter=given.drafter.part(PROMISING))
        short = replace(limits, max_draft_tokens=max(limits.min_draft_tokens or 1, min(FIRST, limits.max_draft_tokens)))
        choices = [*rounds(cheap, short), *trees(cheap, short)]
        trial = self._under_way
        promised = self._best(cheap, [one for one in choices if trial and Mode.of(one) is trial.mode] or choices)
        tried, plain = self._rated(given, promised.choice), policy.rated[Mode.PLAIN]
        hopes = ((promised.forecast.speed, tried), (PROMISING * plain.speed, plain))
        used, least = Mode.of(policy.best.choice), MARGIN * policy.best.speed
        worth = [one for hoped, one in hopes if hoped > least and Mode.of(one.choice) is not used]
        return tried, sorted(worth, key=lambda one: self._share(Mode.of(one.choice)).seen)

    def _trial_due(self, policy: Policy, worth: Sequence[Rated]) -> float:
        """Tokens of all outputs at which the first of these is tried."""
        before = self._tried_at.setdefault(self._load, self._emitted)
        if not worth:
            return inf
        unknown = not self.rounds.known and not worth[0].choice.overlap
        lost = TRIAL * max(LEAST_LOST, policy.best.speed / worth[0].speed - 1)
        return before + lost / (FIRST_BUDGET if unknown else BUDGET) * self.outputs

    def _usual(self, given: Conditions, output: "OutputController", before: Policy | None) -> Policy:
        """By the forecasts, corrected by what their modes have brought."""
        rated = self._modes(given, output.limits)
        best = max(rated.values(), key=lambda one: one.speed)
        if best.speed < MARGIN * rated[Mode.PLAIN].speed:
            best = rated[Mode.PLAIN]
        until = self._emitted + self.trusted
        if before is not None:
            stays = rated[Mode.of(before.best.choice)]
            least = MARGIN if self._emitted > before.until else FAR
            if best is stays or (best is not rated[Mode.PLAIN] and best.speed < least * stays.speed):
                best, until = stays, before.until
        return Policy(best, rated, given, output.acceptance.chances(), self._seen, until)

    def _modes(self, given: Conditions, limits: Limits) -> dict[Mode, Rated]:
        """The best choice of each mode."""
        rated = {Mode.PLAIN: self._rated(given, PLAIN), Mode.LOCK_STEP: self._best(given, rounds(given, limits))}
        if found := [*trees(given, limits)]:
            rated[Mode.TREES] = self._best(given, found)
        if not limits.rounds_only:
            widest = self._best(given, overlapped(given, limits, [limits.max_draft_tokens], (0, *SIZES)))
            rated[Mode.OVERLAPPED] = self._best(
                given, overlapped(given, limits, limits.sizes, [widest.choice.min_draft_tokens])
            )
        if not (limits.rounds_only or limits.min_draft_tokens):
            rated[Mode.HURRIED] = self._best(given, overlapped(given, limits, limits.sizes, [None]))
        return rated

    def _rated(self, given: Conditions, choice: Choice) -> Rated:
        expected = forecast(given, choice)
        usual = self._drafting_brought if choice.drafts else 1.0
        return Rated(choice, expected, expected.speed * self._share(Mode.of(choice)).mean(usual, self.trusted))

    @property
    def _drafting_brought(self) -> float:
        """Of what was forecast of any drafting: where one mode disappoints, such as where all services share few
        processors, the others will; and where plain decoding does, drafting will too."""
        shares = [self._share(mode) for mode in Mode if mode is not Mode.PLAIN]
        held, seen = sum(share.held for share in shares), sum(share.seen for share in shares)
        plain = self._share(Mode.PLAIN).mean(1.0, self.trusted)
        return min(1.0, plain, (held + plain * self.trusted) / (seen + self.trusted))

    def _best(self, given: Conditions, choices: Iterable[Choice]) -> Rated:
        return max((self._rated(given, choice) for choice in choices), key=lambda one: one.forecast.speed)


class OutputController:
    """Decides how the epochs of one output are run, as a part of its target's controller."""

    waits_for_drafter = False

    def __init__(self, target: TargetController, kind: Kind, limits: Limits, acceptance: Acceptance) -> None:
        self.target, self.kind, self.limits, self.acceptance = target, kind, limits, acceptance
        self._there = True
        self._why = ""  # the drafter could not go on, the last time that it could not
        self._aside = 0  # tokens until it asks a drafter again that could not go on with its text
        self._drafted = 0  # draft tokens of the running epoch
        self._running = PLAIN
        self._mode: Mode | None = None  # of the running epoch; None: it is the first
        self._behind = 0.0  # tokens drawn by the target itself that the draft has not caught up with
        self._in_run = False  # the latest pass was the target's own
        self.fared = Fared()
        self._policy: Policy | None = None  # that the running epoch follows
        self.latest: Policy | None = None  # that any epoch followed
        self._since = 0.0  # seconds: when the running epoch began
        self._tokens = 0  # that it has emitted
        self._whole = False  # ... and all of them under its choice
        self._run = 1  # tokens of the latest plain run
        self._drafting = 1  # outputs that shared the drafter when it was asked, or answered last

    @property
    def usable(self) -> bool:
        """Whether it has a drafter that can go on with its text."""
        return self._there and not self._aside

    @property
    def settled(self) -> bool:
        """Whether it drafts as its policy says: what it finds out is of its own text."""
        return self._policy is not None and self._running.drafts

    def observe(self, seen: Observation, now: float) -> None:
        """Learn from an observation; `now` in seconds of the session's clock."""
        match seen:
            case PassSeen():
                self._in_run = not seen.asked
                self.target.passed(seen, self)
            case DraftSeen():
                self._drafted += seen.draft_tokens
                self._aside, self._why = self._pause if seen.aside else 0, seen.aside
                if not self.limits.copies:  # which often find nothing
                    self.target.empty = 0 if seen.draft_tokens else self.target.empty + 1
                self.target.drafted(seen, 0 if self._running.overlap else self._running.width, self._drafting)
                self._drafting = self.target.drafting
            case Judged():
                self._judged(seen)
            case StallSeen(seconds):
                self.target.drafter_trip.add(max(seconds, self.target.drafter_trip.value))
            case DrafterSeen(there):
                self._there = there
                if not there:
                    self._leave(now)
            case Started():  # of many that come at once the first is to know of the others
                self.target.begun(self, Mode.PLAIN)
            case Ended():
                self._compare(now)
                self.target.ended(self)

    @property
    def _pause(self) -> int:
        """Tokens until a drafter is asked again that stands aside; one that copies soon finds something."""
        step = self.target.target.cost.seconds(self.target.outputs)
        if not (self.limits.copies and step):
            return EXPLORED
        return 0 if self._drafted else min(EXPLORED, round(self.target.drafter_trip.value / step / ASKING))

    def _judged(self, seen: Judged) -> None:
        """While the draft is behind, its tokens are compared with the target's own; the others were judged."""
        self._tokens += seen.tokens
        self._aside -= min(self._aside, seen.tokens)
        worth = self.acceptance.tokens_each
        compared = 0
        while self._behind > 0 and compared < seen.accepted:
            compared += 1
            self._behind = max(0.0, self._behind - worth)
        judged, match = seen.accepted - compared, seen.refused and self._behind > 0
        if compared or match:
            self.acceptance.compare(compared, match, 1.0 if self.limits.samples else MATCHES)
        if judged or (seen.refused and not match):
            refused = seen.refused and not match
            first = seen.first + compared
            self.acceptance.add(first, judged, refused)
            if self.latest:
                usual, places = self.latest.usual, range(first, first + judged + refused)
                self.fared.add(judged, [usual[min(place, len(usual) - 1)] for place in places])
            if judged:
                self.acceptance.worth.add(max(0, seen.tokens - seen.settled - refused), judged)
        drafting = self._running.drafts and not self._in_run  # what follows a run is chosen before its end
        self._behind = 0.0 if seen.refused else self._behind + seen.settled * drafting

    @property
    def conditions(self) -> Conditions:
        """What forecasts for this output depend on now."""
        return self.target.conditions(self.acceptance, self.limits.samples, self.fared.factor)

    def explain(self) -> Sequence[str]:
        """What was decided from last, as lines of text: costs, and what each number of draft tokens brings."""
        return explanation(self.conditions, self.latest)

    def choose(self, now: float) -> Choice:
        """How the next epoch is run."""
        rest = self._running.run if self._in_run else 0  # tokens, at most, until a run is over and the drafter is asked
        choice = self.review(now)
        self._behind, self._drafted = 0.0, 0
        if choice.drafts:
            self.target.asked(self, now + rest * self.target.target.cost.seconds(self.target.outputs))
            self._drafting = self.target.drafting
        return choice

    def wants_drafter(self, now: float) -> bool:
        """Whether its next choice may be to draft; what was decoded since the last time is counted as plain."""
        self._compare(now)
        policy = self.target.policy(self, now)
        self.latest = policy or self.latest
        decoding = self._tokens > 0  # the prompt comes first, which says nothing of what follows
        self._policy = policy if decoding else None
        self._since, self._tokens, self._mode, self._whole = now, 0, Mode.PLAIN, True
        if policy is None:  # what one finds out is enough to know whether the others want one
            return self.target.measures(self)
        return policy.best.choice.drafts or (decoding and not self.target.may_try() and self.target.measures(self))

    def review(self, now: float) -> Choice:
        """How the running epoch goes on."""
        self._compare(now)
        choice = self._choice(now)
        self._since, self._tokens, self._mode = now, 0, Mode.of(choice)
        self._whole = not (self._in_run and choice.drafts)  # else the rest of a run comes first
        self.target.begun(self, self._mode)
        if choice.drafts:
            self._run = 1
        else:
            self.target.stopped(self, now)
            self._run = LONG_RUN if self._policy else min(LONG_RUN, 2 * self._run)  # short ones wait for round trips
            choice = replace(choice, run=min(self._run, self.target.longest_run()))
        self._running = choice
        return choice

    def _leave(self, now: float) -> None:
        """Without its drafter the target goes on by itself, whatever the choice was."""
        self._compare(now)
        self._policy, self._mode, self._tokens = None, None, 0
        self._running = PLAIN
        self.target.begun(self, Mode.PLAIN)
        self.target.waits_no_more(self)

    def _compare(self, now: float) -> None:
        """Compare the epoch that is over with its forecast."""
        self.target.emitted(self._tokens)
        if self._policy and self._mode and self._tokens and self._whole:
            expected = (now - self._since) * self._policy.rated[self._mode].forecast.speed
            self.target.brought(self._mode, self._tokens, min(expected, OUTLIER * self._tokens))

    def _choice(self, now: float) -> Choice:
        target = self.target
        if self._aside:
            self._policy = None
            return replace(PLAIN, reason=ASIDE.format(self._why))
        self._policy = policy = target.policy(self, now)
        self.latest = policy or self.latest
        silent = target.silent(now)
        if policy is None and not silent:
            if target.measures(self):
                return self._first("measuring the drafter")
            return replace(PLAIN, reason="another output is measuring the drafter")
        if policy is not None and policy.best.choice.drafts and not silent:
            return replace(policy.best.choice, reason=policy.reason)
        tries = policy is None or policy.trial is None
        if tries and not target.may_try() and target.measures(self):
            target.tried()
            self._policy = None
            return self._first("trying a drafter that does not pay")
        reason = "the drafter does not answer" if policy is None or silent else policy.reason
        return replace(PLAIN, reason=reason)

    def _first(self, reason: str) -> Choice:
        """Draft tokens beside passes that do not wait for them: it costs next to nothing with any drafter."""
        window = min(FIRST, self.limits.max_draft_tokens)
        if self.limits.rounds_only:
            size = self.limits.max_draft_tokens if self.limits.copies else min(2, window)
            return Choice(size, size, overlap=False, patience=FIRST_PATIENCE, reason=reason)
        return Choice(window, patience=0.0, review_after=REVIEWED, reason=reason)


class PlainController:
    """Of an output that never drafts: the others learn from its passes, and that it is in theirs."""

    waits_for_drafter = False

    def __init__(self, target: TargetController) -> None:
        self._target = target

    def observe(self, seen: Observation, now: float) -> None:
        match seen:
            case PassSeen():
                self._target.passed(seen, self)
            case Judged():
                self._target.emitted(seen.tokens)
            case Started() | Ended():
                self._target.undrafted(self, isinstance(seen, Started))

    def choose(self, now: float) -> Choice:
        return PLAIN

    def review(self, now: float) -> Choice:
        return PLAIN

    def wants_drafter(self, now: float) -> bool:
        return False
