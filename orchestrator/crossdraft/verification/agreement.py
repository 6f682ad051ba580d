"""How probably a draft's text reaches a token of the target, letter by letter.

At a common prefix the target's token ends there or goes on with a letter, and so does the draft's. A token of the
target that ends has been reached: it is accepted whatever the draft shows. Two equal letters go on together. Where
only the draft's token ends, the next proposal goes on. Different letters are a refusal. Methods differ in how the
two events are drawn together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

from crossdraft.text.letters import Letters
from crossdraft.text.pairing import Pair
from crossdraft.verification.rows import Row, Whose

Weights = dict[int, float]  # token id -> weight above 0; any sum
Masses = dict[str, float]  # next letter -> probability


@dataclass(frozen=True)
class Expected:
    """A probability, of which paths that are too improbable may have been left out."""

    acceptance: float  # at least this
    pruned: float = 0.0  # and at most this much more

    def __add__(self, other: Self) -> "Expected":
        return Expected(self.acceptance + other.acceptance, self.pruned + other.pruned)


@dataclass(frozen=True)
class Drafting:
    """What is known of a drafter."""

    pair: Pair
    row_after: Callable[[tuple[int, ...]], Row]  # its whole law after these tokens of its own, that it draws from
    proposals: int = 1  # n: a target token that the text of n proposals has not reached is not accepted
    least: float = 0.0  # rows are not asked for where both sides still agree with a smaller probability; 0: exact
    whose: Whose = Whose.DRAFTER  # whose ids the first row has


class Meeting(NamedTuple):
    """Joint probabilities at a prefix, besides those with the target's end."""

    together: Masses  # both show this letter
    behind: Masses  # the draft's token ends, the target's goes on with this letter


Coupling = Callable[[float, Masses, Masses], Meeting]  # of the draft's end, the target's letters, the draft's letters


def independent(ends: float, target: Masses, draft: Masses) -> Meeting:
    """Both draw by themselves."""
    together = {letter: mass * draft[letter] for letter, mass in target.items() if letter in draft}
    return Meeting(together, {letter: mass * ends for letter, mass in target.items()})


def maximal(ends: float, target: Masses, draft: Masses) -> Meeting:
    """The coupling under which both show the same event as often as possible; surpluses are independent."""
    together = {letter: min(mass, draft[letter]) for letter, mass in target.items() if letter in draft}
    surplus = {letter: mass - together.get(letter, 0.0) for letter, mass in target.items()}
    # What the draft's end has more than the target's; then all of the target's surplus lies on letters.
    ended = max(0.0, ends - max(0.0, 1.0 - sum(target.values())))
    share = ended / total if (total := sum(surplus.values())) > 0 else 0.0
    return Meeting(together, {letter: mass * share for letter, mass in surplus.items()})


@dataclass(frozen=True)
class Agreement:
    """Sums over the texts that both sides can write."""

    drafting: Drafting
    couple: Coupling

    def starting(self, target: Weights) -> Expected:
        """Both at a token start, with the drafter's first row."""
        return self.at_start(1.0, target, weights_of(self.drafting.row_after(())))

    def at_start(self, mass: float, target: Weights, draft: Weights) -> Expected:
        """The same with a draft law of its own; `mass` is the probability of being there."""
        return self._meet(mass, target, 0, draft, 0, ())

    def after_proposal(self, mass: float, target: Weights, tokens: tuple[int, ...]) -> Expected:
        """The draft so far is `tokens`, and the target's token begins with all of it and is longer."""
        return self._next(mass, target, len(self.drafting.pair.drafter.letters_of(tokens)), tokens)

    def _next(self, mass: float, target: Weights, at: int, tokens: tuple[int, ...]) -> Expected:
        if len(tokens) == self.drafting.proposals or mass <= 0:
            return Expected(0.0)
        if mass < self.drafting.least:
            return Expected(0.0, mass)
        return self._meet(mass, target, at, weights_of(self.drafting.row_after(tokens)), at, tokens)

    def _meet(
        self, mass: float, target: Weights, at: int, draft: Weights, start: int, tokens: tuple[int, ...]
    ) -> Expected:
        """At letter `at` of the target's token; the draft's token began at letter `start` of it."""
        if mass <= 0 or not target or not draft:
            return Expected(0.0)
        ours = _split(target, self.drafting.pair.target.letters, at)
        theirs = _split(draft, self.drafting.pair.drafter.letters, at - start)
        ends = sum(theirs.ended.values()) / theirs.total
        meeting = self.couple(ends, ours.masses(), theirs.masses())
        found = Expected(mass * sum(ours.ended.values()) / ours.total)
        for letter, share in meeting.together.items():
            found += self._meet(mass * share, ours.going_on[letter], at + 1, theirs.going_on[letter], start, tokens)
        behind = sum(meeting.behind.values())
        if theirs.ended and behind > 0:
            rest = ours.reweighted(meeting.behind)
            for token, weight in theirs.ended.items():
                share = behind * weight / sum(theirs.ended.values())
                found += self._next(mass * share, rest, at, (*tokens, token))
        return found


class _Split(NamedTuple):
    """A law at a prefix that all its tokens have."""

    total: float
    ended: Weights  # tokens that are the prefix
    going_on: dict[str, Weights]  # the others by their next letter

    def masses(self) -> Masses:
        """Probability of each next letter."""
        return {letter: sum(weights.values()) / self.total for letter, weights in self.going_on.items()}

    def reweighted(self, masses: Masses) -> Weights:
        """The tokens that go on, those of each letter with its mass in all."""
        found: Weights = {}
        for letter, weights in self.going_on.items():
            if masses.get(letter, 0.0) > 0:
                scale = masses[letter] / sum(weights.values())
                found.update((token, weight * scale) for token, weight in weights.items())
        return found


def _split(weights: Weights, letters: tuple[Letters, ...], at: int) -> _Split:
    ended: Weights = {}
    going_on: dict[str, Weights] = {}
    for token, weight in weights.items():
        text = letters[token]
        if len(text) == at:
            ended[token] = weight
        else:
            going_on.setdefault(text[at], {})[token] = weight
    return _Split(sum(weights.values()), ended, going_on)


def weights_of(row: Row) -> Weights:
    """A whole row's ids and probabilities, those above zero.

    Raises:
        ValueError: the row has a tail, so the expectation would not be one.
    """
    if not row.whole:
        raise ValueError(f"expected acceptance needs whole rows, and this one has a tail of {row.tail}")
    return {token: weight for token, weight in zip(row.ids.tolist(), row.probabilities.tolist(), strict=True) if weight}
