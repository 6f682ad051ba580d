"""`crossdraft bench pruning`: tokens per pass with drafters that keep fewer and fewer ids of their head."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.cli.acceptance import PATIENCE, Cell, cell_of, run_all
from crossdraft.cli.benching import Setting, Workload, print_table, write_json
from crossdraft.cli.corpora import corpus_texts
from crossdraft.cli.failures import Misused
from crossdraft.cli.head import check_shares, sizes_of
from crossdraft.cli.processes import Wanted, services, threads_each
from crossdraft.cli.running import run_to_end
from crossdraft.cli.vocabularies import Named
from crossdraft.models.training.corpus import read_corpus
from crossdraft.pipeline import connect
from crossdraft.text.letters import Side
from crossdraft.text.ranking import Ranking, count_frequencies

COLUMNS = ("method", "drafter", "T", "k", "keep", "of the corpus", "tokens/pass", "of the whole", "accepted", "tokens")


@dataclass(frozen=True)
class Pruned:
    """What was measured with one setting and one size of the head."""

    keep: int  # ids
    covered: float  # share of the corpus's tokens that the `keep` most frequent ids make
    cell: Cell


@dataclass(frozen=True)
class Counted:
    """A drafter's vocabulary ranked by a corpus."""

    name: str
    ranking: Ranking
    file: Path

    def options(self, keep: int) -> tuple[str, ...]:
        """Those of the drafter's command that keep so many ids; none for the whole head."""
        if keep >= len(self.ranking.counts):
            return ()
        return ("--vocab-keep", str(keep), "--frequencies", str(self.file))


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    workload: Workload
    shares: tuple[float, ...]  # of the vocabulary
    corpus: Path | None  # None: what the bundled models have learnt from
    concurrency: int


def measure(plan: Plan, json_path: Path | None) -> None:
    """Measures every drafter with every size of its head; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails, or the corpus cannot be read.
    """
    check_shares(plan.shares)
    if plan.concurrency < 1:
        raise Misused(f"--concurrency must be at least 1, got {plan.concurrency}")
    plan.workload.check()
    with TemporaryDirectory() as folder:
        names = dict.fromkeys(setting.drafter for setting in plan.workload.settings)
        counted = [_counted(name, plan.corpus, Path(folder, str(number))) for number, name in enumerate(names)]
        run_to_end(_measure(plan, counted, json_path))


def _counted(name: str, corpus: Path | None, file: Path) -> Counted:
    named = Named.load(name, Side.DRAFTER)
    texts = (document.text for document in read_corpus().training) if corpus is None else corpus_texts(corpus, name)
    ranking = count_frequencies(named.tokenizer_json, named.tokenization, texts)
    ranking.write(file)
    return Counted(name, ranking, file)


async def _measure(plan: Plan, counted: Sequence[Counted], json_path: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = sum(len(_sizes(plan, one)) * len(_settings(plan, one)) for one in counted)
        task = progress.add_task("starting", total=total * len(plan.workload.prompts))
        async with aclosing(_cells(plan, counted, lambda: progress.advance(task))) as cells:
            async for one in cells:
                progress.update(task, description=f"{one.cell.drafter}, {one.keep:,} kept")
                found.append(one)
    whole = {_key(one.cell): one.cell.tokens_per_pass for one in reversed(found)}  # the whole head comes first
    print_table("Tokens per pass", COLUMNS, [shown(one, whole[_key(one.cell)]) for one in found])
    if json_path is not None:
        tokens = {one.name: one.ranking.tokens for one in counted}
        record = {"target": plan.workload.target, "max_tokens": plan.workload.max_tokens, "corpus_tokens": tokens}
        write_json(json_path, record | {"cells": [asdict(one) for one in found]})


async def _cells(plan: Plan, counted: Sequence[Counted], advance: Callable[[], None]) -> AsyncGenerator[Pruned, None]:
    """Every drafter with every size of its head, the whole one first."""
    workload, threads = plan.workload, threads_each(2)
    async with services([Wanted("target", workload.target, threads)]) as (target,):
        for one in counted:
            for keep in _sizes(plan, one):
                wanted = Wanted("drafter", one.name, threads, one.options(keep))
                async with (
                    services([wanted]) as (drafter,),
                    connect(target, drafter, PATIENCE, needs_drafter=True) as pipeline,
                ):
                    for setting in _settings(plan, one):
                        requests = setting.requests(workload.prompts, workload.max_tokens)
                        began = time.monotonic()
                        figures = await run_all(pipeline, requests, plan.concurrency, advance)
                        cell = cell_of(setting, figures, time.monotonic() - began)
                        yield Pruned(keep, one.ranking.covered(keep), cell)


def _sizes(plan: Plan, one: Counted) -> list[int]:
    return sizes_of(len(one.ranking.counts), plan.shares)


def _settings(plan: Plan, one: Counted) -> list[Setting]:
    return [setting for setting in plan.workload.settings if setting.drafter == one.name]


def _key(cell: Cell) -> tuple[object, ...]:
    """What cells have in common that differ in their heads only."""
    return (cell.method, cell.drafter, cell.temperature, cell.k)


def shown(one: Pruned, whole: float) -> tuple[str, ...]:
    """A row of the table; `whole`: tokens per pass with the whole head."""
    cell = one.cell
    return (
        cell.method,
        cell.drafter,
        f"{cell.temperature:g}",
        str(cell.k),
        f"{one.keep:,}",
        f"{one.covered:.1%}",
        f"{cell.tokens_per_pass:.2f} ± {cell.standard_error:.2f}",
        f"{cell.tokens_per_pass / whole:.1%}",
        f"{cell.acceptance:.1%}",
        f"{cell.tokens:,}",
    )
