"""Outputs as those who asked for them saw them, and the spread of their latencies. Times are seconds of one clock."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from crossdraft.types.statistics import LaneFigures, Statistics

MILLISECONDS = 1000.0  # of a second
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class OutputFigures:
    """The part of an output's `Statistics` that a load test uses, under the same names; HTTP servers send no more."""

    tokens: int
    passes: int  # of the target
    accepted: int  # draft tokens
    corrected: int  # tokens in the place of a refused draft token
    judged_at: tuple[int, ...]  # by position in a round: draft tokens that were accepted or refused
    accepted_at: tuple[int, ...]  # by position in a round: draft tokens that were accepted
    lanes: tuple[LaneFigures, ...]  # sessions with services


Costs = OutputFigures | Statistics


@dataclass(frozen=True)
class Output:
    """One output, or what came of it."""

    asked: float
    moments: tuple[float, ...]  # when each token came; over HTTP: each chunk that has a token
    ended: float  # when its end came, or its error
    ids: tuple[int, ...] = ()  # of the target; empty: they were not kept
    figures: Costs | None = None  # None: it had no end, or is not one of ours
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
class Latencies:
    """Of outputs that came whole."""

    first_token_ms: Spread | None
    per_token_ms: Spread | None  # of each output: from its first token to its last, for each token after the first
    between_chunks_ms: Spread | None  # between any two tokens of an output; those of one pass come together
    end_to_end_ms: Spread | None


def latencies_of(outputs: Sequence[Output]) -> dict[str, Any]:
    """The fields of `Latencies`."""
    return {
        "first_token_ms": Spread.of(output.first_token for output in outputs),
        "per_token_ms": Spread.of(output.per_token for output in outputs if output.per_token is not None),
        "between_chunks_ms": Spread.of(late - early for output in outputs for early, late in pairwise(output.moments)),
        "end_to_end_ms": Spread.of(output.end_to_end for output in outputs),
    }


def ratio(part: float, whole: float) -> float | None:
    """None: there is no whole."""
    return part / whole if whole else None
