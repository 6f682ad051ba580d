"""`crossdraft bench acceptance`: tokens per pass of methods and drafters, over many prompts."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import zip_longest
from math import sqrt
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.cli.benching import Setting, Workload, finished, print_table, running_pairs, write_json
from crossdraft.cli.failures import Misused
from crossdraft.cli.running import run_to_end
from crossdraft.models.names import BUNDLED_PREFIX
from crossdraft.pipeline import GenerationRequest, Pipeline, Statistics, connect
from crossdraft.pipeline.resolution import fault_of_pair
from crossdraft.rpc.clients import Patience
from crossdraft.verification.methods import method_named

PATIENCE = Patience(reply_seconds=600.0)  # many generations wait for one model
COLUMNS = (
    *("method", "drafter", "T", "k", "tokens/pass", "no misses", "accepted", "a round"),
    *("misses", "tokens", "passes", "s"),
)


@dataclass(frozen=True)
class Cell:
    """What was measured with one setting, over all prompts."""

    method: str
    drafter: str  # a model's name
    temperature: float
    k: int  # proposals in a round
    prompts: int
    tokens: int  # emitted
    passes: int  # of the target, row misses included
    tokens_per_pass: float  # sum over sum
    standard_error: float  # of tokens_per_pass, over prompts
    tokens_per_planned_pass: float  # the same with row misses not counted as passes
    acceptance: float  # share of the judged tokens that agreed with the draft
    accepted_length: float  # proposals accepted in a round, mean over the rounds that had any
    acceptance_at: tuple[float, ...]  # by place in a round, of the proposals judged there
    row_misses: int
    proposals: int
    seconds: float  # wall clock, for all prompts together


@dataclass(frozen=True)
class Skipped:
    """A setting that the pair refuses."""

    method: str
    drafter: str  # a model's name
    reason: str


def measure(workload: Workload, concurrency: int, json_path: Path | None) -> None:
    """Measures every setting; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails.
    """
    if concurrency < 1:
        raise Misused(f"--concurrency must be at least 1, got {concurrency}")
    workload.check()
    run_to_end(_measure(workload, concurrency, json_path))


async def _measure(workload: Workload, concurrency: int, json_path: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    cells: list[Cell] = []
    skipped: list[Skipped] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=len(workload.settings) * len(workload.prompts))
        async with aclosing(running_pairs(workload)) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline:
                    for setting in settings:
                        progress.update(task, description=" ".join(_labels(setting)))
                        found = await _found(
                            pipeline, workload, setting, concurrency, lambda count: progress.advance(task, count)
                        )
                        if isinstance(found, Cell):
                            cells.append(found)
                        elif found not in skipped:
                            skipped.append(found)
    _print(cells, skipped)
    if json_path is not None:
        record = {"target": workload.target, "max_tokens": workload.max_tokens, "concurrency": concurrency}
        lists = {"cells": [asdict(cell) for cell in cells], "skipped": [asdict(one) for one in skipped]}
        write_json(json_path, record | lists)


async def _found(
    pipeline: Pipeline, workload: Workload, setting: Setting, concurrency: int, advance: Callable[[int], None]
) -> Cell | Skipped:
    fault = fault_of_pair(method_named(setting.method), pipeline.models)
    if fault:
        advance(len(workload.prompts))
        return Skipped(setting.method, setting.drafter, fault)
    requests = setting.requests(workload.prompts, workload.max_tokens)
    began = time.monotonic()
    figures = await run_all(pipeline, requests, concurrency, lambda: advance(1))
    return cell_of(setting, figures, time.monotonic() - began)


def _print(cells: Sequence[Cell], skipped: Sequence[Skipped]) -> None:
    print_table("Tokens per pass", COLUMNS, [shown(cell) for cell in cells])
    places = max((len(cell.acceptance_at) for cell in cells), default=0)
    names = ("method", "drafter", "T", "k", *(str(place + 1) for place in range(places)))
    rows = [
        (*_labels(cell), *(f"{share:.1%}" for share in cell.acceptance_at), *[""] * (places - len(cell.acceptance_at)))
        for cell in cells
    ]
    print_table("Accepted by place in a round, of the proposals judged there", names, rows)
    for one in skipped:
        print(f"Skipped {one.method} with {one.drafter}: it {one.reason}")


async def run_all(
    pipeline: Pipeline, requests: Sequence[GenerationRequest], concurrency: int, advance: Callable[[], None]
) -> list[Statistics]:
    """The requests' figures, in their order, with so many under way at once."""
    places = asyncio.Semaphore(concurrency)

    async def run(request: GenerationRequest) -> Statistics:
        async with places:
            figures = await finished(pipeline.run(request))
        advance()
        return figures

    return await asyncio.gather(*map(run, requests))


def cell_of(setting: Setting, figures: Sequence[Statistics], seconds: float) -> Cell:
    """Sums over prompts.

    The standard error is that of a ratio of sums, to first order: with r the ratio and n prompts, the residuals
    tokens − r·passes have mean 0, and the error is √(n/(n−1) Σ residual²) / Σ passes; 0 for one prompt.
    """
    tokens = sum(figure.tokens for figure in figures)
    passes = sum(figure.passes for figure in figures)
    accepted = sum(figure.accepted for figure in figures)
    judged = accepted + sum(figure.corrected for figure in figures)
    squares = sum((figure.tokens - tokens / passes * figure.passes) ** 2 for figure in figures)
    count = len(figures)
    misses = sum(figure.row_misses for figure in figures)
    proposed_at = summed([figure.proposed_at for figure in figures])
    judged_at = summed([figure.judged_at for figure in figures])
    accepted_at = summed([figure.accepted_at for figure in figures])
    return Cell(
        **asdict(setting),
        prompts=count,
        tokens=tokens,
        passes=passes,
        tokens_per_pass=tokens / passes,
        standard_error=sqrt(count / (count - 1) * squares) / passes if count > 1 else 0.0,
        tokens_per_planned_pass=tokens / (passes - misses),
        acceptance=accepted / judged if judged else 0.0,
        accepted_length=sum(accepted_at) / proposed_at[0] if proposed_at else 0.0,
        acceptance_at=tuple(one / all_ if all_ else 0.0 for one, all_ in zip(accepted_at, judged_at, strict=True)),
        row_misses=misses,
        proposals=sum(figure.proposals for figure in figures),
        seconds=seconds,
    )


def summed(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Sums by place; a generation without rounds so long has none there."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _labels(cell: Cell | Setting) -> tuple[str, ...]:
    return (cell.method, cell.drafter.removeprefix(BUNDLED_PREFIX), f"{cell.temperature:g}", str(cell.k))


def shown(cell: Cell) -> tuple[str, ...]:
    """A row of the table."""
    return (
        *_labels(cell),
        f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}",
        f"{cell.tokens_per_planned_pass:.2f}",
        f"{cell.acceptance:.1%}",
        f"{cell.accepted_length:.2f}",
        f"{cell.row_misses:,}",
        f"{cell.tokens:,}",
        f"{cell.passes:,}",
        f"{cell.seconds:.1f}",
    )
