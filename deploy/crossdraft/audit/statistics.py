"""What drawn tokens say about the probabilities that were reported for them. It needs scipy.

At each place an endpoint lists the most probable tokens with their probabilities; all others are one further cell.
Three kinds of tests compare them with the draws:

- chi-square (Pearson) at one place: cells whose expected count is below five are pooled.
- temperature, over all places: with g the log-probability (of the cell of all others, the smallest that is listed), the
  sum of g − E g has variance V = Σ Var g and is asymptotically normal, as its terms are martingale differences: the
  law of a place is known given all draws before. At a temperature T (1 + e) instead of T its mean is −V e / (1 + e) to
  first order or, because of the cell of all others, farther from 0.
- a token that never comes: while a token is not drawn, the product of 1 / (1 − p) over the places that list it is a
  martingale that starts at 1, so by Ville's inequality P(never drawn and Σ −log(1 − p) ≥ s) ≤ exp(−s). The token that
  was listed as the i-th has the share 1 / (i (i + 1)) of the error, so all tokens together have at most all of it.

All tests of an audit together give a false alarm with at most the wanted probability (Holm's correction).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import copysign, exp, log, sqrt
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from crossdraft.types.rows import Probabilities

Floats = npt.NDArray[np.float64]
OTHERS = "(all others)"  # the cell of tokens that are not listed
LEAST = 5.0  # expected count of a cell of a chi-square; smaller ones are pooled
DOUBTFUL = 0.01  # p-values of a chi-square below are simulated,
RARE = 1e-7  # those above: others are faults by any approximation
SIMULATED = 100_000
STEEPEST = 5.0  # largest tilt that is looked for
NEARLY_ZERO = 0.05  # standard deviations within which the normal approximation is good, and the other one is 0 / 0
TINY = 1e-12  # stands for a probability of 0, whose logarithm is asked for
POWER = 0.95  # probability with which a fault of the stated size is found


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square test of counts."""

    count: int  # of draws
    statistic: float
    freedom: int  # degrees of freedom: cells less one
    p: float  # probability of a statistic at least as large, if the draws have the distribution


def fit_of(counts: Mapping[int, int], distribution: Probabilities) -> Fit | None:
    """Compares how often ids were drawn with their probabilities, (V,); None if there are too few for two cells."""
    drawn = np.zeros(len(distribution))
    drawn[list(counts)] = list(counts.values())
    total = float(drawn.sum())
    wanted, observed = _pooled(total * distribution, drawn)
    if len(wanted) < 2:
        return None
    found = stats.chisquare(observed, wanted, sum_check=False)  # sums differ by rounding
    return Fit(int(total), float(found.statistic), len(wanted) - 1, float(found.pvalue))


def simulated(fit: Fit, distribution: Probabilities) -> float:
    """The probability of so large a chi-square, by drawing from the distribution: with cells of five expected draws the
    usual approximation is too small by up to ten times where it matters."""
    (wanted,) = _pooled(fit.count * distribution)
    counts = np.random.default_rng(0).multinomial(fit.count, wanted / wanted.sum(), SIMULATED)
    larger = int((((counts - wanted) ** 2 / wanted).sum(axis=1) >= fit.statistic).sum())
    return (1 + larger) / (1 + SIMULATED)


def _pooled(expected: Floats, *others: Floats) -> list[Floats]:
    """Cells that are expected LEAST times at least, and one of all the rest; the same of other numbers by cell."""
    large = expected >= LEAST
    found = [np.append(cells[large], cells[~large].sum()) for cells in (expected, *others)]
    wanted = found[0]
    if wanted[-1] >= LEAST or len(wanted) == 1:
        return found
    place = int(wanted[:-1].argmin())  # what is left is too little for a cell: the smallest one takes it
    for cells in found:
        cells[place] += cells[-1]
    return [cells[:-1] for cells in found]


@dataclass(frozen=True, eq=False)
class Draw:
    """A drawn token, and the distribution that was reported for its place."""

    token: str
    listed: tuple[str, ...]
    probabilities: Floats  # shape (len(listed) + 1,), sums to one; the last one is of all others
    cell: int  # where the token is in `probabilities`


@dataclass(frozen=True)
class LawTest:
    """One comparison of draws with reported probabilities."""

    kind: str  # first token, second token, temperature, or missing token
    where: str
    count: int  # draws
    statistic: float
    freedom: int  # degrees of freedom of a chi-square; 0: another kind of test
    p: float  # probability of so extreme a statistic if the reported probabilities are right
    finding: str  # what deviates most


def chi_square(kind: str, where: str, draws: Sequence[Draw]) -> LawTest | None:
    """Draws at one place against the mean of the reported probabilities, as engines report slightly other numbers for
    it in another batch; None if they are too few for two cells."""
    expected: defaultdict[str, float] = defaultdict(float)
    for draw in draws:
        for token, probability in zip((*draw.listed, OTHERS), draw.probabilities, strict=True):
            expected[token] += float(probability)
    observed = Counter((*draw.listed, OTHERS)[draw.cell] for draw in draws)
    law = np.array(list(expected.values())) / max(1, len(draws))
    fit = fit_of({place: observed[name] for place, name in enumerate(expected)}, law)
    if fit is None:
        return None
    p = simulated(fit, law) if RARE < fit.p < DOUBTFUL else fit.p
    name = max(expected, key=lambda one: (observed[one] - expected[one]) ** 2 / max(LEAST, expected[one]))
    finding = f"{name!r} came {observed[name]} times, expected {expected[name]:.1f}"
    return LawTest(kind, where, fit.count, fit.statistic, fit.freedom, p, finding)


@dataclass(frozen=True, eq=False)
class Scores:
    """The sum over places of g − E g, and its law if the reported probabilities are right."""

    laws: Floats  # shape (places, cells); what is behind a shorter list has a probability of 0
    values: Floats  # g − E g, in nats, of the same shape
    total: float  # of the drawn tokens

    @classmethod
    def of(cls, draws: Sequence[Draw], listed: bool = False) -> Self:
        """Args: draws: one at least. listed: all of them are, and the laws are those of tokens that are."""
        laws = np.zeros((len(draws), max(len(draw.probabilities) for draw in draws)))
        for draw, law in zip(draws, laws, strict=True):
            law[: len(draw.probabilities)] = draw.probabilities
        places, others = np.arange(len(draws)), [len(draw.listed) for draw in draws]
        if listed:
            laws[places, others] = 0.0
            laws /= laws.sum(axis=1, keepdims=True)
        values = np.log(np.maximum(laws, TINY))
        behind = np.arange(laws.shape[1]) >= np.array(others)[:, None]
        values[places, others] = np.where(behind, 0.0, values).min(axis=1)
        values -= (laws * values).sum(axis=1, keepdims=True)
        return cls(laws, values, float(values[places, [draw.cell for draw in draws]].sum()))

    def cumulants(self, t: float) -> tuple[float, float, float]:
        """K, K' and K'' at t, with K the sum's cumulant-generating function: K'(0) is 0, and K''(0) its variance."""
        shift = (t * self.values).max(axis=1, keepdims=True)
        weights = self.laws * np.exp(t * self.values - shift)
        sums = weights.sum(axis=1, keepdims=True)
        weights /= sums
        means = (weights * self.values).sum(axis=1)
        spread = (weights * self.values**2).sum() - (means**2).sum()
        return float((np.log(sums) + shift).sum()), float(means.sum()), float(spread)

    def tilt(self) -> float | None:
        """The t at which K'(t) is the total; None if it is beyond STEEPEST.

        With probabilities ∝ p exp(t g) the drawn total is what is expected. As p is ∝ exp(g) among the listed tokens,
        1 + t is there the likeliest inverse of the temperature, relative to the one that was asked for.
        """

        def excess(t: float) -> float:
            return self.cumulants(t)[1] - self.total

        end = copysign(STEEPEST, self.total)
        return float(optimize.brentq(excess, 0.0, end, xtol=1e-10)) if excess(end) * end >= 0 else None


def temperature(draws: Sequence[Draw]) -> LawTest | None:
    """The test of the temperature over all places; None if all of them are certain.

    Where places are nearly certain the sum is skewed, and the normal approximation is wrong by a factor in its tails:
    Lugannani and Rice's saddlepoint approximation, in Barndorff-Nielsen's form, is not.
    """
    scores = Scores.of(draws)
    variance, t = scores.cumulants(0.0)[2], scores.tilt()
    if variance < TINY:
        return None
    z = scores.total / sqrt(variance)
    distance = abs(z)  # standard deviations
    if t is not None and distance > NEARLY_ZERO:
        value, _, curvature = scores.cumulants(t)
        root = sqrt(max(TINY, 2 * (t * scores.total - value)))
        distance = root + log(abs(t) * sqrt(curvature) / root) / root
    found = likeliest_error(draws)
    finding = (
        "the drawn tokens that are listed follow no temperature"
        if found is None
        else f"as at a temperature of {found[0]:+.1%} ± {found[1]:.1%} from the one that was asked for"
    )
    p = min(1.0, 2 * float(stats.norm.sf(distance)))
    return LawTest("temperature", "all places", len(draws), z, 0, p, finding)


def likeliest_error(draws: Sequence[Draw]) -> tuple[float, float] | None:
    """The maximum-likelihood e of a temperature T (1 + e), and its standard error; None: no temperature fits.

    By the draws that are listed, so that it holds whatever the others are.
    """
    listed = [draw for draw in draws if draw.cell < len(draw.listed)]
    scores = Scores.of(listed, listed=True) if listed else None
    t = scores.tilt() if scores is not None else None
    if scores is None or t is None or t <= -1:
        return None
    curvature = scores.cumulants(t)[2]
    return (-t / (1 + t), 1 / (sqrt(curvature) * (1 + t) ** 2)) if curvature > TINY else None


def missing(draws: Sequence[Draw]) -> LawTest:
    """Whether a token never comes that should have."""
    evidence: defaultdict[str, float] = defaultdict(float)  # by token, in the order in which they were first listed
    for draw in draws:
        for token, value in zip(draw.listed, -np.log1p(-np.minimum(draw.probabilities, 1 - TINY)), strict=False):
            evidence[token] += float(value)
    seen = {draw.token for draw in draws}
    bounds = {
        token: log(place * (place + 1)) - found
        for place, (token, found) in enumerate(evidence.items(), 1)
        if token not in seen
    }
    token = min(bounds, key=lambda one: bounds[one], default="")
    found = evidence[token] if bounds else 0.0
    finding = f"{token!r} never came, expected about {found:.1f}" if bounds else "every listed token came"
    p = exp(min(0.0, bounds.get(token, 0.0)))
    return LawTest("missing token", "all places", len(draws), found, 0, p, finding)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below a level errs anywhere with at most that probability."""
    values, order = np.array(p_values), np.argsort(p_values)
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(np.arange(len(values), 0, -1) * values[order])
    return [float(one) for one in adjusted.clip(max=1.0)]


@dataclass(frozen=True)
class Power:
    """The smallest faults that an audit of this size finds with a probability of at least 95 %.

    For Holm's correction at its strictest, that is for Bonferroni's: each test at the level divided by their number.
    """

    temperature: float | None  # relative error of the temperature; None: none is found
    missing: float  # −Σ log(1 − p), about the expected number, of a token that never comes


def power_of(draws: Sequence[Draw], tests: int, level: float) -> Power:
    """Args: draws: all of the audit. tests: how many are made of them. level: of all tests together."""
    each, listed = level / max(1, tests), len({token for draw in draws for token in draw.listed})
    needed = float(stats.norm.isf(each / 2) + stats.norm.isf(1 - POWER))  # standard deviations
    deviation = sqrt(max(0.0, Scores.of(draws).cumulants(0.0)[2]))
    error = needed / (deviation - needed) if deviation > needed else None
    return Power(error, log(max(1, listed) * (listed + 1) / each))
