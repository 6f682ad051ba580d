"""Whether counts fit a law: Pearson's chi-square test."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import erfc, exp, lgamma, log, sqrt

import numpy as np

from crossdraft.verification.rows import Probabilities

LEAST = 5.0  # expected count of a cell; smaller ones are pooled


@dataclass(frozen=True)
class Fit:
    """One test."""

    count: int  # of draws
    statistic: float
    freedom: int  # degrees of freedom: cells less one
    p: float  # probability of a statistic at least as large, if the draws have the law


def fit_of(counts: Mapping[int, int], law: Probabilities) -> Fit | None:
    """Compares draws with their law; None if there are too few for two cells.

    Args:
        counts: how often each id was drawn.
        law: probability of each id, shape (V,), sums to one.
    """
    drawn = np.zeros(len(law))
    drawn[list(counts)] = list(counts.values())
    total = float(drawn.sum())
    expected = total * law
    large = expected >= LEAST
    observed = np.append(drawn[large], drawn[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < LEAST and len(wanted) > 1:  # what is left is too little for a cell: the smallest one takes it
        place = int(wanted[:-1].argmin())
        for cells in (observed, wanted):
            cells[place] += cells[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) < 2:
        return None
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return Fit(int(total), statistic, len(wanted) - 1, chi_square_tail(statistic, len(wanted) - 1))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(χ² ≥ statistic) = Q(freedom / 2, statistic / 2), the regularized upper incomplete gamma function.

    A finite sum, as freedom / 2 = a is a whole or half number: Q(a + 1, x) = Q(a, x) + xᵃ e⁻ˣ / Γ(a + 1), from
    Q(1, x) = e⁻ˣ or Q(1/2, x) = erfc(√x).
    """
    x = statistic / 2
    if x == 0:
        return 1.0
    a, tail = (0.5, erfc(sqrt(x))) if freedom % 2 else (1.0, exp(-x))
    while a < freedom / 2:
        tail += exp(a * log(x) - x - lgamma(a + 1))
        a += 1
    return min(1.0, tail)
