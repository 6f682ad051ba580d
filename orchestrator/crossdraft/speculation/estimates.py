"""How draft tokens fare."""

from collections.abc import Sequence
from itertools import pairwise

from crossdraft.types.messages import MOST_DRAFT_TOKENS

PLACES = (0, 1, 2, 4, 8, 16)  # begins of the ranges of places with one acceptance each: later ones are seen less often
MEMORY = 200.0  # judged draft tokens after which one weighs 1/e: acceptance is known within 0.03
PRIOR, HOPED = 6.0, 0.75  # draft tokens that a prior weighs, and their acceptance
CLEAR = 3.0  # standard deviations that are no chance: another text, or another drafter


class Share:
    """A probability, counted with exponential discounting."""

    def __init__(self, held: float = 0.0, seen: float = 0.0, memory: float = MEMORY) -> None:
        self.held, self.seen, self._memory = held, seen, memory

    def add(self, held: float, seen: float) -> None:
        """Add observations, after discounting the earlier ones."""
        self.fade(seen)
        self.held, self.seen = self.held + held, self.seen + seen

    def fade(self, seen: float) -> None:
        """Discount the observations so far as if so many more had been made."""
        kept = max(0.0, 1 - seen / self._memory)
        self.held, self.seen = self.held * kept, self.seen * kept

    def mean(self, prior: float, weight: float = PRIOR) -> float:
        """The probability, with a prior that counts as so many observations."""
        return (self.held + prior * weight) / (self.seen + weight)


class Acceptance:
    """How draft tokens of one kind of request fare, by place in their epoch."""

    def __init__(self, held: float = 0.0, seen: float = 0.0) -> None:
        self.worth = Share(PRIOR, PRIOR)  # target tokens of an accepted draft token
        self.reset(held, seen)

    def reset(self, held: float, seen: float) -> None:
        """Nothing counts but so many draft tokens."""
        self._all, self._places = Share(held, seen), [Share() for _ in PLACES]
        self._chances: list[float] = []  # as long as nothing is added

    @property
    def mean(self) -> float:
        """The acceptance of any draft token."""
        return self._all.mean(HOPED)

    def add(self, first: int, accepted: int, refused: bool) -> None:
        """So many draft tokens from this place on were accepted, and the next one perhaps refused."""
        for place in range(first, first + accepted + refused):
            found = max(number for number, begin in enumerate(PLACES) if begin <= place)
            self._places[found].add(float(place < first + accepted), 1)
        self._all.add(accepted, accepted + refused)
        self._chances = []

    def fade(self, tokens: float) -> None:
        """So many were emitted without a drafter: what was seen before says less of how it would fare now."""
        for share in (self._all, *self._places):
            share.fade(tokens)
        self._chances = []

    def chances(self, factor: float = 1.0) -> Sequence[float]:
        """The probability of each place that its draft token is accepted if all before it were."""
        if not self._chances:
            ends = pairwise((*PLACES, MOST_DRAFT_TOKENS + 1))
            shares = zip(self._places, ends, strict=True)
            self._chances = [share.mean(self.mean) for share, (begin, end) in shares for _ in range(begin, end)]
        return self._chances if factor == 1 else [min(1.0, factor * chance) for chance in self._chances]


class Fared:
    """How the latest draft tokens fared beside those of usual texts; after `memory` of them one weighs 1/e."""

    def __init__(self, memory: float) -> None:
        self.accepted, self._expected, self._variance = (Share(memory=memory) for _ in range(3))

    def add(self, accepted: int, chances: Sequence[float]) -> None:
        """So many were accepted, each of which has this chance in a usual text."""
        self.accepted.add(accepted, len(chances))
        self._expected.add(sum(chances), len(chances))
        self._variance.add(sum(chance * (1 - chance) for chance in chances), len(chances))

    def fade(self, tokens: float) -> None:
        for share in (self.accepted, self._expected, self._variance):
            share.fade(tokens)

    @property
    def factor(self) -> float:
        """Times as many as usual that are accepted; 1 unless it is clear that they fare otherwise."""
        accepted, expected = self.accepted.held, self._expected.held
        if (accepted - expected) ** 2 <= CLEAR**2 * (0.5 + self._variance.held):
            return 1.0
        return (accepted + 1) / (expected + 1)
