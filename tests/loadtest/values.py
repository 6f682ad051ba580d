"""Timelines whose figures can be worked out by hand. Times are seconds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from crossdraft.cli.loadtest import conditions_of
from crossdraft.config.commands import LoadOptions, LoadRequests
from crossdraft.loadtest.runner import OutputFigures, RequestTimeline
from crossdraft.types.statistics import BOUNDS, LaneFigures, Trips

SCHEMA = json.loads((Path(__file__).parents[2] / "deploy/loadtest/report.schema.json").read_text(encoding="utf-8"))
CONDITIONS = conditions_of(LoadOptions(), LoadRequests(), "")
TRIPS = (*(4 if bound == 0.005 else 0 for bound in BOUNDS), 0)  # four of 2.5 to 5 ms
TARGET = LaneFigures("target", "", 100, 300, Trips(TRIPS, 0.016, 0.004), "", 0.4, 0.002, 1.0, 0.5)
DRAFTER = LaneFigures("drafter", "", 50, 150, Trips(TRIPS, 0.014), "unreachable", 0.1, 0.001, 0.8, 0.2)
FIGURES = OutputFigures(
    4, passes=2, accepted=2, corrected=1, judged_at=(2, 1), accepted_at=(2, 0), lanes=(TARGET, DRAFTER)
)
# Sent at 10; tokens after 0.1, 0.2, 0.2 and 0.4 s; its end 0.1 s after the last.
WHOLE = RequestTimeline(
    number=0,
    category="text",
    sent=10.0,
    chunks=(10.1, 10.2, 10.2, 10.4),
    ended=10.5,
    made=(0.09, 0.18, 0.18, 0.37),
    figures=FIGURES,
)
FAILED = replace(
    WHOLE, number=1, sent=11.0, chunks=(), ended=12.5, made=(), error="HTTP 429", fault="no room", figures=None
)


def validated(report: dict[str, Any]) -> dict[str, Any]:
    """The report, if it is as its schema says."""
    jsonschema.Draft202012Validator(SCHEMA).validate(report)
    return report


def at(number: int, sent: float, took: float) -> RequestTimeline:
    """A request with two tokens, the last one with its end."""
    return RequestTimeline(number, "text", sent, (sent + took / 2, sent + took), sent + took)
