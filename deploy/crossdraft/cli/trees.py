"""`crossdraft bench trees`: what it brings that a pass carries a tree of paths instead of a chain."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from crossdraft.cli.acceptance import Cell, cell_of
from crossdraft.cli.benching import Setting, Workload, finished, running_pairs, write_json, write_text
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.progress import counted
from crossdraft.cli.running import checked_options, run_to_end
from crossdraft.cli.watched import Watch
from crossdraft.models.names import BUNDLED_PREFIX
from crossdraft.pipeline import Generation, GenerationRequest, Overlap, Statistics, connect
from crossdraft.pipeline.resolution import Models, resolve

BRANCHES = 4  # proposals of a prepared continuation
HEADINGS = (
    *("method", "drafter", "T", "epochs run", "paths", "tokens/pass", "row misses", "a pass", "nodes a pass"),
    *("accepted", "branches hit"),
)


@dataclass(frozen=True)
class Shape:
    """How epochs are run, and how many paths a tree has at most."""

    overlap: bool
    paths: int
    branches: int = 0  # proposals of each prepared continuation

    @property
    def label(self) -> str:
        """How epochs are run, for a table."""
        branches = f", branches {self.branches}" if self.branches else ""
        return f"{'overlapped' if self.overlap else 'lock-step'}{branches}"

    def request(self, plain: GenerationRequest) -> GenerationRequest:
        """The same request, run in this way."""
        if not self.overlap:
            return replace(plain, paths=self.paths)
        return replace(
            plain, overlap=Overlap.ON, paths=self.paths, branches=self.branches, branch_width=2 if self.branches else 1
        )


SHAPES = (
    *(Shape(overlap, paths) for overlap in (False, True) for paths in (1, 2)),
    *(Shape(True, paths, BRANCHES) for paths in (2, 6)),
)


@dataclass(frozen=True)
class Measured:
    """One setting with one shape, over all prompts."""

    shape: Shape
    cell: Cell
    nodes: float  # of a pass's tree, on average
    branches_hit: float | None  # share of the refusals that a branch continued; None: no branches


def measure(workload: Workload, concurrency: int, json_path: Path | None, markdown_path: Path | None) -> None:
    """Measures every setting with every shape; a table in Markdown on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: a service does not start or fails.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    workload.check()
    with checked_options():
        for setting in workload.settings:
            for shape in SHAPES:
                shape.request(setting.requests(workload.prompts[:1], workload.max_tokens)[0])
    run_to_end(_measure(workload, concurrency, json_path, markdown_path))


async def _measure(workload: Workload, concurrency: int, json_path: Path | None, markdown_path: Path | None) -> None:
    found: list[Measured] = []
    with counted(len(workload.settings) * len(SHAPES), "settings") as advance:
        async with aclosing(_all(workload, concurrency)) as measured:
            async for one in measured:
                found.append(one)
                advance()
                if json_path is not None:
                    write_json(json_path, {"target": workload.target, "measured": [asdict(each) for each in found]})
    table = markdown(HEADINGS, [_row(one) for one in found])
    if markdown_path is not None:
        write_text(markdown_path, table)
    print(table, end="")


async def _all(workload: Workload, concurrency: int) -> AsyncGenerator[Measured, None]:
    async with aclosing(running_pairs(workload)) as pairs:
        async for target, drafter, settings in pairs:
            async with AsyncExitStack() as stack:
                async with connect(target, drafter, needs_drafter=True) as pipeline:
                    models = pipeline.models
                watch = await Watch.of([target], [drafter], stack)
                for setting in settings:
                    for shape in SHAPES:
                        yield await Run(workload, setting, shape, models, watch).measured(concurrency)


@dataclass(frozen=True, eq=False)
class Run:
    """One setting with one shape."""

    workload: Workload
    setting: Setting
    shape: Shape
    models: Models
    watch: Watch

    async def measured(self, concurrency: int) -> Measured:
        """Over all prompts, so many at once."""
        places, began = asyncio.Semaphore(concurrency), time.monotonic()
        nodes = self._nodes()

        async def run(request: GenerationRequest) -> Statistics:
            async with places:
                return await finished(Generation(resolve(request, self.models), self.watch.services))

        plain = self.setting.requests(self.workload.prompts, self.workload.max_tokens)
        figures = await asyncio.gather(*(run(self.shape.request(one)) for one in plain))
        cell = cell_of(self.setting, figures, time.monotonic() - began)
        tried, hit = sum(one.branches_tried for one in figures), sum(one.branches_hit for one in figures)
        return Measured(self.shape, cell, (self._nodes() - nodes) / cell.passes, hit / tried if tried else None)

    def _nodes(self) -> int:
        return sum(port.nodes for port in self.watch.ports.values())


def _row(one: Measured) -> tuple[str, ...]:
    cell = one.cell
    return (
        *(cell.method, cell.drafter.removeprefix(BUNDLED_PREFIX), f"{cell.temperature:g}"),
        *(one.shape.label, str(one.shape.paths), f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}"),
        *(f"{cell.row_misses:,}", f"{cell.row_misses / cell.passes:.3f}", f"{one.nodes:.1f}", f"{cell.acceptance:.1%}"),
        "" if one.branches_hit is None else f"{one.branches_hit:.0%}",
    )
