"""The harness of the benchmarks: turns, files, ratios with their intervals, counts against distributions."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from crossdraft.audit.statistics import fit_of
from crossdraft.cli.running import CommandFailed, ProgressCounter, UsageError
from crossdraft.lab.harness import Benchmark, Ratio, Timed, in_turns, speed_of, speed_ratio


@dataclass(frozen=True)
class Square:
    number: int
    square: int


@dataclass(frozen=True)
class SquaresPlan:
    count: int


class Squares(Benchmark[SquaresPlan, Square]):
    """A benchmark that measures nothing."""

    columns = {"number": lambda one: one.number, "square": lambda one: f"{one.square:.1f}"}  # noqa: RUF012
    title = "Squares"

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Square, None]:
        for number in range(self.plan.count):
            if number == 3:
                raise CommandFailed("a service failed")
            yield Square(number, number**2)
            advance()


def test_results_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = "Squares\n\n| number | square |\n| --- | --- |\n| 0 | 0.0 |\n| 1 | 1.0 |\n"
    Squares(SquaresPlan(2)).run(tmp_path / "out.json", tmp_path / "out.md")
    assert (tmp_path / "out.md").read_text() == table
    assert capsys.readouterr().out == table
    written = json.loads((tmp_path / "out.json").read_text())
    assert all(written.pop(name) for name in ("begun", "software", "cores"))
    assert written == {"plan": {"count": 2}, "results": [{"number": 0, "square": 0}, {"number": 1, "square": 1}]}


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="a service failed"):
        Squares(SquaresPlan(5)).run(tmp_path / "out.json")
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == 3


def test_files_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        Squares(SquaresPlan(5)).run(tmp_path / "none" / "out.json")


async def test_configurations_take_turns_so_that_each_comes_after_each_other_one() -> None:
    asked: list[tuple[str, int]] = []

    async def run(configuration: str, turn: int) -> int:
        asked.append((configuration, turn))
        return len(asked)

    found = await in_turns(["a", "b", "c"], 2, run)
    assert asked == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1)]
    assert found == {"a": [1, 6], "b": [2, 4], "c": [3, 5]}


def test_a_ratio_is_of_all_tokens_over_all_time() -> None:
    ours = [Timed(100, 1.0), Timed(10, 1.0)]
    others = [Timed(50, 1.0), Timed(10, 2.0)]
    assert speed_of(ours) == 55
    assert speed_ratio(ours, others).value == pytest.approx(55 / 20)


def test_pairs_that_agree_leave_no_doubt_however_they_differ_from_each_other() -> None:
    others = [Timed(100, 1.0), Timed(10, 1.0), Timed(300, 7.0)]
    twice = [Timed(run.tokens, run.seconds / 2) for run in others]
    assert speed_ratio(twice, others) == Ratio(pytest.approx(2), pytest.approx(2), pytest.approx(2))


def test_an_interval_is_that_of_prompts_drawn_again() -> None:
    random = np.random.default_rng(1)
    ours = [Timed(int(tokens), 1.0) for tokens in random.integers(50, 150, 40)]
    found = speed_ratio(ours, [Timed(100, 1.0)] * 40)
    wanted = stats.bootstrap([[one.tokens / 100 for one in ours]], np.mean, method="percentile", rng=2)
    assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval), abs=0.02)
    assert found.low < found.value < found.high
    (alone, *_) = ours
    assert speed_ratio([alone], [alone]) == Ratio(1.0, 1.0, 1.0)


def test_only_pairs_are_compared() -> None:
    for ours, others in (([], []), ([Timed(1, 1.0)], [])):
        with pytest.raises(ValueError, match=r"in pairs|zip"):
            speed_ratio(ours, others)


def test_what_is_too_little_for_a_cell_joins_the_smallest() -> None:
    distribution = np.array([0.9, 0.09, *[0.0001] * 100])  # the rest: an expectation of 1
    found = fit_of({0: 80, 1: 15, 7: 5}, distribution)
    assert found is not None
    assert (found.statistic, found.freedom) == pytest.approx((10**2 / 90 + 10**2 / 10, 1))
