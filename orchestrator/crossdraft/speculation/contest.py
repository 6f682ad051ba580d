"""Which arm is used: what each has brought, trials of others, and the account that pays for them.

All that share a target use one arm. What it brings is seen in windows of a few rounds, in tokens a second beside what
was expected, so that what is learned holds when acceptance or costs change. An arm of which little was seen may be
better than it seems, and is tried for one window if the account can pay for it.

The account bounds the loss. It begins with CREDIT tokens of each output and earns EARNED of what is emitted; what
trials lose beside the usual arm is taken from it, and so is what the usual arm loses beside no drafter. While nothing
is in it no drafter is used. So about 2 % and 60 tokens of each output are lost beside no drafter as it was measured,
and a round more. Such a round may be an outage of minutes: its loss is earned again up to CREDIT tokens, so that
drafting rests for thousands of tokens only. Rounds that stall once and outputs that are decided for alone are not
charged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from crossdraft.speculation.arms import NO_DRAFTER, Arm, Round

CREDIT = 60.0  # tokens of each output: two arms are tried in the first hundred; a quarter is not for trials
EARNED = 0.02  # of the tokens emitted
FREE = 5  # trials after which a trial begins only when what the one before it has lost is earned again
LEAST = 2.0  # tokens that a trial may lose at least: two rounds show next to nothing
WINDOW = 6  # rounds of one output: their time is then known within a few hundredths
STALL = 4.0  # times as long as expected that a round takes which is nobody's: a capture, a garbage collection
MARGIN = 1.04  # times as fast as the usual arm that another one must be: less is not told from noise
HOPE = 0.3  # of its speed, that an arm may be faster than thought before a window of it was seen
GUESS = 0.5  # windows that a guess weighs beside what was measured
LUCK = 12.0  # tokens that the expected number weighs beside the emitted one
JUMP = 1.3  # times as slow, or as fast, as before that makes an arm's window count more than all before it
KEPT = 0.95  # of its evidence that an arm keeps with a window of its own, and with five of another: 20 windows weigh


@dataclass
class Account:
    """What may be lost, in tokens of each output."""

    credit: float = CREDIT
    behind: float = 0.0  # that the usual arm has lost beside no drafter; what it has won counts up to a quarter

    @property
    def pays(self) -> bool:
        """Whether the usual arm may go on."""
        return self.behind <= max(0.0, self.credit)

    def add(self, tokens: float) -> None:
        self.credit = max(-CREDIT, min(CREDIT, self.credit + tokens))

    def compare(self, lost: float) -> None:
        self.behind = max(-CREDIT / 4, self.behind + lost)

    def settle(self) -> None:
        """Another arm is usual from now on."""
        self.add(-max(0.0, self.behind))
        self.behind = 0.0


@dataclass
class Record:
    """What an arm has brought."""

    windows: float = 0.0  # that count
    slower: float = 0.0  # sum over windows: the seconds of a round beside those expected
    tokens: float = 0.0
    expected: float = 0.0  # tokens

    def kept(self, part: float) -> "Record":
        return Record(part * self.windows, part * self.slower, part * self.tokens, part * self.expected)


Guesses = Mapping[Arm, Round]


@dataclass
class Contest:
    """The arms at one load. `usual` is what all use but while `trial` is set; guesses are what is expected by now."""

    account: Account
    records: dict[Arm, Record] = field(default_factory=dict)
    usual: Arm = NO_DRAFTER
    trial: Arm | None = None
    _rounds: list[tuple[float, float, float]] = field(default_factory=list)  # seconds, tokens, seconds as expected
    _tried: int = 0  # rounds since the trial began
    _least: float = 0.0  # of the account, with which the trial ends
    _began: float = 0.0  # the account when the trial began
    _trials: int = 0  # begun; only after FREE of them is anything owed
    _owed: float = 0.0  # tokens that the latest trial has lost, and that are to be earned again before the next one
    _stalled: bool = False  # the latest round

    @property
    def current(self) -> Arm:
        return self.trial or self.usual

    def at_another_load(self) -> "Contest":
        """One that begins with what this one has seen: a better guess than none. No drafter is measured anew."""
        seen = {arm: one for arm, one in self.records.items() if arm.depth and one.windows}
        return Contest(self.account, {arm: one.kept(min(1.0, GUESS / one.windows)) for arm, one in seen.items()})

    def windows(self, arm: Arm) -> float:
        return self.records[arm].windows if arm in self.records else 0.0

    def speed(self, arm: Arm, guesses: Guesses) -> float:
        """Tokens a second of each output, as far as they were measured."""
        record, slower = self.records.get(arm, Record()), 1.0
        if (
            arm.depth
        ):  # where one way of drafting disappoints, as where services share few processors, those like it will
            alike = [one for other, one in self.records.items() if other.depth and other.overlap == arm.overlap]
            slower = (1 + sum(one.slower for one in alike)) / (1 + sum(one.windows for one in alike))
        lasts = (record.slower + GUESS * slower) / (record.windows + GUESS)
        return guesses[arm].speed * (record.tokens + LUCK) / (record.expected + LUCK) / lasts

    def hope(self, arm: Arm, guesses: Guesses) -> float:
        """What the speed may be."""
        return self.speed(arm, guesses) * (1 + HOPE / (1 + self.windows(arm)))

    def add(self, seconds: float, tokens: float, pure: bool, guesses: Guesses, outputs: int) -> None:
        """A round of all outputs: how long it took, and what it brought to each.

        Args:
            pure: all outputs used `current`, and had begun to before the round.
        """
        arm, guess, account = self.current, guesses[self.current], self.account
        plain = self.speed(NO_DRAFTER, guesses) if NO_DRAFTER in guesses else 0.0
        stalled, before = seconds > STALL * guess.seconds, self._stalled
        counted, self._stalled = (guess.seconds if stalled and not before else seconds), stalled
        if self.trial is not None:
            self._tried += 1
            account.add(tokens - counted * max(plain, self.speed(self.usual, guesses)))
        else:
            account.add(EARNED * tokens)
            self._owed -= EARNED * tokens
            account.compare(counted * plain - tokens if arm.depth else 0.0)
        if pure:
            self._rounds.append((seconds, tokens, guess.seconds))
        window = max(3, WINDOW - outputs.bit_length() + 1)
        if self._given_up(guesses) or len(self._rounds) >= (window if arm.depth else 3):
            self._close(arm, guess, outputs)
            self._decide(guesses, window, arm)

    def interrupt(self) -> None:
        """What has changed meanwhile makes the running window worthless."""
        self._rounds.clear()
        self._owed = 0.0

    def end_trial(self) -> None:
        self.trial = None
        self._rounds.clear()

    def _given_up(self, guesses: Guesses) -> bool:
        if self.trial is None:
            return not self.account.pays
        hopeless = self._tried > 1 and self.hope(self.trial, guesses) < self.speed(self.usual, guesses)
        return hopeless or self.account.credit < self._least

    def _close(self, arm: Arm, guess: Round, outputs: int) -> None:
        """The window is over: its stalls do not count, unless they are many."""
        rounds, self._rounds = self._rounds, []
        kept = [one for one in rounds if one[0] <= STALL * one[2]]
        kept = kept if 3 * len(kept) >= 2 * len(rounds) else rounds
        if len(kept) < 2:
            return
        self.records = {other: one.kept(KEPT if other == arm else KEPT**0.2) for other, one in self.records.items()}
        record, slower = self.records.get(arm, Record()), sum(one[0] for one in kept) / sum(one[2] for one in kept)
        if record.windows and not 1 / JUMP < slower * record.windows / record.slower < JUMP:
            record = record.kept(min(1.0, GUESS / record.windows))
        self.records[arm] = record
        part = min(1.0, len(kept) / WINDOW * outputs**0.5)
        record.windows += part
        record.slower += part * slower
        record.tokens += outputs * sum(one[1] for one in kept)
        record.expected += outputs * len(kept) * guess.tokens

    def _decide(self, guesses: Guesses, window: int, used: Arm) -> None:
        """Which arm is usual from now on, and whether another one is tried. After no drafter one has to be tried."""
        if self.trial is not None:
            self._owed = max(0.0, self._began - self.account.credit)
        self.end_trial()
        account, before = self.account, self.usual
        seen = [
            arm for arm in guesses if self.windows(arm) and (before.depth or not self._trials or arm in (before, used))
        ]
        best = max(seen, key=lambda arm: self.speed(arm, guesses), default=before)
        if NO_DRAFTER in guesses and (not account.pays or (account.credit <= 0 and not before.depth)):
            best = self.usual = NO_DRAFTER
        if self.speed(best, guesses) > (MARGIN if best.depth else 1.0) * self.speed(before, guesses):
            self.usual = best
        if self.usual != before:
            account.settle()
        if NO_DRAFTER in guesses and NO_DRAFTER not in self.records:
            return
        usual, others = self.speed(self.usual, guesses), [arm for arm in guesses if arm != self.usual]
        tried = max(others, key=lambda arm: self.hope(arm, guesses), default=self.usual)
        lost = window * guesses[tried].seconds * max(0.0, usual - self.speed(tried, guesses))
        free = account.credit - CREDIT / 4
        may = free > max(LEAST, lost) and (self._trials < FREE or self._owed <= 0)
        if may and self.hope(tried, guesses) > MARGIN * usual:
            self.trial, self._tried, self._least = tried, 0, account.credit - max(LEAST, free / 3)
            self._began, self._trials = account.credit, self._trials + 1
