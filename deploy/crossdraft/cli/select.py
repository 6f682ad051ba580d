"""`crossdraft select`: which drafter, method and number of proposals to use for a target, by measuring them."""

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from math import log, sqrt
from pathlib import Path
from statistics import stdev

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.cli.advice import Candidate, Skipped, advice, best_of, print_report, short, told_apart
from crossdraft.cli.benching import Setting, finished
from crossdraft.cli.costs import Plain, Rounds
from crossdraft.cli.failures import Misused
from crossdraft.cli.plots import SpeedCurve, check_picture, plot_speeds
from crossdraft.cli.processes import Wanted, services, threads_each
from crossdraft.cli.running import STARTS_PROCESSES, checked_options, run_to_end
from crossdraft.pipeline import GenerationRequest, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.pipeline.resolution import fault_of_pair
from crossdraft.verification.exchange import Description
from crossdraft.verification.methods import method_named

ADDRESS = re.compile(r"[^/\s]+:\d+")  # a hub id or bundled:NAME has no number behind the colon
GREEDY_METHODS = ("standard", "slem", "tli", "coupled")
SAMPLING_METHODS = ("standard", "seeded", "tli", "coupled", "coupled-shared")
KS = (1, 2, 3, 4, 6)  # numbers of proposals that are chosen from, unless others are given
COPYING_KS = (4, 8, 16, 32)  # ... with a drafter that copies: its proposals are bytes, and cost next to nothing

RUNS = 4  # of each prompt with a method: a probe and the best K, each beside one without a drafter


@dataclass(frozen=True)
class Choosing:
    """What is compared."""

    target: str  # a model's name or HOST:PORT
    drafters: tuple[str, ...]  # likewise
    prompts: tuple[str, ...]
    methods: tuple[str, ...]  # none: those that suit the temperature
    ks: tuple[int, ...]  # numbers of proposals to choose from; none: those that suit the drafter
    temperature: float
    max_tokens: int

    @property
    def tried(self) -> tuple[str, ...]:
        """The methods, with every drafter."""
        return self.methods or (GREEDY_METHODS if self.temperature == 0 else SAMPLING_METHODS)

    def ks_for(self, copies: bool) -> tuple[int, ...]:
        """Numbers of proposals to choose from, with a drafter that copies or with a model."""
        return self.ks or (COPYING_KS if copies else KS)

    def setting(self, method: str, drafter: str, copies: bool) -> Setting:
        """What is probed with a method and a drafter: the largest K."""
        return Setting(method, drafter, self.temperature, max(self.ks_for(copies)))

    def plain(self) -> list[GenerationRequest]:
        """One request a prompt, to be run without a drafter."""
        options = SamplingOptions(self.temperature)
        return [
            GenerationRequest(text, max_tokens=self.max_tokens, options=options, seed=0, choice=number)
            for number, text in enumerate(self.prompts)
        ]

    def check(self) -> None:
        """Raises Misused if a request would be refused, before anything is started."""
        if not self.drafters:
            raise Misused("give at least one --drafter")
        if len(self.prompts) < 2:
            raise Misused("give at least two prompts: one alone does not show what is chance")
        with checked_options():
            for method in self.tried:
                for k in self.ks_for(copies=False):
                    Setting(method, "", self.temperature, k).requests(self.prompts, self.max_tokens)


def select(choosing: Choosing, as_json: bool, plot: Path | None) -> None:
    """Measures, prints a table or JSON, and says what to use.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: a service does not start, is not there, or fails.
    """
    check_picture(plot)
    choosing.check()
    run_to_end(_select(choosing, as_json, plot), STARTS_PROCESSES)


async def _select(choosing: Choosing, as_json: bool, plot: Path | None) -> None:
    candidates: list[Candidate] = []
    skipped: list[Skipped] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = RUNS * len(choosing.prompts) * len(choosing.tried) * len(choosing.drafters)
        task = progress.add_task("starting", total=total)
        async with _running("target", choosing.target) as target, connect(target) as plainly:
            served = _named(choosing.target, plainly.models.target)
            for name in choosing.drafters:
                async with (
                    _running("drafter", name) as drafter,
                    connect(target, drafter, needs_drafter=True) as pipeline,
                ):
                    progress.update(task, description=short(name))
                    pair = _Pair(choosing, name, plainly, pipeline, lambda count=1: progress.advance(task, count))
                    await pair.measure(candidates, skipped)
    candidates = told_apart(candidates)
    title = f"Drafters for {short(served)}, temperature {choosing.temperature:g}"
    _report(choosing, title, candidates, skipped if choosing.methods else [], as_json)
    if plot is not None and candidates:
        curves = [
            SpeedCurve(one.label, one.expected, one.best_k, one.measured, one.error)
            for one in sorted(candidates, key=lambda one: -one.measured)
        ]
        plot_speeds(plot, title, curves)


def _named(given: str, about: Description) -> str:
    """The name of a model: of a service, what it says itself."""
    return about.model if ADDRESS.fullmatch(given) else given


@asynccontextmanager
async def _running(role: str, name: str) -> AsyncIterator[str]:
    """The address of a service: the given one, or that of one which runs as long as the block."""
    if ADDRESS.fullmatch(name):
        yield name
        return
    async with services([Wanted(role, name, threads_each(2))]) as (address,):
        yield address


@dataclass(frozen=True, eq=False)
class _Pair:
    """The target with one drafter."""

    choosing: Choosing
    name: str  # of the drafter
    plainly: Pipeline  # without the drafter
    pipeline: Pipeline
    advance: Callable[..., None]

    @property
    def _about(self) -> Description:
        """The drafter's words about itself."""
        about = self.pipeline.models.drafter
        assert about is not None  # it was connected with one
        return about

    async def measure(self, candidates: list[Candidate], skipped: list[Skipped]) -> None:
        """Adds what was found."""
        for method in self.choosing.tried:
            setting = self.choosing.setting(method, self.name, self._about.copies)
            fault = fault_of_pair(method_named(setting.method), self.pipeline.models)
            if fault:
                skipped.append(Skipped(self.name, setting.method, fault))
                self.advance(RUNS * len(self.choosing.prompts))
            else:
                candidates.append(await self._candidate(setting))

    async def _candidate(self, setting: Setting) -> Candidate:
        """Rounds of the largest K say which K should be best; that one is then measured."""
        probed, beside = await self._in_turns(setting)
        rounds, plain = Rounds.of(setting.k, probed), Plain.of(beside)
        ks = self.choosing.ks_for(self._about.copies)
        best = rounds.best(ks, plain)
        drafted, beside = await self._in_turns(replace(setting, k=best))
        judged = sum(figure.accepted + figure.corrected for figure in probed)
        speed, plain_speed = _speed(drafted), _speed(beside)
        gains = [
            log(one.tokens_per_second / other.tokens_per_second) for one, other in zip(drafted, beside, strict=True)
        ]
        return Candidate(
            drafter=self.name,
            method=setting.method,
            acceptance=sum(figure.accepted for figure in probed) / max(1, judged),
            draft_cost=rounds.proposal_seconds / plain.pass_seconds,
            tokens_per_pass=sum(figure.tokens for figure in drafted) / sum(figure.passes for figure in drafted),
            best_k=best,
            expected={k: rounds.speed_with(k, plain) for k in ks},
            measured=speed / plain_speed,
            error=speed / plain_speed * stdev(gains) / sqrt(len(gains)),
            tokens_per_second=speed,
            plain_tokens_per_second=plain_speed,
            model=_named(self.name, self._about),
        )

    async def _in_turns(self, setting: Setting) -> tuple[list[Statistics], list[Statistics]]:
        """With the drafter and without, prompt by prompt, so that both meet the same machine."""
        drafted, plain = [], []
        requests = setting.requests(self.choosing.prompts, self.choosing.max_tokens)
        for request, without in zip(requests, self.choosing.plain(), strict=True):
            drafted.append(await self._run(self.pipeline, request))
            plain.append(await self._run(self.plainly, without))
        return drafted, plain

    async def _run(self, pipeline: Pipeline, request: GenerationRequest) -> Statistics:
        figures = await finished(pipeline.run(request))
        self.advance()
        return figures


def _speed(figures: Sequence[Statistics]) -> float:
    """Tokens a second, opening of the sessions and prompts included."""
    return sum(figure.tokens for figure in figures) / sum(figure.seconds for figure in figures)


def _report(
    choosing: Choosing, title: str, candidates: Sequence[Candidate], skipped: Sequence[Skipped], as_json: bool
) -> None:
    if not as_json:
        print_report(f"{title}; speed without one is 1", candidates, skipped)
        return
    best = best_of(candidates)
    record = {
        **asdict(choosing),
        "candidates": [asdict(one) for one in candidates],
        "skipped": [asdict(one) for one in skipped],
        "choice": None if best is None else {"drafter": best.drafter, "method": best.method, "k": best.best_k},
        "advice": advice(candidates),
    }
    print(json.dumps(record))
