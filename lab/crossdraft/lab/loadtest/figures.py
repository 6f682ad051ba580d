"""Figures of a load test, computed from the timelines of its requests."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from crossdraft.cli.measuring import Columns
from crossdraft.lab.harness import optional
from crossdraft.lab.outputs import MILLISECONDS, Costs, Latencies, Output, Spread, latencies_of, ratio
from crossdraft.types.statistics import BOUNDS

ROLES = ("target", "drafter")


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Communication of the orchestrator with the services of one role, over all outputs.

    A round trip goes from a question (a pass, a draft, more of a row, scores) to its first answer, without the model's
    time for that answer. It consists of queueing (the question waited for a model that was busy) and of the wire, which
    is the rest: network, gRPC, serialization on both sides, event loops.
    """

    role: str  # target or drafter
    questions: int
    questions_per_token: float
    round_trip_ms: Spread | None  # quantiles are interpolated within the bins of `types.statistics.BOUNDS`
    queueing_ms: float  # mean
    wire_ms: float  # mean
    serialization_ms_per_token: float  # in the orchestrator's process; part of the wire
    model_ms_per_token: float
    model_share: float  # in the model, of the time that sessions were open
    idle_share: float  # of that time, without a question that was not answered
    bytes_per_token: float  # serialized, both ways
    lost: int  # sessions that failed

    @staticmethod
    def of(role: str, outputs: Sequence[Costs]) -> "Hop | None":
        """Of all sessions with services of a role; None: there are none."""
        lanes = [lane for output in outputs for lane in output.lanes if lane.role == role]
        tokens = sum(output.tokens for output in outputs)
        if not lanes:
            return None
        counts = _sums(lane.trips.counts for lane in lanes)
        bounds = [MILLISECONDS * bound for bound in BOUNDS]
        asked, opened = sum(counts), sum(lane.open_seconds for lane in lanes)
        trips, queued = sum(lane.trips.seconds for lane in lanes), sum(lane.trips.queued_seconds for lane in lanes)
        model = sum(lane.model_seconds for lane in lanes)
        return Hop(
            role=role,
            questions=asked,
            questions_per_token=share(asked, tokens),
            round_trip_ms=Spread.of_bins(counts, bounds, MILLISECONDS * trips) if asked else None,
            queueing_ms=MILLISECONDS * share(queued, asked),
            wire_ms=MILLISECONDS * share(max(0.0, trips - queued), asked),
            serialization_ms_per_token=MILLISECONDS * share(sum(lane.codec_seconds for lane in lanes), tokens),
            model_ms_per_token=MILLISECONDS * share(model, tokens),
            model_share=share(model, opened),
            idle_share=share(sum(lane.idle_seconds for lane in lanes), opened),
            bytes_per_token=share(sum(lane.bytes_sent + lane.bytes_received for lane in lanes), tokens),
            lost=sum(bool(lane.lost) for lane in lanes),
        )


@dataclass(frozen=True, kw_only=True)
class LoadRun(Latencies):
    """All figures under one delay. Latencies are of requests without an error."""

    delay_ms: float | None  # one way, on an emulated network; None: there is none
    requests: int
    errors: Mapping[str, int]  # by kind
    faults: Mapping[str, str]  # the text of the first one, by kind
    seconds: float  # from the first request to the last end
    tokens: int
    requests_per_second: float  # answered
    tokens_per_second: float
    front_ms: Spread | None  # of each token: its own way from the server, and its request's way there
    tokens_per_pass: float | None
    acceptance: float | None  # of the judged tokens
    places: tuple[float, ...]  # acceptance at each position of a round, given that all before were accepted
    hops: tuple[Hop, ...]

    @property
    def name(self) -> str:
        return "HTTP" if self.delay_ms is None else f"{self.delay_ms:g} ms"

    @staticmethod
    def of(delay_ms: float | None, outputs: Sequence[Output]) -> "LoadRun":
        """Of at least one output."""
        answered, failed = ([output for output in outputs if output.ok == ok] for ok in (True, False))
        seconds = max(output.ended for output in outputs) - min(output.asked for output in outputs)
        tokens = sum(output.tokens for output in answered)
        figures = [output.figures for output in answered if output.figures is not None]
        return LoadRun(
            delay_ms=delay_ms,
            requests=len(outputs),
            errors=dict(sorted(Counter(output.error or "no token" for output in failed).items())),
            faults={output.error: output.fault for output in reversed(failed) if output.error},
            seconds=seconds,
            tokens=tokens,
            tokens_per_second=share(tokens, seconds),
            requests_per_second=share(len(answered), seconds),
            **latencies_of(answered),
            front_ms=Spread.of(took for output in answered for took in output.front),
            **_acceptance([figure for figure in figures if figure.passes]),
            hops=tuple(hop for role in ROLES if (hop := Hop.of(role, figures))),
        )


def _acceptance(figures: Sequence[Costs]) -> dict[str, Any]:
    """Over all outputs together."""
    if not figures:
        return {"tokens_per_pass": None, "acceptance": None, "places": ()}
    judged, accepted = _sums(figure.judged_at for figure in figures), _sums(figure.accepted_at for figure in figures)
    all_accepted = sum(figure.accepted for figure in figures)
    return {
        "tokens_per_pass": sum(figure.tokens for figure in figures) / sum(figure.passes for figure in figures),
        "acceptance": share(all_accepted, all_accepted + sum(figure.corrected for figure in figures)),
        "places": tuple(good / of for of, good in zip(judged, accepted, strict=False) if of),
    }


def _sums(rows: Iterable[Sequence[int]]) -> list[int]:
    """Of each column; shorter rows count as if they ended with zeros."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def share(part: float, whole: float) -> float:
    return ratio(part, whole) or 0.0


# Tables, a column for each configuration. The first names are those of `vllm bench serve`.

SEEN: Columns = {
    "what clients see (mean / p50 / p90 / p99)": lambda run: run.name,
    "Requests": lambda run: run.requests,
    "Failed requests": lambda run: sum(run.errors.values()),
    "Benchmark duration (s)": lambda run: f"{run.seconds:.2f}",
    "Total generated tokens": lambda run: run.tokens,
    "Request throughput (req/s)": lambda run: f"{run.requests_per_second:.2f}",
    "Output token throughput (tok/s)": lambda run: f"{run.tokens_per_second:.2f}",
    "TTFT (ms)": lambda run: run.first_token_ms or "",
    "TPOT (ms)": lambda run: run.per_token_ms or "",
    "ITL (ms)": lambda run: run.between_chunks_ms or "",
    "E2EL (ms)": lambda run: run.end_to_end_ms or "",
    "client to server and back, ms": lambda run: run.front_ms or "",
    "tokens per pass": lambda run: optional(run.tokens_per_pass, ".2f"),
    "acceptance": lambda run: optional(run.acceptance, ".1%"),
    "acceptance by position": lambda run: " ".join(f"{place:.0%}" for place in run.places[:6]),
}
HOP: Columns = {
    "round trip, ms": lambda hop: hop.round_trip_ms or "",
    "of it queueing, ms": lambda hop: f"{hop.queueing_ms:.2f}",
    "of it wire, ms": lambda hop: f"{hop.wire_ms:.2f}",
    "questions a token": lambda hop: f"{hop.questions_per_token:.2f}",
    "serialization, ms a token": lambda hop: f"{hop.serialization_ms_per_token:.3f}",
    "model, ms a token": lambda hop: f"{hop.model_ms_per_token:.2f}",
    "time in the model": lambda hop: f"{hop.model_share:.0%}",
    "time idle": lambda hop: f"{hop.idle_share:.0%}",
    "bytes a token": lambda hop: f"{hop.bytes_per_token:,.0f}",
    "sessions lost": lambda hop: hop.lost,
}
