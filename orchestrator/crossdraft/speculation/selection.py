"""Which arm is used: what each has brought, trials of others, and what these may cost.

A budget bounds the loss. It begins with CREDIT tokens of each output and earns EARNED of what is emitted. What a
round with a drafter loses beside no drafter, as that was measured (at a load that is new: as it is expected), is taken
from it, after what drafting has won lately; a trial is charged with what it loses beside the arm that it interrupts.
While nothing is in it no drafter is used. So at most EARNED of all tokens and CREDIT of each output are lost, and what
the round that empties the budget overdraws it by. No more than CREDIT of that is owed: else an outage of minutes would
keep drafters away for hours.

A round that takes STALL times as long as expected is nobody's, as a capture, a garbage collection or a first use is:
it does not count. EXCUSES rounds are so excused, and EARNED of further ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossdraft.speculation.choice import Choice
from crossdraft.speculation.estimates import Round

CREDIT = 60.0  # tokens of each output: two arms are tried in the first hundred
EARNED = 0.02  # of the tokens emitted
STALL, EXCUSES = 4.0, 8.0  # as above; the first uses of an accelerator's shapes are about as many
WINDOW = 6  # rounds of one output that are compared at once, behind a first one to get in step: 4 took noise for gains
TOGETHER = 2.0  # rounds of one output that a round of several tells as much as, at most: their noise is averaged
KEPT = 0.95  # of its evidence that an arm keeps with a window of its own, and with five of another: 20 windows weigh
MARGIN = 1.04  # times as fast as the usual arm that another one must be: less is not told from noise
HOPE = 0.2  # of its speed, that an arm may be faster than thought before a window was seen
GUESS = 0.5  # windows that a guess of an arm's speed weighs beside what was measured


@dataclass
class LossBudget:
    """What may be lost, in tokens of each output, and how many stalls are excused."""

    credit: float = CREDIT
    spare: float = 0.0  # tokens that drafting has won lately, up to a quarter of CREDIT
    excuses: float = EXCUSES

    @property
    def pays(self) -> bool:
        """Whether drafting may go on."""
        return self.credit > 0 or self.spare > 0

    def add(self, tokens: float) -> None:
        self.credit = max(-CREDIT, min(CREDIT, self.credit + tokens))

    def compare(self, won: float) -> None:
        """Drafting has won so many tokens beside no drafter, or lost them."""
        self.add(min(0.0, self.spare + won))
        self.spare = min(CREDIT / 4, max(0.0, self.spare + won))

    def excused(self, stalled: bool) -> bool:
        """Whether the round that is over is a stall that does not count."""
        excused = stalled and self.excuses >= 1
        self.excuses = min(EXCUSES, self.excuses + EARNED / 2) - excused
        return excused


@dataclass
class Record:
    """What an arm has brought, over windows of rounds."""

    windows: float = 0.0  # that count
    seconds: float = 0.0  # of a round, summed over windows
    due: float = 0.0  # ... that its tokens should have taken; of no drafter the tokens

    @property
    def ratio(self) -> float:
        return self.due / self.seconds if self.seconds else 0.0

    def keep(self, part: float) -> None:
        self.windows, self.seconds, self.due = part * self.windows, part * self.seconds, part * self.due

    def mean(self, prior: float) -> float:
        """The ratio, with a guess."""
        return (self.ratio * self.windows + GUESS * prior) / (self.windows + GUESS)


Guesses = Mapping[Choice, Round]


class ArmSelection:
    """The arms at one load. `usual` is what all use but while `trial` is set; guesses are what is expected by now."""

    def __init__(self, budget: LossBudget, plain: Choice) -> None:
        self.budget, self.plain, self.usual = budget, plain, plain
        self.trial: Choice | None = None
        self._paused: Choice | None = None  # a trial, while another load's selection is used
        self.records: dict[Choice, Record] = {}
        self._trails = False  # no drafter is used, but what is left of drafts may take time
        self._rounds = 0.0  # of one output, that the window has as much as
        self._new = False  # the arm in use is, so that outputs are not in step yet
        self._floor = 0.0  # of the budget, with which the trial ends

    @property
    def current(self) -> Choice:
        return self.trial or self.usual

    def seen(self, arm: Choice) -> float:
        """Windows of an arm that count."""
        return self.records[arm].windows if arm in self.records else 0.0

    def speed(self, arm: Choice, guess: Round) -> float:
        """Tokens a second of each output, as far as they were measured.

        Where drafting disappoints, as where services share few processors, arms that were not seen are expected to. No
        drafter is as fast as it was when it was measured, whatever passes take that share a processor with drafts.
        """
        speed, record = guess.tokens / max(guess.seconds, 1e-9), self.records.get(arm, Record())
        if not arm.drafts:
            return record.mean(max(speed, record.ratio))
        drafting = [one for other, one in self.records.items() if other.drafts]
        lent = (1 + sum(one.ratio * one.windows for one in drafting)) / (1 + sum(one.windows for one in drafting))
        return speed * record.mean(lent)

    def speeds(self, guesses: Guesses) -> dict[Choice, float]:
        """Of all arms."""
        return {arm: self.speed(arm, guess) for arm, guess in guesses.items()}

    def hope(self, speeds: Mapping[Choice, float]) -> dict[Choice, float]:
        """What the speeds may be: up to twice what is thought of rounds, or of overlapped arms, while none was seen, as
        on one device those two slow each other's passes and steps down differently."""
        known = {arm.overlap for arm in self.records if arm.drafts}
        hopes = {arm: HOPE if arm.overlap in known or not arm.drafts else 1.0 for arm in speeds}
        return {arm: speed * (1 + hopes[arm] / (1 + self.seen(arm))) for arm, speed in speeds.items()}

    def add(self, seconds: float, tokens: float, weight: float, guesses: Guesses, outputs: int) -> bool:
        """A round of all outputs: how long it took, and what it brought to each. Returns whether to `decide` now.

        Args:
            weight: what it tells, up to 1; 0: not all outputs used `current`, or had begun to before the round.
            guesses: of `current`, `usual` and no drafter.
        """
        self._doubt(guesses)
        arm, guess = self.current, guesses[self.current]
        if arm.drafts and self.budget.excused(seconds > STALL * guess.seconds):
            return False
        self._charge(seconds, tokens, guesses)
        lost = self._lost
        if weight and self._new and arm.drafts and not lost:
            self._new = False
        elif (weight or lost) and (arm.drafts or not self._trails):
            part = (weight or 1.0) * min(TOGETHER, outputs**0.5)
            self._rounds += part
            self._count(arm, guess, seconds, tokens, part / WINDOW)
        over = lost or self._rounds >= (WINDOW if arm.drafts else WINDOW / 2)
        if self._paused is not None and not over:
            self._try(self._paused)
        return over

    def _doubt(self, guesses: Guesses) -> None:
        """Nearly forget what no drafter brought where passes are clearly faster now: beside drafts they are not."""
        record, guess = self.records.get(self.plain), guesses.get(self.plain)
        if record is not None and guess is not None and guess.tokens > (1 + HOPE) * record.ratio * guess.seconds:
            record.keep(min(1.0, GUESS / 4 / record.windows))

    def _charge(self, seconds: float, tokens: float, guesses: Guesses) -> None:
        """Take what a round has lost from the budget."""
        arm, budget = self.current, self.budget
        plain = self.speed(self.plain, guesses[self.plain]) if self.plain in guesses else 0.0
        # Drafts that were asked for may go on without a drafter in use: until it is as fast as before that costs, too.
        slow = self._trails and budget.pays and tokens < (1 - HOPE) * seconds * plain
        self._trails = arm.drafts or slow
        budget.add(EARNED * tokens)
        if self.trial is not None:
            budget.add(tokens - seconds * max(plain, self.speed(self.usual, guesses[self.usual])))
        elif self._trails:
            budget.compare(tokens - seconds * plain)
            if arm.drafts and not budget.spare and self.seen(arm) > 1:  # what it brought before says little now
                self.records[arm].keep(1 / self.seen(arm))

    @property
    def _allowance(self) -> float:
        """Tokens of each output that a trial may lose; with less than one it shows nothing."""
        return (self.budget.credit - CREDIT / 2) / 3

    @property
    def _lost(self) -> bool:
        """Whether the drafter, or the trial, has lost what it may before the window is over."""
        if self.trial is None:
            return self.usual.drafts and not self.budget.pays
        return self.trial.drafts and self.budget.credit <= self._floor

    def _count(self, arm: Choice, guess: Round, seconds: float, tokens: float, part: float) -> None:
        record = self.records.setdefault(arm, Record())
        for other, one in self.records.items():  # no drafter is seldom used where drafting pays
            one.keep(KEPT ** (part if other == arm else part / 5 * other.drafts))
        record.windows += part
        record.seconds += part * seconds
        if arm.drafts and not arm.overlap:  # acceptance is known from all rounds: that weighs as much as a window
            tokens += (guess.tokens - tokens) / (1 + record.windows)
        record.due += part * tokens * (guess.seconds / guess.tokens if arm.drafts else 1.0)
        self.records = {one: of for one, of in self.records.items() if one == arm or of.windows > GUESS / 10}

    def resume(self, arms: Sequence[Choice], usual: Choice) -> None:
        """All outputs use it from now on, with these arms. A trial goes on after a round, if outputs stay so long."""
        self.trial, self._paused, self._new = None, self.trial or self._paused, True
        if self._paused not in arms or self._allowance < 1:
            self.end_trial()
        self.usual = usual if usual in arms else self.plain

    def end_trial(self) -> None:
        self.trial = self._paused = None
        self._rounds, self._new = 0.0, True

    def _try(self, arm: Choice) -> None:
        self.trial, self._paused, self._new = arm, None, True
        self._floor = self.budget.credit - self._allowance

    def decide(self, guesses: Guesses) -> None:
        """Which arm is usual from now on, of the one that was used and no drafter, and whether another one is tried."""
        used, plain = self.current, self.plain if self.plain in guesses else self.usual
        self.end_trial()
        speeds = self.speeds({arm: guesses[arm] for arm in (used, plain, self.usual)})
        for arm, margin in ((used, MARGIN), (plain, 1.0)):
            if speeds[arm] > margin * speeds[self.usual] and self.seen(arm):
                self.usual = arm
        if not self.budget.pays:
            self.usual = plain
        known = self.seen(plain) or plain.drafts
        if self.usual.drafts and not known:
            self._try(plain)  # drafting began as at another load, and was charged by a guess
        elif known and self._allowance > 1:
            hope = self.hope(self.speeds(guesses))
            tried = max((arm for arm in guesses if arm != self.usual), key=lambda arm: hope[arm], default=self.usual)
            if hope[tried] > MARGIN * speeds[self.usual]:
                self._try(tried)
        self._new = self.current != used
