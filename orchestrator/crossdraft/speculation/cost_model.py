"""The expected speed of a choice, computed without randomness.

With given durations, an epoch in which nothing has been refused so far is deterministic. Following it once, with the
probability that it still goes on, gives every way that it can end. Epochs differ only in how they begin (adopted draft
tokens, remaining time of the pass under way), so they form a Markov renewal process, and the speed is the mean of
tokens over the mean of time under its stationary distribution (renewal-reward theorem).
"""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from crossdraft.speculation.choice import Choice, Workload

LONG = 0.1  # share of a pass above which the rest of a drafter's forward at a refusal is estimated, not half of it


@dataclass(frozen=True)
class Forecast:
    """What is expected of a choice."""

    speed: float  # tokens a second
    idle: float  # share of the time in which the target has no pass
    passes_per_token: float


def forecast(workload: Workload, choice: Choice) -> Forecast:
    """The expected long-run speed of one target with this choice; `speculate` is ignored."""
    if not choice.drafts or workload.token == float("inf"):
        return Forecast(1 / workload.plain_seconds, 0.0, 1.0)
    return _rounds(workload, choice) if not choice.overlap else _epochs(workload, choice)


def _rounds(workload: Workload, choice: Choice) -> Forecast:
    """Lock-step: all rounds take the same time, and bring the accepted tokens and one more."""
    passing = workload.pass_seconds(choice.max_draft_tokens)
    seconds = workload.drafter_trip + choice.max_draft_tokens * workload.token + passing
    alive, accepted = 1.0, 0.0
    for place in range(choice.max_draft_tokens):
        alive *= workload.accepted(place)
        accepted += alive
    tokens = 1 + accepted * workload.tokens_per_draft_token
    return Forecast(tokens / seconds, 1 - passing / seconds, 1 / tokens)


def _epochs(workload: Workload, choice: Choice) -> Forecast:
    """The mean epoch. A drafter with long forwards may be in the middle of one when it is told of a refusal."""
    forward = workload.forward(choice)
    mean = _mean_epoch(workload, choice, forward / 2)
    if forward > LONG * workload.pass_seconds(0):
        mean = _mean_epoch(workload, choice, mean.busy)
    return Forecast(mean.tokens / mean.seconds, max(0.0, 1 - mean.passing / mean.seconds), mean.passes / mean.tokens)


Beginning = tuple[int, int]  # adopted draft tokens; steps that the pass in flight still takes, or FREE


@dataclass
class Sums:
    """Expected values over an epoch, and the probabilities of how the next one begins."""

    seconds: float = 0.0
    tokens: float = 0.0
    passing: float = 0.0  # seconds of passes
    passes: float = 0.0
    busy: float = 0.0  # seconds that the drafter still spends on what has been refused
    nexts: dict[Beginning, float] = field(default_factory=lambda: defaultdict(float))


def _mean_epoch(workload: Workload, choice: Choice, busy: float) -> Sums:
    """The mean over all kinds of epochs that can follow the first one, weighted by frequency."""
    kinds: dict[Beginning, Sums] = {}
    new: list[Beginning] = [(0, FREE)]
    while new:
        kind = new.pop()
        if kind not in kinds:
            kinds[kind] = ExpectedEpoch(workload, choice, kind, busy).sums
            new += kinds[kind].nexts
    mean = Sums()
    for kind, share in _stationary(list(kinds), kinds).items():
        sums = kinds[kind]
        mean.seconds += share * sums.seconds
        mean.tokens += share * sums.tokens
        mean.passing += share * sums.passing
        mean.passes += share * sums.passes
        mean.busy += share * sums.busy
    return mean


def _stationary(order: list[Beginning], kinds: dict[Beginning, Sums]) -> dict[Beginning, float]:
    """The stationary distribution over the kinds of epochs."""
    if len(order) == 1:
        return {order[0]: 1.0}
    place = {kind: i for i, kind in enumerate(order)}
    system = np.zeros((len(order), len(order)))
    for kind, sums in kinds.items():
        for following, probability in sums.nexts.items():
            system[place[following], place[kind]] += probability
    system -= np.eye(len(order))
    system[0] = 1.0  # the normalization replaces one of the linearly dependent balance equations
    return dict(zip(order, np.linalg.solve(system, np.eye(len(order))[0]).tolist(), strict=True))


NEGLIGIBLE = 0.01  # probability of going on at which an epoch is cut short
LONGEST = 48  # passes of an epoch that are followed
STEPS = 4  # the rest of a pass is rounded to quarters of a plain one, at random, so that its mean is kept
FREE = -1  # no pass under way


class ExpectedEpoch:
    """Follows an epoch as long as every draft token is accepted. Times are seconds since it began."""

    def __init__(self, workload: Workload, choice: Choice, beginning: Beginning, busy: float) -> None:
        self._workload, self._choice = workload, choice
        self._adopted, remaining = beginning
        self._plain = workload.pass_seconds(0)
        self._forward = workload.forward(choice)
        self._half = workload.drafter_trip / 2
        self._done = self._half + busy  # when the drafter's latest forward so far ends
        self._arrivals = [0.0] * self._adopted
        self._made = [0.0] * self._adopted  # when the forwards end that make them
        self._sent = self._adopted  # draft tokens in replies that are full
        self._judged = 0
        self._ahead = 0  # draft tokens that the draft is behind the output
        self._stalled = False  # patience has ended, and nothing has come since
        self._tokens = 0.0
        self._alive = 1.0
        self._usable = 0.0 if workload.samples else workload.drafter_trip  # rows of what was adopted
        self.sums = Sums()
        self._reveal(0.0)
        now = 0.0
        if remaining != FREE:
            left = remaining * self._plain / STEPS
            self.sums.passing += left
            now = self._walk(left, 0)
        self._passes(now)

    def _passes(self, now: float) -> None:
        before = (now, self._tokens, self._alive)
        for _ in range(LONGEST):
            before = (now, self._tokens, self._alive)
            start = self._start(now)
            self._caught_up(start, None)
            draft_tokens = max(0, self._known(start) - self._judged)
            seconds = self._beside(start, self._workload.pass_seconds(draft_tokens))
            self.sums.passing += self._alive * seconds
            self.sums.passes += self._alive
            self._caught_up(start + seconds, start + seconds)
            now = self._walk(start + seconds, draft_tokens)
            if self._alive < NEGLIGIBLE:
                break
        self._end(now, before)

    def _beside(self, start: float, seconds: float) -> float:
        """What a pass takes that would take so many seconds if the drafter did not work meanwhile."""
        slowed = self._workload.slowed
        place = bisect_right(self._arrivals, start + self._half)
        if not slowed or place >= len(self._arrivals):
            return seconds
        begins = max(start, self._arrivals[place] - self._half - self._forward)
        beside = min(self._done - begins, (start + seconds - begins) * self._workload.contention)
        return seconds + slowed * max(0.0, beside)

    def _end(self, now: float, before: tuple[float, float, float]) -> None:
        """What is left goes on like the last pass for as long as it is expected to."""
        start, tokens, alive = before
        kept = min(self._alive / alive, 0.999) if alive else 0.0
        further = kept / (1 - kept) if self._alive >= NEGLIGIBLE else 0.0
        self.sums.passes += self._alive * further
        self.sums.passing += self._alive * further * min(now - start, self._plain)
        later, more = now + further * (now - start), further * (self._tokens - tokens)
        self._finish(self._alive, later, self._tokens + more, {(0, FREE): 1.0})

    def _start(self, now: float) -> float:
        """When the next pass begins; patience may end before it has what it waits for."""
        choice = self._choice
        place = min(self._judged + self._ahead + choice.min_draft_tokens, len(self._arrivals)) - 1
        if not choice.min_draft_tokens or self._stalled or not choice.patience or self._arrivals[place] <= now:
            return now
        self._stalled = self._arrivals[place] > now + choice.patience
        return min(self._arrivals[place], now + choice.patience)

    @property
    def _patience(self) -> float:
        """Seconds that a row is kept for the next draft token."""
        return 0.0 if self._workload.samples or self._stalled else self._choice.patience

    def _walk(self, now: float, draft_tokens: int) -> float:
        """The rows of a pass over so many draft tokens are there; returns when the next pass may begin."""
        while self._ahead:  # the draft is behind still
            came = self._arrival(self._judged + self._workload.draft_tokens_per_token - 1)
            if came > now + self._patience:
                return self._settle(now)
            now = self._caught_up(came, None)
        known = min(self._known(now) - self._judged, draft_tokens + 1)
        if known and self._judged < self._adopted:
            now = max(now, self._usable)
        for _ in range(known):
            self._judge(now)
        self._reveal(now)
        if known == draft_tokens + 1:
            return now
        following = self._arrival(self._judged)
        if following > now + self._patience:
            return self._settle(now)
        self._judge(following)
        self._reveal(following)
        return following

    def _settle(self, now: float) -> float:
        """The target's own token, when patience has ended."""
        now += self._patience
        self._stalled = self._stalled or self._patience > 0
        self._tokens += 1
        self._ahead += self._workload.draft_tokens_per_token
        return now

    def _judge(self, now: float) -> None:
        accepted = self._workload.accepted(self._judged)
        self._refuse(1 - accepted, now, 1, None)
        self._alive *= accepted
        self._tokens += self._workload.tokens_per_draft_token
        self._judged += 1
        self._stalled = False

    def _caught_up(self, until: float, end: float | None) -> float:
        """Compares the target's own tokens with the draft tokens that arrive by then; `end`: of the pass in flight."""
        needed = self._workload.draft_tokens_per_token
        while self._ahead and (came := self._arrival(self._judged + needed - 1)) <= until:
            self._refuse(1 - self._workload.match, came, 0, None if end is None else end - came)
            self._alive *= self._workload.match
            self._judged += needed
            self._ahead -= needed
            self._reveal(came)
            self._stalled = False
        return until

    def _refuse(self, refused: float, now: float, tokens: int, left: float | None) -> None:
        """The epoch may end here. `left`: seconds that the pass in flight still takes; None: none is."""
        share = self._alive * refused
        if not share:
            return
        choice = self._choice
        came = self._arrival(self._judged) + choice.branch_depth * self._forward
        prepared = choice.branch_depth and self._judged >= self._adopted and came <= now
        hit = self._workload.hit(choice.branch_width) if prepared else 0.0
        self.sums.busy += share * self._busy_at(now + self._half)
        if left is None:
            nexts = {(0, FREE): 1 - hit, (choice.branch_depth, FREE): hit}
        else:
            self.sums.passing -= share * left  # the next epoch's
            steps = min(left / self._plain, 1.0) * STEPS
            whole = int(steps)
            nexts = {(0, whole): whole + 1 - steps, (0, whole + 1): steps - whole}
        self._finish(share, now, self._tokens + tokens, nexts)

    def _busy_at(self, told: float) -> float:
        """Seconds that the drafter's forward at this time still takes."""
        place = bisect_right(self._made, told)
        if place >= len(self._made):
            return 0.0
        left = self._made[place] - told
        return left if left < self._forward else 0.0

    def _finish(self, share: float, now: float, tokens: float, nexts: dict[Beginning, float]) -> None:
        self.sums.seconds += share * now
        self.sums.tokens += share * tokens
        for kind, probability in nexts.items():
            if probability:
                self.sums.nexts[kind] += share * probability

    def _known(self, now: float) -> int:
        return bisect_right(self._arrivals, now)

    def _arrival(self, place: int) -> float:
        return self._arrivals[place] if place < len(self._arrivals) else float("inf")

    def _reveal(self, now: float) -> None:
        """The window moves on: more draft tokens are drafted, one after the other, and sent several at a time."""
        wanted, asked = self._judged + self._choice.max_draft_tokens, now + self._half
        if len(self._made) >= wanted:
            return
        if self._done <= asked:
            self._sent = len(self._made)  # all were sent that had been asked for
        while len(self._made) < wanted:
            self._done = max(self._done, asked) + self._forward
            self._made.append(self._done)
        del self._arrivals[self._sent :]
        while (end := self._sent + self._choice.reply(self._sent)) <= wanted:
            self._arrivals += [self._made[end - 1] + self._half] * (end - self._sent)
            self._sent = end
        self._arrivals += [self._done + self._half] * (wanted - self._sent)
