"""Figures of a load test, computed from the timelines of its requests."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from statistics import median
from typing import Annotated, Any

import numpy as np

from crossdraft.lab.loadtest.runner import LATENCIES, Costs, RequestTimeline
from crossdraft.types.statistics import BOUNDS

MILLISECONDS = 1000.0
ROLES = ("target", "drafter")
QUANTILES = (0.5, 0.9, 0.99)


Shown = Callable[[Any], str]
TWO_DIGITS: Shown = "{:.2f}".format
PERCENT: Shown = "{:.0%}".format


@dataclass(frozen=True)
class Row:
    """In the annotation of a field: it is a row of the report's tables."""

    title: str
    shown: Shown = str


def _first_six(values: Sequence[object]) -> str:
    return " ".join(map(str, values[:6]))


@dataclass(frozen=True)
class PositionAcceptance:
    """Draft tokens at one position of a round."""

    judged: int
    acceptance: float  # of the judged tokens; given that all before were accepted

    def __str__(self) -> str:
        return f"{self.acceptance:.0%}"


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles of some values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        return " / ".join(f"{one:.{0 if abs(one) >= 100 else 2}f}" for one in (self.mean, self.p50, self.p90, self.p99))

    @staticmethod
    def of(values: Iterable[float], scale: float = 1.0) -> "Spread | None":
        """Of values times `scale`; None: there are none."""
        scaled = scale * np.fromiter(values, dtype=np.float64)
        if not len(scaled):
            return None
        return Spread(len(scaled), float(scaled.mean()), *np.quantile(scaled, QUANTILES).tolist())

    @staticmethod
    def of_bins(counts: Sequence[int], bounds: Sequence[float], total: float) -> "Spread":
        """Of values that were counted by bins; quantiles are linear within a bin.

        Args:
            counts: of each bin, and last of the values above all bounds; any positive number of values in all.
            bounds: the bins' upper bounds, ascending. Values above the last one are taken for it.
            total: sum of the values.
        """
        edges, filled = np.array([0.0, *bounds, bounds[-1]]), np.flatnonzero(counts)
        reached = np.cumsum(counts)[filled]
        ranks = np.stack([reached - np.take(counts, filled), reached], axis=1).ravel()
        values = np.stack([edges[filled], edges[filled + 1]], axis=1).ravel()
        count = int(reached[-1])
        return Spread(count, total / count, *np.interp(np.multiply(QUANTILES, count), ranks, values).tolist())


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Communication of the orchestrator with the services of one role, over all outputs.

    A round trip goes from a question (a pass, a draft, more of a row, scores) to its first answer, without the model's
    time for that answer. It consists of queueing (the question waited for a model that was busy) and of the wire, which
    is the rest: network, gRPC, serialization on both sides, event loops.
    """

    role: str  # target or drafter
    questions: int
    # Quantiles are interpolated within the bins of `types.statistics.BOUNDS`.
    round_trip_ms: Annotated[Spread | None, Row("round trip, ms")]
    queueing_ms: Annotated[float, Row("of it queueing, ms", TWO_DIGITS)]  # mean
    wire_ms: Annotated[float, Row("of it wire, ms", TWO_DIGITS)]  # mean
    questions_per_token: Annotated[float, Row("questions a token", TWO_DIGITS)]
    # Messages encoded and decoded in the orchestrator's process; part of the wire.
    serialization_ms_per_token: Annotated[float, Row("serialization, ms a token", "{:.3f}".format)]
    model_ms_per_token: Annotated[float, Row("model, ms a token", TWO_DIGITS)]
    model_share: Annotated[float, Row("time in the model", PERCENT)]  # of the time that sessions were open
    idle_share: Annotated[float, Row("time idle", PERCENT)]  # of that time, without a question that was not answered
    bytes_per_token: Annotated[float, Row("bytes a token", "{:,.0f}".format)]  # serialized, both ways
    lost: Annotated[int, Row("sessions lost")]  # sessions that failed

    @staticmethod
    def of(role: str, outputs: Sequence[Costs]) -> "Hop | None":
        """Of all sessions with services of a role; None: there are none."""
        lanes = [lane for one in outputs for lane in one.lanes if lane.role == role]
        tokens = sum(one.tokens for one in outputs)
        if not lanes:
            return None
        counts = _sums(one.trips.counts for one in lanes)
        bounds = [MILLISECONDS * bound for bound in BOUNDS]
        asked, opened = sum(counts), sum(one.open_seconds for one in lanes)
        trips, queued = sum(one.trips.seconds for one in lanes), sum(one.trips.queued_seconds for one in lanes)
        model = sum(one.model_seconds for one in lanes)
        return Hop(
            role=role,
            questions=asked,
            questions_per_token=_ratio(asked, tokens),
            round_trip_ms=Spread.of_bins(counts, bounds, MILLISECONDS * trips) if asked else None,
            queueing_ms=MILLISECONDS * _ratio(queued, asked),
            wire_ms=MILLISECONDS * _ratio(max(0.0, trips - queued), asked),
            serialization_ms_per_token=MILLISECONDS * _ratio(sum(one.codec_seconds for one in lanes), tokens),
            model_ms_per_token=MILLISECONDS * _ratio(model, tokens),
            model_share=_ratio(model, opened),
            idle_share=_ratio(sum(one.idle_seconds for one in lanes), opened),
            bytes_per_token=_ratio(sum(one.bytes_sent + one.bytes_received for one in lanes), tokens),
            lost=sum(bool(one.lost) for one in lanes),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All figures of one configuration. Latencies are of requests without an error."""

    # In the words of `vllm bench serve`, then those that it does not have.
    requests: Annotated[int, Row("Requests")]
    errors: Annotated[Mapping[str, int], Row("Failed requests", lambda kinds: str(sum(kinds.values())))]  # by kind
    seconds: Annotated[float, Row("Benchmark duration (s)", TWO_DIGITS)]  # summed over repetitions
    tokens: Annotated[int, Row("Total generated tokens")]
    requests_per_second: Annotated[float, Row("Request throughput (req/s)", TWO_DIGITS)]  # answered
    tokens_per_second: Annotated[float, Row("Output token throughput (tok/s)", TWO_DIGITS)]
    first_token_ms: Annotated[Spread | None, Row("TTFT (ms)")]
    per_token_ms: Annotated[Spread | None, Row("TPOT (ms)")]  # of each request, for each token after the first
    between_chunks_ms: Annotated[Spread | None, Row("ITL (ms)")]  # near 0 within a pass
    end_to_end_ms: Annotated[Spread | None, Row("E2EL (ms)")]
    front_ms: Annotated[Spread | None, Row("client to server and back, ms")]  # of each token
    tokens_per_pass: Annotated[float | None, Row("tokens per pass", TWO_DIGITS)]
    acceptance: Annotated[float | None, Row("acceptance", "{:.1%}".format)]  # of the judged tokens
    places: Annotated[tuple[PositionAcceptance, ...], Row("acceptance by position", _first_six)]
    hops: tuple[Hop, ...]


Repetitions = Sequence[Sequence[RequestTimeline]]  # of the same requests, each of at least one


def summary_of(repetitions: Repetitions) -> Summary:
    timelines = list(chain.from_iterable(repetitions))
    answered = [one for one in timelines if one.ok]
    seconds = sum(max(one.ended for one in each) - min(one.sent for one in each) for each in repetitions)
    tokens = sum(one.tokens for one in answered)
    figures = [one.figures for one in answered if one.figures is not None]
    latencies: dict[str, Any] = {
        name: Spread.of(chain.from_iterable(map(of, answered)), MILLISECONDS) for name, of in LATENCIES.items()
    }
    return Summary(
        requests=len(timelines),
        errors=dict(sorted(Counter(one.error or "no token" for one in timelines if not one.ok).items())),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=_ratio(tokens, seconds),
        requests_per_second=_ratio(len(answered), seconds),
        **latencies,
        **_acceptance([one for one in figures if one.passes]),
        hops=tuple(hop for role in ROLES if (hop := Hop.of(role, figures))),
    )


def _acceptance(figures: Sequence[Costs]) -> dict[str, Any]:
    """Over all outputs together."""
    if not figures:
        return {"tokens_per_pass": None, "acceptance": None, "places": ()}
    judged, accepted = _sums(one.judged_at for one in figures), _sums(one.accepted_at for one in figures)
    all_accepted = sum(one.accepted for one in figures)
    return {
        "tokens_per_pass": sum(one.tokens for one in figures) / sum(one.passes for one in figures),
        "acceptance": _ratio(all_accepted, all_accepted + sum(one.corrected for one in figures)),
        "places": tuple(PositionAcceptance(of, good / of) for of, good in zip(judged, accepted, strict=False) if of),
    }


def _sums(rows: Iterable[Sequence[int]]) -> list[int]:
    """Of each column; shorter rows count as if they ended with zeros."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class Added:
    """Milliseconds that a configuration takes longer than another, for the requests that both answered."""

    way: str  # the configuration's name
    delay_ms: float | None  # under which both were measured; None: nothing is emulated
    than: str  # the other one's name
    first_token_ms: Annotated[Spread | None, Row("first token, ms")]
    per_token_ms: Annotated[Spread | None, Row("per token, ms")]  # of each request, for each token after the first
    end_to_end_ms: Annotated[Spread | None, Row("end to end, ms")]
    per_token_ratio: Annotated[float | None, Row("time a token, as a ratio", "{:.3f}".format)]  # median over requests


def added_by(way: str, made: Repetitions, delay_ms: float | None, than: str, others: Repetitions) -> Added:
    """Compares two configurations, whose repetitions have the same requests in the same order."""
    both = (zip(one, other, strict=True) for one, other in zip(made, others, strict=True))
    pairs = [(one, other) for one, other in chain.from_iterable(both) if one.ok and other.ok]
    paces = [(one.per_token, other.per_token) for one, other in pairs]
    known = [(one, other) for one, other in paces if one is not None and other is not None]
    ratios = [one / other for one, other in known if other > 0]
    return Added(
        way,
        delay_ms,
        than,
        Spread.of((one.first_token - other.first_token for one, other in pairs), MILLISECONDS),
        Spread.of((one - other for one, other in known), MILLISECONDS),
        Spread.of((one.end_to_end - other.end_to_end for one, other in pairs), MILLISECONDS),
        median(ratios) if ratios else None,
    )
