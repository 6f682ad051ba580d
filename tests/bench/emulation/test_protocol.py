"""Delays, without any traffic, and what the two processes say to each other."""

import pytest

from crossdraft.bench.emulation.protocol import (
    Lane,
    Place,
    Reshape,
    Shape,
    Through,
    read_order,
    read_places,
    write_order,
    write_places,
)


def test_what_enters_later_never_leaves_earlier() -> None:
    lane = Lane()
    assert lane.due(1.0, 20, 0) == pytest.approx(1.02)
    assert lane.due(1.001, 0, 0) == pytest.approx(1.02)  # the delay was taken away
    assert lane.due(1.5, 0, 0) == 1.5


def test_jitter_is_around_the_delay_and_differs() -> None:
    lane = Lane()
    found = [lane.due(number, 20, 5) - number for number in range(100)]
    assert all(0.015 <= one <= 0.025 for one in found)
    assert len(set(found)) > 90


@pytest.mark.parametrize("wrong", [{"there_ms": -1.0}, {"back_ms": float("inf")}, {"jitter_ms": float("nan")}])
def test_impossible_delays_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="between 0 and 60,000"):
        Shape(**wrong)


@pytest.mark.parametrize("order", [Reshape("far", Shape(1.5, 2.0, 0.5, True)), Through("far", "127.0.0.1:7")])
def test_an_order_is_read_as_it_was_written(order: Reshape | Through) -> None:
    line = write_order(order)
    assert line.endswith(b"\n")
    assert read_order(line) == order


def test_so_are_places() -> None:
    places = {"far": Place(("nsenter", "--net=/x"), "198.18.0.2"), "near": Place((), "127.0.0.1")}
    assert read_places(write_places(places)) == places
