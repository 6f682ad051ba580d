"""The harness of all benchmarks.

A benchmark has a plan, whose fields are the options of its command. Its `measure` yields one result after the other,
and its `report` says which tables show them. The harness checks options and files before anything is started, counts
on stderr, writes the results whenever there is one more (an interrupted run keeps what it has) and prints the tables.

Configurations that are compared take turns (`in_turns`), so that a machine that gets slower or faster meanwhile does
so for all of them alike.
"""

import asyncio
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from crossdraft.cli.measuring import Columns, Table, print_table
from crossdraft.cli.prompts import Prompt, prompts_of
from crossdraft.cli.running import ProgressCounter, Run, UsageError, check_output, counted, run_to_end, write_text
from crossdraft.client.api import software
from crossdraft.config.request import Overlap
from crossdraft.lab.commands import PromptsPlan

Planned = TypeVar("Planned")
Result = TypeVar("Result")
Configuration = TypeVar("Configuration")
PromptsPlanned = TypeVar("PromptsPlanned", bound=PromptsPlan)
Item = TypeVar("Item")


def optional(value: float | None, form: str) -> str:
    """A figure in this format; nothing where there is none."""
    return "" if value is None else format(value, form)


# A benchmark, and the run of one.


class Benchmark(ABC, Generic[Planned, Result]):
    """What is measured, and how."""

    unit: ClassVar[str] = "results"  # what the counter counts
    title: ClassVar[str] = ""  # of the table
    columns: ClassVar[Columns] = {}
    runner: ClassVar[Run] = staticmethod(asyncio.run)  # as most start processes (`running.STARTS_PROCESSES`)

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


class Prompted(Benchmark[PromptsPlanned, Result]):
    """A benchmark that generates from the prompts of a file."""

    @cached_property
    def _read(self) -> tuple[Prompt, ...]:
        path = self.plan.prompts
        if path == PromptsPlan.prompts and not path.is_file():
            raise UsageError(f"there is no {path}: run this in a checkout of crossdraft, or give a file with --prompts")
        return prompts_of(path, self.plan.limit)

    @property
    def prompts(self) -> tuple[str, ...]:
        """Their texts; raises UsageError."""
        return tuple(str(prompt.content) for prompt in self._read)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Their categories."""
        return tuple(prompt.category for prompt in self._read)

    def check(self) -> None:
        _ = self.prompts


# Choices in place of the controller's: what a request says for each.


def lock_step(k: int, nodes: int = 0) -> dict[str, Any]:
    """Rounds of so many draft tokens, or of trees of that depth."""
    return {"overlap": Overlap.OFF, "num_speculative_tokens": k, "tree_nodes": nodes}


def overlapped(most: int, least: int) -> dict[str, Any]:
    """So many draft tokens ahead at most; a pass waits for so many at least."""
    return {"overlap": Overlap.ON, "max_draft_tokens": most, "min_draft_tokens": least}


# Several at once, and in turns.


async def gathered(make: Callable[[Item], Awaitable[Result]], items: Iterable[Item], concurrency: int) -> list[Result]:
    """What is made of each, in their order, with so many under way at once."""
    places = asyncio.Semaphore(concurrency)

    async def limited(item: Item) -> Result:
        async with places:
            return await make(item)

    return await asyncio.gather(*map(limited, items))


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
