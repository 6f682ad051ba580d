"""The harness of all benchmarks.

A benchmark has a plan, whose fields are the options of its command. Its `measure` yields one result after the other,
and its `report` says which tables show them. The harness checks options and files before anything is started, counts
on stderr, writes the results whenever there is one more (an interrupted run keeps what it has) and prints the tables.

Configurations that are compared take turns (`in_turns`), so that a machine that gets slower or faster meanwhile does
so for all of them alike. Ratios of their speeds have bootstrap intervals (`speed_ratio`).
"""

import json
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import uvloop

from crossdraft.cli.measuring import SEED, Columns, Table, print_table
from crossdraft.cli.running import ProgressCounter, Run, check_output, counted, run_to_end, write_text
from crossdraft.client import Statistics
from crossdraft.client.api import software

Planned = TypeVar("Planned")
Result = TypeVar("Result")
Configuration = TypeVar("Configuration")
Floats = npt.NDArray[np.float64]


def optional(value: float | None, form: str) -> str:
    """A figure in this format; nothing where there is none."""
    return "" if value is None else format(value, form)


# A benchmark, and the run of one.


class Benchmark(ABC, Generic[Planned, Result]):
    """What is measured, and how."""

    unit: ClassVar[str] = "results"  # what the counter counts
    title: ClassVar[str] = ""  # of the table
    columns: ClassVar[Columns] = {}
    runner: ClassVar[Run] = staticmethod(uvloop.run)

    def __init__(self, plan: Planned) -> None:
        self.plan = plan  # a dataclass: the options of the command
        self.begun = datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def total(self) -> int | None:
        """How many units are counted; None: not known before."""
        return None

    def described(self) -> dict[str, Any]:
        """The plan, as the file of results has it."""
        return asdict(self.plan)  # type: ignore[call-overload,no-any-return]  # a dataclass

    def check(self) -> None:
        """Raises UsageError if a value is out of its range, before anything is started."""

    @abstractmethod
    def measure(self, advance: ProgressCounter) -> AsyncGenerator[Result, None]:
        """The results, one after the other. Raises UsageError: the pair of models cannot do what is asked;
        CommandFailed: a service does not start or fails."""

    def report(self, results: Sequence[Result]) -> Iterator[Table | str]:
        """The tables, and notes between them."""
        yield Table.of(results, self.columns, self.title)

    def finish(self, results: Sequence[Result]) -> None:
        """After everything was written; raises CommandFailed if what was found is a failure."""

    def run(self, json_path: Path | None = None, markdown_path: Path | None = None) -> None:
        """Measures; tables on stdout, and in files if paths are given. Raises UsageError: a value is out of its range,
        or a file cannot be written; CommandFailed: a service does not start or fails."""
        for path in (json_path, markdown_path):
            if path is not None:
                check_output(path)
        self.check()
        results: list[Result] = []

        async def collect() -> None:
            async with aclosing(self.measure(advance)) as found:
                async for result in found:
                    results.append(result)
                    self._write(results, json_path, markdown_path)

        with counted(self.total, self.unit) as advance:
            run_to_end(collect(), type(self).runner)
        self._print(results)
        self.finish(results)

    def _print(self, results: Sequence[Result]) -> None:
        """On stdout: tables on a terminal, Markdown in a file or a pipe."""
        if not sys.stdout.isatty():
            print(self._markdown(results), end="")
            return
        for part in self.report(results):
            if isinstance(part, Table):
                print_table(part)
            else:
                print(f"{part}\n")

    def _markdown(self, results: Sequence[Result]) -> str:
        return "\n".join(part.markdown() if isinstance(part, Table) else f"{part}\n" for part in self.report(results))

    def _write(self, results: Sequence[Result], json_path: Path | None, markdown_path: Path | None) -> None:
        if json_path is not None:
            about = {"begun": self.begun, "software": software(), "cores": len(os.sched_getaffinity(0))}
            record = {**about, "plan": self.described(), "results": [asdict(result) for result in results]}  # type: ignore[call-overload]
            write_text(json_path, json.dumps(record, indent=1, default=str) + "\n")
        if markdown_path is not None:
            write_text(markdown_path, self._markdown(results))


# Turns.


async def in_turns(
    configurations: Sequence[Configuration], turns: int, run: Callable[[Configuration, int], Awaitable[Result]]
) -> dict[Configuration, list[Result]]:
    """Runs each configuration once in each turn, one at a time; `run` gets the configuration and the turn's number.

    Each turn begins one further on, so that none of them always comes after the same one.
    """
    found: dict[Configuration, list[Result]] = {configuration: [] for configuration in configurations}
    for turn in range(turns):
        for place in range(turn, turn + len(configurations)):
            configuration = configurations[place % len(configurations)]
            found[configuration].append(await run(configuration, turn))
    return found


def drafts_accepted(total: Statistics) -> float:
    """Share of the draft tokens that were accepted, of those that were judged."""
    return sum(total.accepted_at) / max(1, sum(total.judged_at))


# Speeds that are compared on the same prompts: ratios with their 95 % intervals, over prompts drawn again.

RESAMPLES = 4_000  # of the prompts, with replacement (the bootstrap)


@dataclass(frozen=True)
class Timed:
    """One output or several: how many tokens were made, and how long that took."""

    tokens: int
    seconds: float
    figures: Statistics | None = None  # of all of them; None: they have not ended


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds, and its 95 % confidence interval over sets of prompts like these."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speed_of(runs: Sequence[Timed]) -> float:
    """Tokens a second over all of them."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.tokens for run in runs) / seconds if seconds else 0.0


def speed_ratio(ours: Sequence[Timed], others: Sequence[Timed]) -> Ratio:
    """Of all tokens over all time, ours and others'; runs at the same place are of the same prompt."""
    if len(ours) != len(others) or not ours:
        raise ValueError(f"runs are compared in pairs, at least one: {len(ours)} and {len(others)} were given")
    samples = np.array([[(run.tokens, run.seconds) for run in runs] for runs in (ours, others)])
    drawn = np.random.default_rng(SEED).integers(len(ours), size=(RESAMPLES, len(ours)))
    tokens, seconds = np.moveaxis(samples[:, [range(len(ours)), *drawn]].sum(2), -1, 0)  # all, then each sample
    speeds = tokens / seconds
    value, *others_ = speeds[0] / speeds[1]
    return Ratio(float(value), *np.quantile(others_, (0.025, 0.975)).tolist())


# Cores and processor time of other processes, as Linux counts it.

USER_TIME, SYSTEM_TIME = 13, 14  # fields of /proc/PID/stat, from 0, in clock ticks


def processor_seconds(process: int, thread: int | None = None) -> float:
    """Of all threads of a process since it began, or of one; 0.0 where there is no /proc, no such process or thread."""
    task = "" if thread is None else f"/task/{thread}"
    try:
        text = Path(f"/proc/{process}{task}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    # The second field is the command's name in brackets, which may itself hold spaces and brackets.
    fields_ = ["", "", *text.rpartition(")")[2].split()]
    return (int(fields_[USER_TIME]) + int(fields_[SYSTEM_TIME])) / os.sysconf("SC_CLK_TCK")


def on_core(number: int) -> tuple[str, ...]:
    """What a command is run by so that it has one core to itself; nothing where there is no taskset (util-linux)."""
    cores = sorted(os.sched_getaffinity(0))
    return () if shutil.which("taskset") is None else ("taskset", "-c", str(cores[number % len(cores)]))
