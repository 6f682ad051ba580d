"""A picture of a load test. matplotlib is imported when one is drawn, and needs no display."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING

from crossdraft.loadtest.report import LoadReport, LoadRun
from crossdraft.loadtest.runner import RequestTimeline
from crossdraft.loadtest.summary import MILLISECONDS, ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 88  # for a small file
COLUMNS = 3
TITLE = 150  # characters of a line that fits
Values = Callable[[RequestTimeline], list[float]]  # seconds
LATENCIES: tuple[tuple[str, Values], ...] = (
    ("time to first token (TTFT)", lambda one: [one.first_token]),
    ("between chunks (ITL)", lambda one: list(one.between_chunks)),
    ("per token after the first (TPOT)", lambda one: [one.per_token] if one.per_token else []),
    ("end to end (E2EL)", lambda one: [one.end_to_end]),
)
JUDGED = 10  # draft tokens, at least, of which a share is drawn
SHORTEST = 0.05  # ms: what is shorter is drawn there, on a logarithmic axis


def figure_of(report: LoadReport) -> "Figure":
    from matplotlib.figure import Figure

    runs = report.runs
    panels = list(_panels(runs))
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(13.0, 3.0 * rows + 1.0), layout="constrained")
    for place, draw in enumerate(panels):
        axes: Axes = figure.add_subplot(rows, COLUMNS, place + 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        draw(axes, runs)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(6, len(runs))), frameon=False)
    figure.suptitle("\n".join(fill(line, TITLE) for line in title_of(report).splitlines()), fontsize=11)
    return figure


def _panels(runs: Sequence[LoadRun]) -> Iterator[Callable[["Axes", Sequence[LoadRun]], None]]:
    """Those for which there are figures: other servers, for instance, do not say what was accepted."""
    for title, values_of in LATENCIES:
        if any(values_of(one) for run in runs for one in run.timelines if one.ok):
            yield partial(_shares, title=title, values_of=values_of)
    yield _speeds
    summaries = [run.summary for run in runs]
    if any(place.judged >= JUDGED for one in summaries if one.acceptance for place in one.acceptance.places):
        yield _acceptance
    if any(one.hops for one in summaries):
        yield _round_trips


def title_of(report: LoadReport) -> str:
    conditions = report.conditions
    kind = f"{conditions.clients} client{'s' * (conditions.clients != 1)}"
    what = f"{kind}, {conditions.requests * conditions.repeat} requests of up to {conditions.wishes.max_tokens} tokens"
    return what + (f"\n{conditions.services}" if conditions.services else "")


def _shares(axes: "Axes", runs: Sequence[LoadRun], title: str, values_of: Values) -> None:
    """Share of the values up to each, on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    for place, run in enumerate(runs):
        fine = [one for one in run.timelines if one.ok]
        values = sorted(max(SHORTEST, MILLISECONDS * value) for one in fine for value in values_of(one))
        shares = [(number + 1) / len(values) for number in range(len(values))]
        axes.step(values, shares, where="post", color=f"C{place}", label=run.name)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    locators = (LogLocator(), LogLocator(subs=(1.0, 2.0, 5.0)), MaxNLocator(5))  # the first with three ticks
    ticks = ([tick for tick in one.tick_values(low, high) if low <= tick <= high] for one in locators)
    axes.set_xticks(next(found for found in ticks if len(found) > 2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("ms")
    axes.set_ylabel("share, up to")
    axes.set_title(title, fontsize=10, loc="left")


def _bars(axes: "Axes", runs: Sequence[LoadRun]) -> range:
    """Places for a bar of each run."""
    axes.set_xticks(range(len(runs)), [run.name.replace(", ", "\n") for run in runs], fontsize=8)
    return range(len(runs))


def _speeds(axes: "Axes", runs: Sequence[LoadRun]) -> None:
    speeds, places = [run.summary.tokens_per_second for run in runs], _bars(axes, runs)
    axes.bar_label(axes.bar(places, speeds, color=[f"C{place}" for place in places]), fmt="%.1f", fontsize=8)
    axes.set_title("throughput, tokens/s", fontsize=10, loc="left")


def _acceptance(axes: "Axes", runs: Sequence[LoadRun]) -> None:
    from matplotlib.ticker import MaxNLocator

    most = 1  # places of any run
    for place, run in enumerate(runs):
        found = run.summary.acceptance
        if found is not None and found.places:
            shares = [one.acceptance for one in found.places if one.judged >= JUDGED]
            axes.plot(range(1, len(shares) + 1), shares, "o-", markersize=3, color=f"C{place}")
            most = max(most, len(shares))
    axes.set_xlim(0.5, most + 0.5)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("place in a round")
    axes.set_title("acceptance, given that all before held", fontsize=10, loc="left")


def _round_trips(axes: "Axes", runs: Sequence[LoadRun]) -> None:
    """A bar of each run's target and one of its drafter."""
    _bars(axes, runs)
    hops = [(place, hop) for place, run in enumerate(runs) for hop in run.summary.hops]
    places = [place + 0.4 * (ROLES.index(hop.role) - 0.5) for place, hop in hops]
    wire, queueing = [hop.wire_ms for _, hop in hops], [hop.queueing_ms for _, hop in hops]
    axes.bar(places, wire, 0.36, color="#7a9cc6", label="wire, codecs, event loops")
    drawn = axes.bar(places, queueing, 0.36, bottom=wire, color="#c67a7a", label="queueing")
    axes.bar_label(drawn, [hop.role[0].upper() for _, hop in hops], fontsize=7)
    axes.set_ylabel("ms")
    axes.set_title("a round trip to target (T) and drafter (D), less the model", fontsize=10, loc="left")
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize=8, loc="upper left", ncols=2, frameon=False)
