"""What a controller estimates: the cost of steps, round trips, and how draft tokens fare.

Costs are fitted to the answers of both services; acceptance is counted by place in an epoch. Everything starts from a
prior, and older observations fade; but each fit is the prior of the next one, so that nothing is forgotten.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import chain, pairwise
from math import inf, log, log2

import numpy as np
from numpy.typing import NDArray

from crossdraft.types.messages import MOST_DRAFT_TOKENS

FADING = 0.98  # weight of a step against the one after it: a new cost is known after some 50 steps
MEMORY = 2000.0  # judged draft tokens after which one weighs 1/e: shares are known within 0.01
RECENTLY = 60.0  # ... of one output, whose text may change at any line
AVERAGE = 50.0  # accepted draft tokens that an output is taken for an average one
CLEAR = 3.0  # ... or half as many, if it is so many standard deviations from it
LEAST_VARIANCE = 0.5  # of the accepted ones of an average text: of a few it says little
FARED = 1.2  # times as many that make a text another one to decide for: that is a tenth of the speed
PRIOR = 6.0  # observations that a prior weighs: a few epochs decide against it, not a few draft tokens
APART = 20.0  # times as long are steps of one size kept while others run: some 1,000 steps, as load comes and goes
SLOPE = 0.01  # of a step, that a further session or token costs until it is known: accelerators are limited by memory
OUTLIER = 4.0  # times, or part, of the expected duration that a step counts as at most, or least: a pause is no cost
RECENT = 15  # numbers of which the lower quartile is taken: what is faster is seen after 4 of them, slower after 12
TESTED = 3.0  # draft tokens of a kind after which its acceptance is more than a prior
CERTAIN = 0.995  # most that any chance is taken for: what was refused once in hundreds is no rule
LEAST_WORTH = 0.2  # target tokens of an accepted draft token at least: a letter of a token of five
PLACES = (0, 1, 2, 4, 8, 16)  # begins of the ranges of places with one acceptance each: later ones are seen less often

FloatArray = NDArray[np.float64]
Kind = tuple[str | None, float, float | None]  # of requests: method and both temperatures


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step that several sessions share."""

    base: float = 0.0
    session: float = 0.0  # more for each session
    token: float = 0.0  # more for each token beyond one of each session

    def seconds(self, sessions: float, tokens: float = 0.0) -> float:
        """For so many sessions, and so many tokens beyond one of each."""
        return self.base + self.session * sessions + self.token * tokens

    def part(self, number: float) -> "StepCost":
        """One of so many equal parts of it."""
        return StepCost(self.base / number, self.session / number, self.token / number)


class FittedCost:
    """A step's cost, by least squares of relative errors.

    What more sessions or tokens cost is seen between steps of different sizes, which may lie far apart in time: the
    latest steps of each size are kept while other sizes run. What a step costs is that of the latest ones.

    Args:
        before: the first estimate; a base of 0: none.
    """

    def __init__(self, before: StepCost) -> None:
        self._cost = before
        self._stale = False
        # Of one, sessions, tokens and seconds, sums over the latest steps; and by size of step, sums of the products
        # of all with one, sessions and tokens. The number of steps is first. Each step is weighted by 1 / seconds^2 as
        # expected, since with those that it took the shortest would count most.
        self._latest = np.zeros(4)
        self._sizes: dict[tuple[int, int], FloatArray] = {}

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self._cost.base > 0

    def add(self, seconds: float, sessions: float, tokens: float = 0.0, share: float = 1.0) -> None:
        """A step, or a share of one: each of its sessions may tell of it."""
        if seconds <= 0:
            return
        if not self.known:
            self._cost = StepCost(seconds / (1 + SLOPE * (sessions + tokens)))
        expected = self.cost.seconds(sessions, tokens)
        seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        size = round(log2(max(1.0, sessions))), round(log2(1 + tokens))
        for other, sums in self._sizes.items():
            sums *= FADING**share if other == size else FADING ** (share / APART)
        values, weight = np.array((1.0, sessions, tokens, seconds)), share / expected**2
        products = weight * np.outer(values[:3], values)
        self._sizes[size] = self._sizes.get(size, 0.0) + np.concatenate(((share,), products.ravel()))
        self._latest = FADING**share * self._latest + weight * values
        self._stale = True

    @property
    def cost(self) -> StepCost:
        """The estimate now."""
        if self._stale:
            self._stale = False
            self._cost = self._fitted()
        return self._cost

    def _fitted(self) -> StepCost:
        """The mean of the latest steps, and two slopes drawn to those before: where steps are alike, these stay."""
        steps, *products = sum(self._sizes.values(), np.zeros(13)).tolist()
        before, one, row, last = self._cost, products[:4], products[4:8], products[8:]
        sessions, tokens, _ = (number / one[0] for number in one[1:])
        usual = PRIOR * one[0] / steps  # weighs differences of a quarter of the mean step
        stiff_session, stiff_token = (usual * max(1.0, (mean / 4) ** 2) for mean in (sessions, tokens))
        slope = SLOPE * before.base
        a = row[1] - sessions * one[1] + stiff_session
        b = row[2] - sessions * one[2]
        c = last[2] - tokens * one[2] + stiff_token
        x = row[3] - sessions * one[3] + stiff_session * (before.session or slope)
        y = last[3] - tokens * one[3] + stiff_token * (before.token or slope)
        each_session = max(0.0, (c * x - b * y) / (a * c - b * b))
        each_token = max(0.0, (a * y - b * x) / (a * c - b * b))
        # A tenth of the latest steps is for their own sake at least, however the rest is divided.
        sessions, tokens, seconds = (self._latest[1:] / self._latest[0]).tolist()
        share = min(1.0, 0.9 * seconds / max(each_session * sessions + each_token * tokens, 1e-9))
        base = seconds - share * (each_session * sessions + each_token * tokens)
        return StepCost(base, share * each_session, share * each_token)


class Recent:
    """The lower quartile of the latest numbers of one kind: without waits for other work."""

    def __init__(self, before: float | None = None) -> None:
        self._latest: deque[float] = deque([] if before is None else [before], maxlen=RECENT)
        self._value = before

    def add(self, number: float) -> None:
        self._latest.append(number)
        self._value = None

    @property
    def value(self) -> float:
        """0 before there is any."""
        if self._value is None:
            self._value = sorted(self._latest)[len(self._latest) // 4] if self._latest else 0.0
        return self._value


class Share:
    """A probability, counted with exponential discounting."""

    def __init__(self, held: float = 0.0, seen: float = 0.0, memory: float = MEMORY) -> None:
        self.held, self.seen, self._memory = held, seen, memory

    def add(self, held: float, seen: float) -> None:
        """Add observations, after discounting the earlier ones."""
        kept = max(0.0, 1 - seen / self._memory)
        self.held, self.seen = self.held * kept + held, self.seen * kept + seen

    def limit(self, most: float) -> None:
        """Let past observations weigh no more than so many."""
        if self.seen > most:
            self.held, self.seen = self.held * most / self.seen, most

    def mean(self, prior: float, weight: float = PRIOR) -> float:
        """The probability, with a prior that counts as so many observations."""
        return (self.held + prior * weight) / (self.seen + weight)


class Acceptance:
    """How draft tokens of one kind of request fare, by place in their epoch.

    Args:
        before: (held, seen) of all, of what they are worth, and of each range of places.
    """

    def __init__(self, before: Sequence[tuple[float, float]] = ()) -> None:
        before = before or [(0.9 * PRIOR, PRIOR), (PRIOR, PRIOR)] + [(0.0, 0.0)] * len(PLACES)
        # Of all, what they are worth (target tokens of an accepted one), and of each range of places.
        self._all, self.worth, *self._places = (Share(*one) for one in before)

    @property
    def state(self) -> tuple[tuple[float, float], ...]:
        """To begin another one with."""
        return tuple((share.held, share.seen) for share in (self._all, self.worth, *self._places))

    @property
    def tested(self) -> bool:
        """Whether it rests on draft tokens and not on its prior only."""
        return self._all.seen > PRIOR + TESTED

    @property
    def tokens_each(self) -> float:
        """Target tokens that an accepted draft token is worth."""
        return max(LEAST_WORTH, self.worth.mean(1.0))

    def add(self, first: int, accepted: int, refused: bool) -> None:
        """So many draft tokens from this place on were accepted, and the next one perhaps refused."""
        for place in range(first, first + accepted + refused):
            self._places[_range_of(place)].add(float(place < first + accepted), 1)
        self._all.add(accepted, accepted + refused)

    def compare(self, matched: int, missed: bool, share: float) -> None:
        """So many draft tokens equalled the target's own, and the next one perhaps not.

        Args:
            share: of acceptable draft tokens that equal one drawn by the target.
        """
        self._all.add(matched, matched + missed * share**2)

    def chances(self) -> list[float]:
        """The probability of each place that its draft token is accepted if all before it were."""
        usual = self._all.mean(0.5, 0.1)
        ends = pairwise((*PLACES, MOST_DRAFT_TOKENS + 1))
        return [
            min(CERTAIN, max(0.0, share.mean(usual)))
            for share, (begin, end) in zip(self._places, ends, strict=True)
            for _ in range(begin, end)
        ]


class Fared:
    """How the draft tokens of one output fare beside those of all, the latest of them."""

    def __init__(self) -> None:
        self._accepted = self._expected = self._variance = 0.0  # the latter two of an average text

    def add(self, accepted: int, chances: Sequence[float]) -> None:
        """So many of the latest judged draft tokens were accepted, each of which has this chance in a usual text."""
        kept = max(0.0, 1 - len(chances) / RECENTLY)
        self._accepted = kept * self._accepted + accepted
        self._expected = kept * self._expected + sum(chances)
        self._variance = kept * self._variance + sum(chance * (1 - chance) for chance in chances)

    @property
    def factor(self) -> float:
        """Times as many as usual that are accepted, in steps of FARED. Most texts are alike, some are very different:
        so the less it is taken for an average one the clearer it differs."""
        deviations = (self._accepted - self._expected) ** 2 / (LEAST_VARIANCE + self._variance)
        weight = AVERAGE / (1 + deviations / CLEAR**2)
        return float(FARED ** round(log((self._accepted + weight) / (self._expected + weight), FARED)))


def _range_of(place: int) -> int:
    return max(number for number, begin in enumerate(PLACES) if begin <= place)


@dataclass(frozen=True)
class Estimates:
    """What a controller has learned, to begin another one with: plain numbers.

    Raises:
        ValueError: a number is negative or not finite, or there is no such state of an acceptance.
    """

    target: StepCost = field(default_factory=StepCost)
    drafter: StepCost = field(default_factory=StepCost)
    rounds: StepCost = field(default_factory=StepCost)  # of the drafter, where the target waits for whole rounds
    target_trip: float = 0.0  # seconds
    drafter_trip: float = 0.0  # seconds
    acceptance: tuple[tuple[Kind, tuple[tuple[float, float], ...]], ...] = ()  # `Acceptance.state`
    widest: float = 1.0  # sessions of the widest pass
    models: tuple[str, ...] = ()  # what it was learned with: names and fingerprints of target and drafter

    def __post_init__(self) -> None:
        states = [state for _, state in self.acceptance]
        costs = [
            *map(astuple, (self.target, self.drafter, self.rounds)),
            (self.target_trip, self.drafter_trip, self.widest),
        ]
        numbers = chain.from_iterable([*costs, *chain.from_iterable(states)])
        if not (all(len(state) == 2 + len(PLACES) for state in states) and all(0 <= one < inf for one in numbers)):
            raise ValueError("estimates must be finite numbers that are not negative, for each range of places")

    @property
    def known(self) -> bool:
        """Whether target and drafter have been seen at work: without either there is nothing to begin with."""
        return bool(self.target.base and (self.drafter.base or self.rounds.base))
