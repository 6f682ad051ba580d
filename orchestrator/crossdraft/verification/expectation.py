"""Expected acceptance of the first target token, from whole rows: Table 2 of arXiv 2502.05202, with what it lacks.

What is computed is the probability that the first token of an epoch, both sides at a token start, is of kind
ACCEPTED under this project's walks. `slem` therefore differs from the paper's Σ p(t)ψ(t): a walk that compares
letters also accepts a token that the draft's text merely begins with, so it is Σ p(t)G(t), never less. `tokentiming`
is left out: its alignment depends on the tokens that follow, not on rows alone.

Of the paper's inequalities, `tli` ≥ `union` holds for all distributions (Theorem 4.1), and so does `coupled` ≥ `tli`
where both draw from T∩D, because the coupling accepts shared strings with min(p, q) before anything else. `coupled` ≥
`slem` and `slrs` ≥ `slem` do not hold for all distributions: accepting `a` as `a` leaves (a, c) of the draft to the
target's `ab`, and the longest token hides its prefixes. tests/verification/test_expectation.py has the counterexamples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import Letters
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.rows import Ids, Probabilities, Row, Whose


@dataclass(frozen=True)
class Expected:
    """A probability that may lack the paths below `DraftDistribution.least`."""

    acceptance: float  # at least this
    pruned: float = 0.0  # and at most this much more

    def __add__(self, other: Self) -> "Expected":
        return Expected(self.acceptance + other.acceptance, self.pruned + other.pruned)


@dataclass(frozen=True)
class DraftDistribution:
    """A drafter's distributions, and how far they are followed."""

    pair: Pair
    row_after: Callable[[tuple[int, ...]], Row]  # the whole row that it draws from, after these draft tokens
    draft_tokens: int = 1  # n: a target token longer than the text of n draft tokens is not accepted
    least: float = 0.0  # prefixes on which both sides agree less probably are not followed; 0: exact
    whose: Whose = Whose.DRAFTER  # whose ids the first row has


def overlap(target: Row, drafting: DraftDistribution) -> Expected:
    """Σ min(p, q) over target ids: `standard`, `union` (all of D drafted), `tli` (T∩D only), `rdk` (target ids).

    One draft token is all that it needs. Drafter ids with the same letters are one target id, as in the walk.
    """
    proposed = drafting.row_after(())
    drafted = in_target_ids(drafting.pair, proposed, drafting.whose)
    return Expected(float(np.minimum(in_target_ids(drafting.pair, target, Whose.TARGET), drafted).sum()))


def matching(target: Row, drafting: DraftDistribution) -> Expected:
    """Σ p(t) G(t) with G(t) = P(the draft's text starts with t): `slem`."""
    return Agreement(drafting, independent).starting(weights_of(target))


def common_noise(target: Row, drafting: DraftDistribution) -> Expected:
    """As `matching`, but the first tokens of both sides are drawn with common noise: `seeded`.

    Their joint distribution has a closed form (`Race`); noise at later offsets is independent of the first token's.
    """
    race = Race(drafting.pair, target, drafting.row_after(()))
    going_on = Agreement(drafting, independent)
    found = Expected(race.reached)
    for drafted, wanted in race.beyond.items():
        found += going_on.after_draft_token(sum(wanted.values()), wanted, (drafted,))
    return found


def string_rejection(target: Row, drafting: DraftDistribution) -> Expected:
    """Σ min(p(t), ψ(t)) with ψ(t) = P(t is the longest target token that the draft's text starts with): `slrs`."""
    weights, psi = weights_of(target), dict[Letters, float]()
    probabilities = _by_letters(drafting.pair.target.letters, weights)
    pruned = _longest_tokens(drafting, weights, psi)
    return Expected(sum(min(probabilities.get(letters, 0.0), mass) for letters, mass in psi.items()), pruned)


def coupled(target: Row, drafting: DraftDistribution) -> Expected:
    """Σ min(p, q) over shared strings, then the maximal coupling of the residuals letter by letter: `coupled`."""
    pair, proposed = drafting.pair, drafting.row_after(())
    ours, theirs = pair.names(target.ids), pair.to_target_ids(proposed.ids)
    p = in_target_ids(pair, Row(ours, target.probabilities), Whose.TARGET)
    q = in_target_ids(pair, proposed)
    both = np.minimum(p, q)
    accepted = float(both.sum())
    surplus = Agreement(drafting, maximal).at_start(
        max(0.0, 1.0 - accepted), _surplus(target, ours, p - both, p), _surplus(proposed, theirs, q - both, q)
    )
    return Expected(accepted) + surplus


# By method name; that draft tokens are of T∩D only, or target tokens, is a matter of `DraftDistribution.row_after`.
EXPECTATIONS: dict[str, Callable[[Row, DraftDistribution], Expected]] = {
    "standard": overlap,
    "union": overlap,
    "tli": overlap,
    "rdk": overlap,
    "slem": matching,
    "seeded": common_noise,
    "slrs": string_rejection,
    "coupled": coupled,
    "coupled-shared": coupled,
}


def in_target_ids(pair: Pair, row: Row, whose: Whose = Whose.DRAFTER) -> Probabilities:
    """A row as a vector over target ids, float64 (|T|,); the mass outside T is left out."""
    distribution = np.zeros(pair.target.size)
    ids = row.ids if whose is Whose.TARGET else pair.to_target_ids(row.ids)
    np.add.at(distribution, ids[ids >= 0], row.probabilities[ids >= 0])
    return distribution


Weights = dict[int, float]  # token id -> weight above 0; any sum


def _by_letters(letters: tuple[Letters, ...], weights: Weights) -> dict[Letters, float]:
    """The weight of each string: ids with the same letters are summed up."""
    found: dict[Letters, float] = {}
    for token, weight in weights.items():
        found[letters[token]] = found.get(letters[token], 0.0) + weight
    return found


def _surplus(row: Row, names: Ids, left: Probabilities, whole: Probabilities) -> Weights:
    """A row without the mass that both sides have in common; `names` is -1 for ids that are not shared."""
    share = np.divide(left, whole, out=np.ones_like(whole), where=whole > 0)
    weights = row.probabilities * np.where(names < 0, 1.0, share[names])
    return {token: weight for token, weight in zip(row.ids.tolist(), weights.tolist(), strict=True) if weight > 0}


@dataclass(frozen=True)
class _Text:
    """A prefix of a draft."""

    tokens: tuple[int, ...]  # of the drafter
    letters: Letters
    mass: float  # its probability


def _longest_tokens(drafting: DraftDistribution, target: Weights, psi: dict[Letters, float]) -> float:
    """Fills ψ from the drafts of at most n tokens; returns what pruned drafts could add to Σ min(p, ψ).

    A draft is followed while a longer target token could begin with all of its text (the paper's stopping rule).
    """
    trie, letters = drafting.pair.target_trie, drafting.pair.drafter.letters
    mass = np.array([target.get(token, 0.0) for token in trie.order.tolist()])
    before = np.concatenate([[0.0], np.cumsum(mass)])  # of the tokens at the first places of the trie
    pruned = 0.0
    texts = [_Text((), Letters(""), 1.0)]
    while texts:
        text = texts.pop()
        longest = trie.longest(text.letters)
        if text.tokens and (len(text.tokens) == drafting.draft_tokens or not trie.extends(text.letters)):
            if longest is not None:
                psi[longest] = psi.get(longest, 0.0) + text.mass
            continue
        first, end = trie.span(text.letters if longest is None else longest)
        most = min(text.mass, float(before[end] - before[first]))
        if text.tokens and most < drafting.least:
            pruned += most
            continue
        for token, weight in weights_of(drafting.row_after(text.tokens)).items():
            texts.append(_Text((*text.tokens, token), Letters(text.letters + letters[token]), text.mass * weight))
    return pruned


# How probably a draft's text reaches the end of a target token. At a common prefix each side ends its token or goes on
# with a letter. If the target's token ends, it is accepted whatever the draft shows. Equal letters are followed. If
# only the draft's token ends, the next draft token is. Different letters are a refusal. Methods differ in how the two
# events are drawn together, the `Coupling`.

Masses = dict[str, float]  # next letter -> probability


class Meeting(NamedTuple):
    """Joint probabilities at a prefix at which the target's token goes on."""

    together: Masses  # both show this letter
    behind: Masses  # the draft's token ends, and the target's goes on with this letter


Coupling = Callable[[float, Masses, Masses], Meeting]  # of the draft's end, the target's letters, the draft's letters


def independent(ends: float, target: Masses, draft: Masses) -> Meeting:
    """Both sides draw independently."""
    together = {letter: mass * draft[letter] for letter, mass in target.items() if letter in draft}
    return Meeting(together, {letter: mass * ends for letter, mass in target.items()})


def maximal(ends: float, target: Masses, draft: Masses) -> Meeting:
    """The coupling under which both show the same event as often as possible; surpluses are independent."""
    together = {letter: min(mass, draft[letter]) for letter, mass in target.items() if letter in draft}
    surplus = {letter: mass - together.get(letter, 0.0) for letter, mass in target.items()}
    # The surplus of the draft's END over the target's; if there is any, the target's surplus is on letters only.
    ended = max(0.0, ends - max(0.0, 1.0 - sum(target.values())))
    share = ended / total if (total := sum(surplus.values())) > 0 else 0.0
    return Meeting(together, {letter: mass * share for letter, mass in surplus.items()})


@dataclass(frozen=True)
class Agreement:
    """Sums over the common prefixes of both sides."""

    drafting: DraftDistribution
    couple: Coupling

    def starting(self, target: Weights) -> Expected:
        """Both at a token start, with the drafter's first row."""
        return self.at_start(1.0, target, weights_of(self.drafting.row_after(())))

    def at_start(self, mass: float, target: Weights, draft: Weights) -> Expected:
        """The same with a draft distribution of its own; `mass` is the probability of being there."""
        return self._meet(mass, target, 0, draft, 0, ())

    def after_draft_token(self, mass: float, target: Weights, tokens: tuple[int, ...]) -> Expected:
        """The draft so far is `tokens`, and the target's token begins with their text and is longer."""
        return self._next(mass, target, len(self.drafting.pair.drafter.letters_of(tokens)), tokens)

    def _next(self, mass: float, target: Weights, at: int, tokens: tuple[int, ...]) -> Expected:
        if len(tokens) == self.drafting.draft_tokens or mass <= 0:
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
    """Weighted tokens that share a prefix, by what follows it."""

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
    """The ids of a whole row with probabilities above zero.

    Raises:
        ValueError: the row has a tail.
    """
    if not row.whole:
        raise ValueError(f"expected acceptance needs whole rows, and this one has a tail of {row.tail}")
    return {token: weight for token, weight in zip(row.ids.tolist(), row.probabilities.tolist(), strict=True) if weight}


# Common noise: the joint probability that the target draws token i and the drafter token j.
#
# Each string (and rank) k has one exponential clock E_k; the target takes the smallest E_k/p_k, the drafter the
# smallest E_k/q_k. With L(s) = Σ max(p_k, s q_k) and F(s) = ∫₀ˢ L⁻², integrating over the ratio of the two winners'
# clocks gives
#
#     P(i, i) = p_i / L(p_i/q_i) = 1 / Σ_k max(p_k/p_i, q_k/q_i)
#     P(i, j) = p_i q_j (F(p_i/q_i) − F(p_j/q_j))⁺  for i ≠ j
#
# L is linear between the ratios p_k/q_k, so F is a sum over them: all pairs cost one sort.

Values = NDArray[np.float64]
Clock = tuple[Letters, int]  # letters and rank: what noise is keyed by


class Race:
    """The joint distribution of the first tokens of a target and a drafter that draw with common noise."""

    def __init__(self, pair: Pair, target: Row, drafted: Row) -> None:
        """Both rows are whole."""
        self._p = _by_clock(pair.target, weights_of(target))
        self._q = _by_clock(pair.drafter, weights_of(drafted))
        clocks = list(self._p | self._q)
        p = np.array([self._p.get(clock, (0, 0.0))[1] for clock in clocks])
        q = np.array([self._q.get(clock, (0, 0.0))[1] for clock in clocks])
        with np.errstate(divide="ignore"):
            ratios = p / q
        envelope, integral = _envelope(p, q, ratios)
        self._integral = dict(zip(clocks, integral, strict=True))
        self._same = dict(zip(clocks, p / envelope, strict=True))
        # The draft's first token is the target's, or begins with it.
        self.reached = 0.0
        # Probability of each target token that only begins with a drafter token, by that token.
        self.beyond: dict[int, Weights] = {}
        self._meet()

    def joint(self, target: Clock, drafted: Clock) -> float:
        """Probability that these two win."""
        if target not in self._p or drafted not in self._q:
            return 0.0
        if target == drafted:
            return float(self._same[target])
        weight = self._p[target][1] * self._q[drafted][1]
        return float(weight * max(0.0, self._integral[target] - self._integral[drafted]))

    def _meet(self) -> None:
        ours, theirs = _ranks(self._p), _ranks(self._q)
        for clock in self._q:
            for length in range(1, len(clock[0]) + 1):
                beginning = Letters(clock[0][:length])
                self.reached += sum(self.joint((beginning, rank), clock) for rank in ours.get(beginning, ()))
        for clock, (token, _) in self._p.items():
            for length in range(1, len(clock[0])):
                beginning = Letters(clock[0][:length])
                for rank in theirs.get(beginning, ()):
                    mass = self.joint(clock, (beginning, rank))
                    if mass > 0:
                        self.beyond.setdefault(self._q[(beginning, rank)][0], {})[token] = mass


def _envelope(p: Values, q: Values, ratios: Values) -> tuple[Values, Values]:
    """L and F at each ratio; a ratio may be infinite, where q is 0."""
    order = np.argsort(ratios, kind="stable")
    finite = order[: int(np.isfinite(ratios).sum())]
    s = ratios[finite]
    # Sums over those with a larger ratio, and over those with one that is not larger.
    larger = p.sum() - np.cumsum(p[finite])
    values = np.maximum(larger, 0.0) + s * np.cumsum(q[finite])
    steps = np.diff(s, prepend=0.0) / (values * np.concatenate([[p.sum()], values[:-1]]))
    envelope, integral = np.ones(len(p)), np.zeros(len(p))
    envelope[finite], integral[finite] = values, np.cumsum(steps)
    beyond = order[len(finite) :]
    envelope[beyond] = np.inf
    if len(finite):
        integral[beyond] = integral[finite[-1]] + 1.0 / (values[-1] * q[finite].sum())
    return envelope, integral


def _by_clock(vocabulary: Vocabulary, weights: Weights) -> dict[Clock, tuple[int, float]]:
    return {(vocabulary.letters[token], vocabulary.rank(token)): (token, weight) for token, weight in weights.items()}


def _ranks(clocks: dict[Clock, tuple[int, float]]) -> dict[Letters, list[int]]:
    found: dict[Letters, list[int]] = {}
    for letters, rank in clocks:
        found.setdefault(letters, []).append(rank)
    return found
