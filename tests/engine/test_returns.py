"""When sessions come back, learned from when they did."""

import pytest

from crossdraft.engine.scheduler import ReturnTimes


def visited(returns: ReturnTimes, session: str, gaps: list[float], now: float = 0.0) -> float:
    """Asks, and is answered at once, with these gaps between; when that ended, with an answer."""
    returns.asked(session, now)
    for gap in gaps:
        returns.answered(session, now)
        now += gap
        returns.asked(session, now)
    returns.answered(session, now)
    return now


def test_a_session_is_expected_about_when_it_came_back_before() -> None:
    returns = ReturnTimes()
    now = visited(returns, "a", [0.003] * 50)
    (left,) = returns.expected(now).values()
    assert left == pytest.approx(0.003, abs=1e-4)
    (left,) = returns.expected(now + 0.002).values()
    assert left == pytest.approx(0.001, abs=1e-4)


def test_one_that_varies_is_given_more_time() -> None:
    returns = ReturnTimes()
    now = visited(returns, "a", [0.001, 0.005] * 50)
    (left,) = returns.expected(now).values()
    assert 0.005 < left < 0.012


def test_whoever_asks_or_is_late_or_over_is_not_expected() -> None:
    returns = ReturnTimes()
    now = visited(returns, "a", [0.003] * 9)
    assert set(returns.expected(now)) == {"a"}
    assert not returns.expected(now + 0.1)
    returns.asked("a", now)
    assert not returns.expected(now)
    returns.answered("a", now)
    returns.over("a")
    assert not returns.expected(now)
    returns.over("never heard of")


def test_a_session_that_never_came_back_is_expected_as_others_are() -> None:
    returns = ReturnTimes()
    returns.asked("first", 0.0)
    returns.answered("first", 0.0)
    assert not returns.expected(0.0)  # nobody ever came back: nothing is known
    now = visited(returns, "a", [0.003] * 50)
    returns.asked("b", now)
    returns.answered("b", now)
    assert set(returns.expected(now)) == {"a", "b"}
    assert returns.expected(now)["b"] == pytest.approx(0.003, abs=1e-3)


def test_one_long_absence_says_little_and_a_lasting_one_is_learned() -> None:
    returns = ReturnTimes()
    now = visited(returns, "a", [*[0.003] * 50, 5.0])
    assert returns.expected(now)["a"] < 0.02
    now = visited(returns, "a", [0.05] * 50, now)
    assert returns.expected(now)["a"] == pytest.approx(0.05, rel=0.2)


def test_each_session_has_its_own_distance() -> None:
    returns = ReturnTimes()
    visited(returns, "far", [0.040] * 40, now=0.0)
    now = visited(returns, "near", [0.002] * 40, now=1.541)
    expected = returns.expected(now)
    assert expected["near"] < 0.01 < expected["far"]
