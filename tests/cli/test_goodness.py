"""Chi-square tests of counts against distributions."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from crossdraft.bench.harness import LEAST, chi_square_tail, fit_of


@given(st.floats(0, 2000), st.integers(1, 600))
def test_the_tail_is_scipys(statistic: float, freedom: int) -> None:
    expected = stats.chi2.sf(statistic, freedom)
    assert chi_square_tail(statistic, freedom) == pytest.approx(expected, rel=1e-8, abs=1e-290)


def draws(distribution: np.ndarray, count: int, seed: int) -> Counter[int]:
    return Counter(np.random.default_rng(seed).choice(len(distribution), count, p=distribution).tolist())


def test_it_is_scipys_test_where_nothing_is_pooled() -> None:
    distribution = np.array([0.1, 0.2, 0.3, 0.4])
    counts = draws(distribution, 500, 1)
    found, expected = (
        fit_of(counts, distribution),
        stats.chisquare([counts[token] for token in range(4)], 500 * distribution),
    )
    assert found is not None
    assert (found.count, found.freedom) == (500, 3)
    assert (found.statistic, found.p) == pytest.approx((expected.statistic, expected.pvalue))


def test_cells_with_a_small_expectation_are_one() -> None:
    distribution = np.array([0.5, 0.44, *[0.001] * 60])
    counts = draws(distribution, 200, 2)
    rare = sum(count for token, count in counts.items() if token > 1)
    found, expected = (
        fit_of(counts, distribution),
        stats.chisquare([counts[0], counts[1], rare], 200 * np.array([0.5, 0.44, 0.06])),
    )
    assert found is not None
    assert (found.statistic, found.freedom) == pytest.approx((expected.statistic, 2))


def test_what_is_too_little_for_a_cell_joins_the_smallest() -> None:
    distribution = np.array([0.9, 0.09, *[0.0001] * 100])  # the rest: an expectation of 1
    found = fit_of({0: 80, 1: 15, 7: 5}, distribution)
    assert found is not None
    assert (found.statistic, found.freedom) == pytest.approx((10**2 / 90 + 10**2 / 10, 1))


def test_too_few_draws_test_nothing() -> None:
    assert fit_of({0: 6, 1: 2}, np.array([0.7, 0.3])) is None
    assert LEAST > 8 * 0.3


def test_p_is_uniform_under_the_distribution_and_tiny_under_another() -> None:
    distribution = np.random.default_rng(3).dirichlet(np.ones(30))
    fits = [fit_of(draws(distribution, 400, seed), distribution) for seed in range(300)]
    assert stats.kstest([fit.p for fit in fits if fit is not None], "uniform").pvalue > 1e-4
    biased = fit_of(draws(distribution**1.3 / (distribution**1.3).sum(), 4000, 4), distribution)
    assert biased is not None
    assert biased.p < 1e-4
