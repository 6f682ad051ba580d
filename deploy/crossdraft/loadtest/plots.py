"""A picture of a load test. matplotlib is imported when one is drawn, and needs no display."""

from collections.abc import Callable, Sequence
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING

from crossdraft.loadtest.report import LoadReport, LoadRun
from crossdraft.loadtest.runner import LATENCIES, Values
from crossdraft.loadtest.summary import MILLISECONDS, ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 88  # for a small file
COLUMNS = 3
TITLE = 150  # characters of a line that fits
TITLES = {  # of latencies that are drawn
    "first_token_ms": "time to first token (TTFT)",
    "between_chunks_ms": "between chunks (ITL)",
    "per_token_ms": "per token after the first (TPOT)",
    "end_to_end_ms": "end to end (E2EL)",
}
JUDGED = 10  # draft tokens, at least, of which a share is drawn
SHORTEST = 0.05  # ms: what is shorter is drawn there, on a logarithmic axis


def figure_of(report: LoadReport) -> "Figure":
    """A panel for each figure that there is."""
    from matplotlib.figure import Figure

    runs = report.runs
    panels: list[tuple[str, Callable[[Axes, Sequence[LoadRun]], None]]] = [
        (title, partial(_latencies, values_of=LATENCIES[name]))
        for name, title in TITLES.items()
        if any(getattr(run.summary, name) for run in runs)
    ]
    panels.append(("throughput, tokens/s", _throughput))
    if any(place.judged >= JUDGED for run in runs for place in run.summary.places):
        panels.append(("acceptance by place in a round, given that all before held", _acceptance))
    if any(run.summary.hops for run in runs):
        panels.append(("round trips to target (T) and drafter (D), less the model", _round_trips))
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(13.0, 3.0 * rows + 1.0), layout="constrained")
    for place, (title, draw) in enumerate(panels):
        axes = figure.add_subplot(rows, COLUMNS, place + 1)
        axes.set_title(title, fontsize=9, loc="left")
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        draw(axes, runs)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(6, len(runs))), frameon=False)
    figure.suptitle("\n".join(fill(line, TITLE) for line in title_of(report).splitlines()), fontsize=11)
    return figure


def title_of(report: LoadReport) -> str:
    said = report.conditions
    clients, requests = said["clients"], said["requests"] * said["repeat"]
    what = f"{clients} client{'s' * (clients != 1)}, {requests} requests of up to {said['wishes']['max_tokens']} tokens"
    return what + (f"\n{said['services']}" if said["services"] else "")


def _latencies(axes: "Axes", runs: Sequence[LoadRun], values_of: Values) -> None:
    """Share of the values up to each."""
    from matplotlib.ticker import LogFormatter

    for place, run in enumerate(runs):
        values = [max(SHORTEST, MILLISECONDS * it) for one in run.timelines if one.ok for it in values_of(one)]
        if values:
            axes.ecdf(values, color=f"C{place}", label=run.name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))  # names some where decades are few
    axes.set(xlabel="ms", ylabel="share, up to")


def _names(axes: "Axes", runs: Sequence[LoadRun]) -> range:
    """Places for a bar of each run."""
    axes.set_xticks(range(len(runs)), [run.name.replace(", ", "\n") for run in runs], fontsize=8)
    return range(len(runs))


def _throughput(axes: "Axes", runs: Sequence[LoadRun]) -> None:
    places = _names(axes, runs)
    bars = axes.bar(places, [run.summary.tokens_per_second for run in runs], color=[f"C{place}" for place in places])
    axes.bar_label(bars, fmt="%.1f", fontsize=8)


def _acceptance(axes: "Axes", runs: Sequence[LoadRun]) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, run in enumerate(runs):
        shares = [one.acceptance for one in run.summary.places if one.judged >= JUDGED]
        axes.plot(range(1, len(shares) + 1), shares, "o-", markersize=3, color=f"C{place}")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _round_trips(axes: "Axes", runs: Sequence[LoadRun]) -> None:
    """A bar of each run's target and one of its drafter."""
    _names(axes, runs)
    hops = [(place, hop) for place, run in enumerate(runs) for hop in run.summary.hops]
    places = [place + 0.4 * (ROLES.index(hop.role) - 0.5) for place, hop in hops]
    wire = [hop.wire_ms for _, hop in hops]
    axes.bar(places, wire, 0.36, color="0.75", label="wire, codecs, event loops")
    queueing = axes.bar(places, [hop.queueing_ms for _, hop in hops], 0.36, bottom=wire, color="0.45", label="queueing")
    axes.bar_label(queueing, [hop.role[0].upper() for _, hop in hops], fontsize=7)
    axes.set_ylabel("ms")
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize=8, loc="upper left", ncols=2, frameon=False)
