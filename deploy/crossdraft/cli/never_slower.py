"""`crossdraft bench never-slower`: drafters that are of no use, and what they cost.

Each prompt is continued without a drafter and with a bad one, in turns, with a new connection each time. What counts
is the speed with the drafter as a share of the speed without.
"""

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.cli.benching import write_json
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.overlap_runs import Outcome
from crossdraft.cli.overlap_stage import Served, drafter_service, target_service
from crossdraft.cli.overlap_ways import GOVERNED, Task
from crossdraft.cli.paired import Ratio, median_ratio, rotated, speed_of
from crossdraft.cli.running import checked_options, run_to_end
from crossdraft.models.names import ModelLoadError
from crossdraft.models.randomized import write_random
from crossdraft.pipeline import GenerationRequest, connect

SLOW_MS = 500.0  # of a step of the drafter that is slow
KILLED_AFTER = 0.25  # of the output, when the drafter dies
HEADINGS = ("drafter", "T", "runs", "tokens/s without", "with", "ratio, median [95 %]", "accepted", "lost")


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: Served
    drafter: Served  # what the bad ones are made of
    temperatures: tuple[float, ...]
    method: str | None
    prompts: tuple[str, ...]
    tokens: int

    def request(self, temperature: float, number: int) -> GenerationRequest:
        """As it is asked for by default, and always this long. Raises ValueError."""
        task = Task(self.prompts, self.method, temperature, self.tokens)
        return replace(task.request(GOVERNED, number), ignore_eos=True)


@dataclass(frozen=True)
class Bad:
    """A bad drafter for the time of one generation."""

    address: str
    mortal: int | None = None  # a process to kill in mid-stream; None: it is left alone


Kind = Callable[[Plan], AbstractAsyncContextManager[Bad]]


@asynccontextmanager
async def running_badly(served: Served) -> AsyncIterator[Bad]:
    """One that is there until the end."""
    async with drafter_service(served, distant=False) as drafter:
        yield Bad(drafter.address)


def slow(plan: Plan) -> AbstractAsyncContextManager[Bad]:
    """One that knows as much as a good one, and takes half a second for each answer."""
    return running_badly(replace(plan.drafter, pace=f"{SLOW_MS:g},0"))


@asynccontextmanager
async def dead(plan: Plan) -> AsyncIterator[Bad]:
    """An address where nobody listens: the port is bound, so that nobody else takes it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield Bad(f"127.0.0.1:{bound.getsockname()[1]}")


@asynccontextmanager
async def dying(plan: Plan) -> AsyncIterator[Bad]:
    """A good one that is killed in mid-stream."""
    async with drafter_service(plan.drafter, distant=False) as drafter:
        yield Bad(drafter.address, drafter.process_id)


@dataclass(frozen=True)
class Verdict:
    """What one kind of bad drafter costs."""

    drafter: str
    temperature: float
    without: float  # tokens a second
    with_it: float  # likewise
    ratio: Ratio  # of the speeds, the median over prompts
    ratios: tuple[float, ...]  # of each prompt
    accepted: int  # tokens that agreed with its drafts
    lost: int  # times that it was lost or given up


def measure(plan: Plan, json_path: Path | None) -> None:
    """Measures all kinds; a table in Markdown on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: the target does not start or fails.
    """
    if json_path is not None:
        check_output(json_path)
    if not plan.prompts:
        raise Misused("there are no prompts")
    with checked_options():
        for temperature in plan.temperatures:
            plan.request(temperature, 0)
    run_to_end(_measure(plan, json_path))


async def _measure(plan: Plan, json_path: Path | None) -> None:
    verdicts = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with TemporaryDirectory() as folder, Progress(*columns, console=Console(stderr=True)) as progress:
        kinds = _kinds(plan, Path(folder))
        task = progress.add_task("", total=len(kinds) * len(plan.temperatures) * len(plan.prompts))
        async with target_service(plan.target) as target:
            for temperature in plan.temperatures:
                for name, kind in kinds.items():
                    progress.update(task, description=name)
                    comparison = Comparison(plan, temperature, target.address, kind, lambda: progress.advance(task))
                    verdicts.append(_verdict(name, temperature, *await comparison.run()))
    if json_path is not None:
        shown = asdict(replace(plan, prompts=())) | {"prompts": len(plan.prompts)}
        write_json(json_path, {"plan": shown, "verdicts": [asdict(verdict) for verdict in verdicts]})
    print(markdown(HEADINGS, [_row(verdict) for verdict in verdicts]), end="")


def _kinds(plan: Plan, folder: Path) -> dict[str, Kind]:
    """By name; raises CommandFailed if a drafter that has learnt nothing cannot be made."""
    try:
        write_random(plan.drafter.model, folder)
    except (ModelLoadError, OSError) as error:
        raise CommandFailed(f"a drafter with random weights cannot be made: {error}") from error
    random = replace(plan.drafter, model=str(folder))
    return {
        "random weights": lambda plan: running_badly(random),
        f"{SLOW_MS:g} ms an answer": slow,
        "dead from the start": dead,
        "killed in mid-stream": dying,
    }


@dataclass(frozen=True, eq=False)
class Comparison:
    """One kind of bad drafter beside none."""

    plan: Plan
    temperature: float
    target: str
    kind: Kind
    advance: Callable[[], None]

    async def run(self) -> tuple[list[Outcome], list[Outcome]]:
        """Without it, and with it; one of each for each prompt. The first one warms up, and does not count."""
        found: tuple[list[Outcome], list[Outcome]] = ([], [])
        await self._generate(0, None)
        for number in range(len(self.plan.prompts)):
            async with self.kind(self.plan) as bad:
                for place in rotated(2, number):
                    found[place].append(await self._generate(number, bad if place else None))
            self.advance()
        return found

    async def _generate(self, number: int, bad: Bad | None) -> Outcome:
        request = self.plan.request(self.temperature, number)
        kill_at = round(KILLED_AFTER * request.max_tokens)
        tokens = 0
        async with (
            connect(self.target, None if bad is None else bad.address) as pipeline,
            pipeline.run(request) as generation,
        ):
            async for _ in generation:
                tokens += 1
                if tokens == kill_at and bad is not None and bad.mortal is not None:
                    os.kill(bad.mortal, signal.SIGKILL)
            figures = generation.statistics
        if figures is None:
            raise CommandFailed("a generation ended without its statistics")
        return Outcome(figures.tokens, figures.seconds, figures)


def _verdict(name: str, temperature: float, without: Sequence[Outcome], with_it: Sequence[Outcome]) -> Verdict:
    figures = [run.figures for run in with_it if run.figures is not None]
    return Verdict(
        name,
        temperature,
        speed_of(without),
        speed_of(with_it),
        median_ratio(with_it, without),
        tuple(one.speed / other.speed for one, other in zip(with_it, without, strict=True)),
        sum(one.accepted for one in figures),
        sum(one.drafters_lost for one in figures),
    )


def _row(verdict: Verdict) -> tuple[str, ...]:
    ratio = verdict.ratio
    return (
        verdict.drafter,
        f"{verdict.temperature:g}",
        str(len(verdict.ratios)),
        f"{verdict.without:.1f}",
        f"{verdict.with_it:.1f}",
        f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        str(verdict.accepted),
        str(verdict.lost),
    )
