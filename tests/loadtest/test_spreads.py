"""Means and quantiles."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.loadtest.summary import Spread, binned_quantile, quantile


def test_a_spread_of_known_values() -> None:
    assert Spread.of(range(101)) == Spread(101, 50.0, 50.0, 90.0, 99.0)
    assert Spread.of([0.002], 1000.0) == Spread(1, 2.0, 2.0, 2.0, 2.0)
    assert Spread.of([]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    assert quantile(sorted(values), share) == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-9)


def test_quantiles_of_bins_are_linear_within_a_bin() -> None:
    assert binned_quantile([0, 4, 0, 0], [1.0, 3.0, 5.0], 0.5) == 2.0
    assert binned_quantile([2, 2, 0, 0], [1.0, 3.0, 5.0], 0.5) == 1.0
    assert binned_quantile([2, 0, 2, 0], [1.0, 3.0, 5.0], 0.75) == 4.0
    assert binned_quantile([0, 0, 0, 3], [1.0, 3.0, 5.0], 0.5) == 5.0


@given(st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any), st.fractions(0, 1))
def test_quantiles_of_bins_rise_and_lie_in_a_bin_with_values(counts: list[int], share: Fraction) -> None:
    bounds = [1.0, 2.0, 4.0]
    found = binned_quantile(counts, bounds, float(share))
    lows = [0.0, *bounds]
    assert any(count and lows[place] <= found <= [*bounds, 4.0][place] for place, count in enumerate(counts))
    assert found <= binned_quantile(counts, bounds, 1.0)
