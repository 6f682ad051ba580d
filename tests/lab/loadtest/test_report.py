"""A load test's report: JSON as its schema says, and tables."""

import io
from dataclasses import replace

import jsonschema
import pytest
from rich.console import Console

from crossdraft.lab.loadtest import report as tables
from crossdraft.lab.loadtest.report import LoadReport, LoadRun, plain
from crossdraft.lab.loadtest.summary import added_by, summary_of
from tests.lab.loadtest.values import CONDITIONS, FAILED, WHOLE, at, validated


def run_of(way: str, delay: float | None, *timelines: object) -> LoadRun:
    return LoadRun(way, delay, summary_of([timelines]), (timelines,))  # type: ignore[arg-type]


RUNS = (
    run_of("HTTP", 0.0, WHOLE, FAILED),
    run_of("in process", 0.0, WHOLE, replace(FAILED, error="timed out", fault="no end")),
    run_of("HTTP", 5.0, *(at(number, 0.1 * number, 1.0 + number) for number in range(20))),
)
ADDED = added_by("HTTP", RUNS[0].repetitions, 0.0, "in process", RUNS[1].repetitions)
REPORT = LoadReport(CONDITIONS, RUNS, (ADDED,))


@pytest.mark.parametrize(
    "report",
    [REPORT, LoadReport(CONDITIONS, (run_of("gRPC", None, FAILED),)), LoadReport(CONDITIONS, ())],
    ids=["full", "nothing but errors", "empty"],
)
def test_json_is_as_its_schema_says(report: LoadReport) -> None:
    validated(plain(report))


def test_the_schema_finds_a_figure_that_it_does_not_know() -> None:
    found = plain(REPORT)
    found["runs"][0]["summary"]["hops"][0]["more"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validated(found)


def test_tables_have_every_figure() -> None:
    console = Console(file=io.StringIO(), width=160)
    for table in tables.tables_of(REPORT):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for wanted in (
        "HTTP, 0 ms",
        "Failed requests",
        "TTFT (ms)",
        "100 / 100 / 100 / 100",
        "E2EL (ms)",
        "Output token throughput (tok/s)",
        "66.7%",  # acceptance
        "100% 0%",  # by place
        "orchestrator and drafter",
        "4.00 / 4.88 / 4.97 / 5.00",  # round trip
        "added to in process",
    ):
        assert wanted in text, wanted


def test_what_must_not_be_overlooked() -> None:
    assert list(tables.notes_of(REPORT)) == [
        "HTTP, 0 ms: 1 of 2 requests failed: 1 HTTP 429",
        "in process, 0 ms: 1 of 2 requests failed: 1 timed out",
        "HTTP 429: no room",
        "timed out: no end",
    ]
