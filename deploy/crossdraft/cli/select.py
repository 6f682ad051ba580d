"""`crossdraft select`: which drafter, method and number of draft tokens to use for a target, by measuring them.

Each drafter and method is first measured with the largest number K of draft tokens in a round. A cost model (`Rounds`)
says from that which K should be best; that one is then measured beside plain decoding, prompt by prompt.
"""

import json
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import log, sqrt
from operator import mul
from pathlib import PurePath
from statistics import stdev

from crossdraft.cli.measuring import Setting, Skipped, finished, print_table, total_of
from crossdraft.cli.processes import Wanted, patience, running, threads_each
from crossdraft.cli.running import STARTS_PROCESSES, ProgressCounter, UsageError, checked_options, counted, run_to_end
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, Statistics, connect
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.engine.names import BUNDLED_PREFIX
from crossdraft.session.models import fault_of_pair
from crossdraft.verification.methods import method_named

ADDRESS = re.compile(r"[^/\s]+:\d+")  # what a hub id or bundled:NAME does not match
GREEDY_METHODS = ("standard", "slem", "tli", "coupled")
SAMPLING_METHODS = ("standard", "seeded", "tli", "coupled", "coupled-shared")
KS = (1, 2, 3, 4, 6)  # numbers of draft tokens to choose from by default
COPYING_KS = (4, 8, 16, 32)  # likewise with an n-gram drafter, whose draft tokens are bytes and cost next to nothing
RUNS = 4  # generations per prompt and method: with the largest and the best K, each beside one without a drafter

COLUMNS = ("drafter", "method", "accepted", "draft/pass", "tokens/pass", "best K", "expected", "measured", "tokens/s")
CERTAIN = 2.0  # standard errors by which a speedup must exceed 1: the fastest of many is partly the luckiest


@dataclass(frozen=True)
class Selection:
    """What is compared."""

    target: str  # a model's name or HOST:PORT
    drafters: tuple[str, ...]  # likewise
    prompts: tuple[str, ...]
    methods: tuple[str, ...]  # none: those that suit the temperature
    ks: tuple[int, ...]  # numbers of draft tokens to choose from; none: those that suit the drafter
    temperature: float
    max_tokens: int
    engine: EngineOptions = STARTED  # of models that are given by name

    @property
    def tried(self) -> tuple[str, ...]:
        return self.methods or (GREEDY_METHODS if self.temperature == 0 else SAMPLING_METHODS)

    def ks_for(self, copies: bool) -> tuple[int, ...]:
        """Numbers of draft tokens to choose from; `copies`: with an n-gram drafter."""
        return self.ks or (COPYING_KS if copies else KS)

    def plain(self) -> list[GenerationRequest]:
        """One request a prompt, to be run without a drafter."""
        options = SamplingOptions(self.temperature)
        return [
            GenerationRequest(text, max_tokens=self.max_tokens, options=options, seed=0, choice=number)
            for number, text in enumerate(self.prompts)
        ]

    def check(self) -> None:
        """Raises UsageError if a request would be refused, before anything is started."""
        if not self.drafters:
            raise UsageError("give at least one --drafter")
        if len(self.prompts) < 2:
            raise UsageError("give at least two prompts: the error of a mean cannot be estimated from one")
        with checked_options():
            for method in self.tried:
                for k in self.ks_for(copies=False):
                    Setting(method, "", self.temperature, k).requests(self.prompts, self.max_tokens)


def select(selection: Selection, as_json: bool) -> None:
    """Measures, prints a table or JSON, and says what to use.

    Raises:
        UsageError: a value is out of its range.
        CommandFailed: a service does not start, is not there, or fails.
    """
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
    acceptance: float  # share of the verified draft tokens that were accepted, at the largest K
    draft_cost: float  # time of a draft token in the drafter's model; 1 is a pass of the target without drafting
    tokens_per_pass: float  # at the best K
    best_k: int  # by the cost model
    expected: dict[int, float] = field(hash=False)  # speedup by K, by the cost model
    measured: float  # speedup at the best K, over the same prompts without a drafter, run in turns
    error: float  # standard error of `measured`, over prompts
    tokens_per_second: float  # at the best K, prompts and the opening of sessions included
    plain_tokens_per_second: float  # without a drafter


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
        about = self.pipeline.models.drafter
        assert about is not None  # the pipeline was connected with one
        for method in self.selection.tried:
            setting = Setting(method, self.name, self.selection.temperature, max(self.selection.ks_for(about.copies)))
            fault = fault_of_pair(method_named(method), self.pipeline.models)
            if fault:
                skipped.append(Skipped(method, self.name, fault))
                self.advance(RUNS * len(self.selection.prompts))
            else:
                candidates.append(await self._candidate(setting, self.selection.ks_for(about.copies)))

    async def _candidate(self, setting: Setting, ks: Sequence[int]) -> Candidate:
        probed, beside = await self._in_turns(setting)
        rounds, plain = Rounds.of(setting.k, probed), Plain.of(beside)
        best = rounds.best(ks, plain)
        drafted, beside = await self._in_turns(replace(setting, k=best))
        total = total_of(drafted)
        speed, plain_speed = total.tokens_per_second, total_of(beside).tokens_per_second
        gains = [
            log(one.tokens_per_second / other.tokens_per_second) for one, other in zip(drafted, beside, strict=True)
        ]
        return Candidate(
            drafter=self.name,
            method=setting.method,
            acceptance=total_of(probed).acceptance,
            draft_cost=rounds.draft_token_seconds / plain.pass_seconds,
            tokens_per_pass=total.tokens_per_pass,
            best_k=best,
            expected={k: rounds.speed_with(k, plain) for k in ks},
            measured=speed / plain_speed,
            error=speed / plain_speed * stdev(gains) / sqrt(len(gains)),
            tokens_per_second=speed,
            plain_tokens_per_second=plain_speed,
        )

    async def _in_turns(self, setting: Setting) -> tuple[list[Statistics], list[Statistics]]:
        """With the drafter and without, prompt by prompt, so that the machine's load is the same for both."""
        drafted, plain = [], []
        requests = setting.requests(self.selection.prompts, self.selection.max_tokens)
        for request, without in zip(requests, self.selection.plain(), strict=True):
            drafted.append(await self._run(self.pipeline, request))
            plain.append(await self._run(self.plain, without))
        return drafted, plain

    async def _run(self, pipeline: Pipeline, request: GenerationRequest) -> Statistics:
        figures = await finished(pipeline.run(request))
        self.advance()
        return figures


def _report(selection: Selection, candidates: Sequence[Candidate], skipped: Sequence[Skipped], as_json: bool) -> None:
    if not as_json:
        rows = [_row(one) for one in sorted(candidates, key=lambda one: -one.measured)]
        title = f"Drafters for {short(selection.target)}, temperature {selection.temperature:g}"
        print_table(f"{title}; speed without one is 1", COLUMNS, rows)
        for one in skipped:
            print(one)
        print(advice(candidates))
        return
    best = best_of(candidates)
    record = {
        **asdict(selection),
        "candidates": [asdict(one) for one in candidates],
        "skipped": [asdict(one) for one in skipped],
        "choice": None if best is None else {"drafter": best.drafter, "method": best.method, "k": best.best_k},
        "advice": advice(candidates),
    }
    print(json.dumps(record))


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest of those that are faster than no drafter by CERTAIN standard errors."""
    helping = [one for one in candidates if one.measured - CERTAIN * one.error > 1]
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
    doubtful = nearest.measured > 1
    verdict = "None is shown to help" if doubtful else "None helps, decode without a drafter"
    doubt = ", which may be chance: measure more prompts (--limit)" if doubtful else ""
    return (
        f"{verdict}: the best, {_used(nearest)}, is {_speedup(nearest)} times as fast{doubt}; a draft token costs "
        f"{nearest.draft_cost:.2f} of a pass, and a pass yields {nearest.tokens_per_pass:.2f} tokens."
    )


def _used(one: Candidate) -> str:
    return f"{one.drafter} with method {one.method} and K = {one.best_k}"


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        short(one.drafter),
        one.method,
        f"{one.acceptance:.1%}",
        f"{one.draft_cost:.2f}",
        f"{one.tokens_per_pass:.2f}",
        str(one.best_k),
        f"{one.expected[one.best_k]:.2f} ×",
        f"{_speedup(one)} ×",
        f"{one.tokens_per_second:.1f} ({one.plain_tokens_per_second:.1f})",
    )


def _speedup(one: Candidate) -> str:
    return f"{one.measured:.2f} ± {one.error:.2f}"


def short(name: str) -> str:
    """A model's name, or an address, in tables; of a folder's whole path its last part."""
    return PurePath(name).name if PurePath(name).is_absolute() else name.removeprefix(BUNDLED_PREFIX)


@dataclass(frozen=True)
class Plain:
    """Decoding without a drafter."""

    step_seconds: float  # per token: pass, transport and verification
    pass_seconds: float  # per token, in the target's model

    @staticmethod
    def of(figures: Sequence[Statistics]) -> "Plain":
        """Over some generations, none of them empty."""
        total = total_of(figures)
        in_model = total.target_seconds
        return Plain((in_model + _beside(total)) / total.tokens, in_model / total.passes)


@dataclass(frozen=True)
class Rounds:
    """The cost model: rounds of `k` draft tokens as measured, and what rounds of fewer would cost and yield.

    A round of K draft tokens takes m passes of t(K), K·d in the drafter and o beside the models, and yields

        tokens(K) = 1 + r·(a₁ + a₁a₂ + … + a₁…a_K),

    where aⱼ is the share of draft tokens accepted at place j of those verified there, and r the target tokens per
    accepted draft token (drafter tokens may be longer or shorter). d, o, r and aⱼ are measured at K = k, where the
    formula gives what was measured. t(K) and m grow linearly from those of plain decoding at K = 0 to those measured.
    """

    k: int
    tokens: float  # per round
    passes: float  # m, per round: 1, and row misses
    accepted_at: tuple[float, ...]  # a₁, …
    draft_token_seconds: float  # d, in the drafter's model
    pass_seconds: float  # t(k), in the target's model
    beside_seconds: float  # o, per round: transport and verification

    @staticmethod
    def of(k: int, figures: Sequence[Statistics]) -> "Rounds":
        """Over some generations, none of them empty."""
        total = total_of(figures)
        return Rounds(
            k,
            tokens=total.tokens / total.epochs,
            passes=total.passes / total.epochs,
            accepted_at=total.acceptance_at,
            draft_token_seconds=total.drafter_seconds / max(1, total.draft_tokens),
            pass_seconds=total.target_seconds / total.passes,
            beside_seconds=_beside(total) / total.epochs,
        )

    def tokens_with(self, k: int) -> float:
        """Expected tokens of a round of `k` draft tokens; `k` is at most the measured number."""
        whole = self._accepted(self.k)
        return 1 + (self.tokens - 1) * self._accepted(k) / whole if whole else 1.0

    def seconds_with(self, k: int, plain: Plain) -> float:
        """Expected time of a round of `k` draft tokens."""
        wider = max(0.0, self.pass_seconds - plain.pass_seconds)
        share = k / self.k
        in_target = (1 + (self.passes - 1) * share) * (plain.pass_seconds + wider * share)
        return in_target + k * self.draft_token_seconds + self.beside_seconds

    def speed_with(self, k: int, plain: Plain) -> float:
        """Expected speedup over plain decoding."""
        return self.tokens_with(k) * plain.step_seconds / self.seconds_with(k, plain)

    def best(self, ks: Iterable[int], plain: Plain) -> int:
        """The number of draft tokens with the largest expected speedup; of equal ones the first."""
        return max(ks, key=lambda k: self.speed_with(k, plain))

    def _accepted(self, k: int) -> float:
        """Expected number of draft tokens accepted in a round: a₁ + a₁a₂ + …"""
        return float(sum(accumulate(self.accepted_at[:k], mul)))


def _beside(total: Statistics) -> float:
    return total.wire_seconds + total.verification_seconds
