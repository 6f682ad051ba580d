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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from crossdraft.types.rows import Probabilities

Floats = npt.NDArray[np.float64]
OTHERS = "(all others)"  # the cell of tokens that are not listed
POWER = 0.95  # probability with which a fault of the stated size is found
STEEPEST = 5.0  # largest saddlepoint that is looked for
NEARLY_ZERO = 0.05  # standard deviations within which the normal approximation is good, and the other one is 0 / 0
NEWTON_STEPS = 12  # each at most doubles or halves the temperature
DOUBTFUL = 0.01  # p-values of a chi-square below are simulated,
RARE = 1e-7  # those above: others are faults by any approximation
SIMULATED = 100_000
TINY = 1e-12  # stands for a probability of 0, whose logarithm is asked for


# Whether counts fit a distribution: Pearson's chi-square test.

LEAST = 5.0  # expected count of a cell; smaller ones are pooled


@dataclass(frozen=True)
class Fit:
    """One test."""

    count: int  # of draws
    statistic: float
    freedom: int  # degrees of freedom: cells less one
    p: float  # probability of a statistic at least as large, if the draws have the distribution


def fit_of(counts: Mapping[int, int], distribution: Probabilities) -> Fit | None:
    """Compares draws with their distribution; None if there are too few for two cells.

    Args:
        counts: how often each id was drawn.
        distribution: probability of each id, shape (V,), sums to one.
    """
    drawn = np.zeros(len(distribution))
    drawn[list(counts)] = list(counts.values())
    total = float(drawn.sum())
    wanted, observed = pooled(total * distribution, drawn)
    if len(wanted) < 2:
        return None
    found = stats.chisquare(observed, wanted, sum_check=False)  # sums differ by rounding
    return Fit(int(total), float(found.statistic), len(wanted) - 1, float(found.pvalue))


def pooled(expected: Floats, *others: Floats) -> list[Floats]:
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


# Draws of an endpoint.


@dataclass(frozen=True, eq=False)
class Draw:
    """A drawn token, and the distribution that was reported for its place."""

    token: str
    listed: tuple[str, ...]
    probabilities: Floats  # shape (len(listed) + 1,), sums to one; the last one is of all others
    cell: int  # where the token is in `probabilities`


@dataclass(frozen=True)
class Cell:
    """One token at one place, or all others."""

    token: str
    expected: float  # number of draws, by the reported probabilities
    observed: int


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
    cells: tuple[Cell, ...] = ()  # of a chi-square, before they are pooled


def chi_square(kind: str, where: str, draws: Sequence[Draw]) -> LawTest | None:
    """Draws at one place against the mean of the reported probabilities; None if they are too few for two cells.

    A mean, because engines report slightly other numbers for the same place in another batch.
    """
    expected: Counter[str] = Counter()
    for draw in draws:
        for token, probability in zip((*draw.listed, OTHERS), draw.probabilities, strict=True):
            expected[token] += float(probability)  # type: ignore[assignment]  # a counter of floats
    observed = Counter((*draw.listed, OTHERS)[draw.cell] for draw in draws)
    names = list(expected)
    fit = fit_of(
        {place: observed[name] for place, name in enumerate(names)},
        np.array([expected[name] for name in names]) / max(1, len(draws)),
    )
    if fit is None:
        return None
    p = fit.p if not RARE < fit.p < DOUBTFUL else simulated(fit, np.array([expected[name] for name in names]))
    cells = tuple(Cell(name, float(expected[name]), observed[name]) for name in names)
    farthest = max(cells, key=lambda one: (one.observed - one.expected) ** 2 / max(LEAST, one.expected))
    finding = f"{farthest.token!r} came {farthest.observed} times, expected {farthest.expected:.1f}"
    return LawTest(kind, where, fit.count, fit.statistic, fit.freedom, p, finding, cells)


def simulated(fit: Fit, expected: Floats) -> float:
    """The probability of so large a chi-square, by drawing from the distribution: with cells of five expected draws the
    usual approximation is too small by up to ten times where it matters."""
    rng = np.random.default_rng(0)
    law = pooled(expected, expected)[0] / expected.sum()
    counts = rng.multinomial(fit.count, law / law.sum(), SIMULATED)
    wanted = fit.count * law
    larger = int((((counts - wanted) ** 2 / wanted).sum(axis=1) >= fit.statistic).sum())
    return (1 + larger) / (1 + SIMULATED)


def information(draws: Sequence[Draw]) -> float:
    """V, the sum over places of the variance of a token's log-probability, in nats²."""
    return float(_scores(draws)[1])


def temperature(draws: Sequence[Draw]) -> LawTest | None:
    """The test of the temperature over all places; None if all of them are certain.

    The error that it names is estimated from the draws that are listed, so that it holds whatever the others are.
    """
    score, variance = _scores(draws)
    if variance < TINY:
        return None
    z, found = score / sqrt(variance), likeliest_error(draws)
    finding = (
        "the drawn tokens that are listed follow no temperature"
        if found is None
        else f"as at a temperature of {found[0]:+.1%} ± {found[1]:.1%} from the one that was asked for"
    )
    p = min(1.0, 2 * tail_of(draws, score))
    return LawTest("temperature", "all places", len(draws), z, 0, p, finding)


def tail_of(draws: Sequence[Draw], score: float) -> float:
    """The probability of so large a sum of g − E g, or of one so far below 0 (Lugannani and Rice's saddlepoint
    approximation in Barndorff-Nielsen's form).

    Where places are nearly certain the sum is skewed, and the normal approximation is wrong by a factor in its tails.
    With K the cumulant-generating function of the sum, which is a sum over places, K'(t) = score at the saddlepoint t.
    """
    groups, variance = _centered(draws), _scores(draws)[1]

    def cumulants(t: float) -> tuple[float, float, float]:
        """K, K' and K'' at t."""
        found = np.zeros(3)
        for chances, values in groups:
            shift = (t * values).max(axis=1, keepdims=True)
            weights = chances * np.exp(t * values - shift)
            total = weights.sum(axis=1, keepdims=True)
            weights /= total
            mean = (weights * values).sum(axis=1)
            spread = (weights * values**2).sum(axis=1) - mean**2
            found += ((np.log(total) + shift).sum(), mean.sum(), spread.sum())
        return float(found[0]), float(found[1]), float(found[2])

    end = STEEPEST if score > 0 else -STEEPEST
    if abs(score) / sqrt(variance) < NEARLY_ZERO or (cumulants(end)[1] - score) * end < 0:
        return float(stats.norm.sf(abs(score) / sqrt(variance)))
    saddle = float(optimize.brentq(lambda t: cumulants(t)[1] - score, 0.0, end, xtol=1e-10))
    value, _, curvature = cumulants(saddle)
    root = sqrt(max(TINY, 2 * (saddle * score - value)))
    adjusted = root + log(abs(saddle) * sqrt(curvature) / root) / root
    return float(stats.norm.sf(adjusted))


def likeliest_error(draws: Sequence[Draw]) -> tuple[float, float] | None:
    """The maximum-likelihood e of a temperature T (1 + e), and its standard error; None: no positive temperature fits.

    At inverse temperature b = 1 / (1 + e), relative to the one asked for, a token among those that are listed at its
    place has a probability ∝ exp(b g). The likelihood is concave in b: Newton's method finds its maximum.
    """
    listed = [draw for draw in draws if draw.cell < len(draw.listed)]
    columns = max((len(draw.listed) for draw in listed), default=0)
    values = np.full((len(listed), columns), -inf)
    for row, draw in zip(values, listed, strict=True):
        row[: len(draw.listed)] = np.log(np.maximum(draw.probabilities[:-1], TINY))
    drawn = values[np.arange(len(listed)), [draw.cell for draw in listed]]
    likeliest = values.max(axis=1, initial=-inf)
    values, drawn, b, curvature = values - likeliest[:, None], drawn - likeliest, 1.0, 0.0
    finite = np.maximum(values, log(TINY))  # where a list is shorter, what stands there weighs nothing
    for _ in range(NEWTON_STEPS):
        weights = np.exp(b * values)
        weights /= weights.sum(axis=1, keepdims=True)
        means = (weights * finite).sum(axis=1)
        curvature = float((weights * finite**2).sum() - (means**2).sum())
        if curvature < TINY:
            return None
        b = min(2 * b, max(b / 2, b + float((drawn - means).sum()) / curvature))
    return (1 / b - 1, 1 / (sqrt(curvature) * b**2)) if b > 1 / 2 ** (NEWTON_STEPS - 1) else None


def _centered(draws: Sequence[Draw]) -> list[tuple[Floats, Floats]]:
    """Probabilities and g − E g, each of shape (places, cells), of places with as many cells."""
    found = []
    for size in {len(draw.probabilities) for draw in draws}:
        chances = np.array([draw.probabilities for draw in draws if len(draw.probabilities) == size])
        values = np.log(np.maximum(chances, TINY))
        values[:, -1] = values[:, :-1].min(axis=1, initial=0.0)
        found.append((chances, values - (chances * values).sum(axis=1, keepdims=True)))
    return found


def _scores(draws: Sequence[Draw]) -> tuple[float, float]:
    """The sums of g − E g and of Var g."""
    score, variance = 0.0, 0.0
    for chances, values in _centered(draws):
        cells = [draw.cell for draw in draws if len(draw.probabilities) == chances.shape[1]]
        score += float(values[np.arange(len(cells)), cells].sum())
        variance += float((chances * values**2).sum())
    return score, variance


def missing(draws: Sequence[Draw]) -> LawTest:
    """Whether a token never comes that should have."""
    evidence: dict[str, float] = {}  # by token, in the order in which they were first listed
    seen: set[str] = set()
    for draw in draws:
        for token, value in zip(draw.listed, -np.log1p(-np.minimum(draw.probabilities, 1 - TINY)), strict=False):
            evidence[token] = evidence.get(token, 0.0) + float(value)
        seen.add(draw.token)
    bounds = {
        token: (log(place * (place + 1)) - found, found)
        for place, (token, found) in enumerate(evidence.items(), 1)
        if token not in seen
    }
    token = min(bounds, key=lambda one: bounds[one][0], default="")
    bound, found = bounds.get(token, (0.0, 0.0))
    finding = f"{token!r} never came, expected about {found:.1f}" if bounds else "every listed token came"
    return LawTest("missing token", "all places", len(draws), found, 0, exp(min(0.0, bound)), finding)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below a level errs anywhere with at most that probability."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


@dataclass(frozen=True)
class Power:
    """The smallest faults that an audit of this size finds with a probability of at least 95 %.

    For Holm's correction at its strictest, that is for Bonferroni's: each test at `level` divided by their number.
    """

    level: float  # of each test
    temperature: float  # relative error of the temperature; infinite if every place is certain
    missing: float  # −Σ log(1 − p), about the expected number, of a token that never comes


def power_of(draws: Sequence[Draw], tests: Sequence[LawTest], level: float) -> Power:
    """Args: draws: all of the audit. tests: those that were made of them. level: of all tests together."""
    each, listed = level / max(1, len(tests)), len({token for draw in draws for token in draw.listed})
    return Power(each, temperature_error(information(draws), each), log(max(1, listed) * (listed + 1) / each))


def temperature_error(variance: float, level: float) -> float:
    """The relative error that the test of the temperature finds with POWER, given V; infinite if none is."""
    deviations = float(stats.norm.isf(level / 2) + stats.norm.isf(1 - POWER))
    return deviations / (sqrt(variance) - deviations) if variance > deviations**2 else inf
