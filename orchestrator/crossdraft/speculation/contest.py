"""Which arm is used, and which of several drafters: what each has brought, trials of others, and what these may cost.

An account bounds the loss. It begins with CREDIT tokens of each output and earns EARNED of what is emitted. What a
round with a drafter loses beside no drafter, as that was measured, is taken from it, and what it wins is added, up to
CREDIT; a trial is charged with what it loses beside the arm that it interrupts. While nothing is in it no drafter is
used. So EARNED of all tokens and CREDIT of each output are lost at most, and what the round that empties it lost more:
of that no more than CREDIT is earned again, else an outage of minutes kept drafters away for hours.

A round that takes STALL times as long as expected is nobody's, as a capture, a garbage collection or a first use is:
it counts as one that took as long as expected. EXCUSES rounds are so excused, and one in PER_EXCUSE further ones.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from crossdraft.speculation.arms import Round
from crossdraft.speculation.choice import Choice

CREDIT = 60.0  # tokens of each output: two arms are tried in the first hundred
EARNED = 0.02  # of the tokens emitted
LEAST = 3.0  # tokens that a trial may lose at least: until all outputs have begun it shows nothing
PART = 1 / 3  # of the account that a trial may lose: a first one that fails leaves enough for four more
STALL, EXCUSES, PER_EXCUSE = 4.0, 8.0, 100.0  # as above; the first uses of an accelerator's shapes are about as many
WINDOW = 6  # rounds of one output: their time is then known within a few hundredths
MARGIN = 1.04  # times as fast as the usual arm that another one must be: less is not told from noise
HOPE = 0.2  # of its speed, that an arm may be faster than thought before a window of it was seen
GUESS = 0.5  # windows that a guess weighs beside what was measured
KEPT = 0.95  # of its evidence that an arm keeps with a window of its own, and with five of another: 20 windows weigh


@dataclass
class Account:
    """What may be lost, in tokens of each output, and how many stalls are excused."""

    credit: float = CREDIT
    spare: float = (
        0.0  # tokens that drafting has won lately, up to a quarter of CREDIT: what it loses is taken from them first
    )
    excuses: float = EXCUSES

    @property
    def pays(self) -> bool:
        """Whether drafting may go on."""
        return self.credit > 0 or self.spare > 0

    def add(self, tokens: float) -> None:
        self.credit = max(-CREDIT, min(CREDIT, self.credit + tokens))

    def compare(self, won: float) -> None:
        """Drafting has won so many tokens beside no drafter, or lost them."""
        self.spare = min(CREDIT / 4, self.spare + won)
        self.add(min(0.0, self.spare))
        self.spare = max(0.0, self.spare)

    def excused(self, stalled: bool) -> bool:
        """Whether the round that is over is a stall that does not count."""
        self.excuses = min(EXCUSES, self.excuses + 1 / PER_EXCUSE)
        excused = stalled and self.excuses >= 1
        self.excuses -= excused
        return excused


@dataclass
class Record:
    """What an arm has brought, over windows of rounds."""

    windows: float = 0.0  # that count
    slower: float = 0.0  # sum over windows: the seconds of a round beside those expected
    tokens: float = 0.0
    expected: float = 0.0  # tokens
    seconds: float = 0.0  # of all outputs, that these tokens took

    def keep(self, part: float) -> None:
        self.windows, self.slower, self.seconds = part * self.windows, part * self.slower, part * self.seconds
        self.tokens, self.expected = part * self.tokens, part * self.expected


Guesses = Mapping[Choice, Round]


class Contest:
    """The arms at one load. `usual` is what all use but while `trial` is set; guesses are what is expected by now."""

    def __init__(self, account: Account, arms: Sequence[Choice], like: "Contest | None" = None) -> None:
        self.account, self.usual = account, arms[0]
        self.trial: Choice | None = None
        self.records = {arm: Record() for arm in arms}
        for arm, seen in like.records.items() if like is not None else ():  # another load is a better guess than none
            if arm.drafts and seen.windows:
                self.records[arm] = Record(seen.windows, seen.slower, seen.tokens, seen.expected)
                self.records[arm].keep(min(1.0, GUESS / seen.windows))
        self._rounds = 0  # of the window that count
        self._tried = 0  # since the trial began, whether they count or not
        self._floor = 0.0  # of the account, with which the trial ends

    @property
    def current(self) -> Choice:
        return self.trial or self.usual

    def speeds(self, guesses: Guesses) -> dict[Choice, float]:
        """Tokens a second of each output, as far as they were measured.

        Where a way of drafting disappoints, as where services share few processors, those like it are expected to. No
        drafter is as fast as it was when it was measured, whatever passes take that share a processor with drafts.
        """
        found = {}
        for arm, guess in guesses.items():
            one, slower = self.records.get(arm, Record()), 1.0
            if arm.drafts:
                alike = [of for other, of in self.records.items() if other.drafts and other.overlap == arm.overlap]
                slower = (1 + sum(of.slower for of in alike)) / (1 + sum(of.windows for of in alike))
            lasts = guess.seconds * (one.slower + GUESS * slower) / (one.windows + GUESS)
            luck = GUESS * WINDOW * guess.tokens
            if not arm.drafts and one.seconds:
                found[arm] = (one.tokens + luck) / (one.seconds + GUESS * WINDOW * guess.seconds)
                continue
            found[arm] = guess.tokens * (one.tokens + luck) / (one.expected + luck) / max(lasts, 1e-9)
        return found

    def hope(self, speeds: Mapping[Choice, float]) -> dict[Choice, float]:
        """What the speeds may be."""
        return {arm: speed * (1 + HOPE / (1 + self.records[arm].windows)) for arm, speed in speeds.items()}

    def add(self, seconds: float, tokens: float, pure: bool, guesses: Guesses, outputs: int) -> None:
        """A round of all outputs: how long it took, and what it brought to each.

        Args:
            pure: all outputs used `current`, and had begun to before the round.
        """
        arm, guess, account = self.current, guesses[self.current], self.account
        speeds, part = self.speeds(guesses), min(2.0, outputs**0.5) / WINDOW
        plain = next((speeds[one] for one in speeds if not one.drafts), 0.0)
        if arm.drafts and account.excused(seconds > STALL * guess.seconds):
            seconds = guess.seconds
        account.add(EARNED * tokens)
        if self.trial is not None:
            account.add(tokens - seconds * max(plain, speeds[self.usual]))
        elif arm.drafts:
            account.compare(tokens - seconds * plain)
            if not account.spare:  # it loses what it has won: what it brought before says little
                self.records[arm].keep(min(1.0, 1.0 / max(self.records[arm].windows, 1e-9)))
        self._tried += 1
        if pure:
            self._rounds += 1
            for other, record in self.records.items():
                record.keep(KEPT ** (part if other == arm else 0.2 * part if other.drafts else 0.0))
            record = self.records[arm]
            record.windows += part
            record.slower += part * seconds / max(guess.seconds, 1e-9)
            record.tokens, record.expected = record.tokens + outputs * tokens, record.expected + outputs * guess.tokens
            record.seconds += outputs * seconds
        window = max(3, WINDOW - outputs.bit_length() + 1) if arm.drafts else 3
        hopeless = self.trial is not None and self._tried > 1 and self.hope(speeds)[arm] < speeds[self.usual]
        spent = account.credit <= self._floor if self.trial is not None else not account.pays
        if hopeless or (arm.drafts and spent) or self._rounds >= window:
            self._decide(guesses, window)

    def interrupt(self) -> None:
        """What has changed makes the running window worthless."""
        self._rounds = 0

    def end_trial(self) -> None:
        self.trial, self._rounds, self._floor = None, 0, 0.0

    def _decide(self, guesses: Guesses, window: int) -> None:
        """Which arm is usual from now on, of the one that was used and no drafter, and whether another one is tried."""
        speeds, used, free = self.speeds(guesses), self.current, self.account.credit - CREDIT / 2
        self.end_trial()
        plain = next((one for one in speeds if not one.drafts), self.usual)
        for arm, margin in ((used, MARGIN), (plain, 1.0)):
            if speeds[arm] > margin * speeds[self.usual] and self.records[arm].windows:
                self.usual = arm
        if not self.account.pays:
            self.usual = plain
        hope = self.hope(speeds)
        tried = max((arm for arm in guesses if arm != self.usual), key=lambda arm: hope[arm], default=self.usual)
        lost = window * guesses[tried].seconds * max(0.0, speeds[self.usual] - speeds[tried])
        may, known = max(LEAST, PART * free), self.records[plain].windows or plain.drafts
        if known and free > LEAST and lost < may and hope[tried] > MARGIN * speeds[self.usual]:
            self.trial, self._tried, self._floor = tried, 0, self.account.credit - may


# Of the drafters that can serve an output, the default one first: how many times as fast as without a drafter its
# outputs were; 0: nothing was seen.
Gains = Mapping[str, float]


class DrafterChoice:
    """Which of several drafters of one model a new output gets.

    The one whose outputs are the fastest, by what its own controller has measured at this load. The others are tried
    in turn, with one output at a time, as far as an account can pay for it; what an output has lost beside the fastest
    drafter is taken from it. Beside no drafter each controller bounds the loss by itself.
    """

    def __init__(self) -> None:
        self._account = Account()
        self.latest = ""  # what the latest kind of request usually gets
        self._usual: dict[Hashable, str] = {}  # by kind of request
        self._turns: dict[str, bool] = {}  # the one that was tried last is the last; whether an output is trying it

    def usual(self, kind: Hashable, gains: Gains) -> str:
        """The fastest; until one was seen, and where they are as fast, the one before, and at first the default one."""
        usual, best = self._usual.get(kind, ""), max(gains, key=lambda name: gains[name])
        usual = usual if usual in gains else next(iter(gains))
        self.latest = self._usual[kind] = best if gains[best] > MARGIN * gains[usual] else usual
        return self.latest

    def begun(self, kind: Hashable, gains: Gains) -> tuple[str, bool]:
        """The drafter of a new output, of at least one; and whether this is a trial of it."""
        usual = self.usual(kind, gains)
        for name in gains:
            self._turns.setdefault(name, False)
        for name, busy in self._turns.items() if gains[usual] else ():
            may = name in gains and name != usual and not busy
            if may and (
                gains[name] >= gains[usual] or self._account.credit > CREDIT * _lost(gains[name], gains[usual])
            ):
                del self._turns[name]
                self._turns[name] = True
                return name, True
        return usual, False

    def ended(self, kind: Hashable, name: str, trial: bool, tokens: int, gains: Gains) -> None:
        """An output that began so has emitted so many tokens."""
        lost = _lost(gains[name], gains[self.usual(kind, gains)]) if trial and name in gains else 0.0
        if trial:
            self._turns[name] = False
        self._account.add((EARNED - lost) * tokens)


def _lost(gain: float, usual: float) -> float:
    """Of each token; nothing is known to be lost with a drafter that was not seen."""
    return max(0.0, 1 - gain / usual) if gain else 0.0
