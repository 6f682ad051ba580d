"""An audit's report: tables for people, JSON for programs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from crossdraft.audit.checks import FAULT, OK, AuditPlan, Result
from crossdraft.audit.statistics import POWER

FORMAT = 2
STYLES = {OK: "green", FAULT: "bold red"}
SHOWN = 8  # differences and tests in the tables; the JSON has all
MAX_WIDTH = 90  # characters of a column
FEW_DRAFTED = 1000  # draft tokens: with fewer, speculation was hardly tested
WANTED_ERROR = 0.02  # of a temperature, for which the report says how many samples would find it


@dataclass(frozen=True)
class Report:
    """What was asked of whom, and what was found."""

    begun: str  # ISO 8601, UTC
    software: str  # version of this package
    url: str
    model: str
    api: str  # completions or chat
    listed: int  # tokens with log-probabilities at each place
    reference: str  # URL or model; empty: none
    plan: AuditPlan
    planned: int  # requests
    requests: int  # that were sent: also those that learnt what the endpoint lets one ask for, and retries
    retries: int
    draft_tokens: tuple[int, int] | None  # of the server meanwhile, and accepted ones; None: it does not say
    result: Result


def plain(report: Report) -> dict[str, Any]:
    """As JSON."""
    return {"format": FORMAT, **asdict(report), "faults": list(report.result.faults)}


def tables_of(report: Report) -> Iterator[Table]:
    result = report.result
    beside = f", against {report.reference}" if report.reference else ""
    checks = _table(f"{report.model} at {report.url} ({report.api}){beside}", "check", "verdict", "finding")
    for check in result.checks:
        checks.add_row(check.name, Text(check.verdict, STYLES.get(check.verdict, "")), Text(check.finding))
    yield checks
    if result.differences:
        found = _table("greedy: the farthest differences", "prompt", "token", "gap, nats", "what came")
        for one in sorted(result.differences, key=lambda one: -one.gap)[:SHOWN]:
            gap = f"{'over ' * one.at_least}{one.gap:.3g}"
            found.add_row(str(one.prompt), str(one.token), gap, Text(one.text))
        yield found
    if result.tests:
        headings = "test", "of", "draws", "statistic", "df", "p", "corrected p"
        tests = _table("distributions: the least probable", *headings)
        ranked = sorted(zip(result.adjusted, result.tests, strict=True), key=lambda one: one[1].p)
        for adjusted, test in ranked[:SHOWN]:
            numbers = f"{test.count:,}", f"{test.statistic:.1f}", str(test.freedom or ""), f"{test.p:.2g}"
            tests.add_row(test.kind, Text(test.where), *numbers, f"{adjusted:.2g}")
        yield tests


def reach_of(report: Report) -> Iterator[str]:
    """What the sample can show, and what it cost, a sentence each."""
    plan, power, drafted = report.plan, report.result.power, report.draft_tokens
    yield f"{report.requests} requests ({report.planned} planned, {report.retries} sent again)."
    yield f"Draft tokens meanwhile: {'not known' if drafted is None else '{:,}, accepted {:,}'.format(*drafted)}."
    if power is None:
        return
    yield (
        f"With {plan.samples:,} samples of each of {plan.sampled} prompts, up to {plan.tokens} tokens each, this audit "
        f"finds the following with a probability of {POWER:.0%}; it raises a false alarm with at most {plan.level:g}:"
    )
    if power.temperature is not None:
        needed = plan.samples * ((1 + 1 / WANTED_ERROR) / (1 + 1 / power.temperature)) ** 2
        yield f"- a temperature that is off by {power.temperature:.1%} (for {WANTED_ERROR:.0%}: --samples {needed:.0f})"
    yield f"- a listed token that never comes, if it was expected {power.missing:.0f} times in all"


def verdict_of(report: Report) -> str:
    """What the audit comes to, where it found no fault."""
    found = "No fault was found in what was checked"
    if report.draft_tokens is None:
        return f"{found}; the server does not say whether it drafted meanwhile."
    drafted = report.draft_tokens[0]
    return found + f", but with {drafted} draft tokens speculation was hardly tested" * (drafted < FEW_DRAFTED) + "."


def _table(title: str, *headings: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", max_width=MAX_WIDTH)
    return table
