"""`crossdraft bench overlap`: how fast the overlapped pipeline is, beside lock-step, plain decoding and others.

Speeds are compared in one run: the services are real processes with a core each, the drafter at an emulated distance,
and all ways to decode take turns on the same prompts.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.cli.benching import write_json
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import HEADINGS, Cell, Conditions, cell_of, markdown, rows_of
from crossdraft.cli.overlap_runs import AnyWay, Bench, Side, assisted_ways
from crossdraft.cli.overlap_stage import LONGEST_DELAY, Distant, Served, drafter_service, target_service
from crossdraft.cli.overlap_ways import GOVERNED, PLAIN, Task, Way, branched, lock_steps, overlapped
from crossdraft.cli.running import checked_options, run_to_end
from crossdraft.models.assisted import AssistedGeneration
from crossdraft.models.names import ModelLoadError
from crossdraft.pipeline import connect
from crossdraft.pipeline.ports import Services
from crossdraft.rpc.clients import DrafterClient, TargetClient


def delays_of(text: str) -> tuple[float, ...]:
    """Milliseconds with commas between; raises Misused."""
    try:
        delays = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise Misused(f"--delay-ms takes numbers with commas between, such as 0,5,20, got {text}") from error
    for delay in delays:
        if not 0 <= delay <= LONGEST_DELAY:
            raise Misused(f"--delay-ms must be between 0 and {LONGEST_DELAY}, got {delay:g}")
    return delays


def pairs_of(option: str, form: str, given: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Values of a repeatable option of the form A,B; raises Misused."""
    pairs = []
    for text in given:
        try:
            first, second = (int(part) for part in text.split(","))
        except ValueError as error:
            raise Misused(f"{option}: {form} expected, two whole numbers such as 16,4, got {text}") from error
        pairs.append((first, second))
    return tuple(pairs)


@dataclass(frozen=True)
class Search:
    """Which numbers of each way are tried on a few prompts, before the best ones are compared."""

    ks: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]  # and waits
    branches: tuple[tuple[int, int], ...]  # depths and widths
    prompts: int = 2
    max_tokens: int = 48

    @staticmethod
    def of(ks: Sequence[int], windows: Sequence[str], branches: Sequence[str]) -> "Search":
        """From options as they were typed; raises Misused."""
        return Search(
            tuple(ks),
            pairs_of("--window", "WINDOW,WAIT", windows),
            pairs_of("--branches", "DEPTH,WIDTH", branches),
        )


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: Served
    drafter: Served
    noises: tuple[float, ...]  # on the drafter's logits
    delays: tuple[float, ...]  # ms to the drafter, one way
    temperatures: tuple[float, ...]
    method: str | None
    prompts: tuple[str, ...]
    row_width: int  # ids of a proposal's row
    max_tokens: int
    repeat: int
    assisted: tuple[int, ...]  # threads of transformers' assisted generation that are tried; none: it is left out
    search: Search

    def task(self, temperature: float) -> Task:
        """What is generated at a temperature."""
        return Task(self.prompts, self.method, temperature, self.max_tokens, self.row_width)

    def check(self) -> None:
        """Raises Misused if a request would be refused, before anything is started."""
        if self.repeat < 1:
            raise Misused(f"--repeat must be at least 1, got {self.repeat}")
        if not self.prompts:
            raise Misused("there are no prompts")
        if min(self.search.ks) < 1:
            raise Misused(f"-k must be at least 1, got {min(self.search.ks)}")
        for noise in self.noises:
            replace(self.drafter, logit_noise=noise)
        with checked_options():
            tried = [*lock_steps(self.search.ks), *overlapped(self.search.windows)]
            tried += branched(tried[-1], self.search.branches)
            for temperature in self.temperatures:
                for way in (PLAIN, GOVERNED, *tried):
                    self.task(temperature).request(way, 0)


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    """Measures every cell; a table in Markdown on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    plan.check()
    run_to_end(_measure(plan, json_path, markdown_path))


async def _measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    cells: list[Cell] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)
        async with aclosing(_cells(plan, lambda: progress.advance(task))) as found:
            async for cell in found:
                cells.append(cell)
                progress.update(task, description=f"{len(cells)} cells")
                _write(plan, cells, json_path, markdown_path)  # what there is survives an interruption
    print(markdown(HEADINGS, rows_of(cells)), end="")


def _write(plan: Plan, cells: Sequence[Cell], json_path: Path | None, markdown_path: Path | None) -> None:
    if json_path is not None:
        shown = asdict(replace(plan, prompts=())) | {"prompts": len(plan.prompts)}
        write_json(json_path, {"plan": shown, "cells": [asdict(cell) for cell in cells]})
    if markdown_path is not None:
        try:
            markdown_path.write_text(markdown(HEADINGS, rows_of(cells)), encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"cannot write the table: {error}") from error


async def _cells(plan: Plan, advance: Callable[[], None]) -> AsyncGenerator[Cell, None]:
    assisted = _assisted(plan)
    async with target_service(plan.target) as target:
        for noise in plan.noises:
            served = replace(plan.drafter, logit_noise=noise)
            async with drafter_service(served, distant=any(plan.delays)) as drafter:
                for delay in plan.delays:
                    await drafter.delay(delay)
                    for temperature in plan.temperatures:
                        conditions = Conditions(plan.method or "default", temperature, noise, delay)
                        yield await _cell(plan, conditions, target.address, drafter, assisted, advance)


async def _cell(
    plan: Plan,
    conditions: Conditions,
    target: str,
    drafter: Distant,
    assisted: AssistedGeneration | None,
    advance: Callable[[], None],
) -> Cell:
    async with (
        connect(target) as plain,
        connect(target, drafter.address, needs_drafter=True) as drafted,
        TargetClient(target) as verify,
        DrafterClient(drafter.address) as draft,
    ):
        sides = Side(plain.models, Services.of(verify)), Side(drafted.models, Services.of(verify, draft))
        bench = Bench(plan.task(conditions.temperature), *sides, assisted, advance)
        ways = await _ways(bench, plan)
        found = await bench.compare(ways, len(plan.prompts), plan.repeat)
        return cell_of(conditions, found, bench.predictions(ways), bench.estimates)


async def _ways(bench: Bench, plan: Plan) -> list[AnyWay]:
    """Plain decoding, the best of each kind, and what the governor does."""
    search = plan.search

    async def best(ways: Sequence[AnyWay]) -> AnyWay:
        return await bench.best(ways, min(search.prompts, len(plan.prompts)), search.max_tokens)

    await bench.warm_up([PLAIN, *lock_steps(search.ks[:1]), GOVERNED])
    locked = await best(lock_steps(search.ks))
    drafted_on = await best(overlapped(search.windows))
    assert isinstance(drafted_on, Way)
    ways: list[AnyWay] = [PLAIN, locked, drafted_on, await best(branched(drafted_on, search.branches)), GOVERNED]
    if bench.assisted is not None:
        tried = assisted_ways(plan.assisted)
        await bench.warm_up(tried)
        ways.append(await best(tried))
    return ways


def _assisted(plan: Plan) -> AssistedGeneration | None:
    if not plan.assisted:
        return None
    try:
        return AssistedGeneration(plan.target.model, plan.drafter.model)
    except ModelLoadError as error:
        raise CommandFailed(f"transformers cannot load this pair: {error}") from error
