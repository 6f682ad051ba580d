"""Outputs as those who asked for them saw them, and figures of several together. Times are seconds of one clock."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from crossdraft.cli.measuring import finished, total_of
from crossdraft.cli.running import CommandFailed
from crossdraft.client import Generation, GenerationRequest, Pipeline, SamplingOptions
from crossdraft.lab.harness import gathered
from crossdraft.types.statistics import Statistics

MILLISECONDS = 1000.0  # of a second
QUANTILES = (0.5, 0.9, 0.99)
Prompt = str | tuple[int, ...]  # its text, or its ids


@dataclass(frozen=True)
class Output:
    """One output, or what came of it."""

    asked: float
    moments: tuple[float, ...]  # when each token came; over HTTP: each chunk that has a token
    ended: float  # when its end came, or its error
    ids: tuple[int, ...] = ()  # of the target; empty: they were not kept
    figures: Statistics | None = None  # None: it had no end, or is not one of ours
    made: tuple[float, ...] = ()  # for each chunk: seconds the server took until it was made; empty: not said
    error: str = ""  # kind of the error that ended it; empty: none
    fault: str = ""  # its text

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.moments)

    @property
    def tokens(self) -> int:
        """Of the output, as far as it came."""
        return len(self.moments) if self.figures is None else self.figures.tokens

    @property
    def first_token(self) -> float:
        """Seconds until its first token came; it must be ok."""
        return self.moments[0] - self.asked

    @property
    def end_to_end(self) -> float:
        return self.ended - self.asked

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first; None: there is none."""
        return (self.moments[-1] - self.moments[0]) / (self.tokens - 1) if self.ok and self.tokens > 1 else None

    @property
    def front(self) -> tuple[float, ...]:
        """For each chunk: seconds from asking to its arrival, less what the server took to make it."""
        return tuple(came - self.asked - made for came, made in zip(self.moments, self.made, strict=False))


@dataclass(frozen=True)
class Work:
    """What was counted so far, or a difference of two readings."""

    target: float = 0.0  # processor seconds of its thread, or of this process for transformers
    drafter: float = 0.0  # likewise
    loop: float = 0.0  # processor seconds of the thread in which the orchestrator runs, and this measures
    steps: float = 0.0  # forwards of the target
    jobs: float = 0.0  # sessions, summed over the forwards
    seconds: float = 0.0  # in forwards and draws

    def __sub__(self, before: "Work") -> "Work":
        return Work(*(late - early for late, early in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class RunResult:
    """All outputs of one configuration that were made together."""

    outputs: tuple[Output, ...]
    seconds: float
    work: Work = Work()

    @property
    def figures(self) -> Statistics:
        """Of all of them, which are ours."""
        return total_of([output.figures for output in self.outputs if output.figures])


@dataclass(frozen=True, eq=False)
class Ours:
    """A configuration: a pipeline, and what is asked of it."""

    name: str
    pipeline: Pipeline
    request: GenerationRequest  # its prompt and its number of tokens are replaced
    work: Callable[[], Work] = Work  # until now

    async def run(
        self, prompts: Sequence[Prompt], tokens: int, at_once: int, options: SamplingOptions | None = None
    ) -> RunResult:
        """`options`: others than those of the request. The drafter may be lost on the way. Raises CommandFailed: an
        output has no figures."""
        asked = replace(self.request, max_tokens=tokens, options=options or self.request.options)
        before, began = self.work(), time.monotonic()

        async def made(number: int) -> Output:
            return await output_of(self.pipeline.run(replace(asked, prompt=prompts[number], choice=number)), lost=True)

        outputs = await gathered(made, range(len(prompts)), at_once)
        return RunResult(tuple(outputs), time.monotonic() - began, self.work() - before)


async def output_of(generation: Generation, *, lost: bool = False) -> Output:
    """Runs it; raises CommandFailed as `finished`."""
    asked, moments = time.monotonic(), list[float]()
    figures = await finished(generation, lost=lost, came=lambda: moments.append(time.monotonic()))
    if not moments:
        raise CommandFailed("an output ended without a token")
    return Output(asked, tuple(moments), [asked, *moments][-1], tuple(generation.ids), figures)


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles of some values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        values = self.mean, self.p50, self.p90, self.p99
        return " / ".join(f"{value:.{0 if abs(value) >= 100 else 2}f}" for value in values)

    @staticmethod
    def of(seconds: Iterable[float]) -> "Spread | None":
        """In milliseconds; None: there are no values."""
        values = MILLISECONDS * np.fromiter(seconds, dtype=np.float64)
        if not len(values):
            return None
        return Spread(len(values), float(values.mean()), *np.quantile(values, QUANTILES).tolist())

    @staticmethod
    def of_bins(counts: Sequence[int], bounds: Sequence[float], total: float) -> "Spread":
        """Of values that were counted by bins and sum up to `total`; quantiles are linear within a bin. `counts`: of
        each bin, and last of the values above all bounds; at least one value in all. `bounds`: the bins' upper ones,
        ascending; values above the last one are taken for it."""
        edges, filled = np.array([0.0, *bounds, bounds[-1]]), np.flatnonzero(counts)
        reached = np.cumsum(counts)[filled]
        ranks = np.stack([reached - np.take(counts, filled), reached], axis=1).ravel()
        values = np.stack([edges[filled], edges[filled + 1]], axis=1).ravel()
        count = int(reached[-1])
        return Spread(count, total / count, *np.interp(np.multiply(QUANTILES, count), ranks, values).tolist())


@dataclass(frozen=True, kw_only=True)
class Together:
    """What several outputs took together. Latencies are of those that came whole."""

    tokens: int
    seconds: float
    tokens_per_second: float
    first_token_ms: Spread | None
    per_token_ms: Spread | None  # of each output: from its first token to its last, for each token after the first
    between_chunks_ms: Spread | None  # between any two tokens of an output; those of one pass come together
    end_to_end_ms: Spread | None
    tokens_per_pass: float | None
    acceptance: float | None  # of the judged tokens; None: none was judged

    @staticmethod
    def fields_of(outputs: Sequence[Output], seconds: float) -> dict[str, Any]:
        """These fields, of outputs that took so long."""
        total, tokens = Together.figures_of(outputs), sum(output.tokens for output in outputs)
        gaps = (late - early for output in outputs for early, late in pairwise(output.moments))
        return {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": ratio(tokens, seconds) or 0.0,
            "first_token_ms": Spread.of(output.first_token for output in outputs),
            "per_token_ms": Spread.of(output.per_token for output in outputs if output.per_token is not None),
            "between_chunks_ms": Spread.of(gaps),
            "end_to_end_ms": Spread.of(output.end_to_end for output in outputs),
            "tokens_per_pass": total and ratio(total.tokens, total.passes),
            "acceptance": total and ratio(total.accepted, total.accepted + total.corrected),
        }

    @staticmethod
    def figures_of(outputs: Iterable[Output]) -> Statistics | None:
        """Of those that have figures, together; None: there are none."""
        found = [output.figures for output in outputs if output.figures is not None]
        return total_of(found) if found else None


def ratio(part: float, whole: float) -> float | None:
    """None: there is no whole."""
    return part / whole if whole else None
