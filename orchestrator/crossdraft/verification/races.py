"""Two laws drawn with common noise: how probably a target token i and a drafter token j win together.

Each string (and rank) k has one exponential clock E_k; the target takes the smallest E_k/p_k, the drafter the
smallest E_k/q_k. With L(s) = Σ max(p_k, s q_k) and F(s) = ∫₀ˢ L⁻², integrating over the ratio of the two winners'
clocks gives

    P(i, i) = p_i / L(p_i/q_i) = 1 / Σ_k max(p_k/p_i, q_k/q_i)
    P(i, j) = p_i q_j (F(p_i/q_i) − F(p_j/q_j))⁺  for i ≠ j

L is linear between the ratios p_k/q_k, so F is a sum over them: all pairs cost one sort.
"""

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import Letters
from crossdraft.text.pairing import Pair
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.agreement import Weights, weights_of
from crossdraft.verification.rows import Row

Values = NDArray[np.float64]
Clock = tuple[Letters, int]  # letters and rank: what noise is keyed by


class Race:
    """First tokens of a target and a drafter that draw with common noise."""

    def __init__(self, pair: Pair, target: Row, drafted: Row) -> None:
        """Both rows whole."""
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
