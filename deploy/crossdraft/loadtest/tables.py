"""A load test's report for people."""

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.table import Table

from crossdraft.loadtest.hops import Hop
from crossdraft.loadtest.report import Comparison, Report, Run
from crossdraft.loadtest.spreads import Spread
from crossdraft.loadtest.summaries import Summary

QUANTILES = "mean / p50 / p90 / p99"
NOTHING = "–"

Row = tuple[str, Callable[[Summary], str]]
HopRow = tuple[str, Callable[[Hop], str]]

ROWS: tuple[Row, ...] = (
    ("requests", lambda one: str(one.requests)),
    ("errors", lambda one: str(sum(one.errors.values()))),
    ("tokens/s", lambda one: f"{one.tokens_per_second:.1f}"),
    ("requests/s", lambda one: f"{one.requests_per_second:.2f}"),
    ("first token, ms", lambda one: spread(one.first_token_ms)),
    ("between chunks, ms", lambda one: spread(one.between_chunks_ms)),
    ("per token, ms", lambda one: spread(one.per_token_ms)),
    ("end to end, ms", lambda one: spread(one.end_to_end_ms)),
    ("client to front and back, ms", lambda one: spread(one.front_ms)),
    ("goodput", lambda one: goodput(one)),
    ("tokens per pass", lambda one: f"{one.acceptance.tokens_per_pass:.2f}" if one.acceptance else NOTHING),
    ("acceptance", lambda one: f"{one.acceptance.share:.1%}" if one.acceptance else NOTHING),
    ("acceptance by place", lambda one: places(one)),
    ("under way at once", lambda one: str(one.schedule.most)),
)
HOP_ROWS: tuple[HopRow, ...] = (
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


def tables_of(report: Report) -> Iterator[Table]:
    """Clients' figures, then those of each hop, then comparisons."""
    runs = report.runs
    table = _table(f"what clients see ({QUANTILES})", [run.name for run in runs])
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


def notes_of(report: Report) -> Iterator[str]:
    """What must not be overlooked, a line each."""
    for run in report.runs:
        yield from _notes(run)


def _notes(run: Run) -> Iterator[str]:
    summary, schedule = run.summary, run.summary.schedule
    if summary.errors:
        counted = ", ".join(f"{count} {kind}" for kind, count in summary.errors.items())
        yield f"{run.name}: {sum(summary.errors.values())} of {summary.requests} requests failed: {counted}"
    if schedule.saturated:
        yield (
            f"{run.name}: saturated: {schedule.at_middle} requests were under way when the middle one was due, and "
            f"{schedule.at_end} when the last one was; latencies grow with the length of the test, so lower --rate"
        )
    if schedule.late:
        yield (
            f"{run.name}: {schedule.late} requests were sent over 10 ms late, at most {schedule.latest_ms:.0f} ms; "
            "this client could not keep up, or was told to wait (--most-at-once). Their waits are in the latencies"
        )


def _compared(comparisons: Sequence[Comparison]) -> Table:
    names = [one.added.way if one.delay_ms is None else f"{one.added.way}, {one.delay_ms:g} ms" for one in comparisons]
    table = _table(f"added to {comparisons[0].added.than} ({QUANTILES})", names)
    table.add_row("first token, ms", *(spread(one.added.first_token_ms) for one in comparisons))
    table.add_row("per token, ms", *(spread(one.added.per_token_ms) for one in comparisons))
    table.add_row("end to end, ms", *(spread(one.added.end_to_end_ms) for one in comparisons))
    ratios = [one.added.per_token_ratio for one in comparisons]
    table.add_row("time a token, as a ratio", *(NOTHING if one is None else f"{one:.3f}" for one in ratios))
    return table


def spread(found: Spread | None) -> str:
    """Mean and quantiles."""
    if found is None:
        return NOTHING
    return " / ".join(_short(value) for value in (found.mean, found.p50, found.p90, found.p99))


def goodput(summary: Summary) -> str:
    """Share of good requests and their rate."""
    good = summary.goodput
    return NOTHING if good is None else f"{good.share:.0%}, {good.requests_per_second:.2f}/s"


def places(summary: Summary) -> str:
    """Acceptance at each place of a round."""
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
