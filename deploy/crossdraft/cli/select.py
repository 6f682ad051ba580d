"""`crossdraft select`: which drafter, method and number of draft tokens to use for a target, by measuring them."""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import log, sqrt
from operator import mul
from pathlib import Path, PurePath
from statistics import stdev

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.acceptance import summed
from crossdraft.bench.harness import finished, print_table
from crossdraft.bench.workload import Setting
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.console.pictures import SpeedCurve, check_picture, plot_speeds
from crossdraft.console.processes import Wanted, services, threads_each
from crossdraft.console.running import STARTS_PROCESSES, Misused, checked_options, run_to_end
from crossdraft.engine.names import BUNDLED_PREFIX
from crossdraft.session.resolution import fault_of_pair
from crossdraft.types.messages import Description
from crossdraft.verification.methods import method_named

ADDRESS = re.compile(r"[^/\s]+:\d+")  # a hub id or bundled:NAME has no number behind the colon
GREEDY_METHODS = ("standard", "slem", "tli", "coupled")
SAMPLING_METHODS = ("standard", "seeded", "tli", "coupled", "coupled-shared")
KS = (1, 2, 3, 4, 6)  # numbers of draft tokens that are chosen from, unless others are given
COPYING_KS = (4, 8, 16, 32)  # ... with a drafter that copies: its draft tokens are bytes, and cost next to nothing
RUNS = 4  # of each prompt with a method: a probe and the best K, each beside one without a drafter


@dataclass(frozen=True)
class Choosing:
    """What is compared."""

    target: str  # a model's name or HOST:PORT
    drafters: tuple[str, ...]  # likewise
    prompts: tuple[str, ...]
    methods: tuple[str, ...]  # none: those that suit the temperature
    ks: tuple[int, ...]  # numbers of draft tokens to choose from; none: those that suit the drafter
    temperature: float
    max_tokens: int

    @property
    def tried(self) -> tuple[str, ...]:
        """The methods, with every drafter."""
        return self.methods or (GREEDY_METHODS if self.temperature == 0 else SAMPLING_METHODS)

    def ks_for(self, copies: bool) -> tuple[int, ...]:
        """Numbers of draft tokens to choose from, with a drafter that copies or with a model."""
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


# What `crossdraft select` found, and which of it to use.


@dataclass(frozen=True)
class Candidate:
    """One drafter and method, as measured."""

    drafter: str  # as it was given: a model's name or HOST:PORT
    method: str
    acceptance: float  # share of the judged tokens that agreed with the draft, at the largest K
    draft_cost: float  # seconds of a draft token in the drafter's model, in plain passes of the target
    tokens_per_pass: float  # at the best K
    best_k: int  # by the cost model
    expected: dict[int, float] = field(hash=False)  # speed by K, of that without a drafter
    measured: float  # speed at the best K, of the same prompts without a drafter, run in turns
    error: float  # standard, of `measured`, over prompts
    tokens_per_second: float  # at the best K
    plain_tokens_per_second: float  # without a drafter, in the same turns
    model: str = ""  # the name that a service gives its model; empty: `drafter` is the name

    @property
    def name(self) -> str:
        """The drafter, in tables."""
        return short(self.model or self.drafter)

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name}, {self.method}"


@dataclass(frozen=True)
class Skipped:
    """A method that a pair refuses."""

    drafter: str
    method: str
    reason: str


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
            draft_cost=rounds.draft_token_seconds / plain.pass_seconds,
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


COLUMNS = ("drafter", "method", "accepted", "draft/pass", "tokens/pass", "best K", "expected", "measured", "tokens/s")
CERTAIN = 2.0  # standard errors by which a gain must exceed nothing: the fastest of many is partly the luckiest


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest one of those that are faster than no drafter beyond doubt."""
    helping = [one for one in candidates if one.measured - CERTAIN * one.error > 1]
    return max(helping, key=lambda one: one.measured, default=None)


def advice(candidates: Sequence[Candidate]) -> str:
    """One sentence: what to use."""
    if not candidates:
        return "None helps: no method can be used with these drafters."
    best = best_of(candidates)
    if best is not None:
        return (
            f"Use {_used(best)}: {_advice_speed(best)} times as fast as no drafter "
            f"({best.tokens_per_second:.1f} against {best.plain_tokens_per_second:.1f} tokens/s)."
        )
    nearest = max(candidates, key=lambda one: one.measured)
    doubtful = nearest.measured > 1
    verdict = "None is shown to help" if doubtful else "None helps, decode without a drafter"
    doubt = ", which may be chance: measure more prompts (--limit)" if doubtful else ""
    return (
        f"{verdict}: the best, {_used(nearest)}, is {_advice_speed(nearest)} times as fast{doubt}; a draft token costs "
        f"{nearest.draft_cost:.2f} of a pass, and a pass yields {nearest.tokens_per_pass:.2f} tokens."
    )


def _used(one: Candidate) -> str:
    model = f" ({one.name})" if one.name not in (one.drafter, short(one.drafter)) else ""
    return f"{one.drafter}{model} with method {one.method} and K = {one.best_k}"


def told_apart(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The same, without the name of a model that several of the drafters have: they go by their addresses."""
    names = Counter(name for _, name in {(one.drafter, one.name) for one in candidates})
    return [replace(one, model="") if names[one.name] > 1 else one for one in candidates]


def print_report(title: str, candidates: Sequence[Candidate], skipped: Sequence[Skipped]) -> None:
    """A table, the fastest first, what was skipped, and what to use."""
    print_table(title, COLUMNS, [_row(one) for one in sorted(candidates, key=lambda one: -one.measured)])
    for one in skipped:
        print(f"Skipped {one.method} with {one.drafter}: it {one.reason}")
    print(advice(candidates))


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        one.name,
        one.method,
        f"{one.acceptance:.1%}",
        f"{one.draft_cost:.2f}",
        f"{one.tokens_per_pass:.2f}",
        str(one.best_k),
        f"{one.expected[one.best_k]:.2f} ×",
        f"{_advice_speed(one)} ×",
        f"{one.tokens_per_second:.1f} ({one.plain_tokens_per_second:.1f})",
    )


def _advice_speed(one: Candidate) -> str:
    return f"{one.measured:.2f} ± {one.error:.2f}"


def short(name: str) -> str:
    """A model's name in tables; of a folder's whole path its last part."""
    return PurePath(name).name if PurePath(name).is_absolute() else name.removeprefix(BUNDLED_PREFIX)


# What a round costs and yields, from one measured number of draft tokens to smaller ones: the cost model of `select`.
#
# With K draft tokens a round takes m passes of t(K), K·d in the drafter and o beside the models, and yields
#
#     tokens(K) = 1 + r·(a₁ + a₁a₂ + … + a₁…a_K),
#
# where aⱼ is the share of draft tokens accepted at place j of those judged there, and r the target tokens that an
# accepted draft token brings (drafter tokens may be longer or shorter). d, o, r and aⱼ are measured at the largest K,
# where the formula gives what was measured. t(K) and m grow evenly with K: from a plain pass, and from one, to what was
# measured.


@dataclass(frozen=True)
class Plain:
    """Decoding without a drafter."""

    step_seconds: float  # a token: pass, transport and bookkeeping
    pass_seconds: float  # in the target's model

    @staticmethod
    def of(figures: Sequence[Statistics]) -> "Plain":
        """Over some generations, none of them empty."""
        tokens = sum(figure.tokens for figure in figures)
        in_model = sum(figure.target_seconds for figure in figures)
        return Plain((in_model + _beside(figures)) / tokens, in_model / sum(figure.passes for figure in figures))


@dataclass(frozen=True)
class Rounds:
    """Rounds of `k` draft tokens, as measured."""

    k: int
    tokens: float  # of a round
    passes: float  # of a round: one, and row misses
    accepted_at: tuple[float, ...]  # a₁, …: accepted of those judged
    draft_token_seconds: float  # d, in the drafter's model
    pass_seconds: float  # t(k), in the target's model
    beside_seconds: float  # o, of a round: transport and bookkeeping

    @staticmethod
    def of(k: int, figures: Sequence[Statistics]) -> "Rounds":
        """Over some generations, none of them empty."""
        rounds = sum(figure.epochs for figure in figures)
        passes = sum(figure.passes for figure in figures)
        draft_tokens = sum(figure.draft_tokens for figure in figures)
        judged = summed([figure.judged_at for figure in figures])
        accepted = summed([figure.accepted_at for figure in figures])
        return Rounds(
            k,
            tokens=sum(figure.tokens for figure in figures) / rounds,
            passes=passes / rounds,
            accepted_at=tuple(one / all_ if all_ else 0.0 for one, all_ in zip(accepted, judged, strict=True)),
            draft_token_seconds=sum(figure.drafter_seconds for figure in figures) / max(1, draft_tokens),
            pass_seconds=sum(figure.target_seconds for figure in figures) / passes,
            beside_seconds=_beside(figures) / rounds,
        )

    def tokens_with(self, k: int) -> float:
        """Expected tokens of a round of `k` draft tokens, at most the measured number of them."""
        whole = self._accepted(self.k)
        return 1 + (self.tokens - 1) * self._accepted(k) / whole if whole else 1.0

    def seconds_with(self, k: int, plain: Plain) -> float:
        """Expected time of such a round."""
        wider = max(0.0, self.pass_seconds - plain.pass_seconds)
        share = k / self.k
        in_target = (1 + (self.passes - 1) * share) * (plain.pass_seconds + wider * share)
        return in_target + k * self.draft_token_seconds + self.beside_seconds

    def speed_with(self, k: int, plain: Plain) -> float:
        """Expected speed, of that without a drafter."""
        return self.tokens_with(k) * plain.step_seconds / self.seconds_with(k, plain)

    def best(self, ks: Iterable[int], plain: Plain) -> int:
        """The number of draft tokens with the largest expected speed; of equal ones the first."""
        return max(ks, key=lambda k: self.speed_with(k, plain))

    def _accepted(self, k: int) -> float:
        """Expected number of draft tokens accepted in a row."""
        return float(sum(accumulate(self.accepted_at[:k], mul)))


def _beside(figures: Sequence[Statistics]) -> float:
    return sum(figure.wire_seconds + figure.verification_seconds for figure in figures)
