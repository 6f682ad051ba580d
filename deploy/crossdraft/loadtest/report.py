"""A load test's report, as JSON and CSV. deploy/loadtest/report.schema.json describes the JSON."""

import csv
import io
import json
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from crossdraft.loadtest.arrivals import Load
from crossdraft.loadtest.asking import Wishes
from crossdraft.loadtest.comparisons import Added
from crossdraft.loadtest.summaries import Goal, Summary
from crossdraft.loadtest.timelines import Timeline

FORMAT = 1
MILLISECONDS = 1000.0
ROUNDED = 4  # digits of milliseconds after the point


@dataclass(frozen=True)
class Conditions:
    """What was done, so that it can be done again."""

    begun: str  # ISO 8601, UTC
    software: str  # version of this package
    cores: int  # that this process may use; services that the test started share them
    load: Load
    goal: Goal
    wishes: Wishes
    requests: int  # of each run, without those that warm up
    warm_up: int  # requests before each run, which do not count
    repeat: int
    seed: int
    prompts: str  # where they are from
    services: str  # what was started, and where; empty: they ran before


@dataclass(frozen=True)
class Run:
    """All requests made in one way under one delay."""

    way: str  # HTTP, gRPC, or in process
    delay_ms: float | None  # one way, on an emulated network; None: there is none
    summary: Summary
    repetitions: tuple[tuple[Timeline, ...], ...]  # of the same requests, in the order of their numbers

    @property
    def name(self) -> str:
        """For people."""
        return self.way if self.delay_ms is None else f"{self.way}, {self.delay_ms:g} ms"

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Of all repetitions."""
        return tuple(chain.from_iterable(self.repetitions))


@dataclass(frozen=True)
class Comparison:
    """What one way adds to another under one delay."""

    delay_ms: float | None
    added: Added


@dataclass(frozen=True)
class Report:
    """All of it."""

    conditions: Conditions
    runs: tuple[Run, ...]
    comparisons: tuple[Comparison, ...] = ()


def plain(report: Report) -> dict[str, Any]:
    """Of dictionaries, lists, texts and numbers only."""
    load = {"kind": type(report.conditions.load).__name__} | asdict(report.conditions.load)
    found = {
        "format": FORMAT,
        "conditions": asdict(report.conditions) | {"load": load},
        "runs": [
            {
                "way": run.way,
                "delay_ms": run.delay_ms,
                "summary": asdict(run.summary),
                "requests": requests_of(run),
            }
            for run in report.runs
        ],
        "comparisons": [{"delay_ms": one.delay_ms, **asdict(one.added)} for one in report.comparisons],
    }
    plain_values: dict[str, Any] = json.loads(json.dumps(found))  # tuples become lists
    return plain_values


def requests_of(run: Run) -> list[dict[str, Any]]:
    """A row for each request; moments are milliseconds since it was due, `due_ms` since the first one was."""
    return [
        {"repetition": number, **_row(one, min(other.due for other in repetition))}
        for number, repetition in enumerate(run.repetitions)
        for one in repetition
    ]


def _row(one: Timeline, begin: float) -> dict[str, Any]:
    return {
        "number": one.number,
        "category": one.category,
        "error": one.error,
        "tokens": one.tokens,
        "due_ms": _milliseconds(one.due - begin),
        "sent_ms": _milliseconds(one.late),
        "first_token_ms": _milliseconds(one.first_token) if one.chunks else None,
        "per_token_ms": None if one.per_token is None else _milliseconds(one.per_token),
        "end_to_end_ms": _milliseconds(one.end_to_end),
        "chunks_ms": [_milliseconds(chunk - one.due) for chunk in one.chunks],
    }


def as_csv(report: Report) -> str:
    """A line for each request; without the moments of chunks."""
    text = io.StringIO()
    rows = [
        {"way": run.way, "delay_ms": run.delay_ms, **{name: row[name] for name in row if name != "chunks_ms"}}
        for run in report.runs
        for row in requests_of(run)
    ]
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["way"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _milliseconds(seconds: float) -> float:
    return round(MILLISECONDS * seconds, ROUNDED)
