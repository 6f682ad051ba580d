"""A load test's report: as JSON, which deploy/loadtest/report.schema.json describes, and as tables."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, get_type_hints

from rich import box
from rich.table import Table

from crossdraft.lab.loadtest.runner import RequestTimeline
from crossdraft.lab.loadtest.summary import ROLES, Added, Repetitions, Summary, added_by, summary_of

FORMAT = 3
HTTP, GRPC, IN_PROCESS = "HTTP", "gRPC", "in process"  # names of configurations
NOTHING = "–"


def titled(way: str, delay_ms: float | None) -> str:
    """A configuration under a delay."""
    return way if delay_ms is None else f"{way}, {delay_ms:g} ms"


@dataclass(frozen=True)
class LoadRun:
    """All requests of one configuration under one delay."""

    way: str  # the configuration: HTTP, gRPC, or in process
    delay_ms: float | None  # one way, on an emulated network; None: there is none
    summary: Summary
    repetitions: Repetitions

    @property
    def name(self) -> str:
        return titled(self.way, self.delay_ms)

    @property
    def timelines(self) -> tuple[RequestTimeline, ...]:
        return tuple(chain.from_iterable(self.repetitions))


@dataclass(frozen=True)
class LoadReport:
    """All of it."""

    conditions: Mapping[str, Any]  # what repeats the test, as the schema has it
    runs: tuple[LoadRun, ...] = ()
    comparisons: tuple[Added, ...] = ()

    def with_stage(self, delay_ms: float | None, found: Mapping[str, Repetitions]) -> "LoadReport":
        """The same with what was found under one more delay, by configuration."""
        runs = [LoadRun(way, delay_ms, summary_of(each), each) for way, each in found.items()]
        direct = found.get(IN_PROCESS)
        others = [(way, each) for way, each in found.items() if direct is not None and each is not direct]
        added = [added_by(way, each, delay_ms, IN_PROCESS, direct or ()) for way, each in others]
        return replace(self, runs=(*self.runs, *runs), comparisons=(*self.comparisons, *added))


def plain(report: LoadReport) -> dict[str, Any]:
    """The report as JSON has it: of dictionaries, lists, texts and numbers only."""
    runs = [{"way": run.way, "delay_ms": run.delay_ms, "summary": asdict(run.summary)} for run in report.runs]
    compared = list(map(asdict, report.comparisons))
    found = {"format": FORMAT, "conditions": report.conditions, "runs": runs, "comparisons": compared}
    plain_values: dict[str, Any] = json.loads(json.dumps(found))  # tuples become lists
    return plain_values


def tables_of(report: LoadReport) -> Iterator[Table]:
    """What clients see, each hop, and what servers add."""
    yield _table("what clients see", {run.name: run.summary for run in report.runs})
    for role in ROLES:
        hops = {run.name: next((hop for hop in run.summary.hops if hop.role == role), None) for run in report.runs}
        if any(hops.values()):
            yield _table(f"orchestrator and {role}", hops)
    if report.comparisons:
        yield _table(f"added to {IN_PROCESS}", {titled(one.way, one.delay_ms): one for one in report.comparisons})


def notes_of(report: LoadReport) -> Iterator[str]:
    """How many requests failed, and the first error of each kind."""
    for run in report.runs:
        if errors := run.summary.errors:
            counted = ", ".join(f"{count} {kind}" for kind, count in errors.items())
            yield f"{run.name}: {sum(errors.values())} of {run.summary.requests} requests failed: {counted}"
    failed = [one for run in report.runs for one in run.timelines if one.error]
    first = {one.error: one.fault for one in reversed(failed)}
    yield from (f"{kind}: {text}" for kind, text in sorted(first.items()))


def _table(title: str, columns: Mapping[str, Any]) -> Table:
    """A line for each `Row` of the records, which are all of one class or None."""
    title += " (mean / p50 / p90 / p99)"
    table = Table("", title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    record = type(next(filter(None, columns.values())))
    for name, annotation in get_type_hints(record, include_extras=True).items():
        for row in getattr(annotation, "__metadata__", ()):
            found = [getattr(one, name, None) for one in columns.values()]
            table.add_row(row.title, *(NOTHING if value in (None, ()) else row.shown(value) for value in found))
    return table
