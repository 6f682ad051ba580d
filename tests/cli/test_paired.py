"""Ratios of speeds, and how certain they are."""

import pytest

from crossdraft.bench.harness import Ratio, Timed, median_ratio, rotated, speed_of, speed_ratio


def test_a_ratio_is_of_all_tokens_over_all_time() -> None:
    ours = [Timed(100, 1.0), Timed(10, 1.0)]
    others = [Timed(50, 1.0), Timed(10, 2.0)]
    assert speed_of(ours) == 55
    assert speed_ratio(ours, others).value == pytest.approx(55 / 20)


def test_pairs_that_agree_leave_no_doubt_however_they_differ_from_each_other() -> None:
    others = [Timed(100, 1.0), Timed(10, 1.0), Timed(300, 7.0)]
    twice = [Timed(run.tokens, run.seconds / 2) for run in others]
    for ratio in (speed_ratio(twice, others), median_ratio(twice, others)):
        assert ratio == Ratio(pytest.approx(2), pytest.approx(2), pytest.approx(2))


def test_the_interval_is_as_wide_as_chance() -> None:
    # The mean of n ratios that are 1 or 3 with equal chances has a standard deviation of 1 / sqrt(n).
    others = [Timed(100, 1.0)] * 100
    ours = [Timed(100, 1.0), Timed(300, 1.0)] * 50
    ratio = speed_ratio(ours, others)
    assert ratio.value == pytest.approx(2)
    assert ratio.high - 2 == pytest.approx(1.96 * 0.1, rel=0.15)
    assert 2 - ratio.low == pytest.approx(1.96 * 0.1, rel=0.15)


def test_a_median_does_not_see_one_that_is_far_off() -> None:
    others = [Timed(100, 1.0)] * 9
    ours = [*others[:8], Timed(100, 50.0)]
    assert median_ratio(ours, others) == Ratio(1, 1, 1)


def test_only_pairs_are_compared() -> None:
    for ours, others in (([], []), ([Timed(1, 1.0)], [])):
        with pytest.raises(ValueError, match=r"in pairs|zip"):
            speed_ratio(ours, others)


def test_each_comes_after_each_other_one() -> None:
    turns = [rotated(3, turn) for turn in range(4)]
    assert turns == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_it_is_short() -> None:
    assert str(Ratio(1.234, 1.1, 1.3)) == "1.23 [1.10, 1.30]"
