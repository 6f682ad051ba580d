"""The harness of the benchmarks: turns and files."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest

from crossdraft.cli.running import CommandFailed, ProgressCounter, UsageError
from crossdraft.lab.harness import Benchmark, in_turns


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
