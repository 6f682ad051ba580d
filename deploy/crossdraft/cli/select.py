"""`crossdraft select`: which drafter and method to use for a target, by measuring them.

Each drafter and method is measured beside decoding without a drafter, prompt by prompt in turns, after the controller,
which decides how far to draft, has learned on the same prompts.
"""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import filterfalse
from math import log, sqrt
from pathlib import Path, PurePath
from statistics import stdev

from crossdraft.cli.measuring import SEED, Columns, Setting, Skipped, Table, finished, print_table, repeats, total_of
from crossdraft.cli.processes import Wanted, checked_addresses, patience, running, threads_each
from crossdraft.cli.prompts import by_category, prompts_of
from crossdraft.cli.running import (
    PROMPTS,
    STARTS_PROCESSES,
    ProgressCounter,
    UsageError,
    checked_options,
    counted,
    run_to_end,
)
from crossdraft.cli.serve import faults_of_models
from crossdraft.client import GenerationRequest, Pipeline, Statistics, connect
from crossdraft.config.engine import EngineOptions
from crossdraft.engine.names import BUNDLED_PREFIX, check_name
from crossdraft.session.models import fault_of_pair
from crossdraft.verification.methods import method_named

ADDRESS = re.compile(r"[^/\s]+:\d+")  # what a hub id or bundled:NAME does not match
GREEDY_METHODS = ("standard", "slem", "tli", "coupled")
SAMPLING_METHODS = ("standard", "seeded", "tli", "coupled", "coupled-shared")
Pair = tuple[Statistics, Statistics]  # of an output, and of the same without a drafter
RUNS = 3  # generations per prompt and method: to learn, and then beside one without a drafter

COLUMNS: Columns = {
    "drafter": lambda candidate: short(candidate.drafter),
    "method": lambda candidate: candidate.method,
    "accepted": lambda candidate: f"{candidate.acceptance:.1%}",
    "tokens/pass": lambda candidate: f"{candidate.tokens_per_pass:.2f}",
    "mostly": lambda candidate: candidate.mostly,
    "measured": lambda candidate: f"{_speedup(candidate)} ×",
    "without repeats": lambda candidate: f"{_times(candidate.without_repeats)} ({candidate.repeating})",
    "tokens/s": lambda candidate: f"{candidate.tokens_per_second:.1f} ({candidate.plain_tokens_per_second:.1f})",
}
CERTAIN = 2.0  # standard errors by which a speedup must exceed 1: the fastest of many is partly the luckiest


@dataclass(frozen=True)
class Selection:
    """What is compared."""

    target: str  # a model's name or HOST:PORT
    drafters: tuple[str, ...]  # likewise
    prompts: tuple[str, ...]
    methods: tuple[str, ...]  # none: those that suit the temperature
    temperature: float
    max_tokens: int
    engine: EngineOptions  # of models that are given by name
    kinds: tuple[str, ...]  # of the prompts

    @property
    def tried(self) -> tuple[str, ...]:
        return self.methods or (GREEDY_METHODS if self.temperature == 0 else SAMPLING_METHODS)

    def requests(self, method: str) -> list[GenerationRequest]:
        """One for each prompt. Raises ValueError if a value is out of its range."""
        setting = Setting(method, "", self.temperature, GenerationRequest.num_speculative_tokens, controlled=True)
        return setting.requests(self.prompts, self.max_tokens)

    def check(self) -> None:
        """Raises UsageError: a request would be refused; CommandFailed: there is no such model."""
        if not self.drafters:
            raise UsageError("give at least one --drafter")
        if len(self.prompts) < 2:
            raise UsageError("give at least two prompts: the error of a mean cannot be estimated from one")
        with checked_options():
            for method in self.tried:
                self.requests(method)
        for option, named in (("--target", (self.target,)), ("--drafter", self.drafters)):
            checked_addresses(option, filter(ADDRESS.fullmatch, named))
        with faults_of_models():
            for name in filterfalse(ADDRESS.fullmatch, (self.target, *self.drafters)):
                check_name(name)


def select(
    target: str,
    drafter: Sequence[str],
    prompts: Path | None,
    limit: int,
    method: Sequence[str] | None,
    temperature: float,
    max_tokens: int,
    as_json: bool,
    engine: EngineOptions,
) -> None:
    """Measures, prints a table or JSON, and says what to use. Raises UsageError: a value is out of its range;
    CommandFailed: a service does not start, is not there, or fails."""
    given = prompts_of(prompts, limit) if prompts else ()
    texts, kinds = tuple(str(one.content) for one in given), tuple(one.category for one in given)
    texts, methods = texts or PROMPTS[:limit], tuple(method or ())
    selection = Selection(target, tuple(drafter), texts, methods, temperature, max_tokens, engine, kinds)
    selection.check()
    run_to_end(_select(selection, as_json), STARTS_PROCESSES)


async def _select(selection: Selection, as_json: bool) -> None:
    candidates: list[Candidate] = []
    skipped: list[Skipped] = []
    total = RUNS * len(selection.prompts) * len(selection.tried) * len(selection.drafters)
    with counted(total, "measuring") as advance:
        async with (
            _running("target", selection.target, selection.engine) as target,
            connect(target, patience=patience()) as plain,
        ):
            for name in selection.drafters:
                async with (
                    _running("drafter", name, selection.engine) as drafter,
                    connect(target, drafter, patience(), needs_drafter=True) as pipeline,
                ):
                    await _Pair(selection, name, plain, pipeline, advance).measure(candidates, skipped)
    _report(selection, candidates, skipped if selection.methods else [], as_json)


@asynccontextmanager
async def _running(role: str, name: str, engine: EngineOptions) -> AsyncIterator[str]:
    """The address of a service: the given one, or that of one which runs as long as the block."""
    if ADDRESS.fullmatch(name):
        yield name
        return
    async with running([Wanted(role, name, threads_each(2), engine=engine)]) as (service,):
        yield service.address


@dataclass(frozen=True)
class Candidate:
    """One drafter and method, as measured."""

    drafter: str  # as given: a model's name or HOST:PORT
    method: str
    acceptance: float  # share of the judged tokens
    tokens_per_pass: float
    mostly: str  # how most epochs were drafted, as the controller chose
    measured: float  # speedup over the same prompts without a drafter, run in turns
    error: float  # standard error of `measured`, over prompts
    tokens_per_second: float  # prompts and the opening of sessions included
    plain_tokens_per_second: float  # without a drafter
    repeating: int  # outputs that repeat themselves
    without_repeats: float  # `measured` by the others; 0: there are none
    kinds: dict[str, float]  # `measured` by the kind of prompt, if there are several


@dataclass(frozen=True, eq=False)
class _Pair:
    """The target with one drafter."""

    selection: Selection
    name: str  # of the drafter
    plain: Pipeline  # without the drafter
    pipeline: Pipeline
    advance: ProgressCounter  # called after each generation

    async def measure(self, candidates: list[Candidate], skipped: list[Skipped]) -> None:
        """Measures all methods, and adds each to one of the lists."""
        for method in self.selection.tried:
            if fault := fault_of_pair(method_named(method), self.pipeline.models):
                skipped.append(Skipped(method, self.name, fault))
                self.advance(RUNS * len(self.selection.prompts))
            else:
                candidates.append(await self._candidate(method))

    async def _candidate(self, method: str) -> Candidate:
        pairs, others, choices = list[Pair](), list[Pair](), Counter[str]()
        requests = self.selection.requests(method)
        for request in requests:
            await self._run(self.pipeline, request, Counter())
        for request in requests:
            drafted, repeating = await self._run(self.pipeline, request, choices)
            plain, _ = await self._run(self.plain, request.unchecked(method=None, seed=SEED), Counter())
            pairs.append((drafted, plain))
            others += [] if repeating else pairs[-1:]
        total, plain_total = map(total_of, zip(*pairs, strict=True))
        speed, plain_speed = total.tokens_per_second, plain_total.tokens_per_second
        gains = [log(one.tokens_per_second / other.tokens_per_second) for one, other in pairs]
        return Candidate(
            drafter=self.name,
            method=method,
            acceptance=total.acceptance,
            tokens_per_pass=total.tokens_per_pass,
            mostly=choices.most_common(1)[0][0],
            measured=speed / plain_speed,
            error=speed / plain_speed * stdev(gains) / sqrt(len(gains)),
            tokens_per_second=speed,
            plain_tokens_per_second=plain_speed,
            repeating=len(pairs) - len(others),
            without_repeats=_speed(others),
            kinds={kind: _speed(some) for kind, some in by_category(self.selection.kinds, pairs).items()},
        )

    async def _run(
        self, pipeline: Pipeline, request: GenerationRequest, choices: Counter[str]
    ) -> tuple[Statistics, bool]:
        """The figures of one output, whose epochs are counted by `choices`, and whether it repeats itself."""
        generation = pipeline.run(request)
        figures = await finished(generation)
        for decision in generation.decisions:
            choices[decision.choice.settings] += decision.epochs
        self.advance()
        return figures, repeats(generation.ids)


def _speed(pairs: Sequence[Pair]) -> float:
    """Of outputs together, beside the same without a drafter; 0: there are none."""
    if not pairs:
        return 0.0
    drafted, plain = map(total_of, zip(*pairs, strict=True))
    return drafted.tokens_per_second / plain.tokens_per_second


def _report(selection: Selection, candidates: Sequence[Candidate], skipped: Sequence[Skipped], as_json: bool) -> None:
    if not as_json:
        fastest_first = sorted(candidates, key=lambda one: -one.measured)
        title = f"Drafters for {short(selection.target)}, temperature {selection.temperature:g}; speed without one is 1"
        print_table(Table.of(fastest_first, COLUMNS, title))
        named = candidates[0].kinds if candidates else ()
        if kinds := {kind: partial(lambda kind, one: _times(one.kinds[kind]), kind) for kind in named}:
            columns = {name: COLUMNS[name] for name in ("drafter", "method")} | kinds
            print_table(Table.of(fastest_first, columns, "By the kind of prompt"))
        for one in skipped:
            print(one)
        print(advice(candidates))
        return
    best = best_of(candidates)
    record = {
        **asdict(selection),
        "candidates": [asdict(one) for one in candidates],
        "skipped": [asdict(one) for one in skipped],
        "choice": None if best is None else {"drafter": best.drafter, "method": best.method},
        "advice": advice(candidates),
    }
    print(json.dumps(record))


def _times(speedup: float) -> str:
    return f"{speedup:.2f} ×" if speedup else "none"


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest of those that are faster than no drafter by CERTAIN standard errors."""
    helping = [candidate for candidate in candidates if candidate.measured - CERTAIN * candidate.error > 1]
    return max(helping, key=lambda one: one.measured, default=None)


def advice(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "None helps: no method can be used with these drafters."
    best = best_of(candidates)
    if best is not None:
        return (
            f"Use {_used(best)}: {_speedup(best)} times as fast as no drafter "
            f"({best.tokens_per_second:.1f} against {best.plain_tokens_per_second:.1f} tokens/s)."
        )
    nearest = max(candidates, key=lambda one: one.measured)
    verdict, doubt = "None helps, decode without a drafter", ""
    if nearest.measured > 1:
        verdict, doubt = "None is shown to help", ", which may be chance: measure more prompts (--limit)"
    return (
        f"{verdict}: the best, {_used(nearest)}, is {_speedup(nearest)} times as fast{doubt}; a pass yields "
        f"{nearest.tokens_per_pass:.2f} tokens."
    )


def _used(one: Candidate) -> str:
    return f"{one.drafter} with method {one.method}"


def _speedup(one: Candidate) -> str:
    return f"{one.measured:.2f} ± {one.error:.2f}"


def short(name: str) -> str:
    """A model's name, or an address, in tables; of a folder's whole path its last part."""
    return PurePath(name).name if PurePath(name).is_absolute() else name.removeprefix(BUNDLED_PREFIX)
