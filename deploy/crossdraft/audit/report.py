"""An audit's report: tables for people, JSON for programs, and a picture."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from crossdraft.audit.checks import FAULT, OK, AuditPlan, Result
from crossdraft.audit.statistics import POWER, chance_of_finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = 1
STYLES = {OK: "green", FAULT: "bold red"}
SHOWN = 8  # differences and tests in the tables; the JSON has all
WIDEST = 90  # characters of a column
TITLE = 120  # characters of a line of the picture's title that fits
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
    """As JSON: infinite values are null, as JSON has none."""
    return {"format": FORMAT, **_finite(asdict(report)), "faults": list(report.result.faults)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def tables_of(report: Report) -> Iterator[Table]:
    result = report.result
    beside = f", against {report.reference}" if report.reference else ""
    checks = _table(f"{report.model} at {report.url} ({report.api}){beside}", "check", "verdict", "finding")
    for check in result.checks:
        checks.add_row(check.name, Text(check.verdict, STYLES.get(check.verdict, "")), Text(check.finding))
    yield checks
    if result.differences:
        found = _table("greedy: the farthest differences", "prompt", "token", "gap, nats", "what came")
        for one in sorted(result.differences, key=lambda one: -(one.gap or 0.0))[:SHOWN]:
            gap = "unknown" if one.gap is None else f"{'over ' * one.at_least}{one.gap:.3g}"
            found.add_row(str(one.prompt), str(one.token), gap, Text(one.text))
        yield found
    if result.tests:
        tests = _table(
            "distributions: the least probable", "test", "of", "draws", "statistic", "df", "p", "corrected p"
        )
        ranked = sorted(zip(result.adjusted, result.tests, strict=True), key=lambda one: one[1].p)
        for adjusted, test in ranked[:SHOWN]:
            numbers = f"{test.count:,}", f"{test.statistic:.1f}", str(test.freedom or ""), f"{test.p:.2g}"
            tests.add_row(test.kind, Text(test.where), *numbers, f"{adjusted:.2g}")
        yield tests


def reach_of(report: Report) -> Iterator[str]:
    """What the sample can show, and what it cost, a sentence each."""
    plan, power = report.plan, report.result.power
    yield f"{report.requests} requests ({report.planned} planned, {report.retries} sent again)."
    drafted = report.draft_tokens
    yield f"Draft tokens meanwhile: {'not known' if drafted is None else '{:,}, accepted {:,}'.format(*drafted)}."
    if power is None:
        return
    yield (
        f"With {plan.samples:,} samples of each of {plan.sampled} prompts, up to {plan.tokens} tokens each, this audit "
        f"finds the following with a probability of {POWER:.0%}; it raises a false alarm with at most {plan.level:g}:"
    )
    if isfinite(power.temperature):
        needed = plan.samples * ((1 + 1 / WANTED_ERROR) / (1 + 1 / power.temperature)) ** 2
        yield f"- a temperature that is off by {power.temperature:.1%} (for {WANTED_ERROR:.0%}: --samples {needed:.0f})"
    yield f"- a listed token that never comes, if it was expected {power.missing:.0f} times in all"
    if power.first_token:
        yield f"- a forbidden first token of any prompt, of probability {max(power.first_token.values()):.1%}"
        yield f"- first tokens whose probabilities are wrong by {max(power.tilt.values()):.0%}, root mean square"


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
        table.add_column(heading, overflow="fold", max_width=WIDEST)
    return table


def figure_of(report: Report) -> "Figure":
    """Draws against reported probabilities, and the errors of a temperature that this sample would find."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_cells(left, report.result)
    _draw_power(right, report.result)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    found = f"faults: {', '.join(report.result.faults)}" if report.result.faults else "no fault found"
    figure.suptitle(fill(f"{report.model} at {report.url}: {found}", TITLE), fontsize=11)
    return figure


def _draw_cells(axes: "Axes", result: Result) -> None:
    """Residuals of all cells, in standard deviations of a binomial."""
    for place, kind in enumerate(("first token", "second token")):
        cells = [(cell, test.count) for test in result.tests if test.kind == kind for cell in test.cells]
        chances = np.array([min(1.0, cell.expected / count) for cell, count in cells])
        spread = np.sqrt(np.maximum([cell.expected for cell, _ in cells] * (1 - chances), 1.0))
        residuals = np.array([cell.observed - cell.expected for cell, _ in cells]) / spread
        axes.plot(np.maximum(chances, 1e-5), residuals, "o", markersize=3, alpha=0.6, color=f"C{place}", label=kind)
    axes.axhspan(-2, 2, color="grey", alpha=0.15)
    axes.set_xscale("log")
    axes.set_xlabel("reported probability of a token")
    axes.set_ylabel("draws more than expected, standard deviations")
    axes.set_title("draws against reported probabilities", fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False)


def _draw_power(axes: "Axes", result: Result) -> None:
    axes.set_title("chance of finding a wrong temperature", fontsize=10, loc="left")
    axes.set_xlabel("relative error of the temperature")
    axes.set_ylim(0, 1.02)
    power = result.power
    if power is None or not isfinite(power.temperature):
        return
    errors = np.linspace(0, 2 * power.temperature, 100)
    axes.plot(errors, [chance_of_finding(error, result.information, power.level) for error in errors], color="C2")
    axes.plot([power.temperature], [POWER], "o", color="C2")
    axes.annotate(f"{power.temperature:.1%}", (power.temperature, POWER), (6, -12), textcoords="offset points")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
