"""`crossdraft bench acceptance`: tokens per pass of methods and drafters, over many prompts."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.cli.benching import Setting, Workload, finished, print_table, running_pairs, write_json
from crossdraft.cli.failures import Misused
from crossdraft.cli.running import run_to_end
from crossdraft.pipeline import GenerationRequest, Pipeline, Statistics, connect
from crossdraft.rpc.clients import Patience

PATIENCE = Patience(reply_seconds=600.0)  # many generations wait for one model
COLUMNS = ("method", "drafter", "T", "k", "tokens/pass", "accepted", "row misses", "tokens", "passes", "s")


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
    acceptance: float  # share of the judged tokens that agreed with the draft
    row_misses: int
    proposals: int
    seconds: float  # wall clock, for all prompts together


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
    cells = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=len(workload.settings) * len(workload.prompts))
        async with aclosing(running_pairs(workload)) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, PATIENCE) as pipeline:
                    for setting in settings:
                        described = f"{setting.method}, {setting.drafter}, T {setting.temperature:g}, k {setting.k}"
                        progress.update(task, description=described)
                        requests = setting.requests(workload.prompts, workload.max_tokens)
                        began = time.monotonic()
                        figures = await run_all(pipeline, requests, concurrency, lambda: progress.advance(task))
                        cells.append(cell_of(setting, figures, time.monotonic() - began))
    print_table("Tokens per pass", COLUMNS, [shown(cell) for cell in cells])
    if json_path is not None:
        record = {"target": workload.target, "max_tokens": workload.max_tokens, "concurrency": concurrency}
        write_json(json_path, record | {"cells": [asdict(cell) for cell in cells]})


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
    return Cell(
        **asdict(setting),
        prompts=count,
        tokens=tokens,
        passes=passes,
        tokens_per_pass=tokens / passes,
        standard_error=sqrt(count / (count - 1) * squares) / passes if count > 1 else 0.0,
        acceptance=accepted / judged if judged else 0.0,
        row_misses=sum(figure.row_misses for figure in figures),
        proposals=sum(figure.proposals for figure in figures),
        seconds=seconds,
    )


def shown(cell: Cell) -> tuple[str, ...]:
    """A row of the table."""
    return (
        cell.method,
        cell.drafter,
        f"{cell.temperature:g}",
        str(cell.k),
        f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}",
        f"{cell.acceptance:.1%}",
        f"{cell.row_misses:,}",
        f"{cell.tokens:,}",
        f"{cell.passes:,}",
        f"{cell.seconds:.1f}",
    )
