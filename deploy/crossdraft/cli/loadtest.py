"""`crossdraft loadtest`: requests on a schedule, and what became of them."""

import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.cli.benching import write_text
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.loadtest_stage import IN_PROCESS, Stage
from crossdraft.cli.outputs import check_output
from crossdraft.cli.paired import rotated
from crossdraft.cli.plots import check_picture
from crossdraft.cli.running import STARTS_PROCESSES, checked_options, run_to_end
from crossdraft.cli.tables import COLUMNS
from crossdraft.loadtest import prompts
from crossdraft.loadtest.arrivals import ClosedLoop, Load
from crossdraft.loadtest.asking import Question, Wishes, questions_of
from crossdraft.loadtest.comparisons import added_by
from crossdraft.loadtest.hearing import Way
from crossdraft.loadtest.plots import plot
from crossdraft.loadtest.prompts import Prompt
from crossdraft.loadtest.report import Comparison, Conditions, Report, Run, as_csv, plain
from crossdraft.loadtest.running import Trial
from crossdraft.loadtest.summaries import Goal, summary_of
from crossdraft.loadtest.tables import notes_of, tables_of
from crossdraft.loadtest.timelines import Timeline


class Staging(Protocol):
    """Where outputs are made: `loadtest_stage.Addressed` or `Started`."""

    @property
    def said(self) -> str:
        """What is started for the test; empty: nothing."""
        ...

    def stages(self) -> AsyncGenerator[Stage, None]:
        """One for each delay; raises ServiceError and CommandFailed."""
        ...


@dataclass(frozen=True)
class Plan:
    """What is asked, when, and how often.

    Raises:
        Misused: a number is out of its range.
    """

    load: Load
    wishes: Wishes
    goal: Goal
    prompts: tuple[Prompt, ...]
    prompts_from: str  # for the report
    requests: int  # of each repetition
    warm_up: int  # requests before, which do not count
    repeat: int
    seed: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        checks = (
            (self.requests >= 1, f"--requests must be at least 1, got {self.requests}"),
            (self.warm_up >= 0, f"--warm-up must be 0 or more, got {self.warm_up}"),
            (self.repeat >= 1, f"--repeat must be at least 1, got {self.repeat}"),
            (0 <= self.seed < 2**32, f"--seed must be between 0 and 2**32 - 1, got {self.seed}"),
            (0 < self.timeout_seconds < float("inf"), f"--timeout must be above 0, got {self.timeout_seconds:g}"),
        )
        for holds, complaint in checks:
            if not holds:
                raise Misused(complaint)

    def questions(self, count: int) -> tuple[Question, ...]:
        """The first requests."""
        return questions_of(self.prompts, count, self.wishes)

    def conditions(self, services: str) -> Conditions:
        """What the report says of it."""
        try:
            software = version("crossdraft")
        except PackageNotFoundError:
            software = "not installed"
        begun, cores = datetime.now(UTC).isoformat(timespec="seconds"), len(os.sched_getaffinity(0))
        counts = self.requests, self.warm_up, self.repeat, self.seed
        return Conditions(
            begun, software, cores, self.load, self.goal, self.wishes, *counts, self.prompts_from, services
        )


@dataclass(frozen=True)
class Files:
    """What is written besides what is shown. Raises Misused."""

    as_json: Path | None = None
    as_csv: Path | None = None
    picture: Path | None = None

    def __post_init__(self) -> None:
        check_picture(self.picture)
        for path in (self.as_json, self.as_csv, self.picture):
            if path is not None:
                check_output(path)

    def write(self, report: Report) -> None:
        """Raises CommandFailed."""
        if self.as_json is not None:
            write_text(self.as_json, json.dumps(plain(report), indent=1) + "\n")
        if self.as_csv is not None:
            write_text(self.as_csv, as_csv(report))
        if self.picture is not None:
            try:
                plot(self.picture, report)
            except OSError as error:
                raise CommandFailed(f"cannot write the picture: {error}") from error


def prompts_of(path: Path | None) -> tuple[tuple[Prompt, ...], str]:
    """Those of a file or the bundled ones, and where they are from; raises Misused."""
    if path is None:
        return prompts.bundled(), "bundled"
    with checked_options():
        return prompts.read(path), path.name


def run(plan: Plan, staging: Staging, files: Files) -> None:
    """Runs the test; tables on stdout, files if paths are given.

    Raises:
        Misused: a request cannot be served by the pair of models.
        CommandFailed: a service or server cannot be used; the report of what was done before is written.
    """
    run_to_end(LoadTest(plan, staging, files).run(), STARTS_PROCESSES)


@dataclass(eq=False)
class LoadTest:
    """A test under way."""

    plan: Plan
    staging: Staging
    files: Files
    runs: list[Run] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)  # what the first error of each kind said

    async def run(self) -> None:
        """All stages, then the report for people."""
        conditions = self.plan.conditions(self.staging.said)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as self._progress:
            self._task = self._progress.add_task("starting", total=None)
            async with aclosing(self.staging.stages()) as stages:
                async for stage in stages:
                    await self._stage(stage)
                    self.files.write(self._report(conditions))  # what there is survives an interruption
        show(self._report(conditions), self.faults)
        if all(not one.fine for run in self.runs for one in run.timelines):
            raise CommandFailed("no request was answered")

    async def _stage(self, stage: Stage) -> None:
        found: dict[str, list[list[Timeline]]] = {name: [] for name in stage.ways}
        for way in stage.ways.values():
            await self._warm_up(way)
        names = list(stage.ways)
        for number in range(self.plan.repeat):
            for place in rotated(len(names), number):
                told = "" if stage.delay_ms is None else f", {stage.delay_ms:g} ms"
                self._progress.reset(self._task, description=f"{names[place]}{told}", total=self.plan.requests)
                questions = self.plan.questions(self.plan.requests)
                trial = self._trial(stage.ways[names[place]])
                found[names[place]].append(await trial.run(self.plan.load, questions, self.plan.seed + number))
        self._keep(stage.delay_ms, found)

    async def _warm_up(self, way: Way) -> None:
        """Raises CommandFailed if all of it fails."""
        if not self.plan.warm_up:
            return
        load = self.plan.load if isinstance(self.plan.load, ClosedLoop) else ClosedLoop(1)
        tried = await self._trial(way).run(load, self.plan.questions(self.plan.warm_up), 0)
        if not any(one.fine for one in tried):
            error = tried[0].error
            raise CommandFailed(f"the first requests failed ({error}): {self.faults.get(error, 'no token came')}")
        self.faults.clear()

    def _trial(self, way: Way) -> Trial:
        return Trial(way, self.plan.timeout_seconds, self._told)

    def _told(self, timeline: Timeline, text: str) -> None:
        self._progress.advance(self._task)
        if timeline.error:
            self.faults.setdefault(timeline.error, text)

    def _keep(self, delay_ms: float | None, found: dict[str, list[list[Timeline]]]) -> None:
        for name, repetitions in found.items():
            summary = summary_of(repetitions, self.plan.load, self.plan.goal)
            self.runs.append(Run(name, delay_ms, summary, tuple(map(tuple, repetitions))))
        others = [name for name in found if name != IN_PROCESS]
        if IN_PROCESS in found:
            for name in others:
                added = added_by(name, found[name], IN_PROCESS, found[IN_PROCESS])
                self.comparisons.append(Comparison(delay_ms, added))

    def _report(self, conditions: Conditions) -> Report:
        return Report(conditions, tuple(self.runs), tuple(self.comparisons))


def show(report: Report, faults: dict[str, str]) -> None:
    """Tables on stdout, what must not be overlooked on stderr."""
    console, notes = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=_width(report.runs))
    for table in tables_of(report):
        console.print(table, highlight=False)
    for note in notes_of(report):
        notes.print(note, highlight=False, soft_wrap=True)
    for kind, text in faults.items():
        notes.print(f"{kind}: {text}", highlight=False, markup=False, soft_wrap=True)


def _width(runs: Sequence[Run]) -> int:
    """Of tables that go to a file or pipe, so that no cell is cut."""
    return max(COLUMNS, 40 + 36 * len(runs))
