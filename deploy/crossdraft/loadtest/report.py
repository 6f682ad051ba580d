"""A load test's report: as JSON, which deploy/loadtest/report.schema.json describes, and as tables."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from rich import box
from rich.table import Table

from crossdraft.loadtest.requests import RequestSettings
from crossdraft.loadtest.runner import RequestTimeline
from crossdraft.loadtest.summary import MILLISECONDS, Added, Hop, Repetitions, Spread, Summary, added_by, summary_of

FORMAT = 2
HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"  # names of configurations
ROUNDED = 4  # digits of milliseconds after the point


@dataclass(frozen=True)
class LoadSettings:
    """The settings of the test, which repeat it."""

    begun: str  # ISO 8601, UTC
    software: str  # version of this package
    cores: int  # that this process may use; services that the test started share them
    clients: int  # each of which sends its next request when it has its answer
    wishes: RequestSettings  # under its name in the JSON
    requests: int  # of each run, without those that warm up; at least 1
    warm_up: int  # requests before each run, which do not count
    repeat: int  # at least 1
    seed: int
    prompts: str  # where they are from
    services: str  # what was started, and where; empty: they ran before


def titled(way: str, delay_ms: float | None) -> str:
    """A configuration under a delay."""
    return way if delay_ms is None else f"{way}, {delay_ms:g} ms"


@dataclass(frozen=True)
class LoadRun:
    """All requests of one configuration under one delay."""

    way: str  # the configuration: HTTP, gRPC, or in process
    delay_ms: float | None  # one way, on an emulated network; None: there is none
    summary: Summary
    repetitions: tuple[tuple[RequestTimeline, ...], ...]  # of the same requests, in the order of their numbers

    @property
    def name(self) -> str:
        return titled(self.way, self.delay_ms)

    @property
    def timelines(self) -> tuple[RequestTimeline, ...]:
        return tuple(chain.from_iterable(self.repetitions))


@dataclass(frozen=True)
class LoadReport:
    """All of it."""

    conditions: LoadSettings
    runs: tuple[LoadRun, ...] = ()
    comparisons: tuple[Added, ...] = ()

    def with_stage(self, delay_ms: float | None, found: Mapping[str, Repetitions]) -> "LoadReport":
        """The same with what was found under one more delay, by configuration."""
        runs = [LoadRun(way, delay_ms, summary_of(each), tuple(map(tuple, each))) for way, each in found.items()]
        direct = found.get(IN_PROCESS)
        others = [(way, each) for way, each in found.items() if direct is not None and each is not direct]
        added = [added_by(way, each, delay_ms, IN_PROCESS, direct or ()) for way, each in others]
        return replace(self, runs=(*self.runs, *runs), comparisons=(*self.comparisons, *added))


def plain(report: LoadReport) -> dict[str, Any]:
    """The report as JSON has it: of dictionaries, lists, texts and numbers only."""
    runs = [
        {"way": run.way, "delay_ms": run.delay_ms, "summary": asdict(run.summary), "requests": _requests_of(run)}
        for run in report.runs
    ]
    found = {
        "format": FORMAT,
        "conditions": asdict(report.conditions),
        "runs": runs,
        "comparisons": list(map(asdict, report.comparisons)),
    }
    plain_values: dict[str, Any] = json.loads(json.dumps(found))  # tuples become lists
    return plain_values


def _requests_of(run: LoadRun) -> list[dict[str, Any]]:
    """A row for each request; moments are milliseconds since it was sent, `sent_ms` since the first one was."""
    return [
        {
            "repetition": number,
            "number": one.number,
            "category": one.category,
            "error": one.error,
            "tokens": one.tokens,
            "sent_ms": _milliseconds(one.sent - min(other.sent for other in repetition)),
            "first_token_ms": _milliseconds(one.first_token) if one.chunks else None,
            "per_token_ms": None if one.per_token is None else _milliseconds(one.per_token),
            "end_to_end_ms": _milliseconds(one.end_to_end),
            "chunks_ms": [_milliseconds(chunk - one.sent) for chunk in one.chunks],
        }
        for number, repetition in enumerate(run.repetitions)
        for one in repetition
    ]


def _milliseconds(seconds: float) -> float:
    return round(MILLISECONDS * seconds, ROUNDED)


QUANTILES = "mean / p50 / p90 / p99"
NOTHING = "–"
Row = tuple[str, Callable[[Summary], str]]
STATISTICS = (("Mean", "mean"), ("Median", "p50"), ("P99", "p99"))
LATENCIES = (
    ("TTFT", "first_token_ms"),
    ("TPOT", "per_token_ms"),
    ("ITL", "between_chunks_ms"),
    ("E2EL", "end_to_end_ms"),
)


def _latency(of: str, statistic: str) -> Callable[[Summary], str]:
    def shown(one: Summary) -> str:
        found: Spread | None = getattr(one, of)
        return NOTHING if found is None else f"{getattr(found, statistic):.2f}"

    return shown


ROWS: tuple[Row, ...] = (  # in the words of `vllm bench serve`, then those that it does not have
    ("Successful requests", lambda one: str(one.requests - sum(one.errors.values()))),
    ("Failed requests", lambda one: str(sum(one.errors.values()))),
    ("Benchmark duration (s)", lambda one: f"{one.seconds:.2f}"),
    ("Total generated tokens", lambda one: str(one.tokens)),
    ("Request throughput (req/s)", lambda one: f"{one.requests_per_second:.2f}"),
    ("Output token throughput (tok/s)", lambda one: f"{one.tokens_per_second:.2f}"),
    *((f"{name} {what} (ms)", _latency(of, it)) for what, of in LATENCIES for name, it in STATISTICS),
    (f"client to server and back, ms ({QUANTILES})", lambda one: spread(one.front_ms)),
    ("tokens per pass", lambda one: f"{one.acceptance.tokens_per_pass:.2f}" if one.acceptance else NOTHING),
    ("acceptance", lambda one: f"{one.acceptance.share:.1%}" if one.acceptance else NOTHING),
    ("acceptance by position", lambda one: _places(one)),
)
HOP_ROWS: tuple[tuple[str, Callable[[Hop], str]], ...] = (
    ("round trip, ms", lambda hop: spread(hop.round_trip_ms)),
    ("of it queueing, ms", lambda hop: f"{hop.queueing_ms:.2f}"),
    ("of it wire, ms", lambda hop: f"{hop.wire_ms:.2f}"),
    ("questions a token", lambda hop: f"{hop.questions_per_token:.2f}"),
    ("serialization, ms a token", lambda hop: f"{hop.serialization_ms_per_token:.3f}"),
    ("model, ms a token", lambda hop: f"{hop.model_ms_per_token:.2f}"),
    ("time in the model", lambda hop: f"{hop.model_share:.0%}"),
    ("time idle", lambda hop: f"{hop.idle_share:.0%}"),
    ("bytes a token", lambda hop: f"{hop.bytes_per_token:,.0f}"),
    ("sessions lost", lambda hop: str(hop.lost)),
)


def tables_of(report: LoadReport) -> Iterator[Table]:
    runs = report.runs
    table = _table("what clients see", [run.name for run in runs])
    for name, shown in ROWS:
        table.add_row(name, *(shown(run.summary) for run in runs))
    yield table
    for role in ("target", "drafter"):
        hops = [next((hop for hop in run.summary.hops if hop.role == role), None) for run in runs]
        if any(hops):
            table = _table(f"orchestrator and {role}", [run.name for run in runs])
            for title, told in HOP_ROWS:
                table.add_row(title, *(NOTHING if hop is None else told(hop) for hop in hops))
            yield table
    if report.comparisons:
        yield _compared(report.comparisons)


def notes_of(report: LoadReport) -> Iterator[str]:
    """How many requests failed, and the first error of each kind."""
    for run in report.runs:
        if errors := run.summary.errors:
            counted = ", ".join(f"{count} {kind}" for kind, count in errors.items())
            yield f"{run.name}: {sum(errors.values())} of {run.summary.requests} requests failed: {counted}"
    failed = [one for run in report.runs for one in run.timelines if one.error]
    first = {one.error: one.fault for one in reversed(failed)}
    yield from (f"{kind}: {text}" for kind, text in sorted(first.items()))


def _compared(added: Sequence[Added]) -> Table:
    names = [titled(one.way, one.delay_ms) for one in added]
    table = _table(f"added to {added[0].than} ({QUANTILES})", names)
    table.add_row("first token, ms", *(spread(one.first_token_ms) for one in added))
    table.add_row("per token, ms", *(spread(one.per_token_ms) for one in added))
    table.add_row("end to end, ms", *(spread(one.end_to_end_ms) for one in added))
    ratios = [one.per_token_ratio for one in added]
    table.add_row("time a token, as a ratio", *(NOTHING if one is None else f"{one:.3f}" for one in ratios))
    return table


def spread(found: Spread | None) -> str:
    if found is None:
        return NOTHING
    return " / ".join(_short(value) for value in (found.mean, found.p50, found.p90, found.p99))


def _places(summary: Summary) -> str:
    if summary.acceptance is None:
        return NOTHING
    return " ".join(f"{place.acceptance:.0%}" for place in summary.acceptance.places[:6]) or NOTHING


def _short(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    return table
