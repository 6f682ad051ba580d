"""Pictures of what was measured, drawn by matplotlib without a display. It is imported only when one is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING

from crossdraft.console.running import CommandFailed, UsageError
from crossdraft.text.report import Combinations, OfLength

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class SpeedCurve:
    """Speed of one drafter and method against the number of draft tokens; 1 is decoding without a drafter."""

    label: str
    expected: Mapping[int, float]  # by K
    k: int  # where it was measured
    measured: float
    error: float  # standard


def check_picture(path: Path | None) -> None:
    """Raises UsageError if a picture cannot be written there, before anything is measured."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot writes {', '.join(FORMATS)} files, got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no folder {path.parent}")


def plot_speeds(path: Path, title: str, curves: Sequence[SpeedCurve]) -> None:
    """Lines of expected speed, and a point where it was measured.

    Raises:
        CommandFailed: the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = _figure(8.0, 5.0, 1)
    for place, curve in enumerate(curves):
        colour = f"C{place % 10}"
        ks = sorted(curve.expected)
        style = "-" if place < 10 else "--"
        axes.plot(ks, [curve.expected[k] for k in ks], style, color=colour, label=curve.label, linewidth=1.6)
        aside = curve.k + 0.04 * (place - (len(curves) - 1) / 2)  # so that errors do not cover one another
        axes.errorbar(aside, curve.measured, curve.error, fmt="o", color=colour, markersize=6, markeredgecolor="white")
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle=":")
    axes.annotate("without a drafter", (0.99, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xlabel("K, draft tokens in a round")
    axes.set_ylabel("speed, of that without a drafter")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"{title}\nlines: expected by the cost model; points: measured, with standard errors", fontsize=10, loc="left"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    save_picture(figure, path)


def plot_combinations(path: Path, title: str, found: Combinations) -> None:
    """Combinations of draft tokens for a target token: against its length, and how many tokens have how many.

    Raises:
        CommandFailed: the file cannot be written.
    """
    save_picture(combinations_figure(title, found), path)


def combinations_figure(title: str, found: Combinations) -> "Figure":
    """The same, not yet written."""
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = _figure(11.0, 4.5, 2)
    most = _most_shown(found.by_length)
    shown = [one for one in found.by_length if one.letters <= most]
    longer = sum(one.tokens for one in found.by_length if one.letters > most)
    boxes = [
        {"whislo": one.smallest, "q1": low, "med": middle, "q3": high, "whishi": one.largest}
        for one in shown
        for low, middle, high in [one.quartiles]
    ]
    left.bxp(boxes, positions=[one.letters for one in shown], widths=0.6, showfliers=False, manage_ticks=False)
    cut = (
        f"{longer:,} tokens of more than {most} letters are"
        if longer > 1
        else f"1 token of more than {most} letters is"
    )
    left.set_xlabel("letters of the target token" + (f"\n({cut} not shown)" if longer else ""))
    left.set_ylabel("draft-token combinations")
    left.set_title("by length: median, quartiles, extremes", fontsize=10)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    _powers_of_ten(left.yaxis, max((one.largest for one in shown), default=0.0))
    left.set_ylim(bottom=-0.05, top=max(1.0, left.get_ylim()[1]))
    # Powers of two on a decadic axis: the counts themselves may exceed a float.
    places, tokens = [n * log10(2) for n, _ in found.by_power], [count for _, count in found.by_power]
    right.bar(places, tokens, width=log10(2), align="edge", color="C0", edgecolor="white")
    _powers_of_ten(right.xaxis, max(places, default=0.0))
    right.set_xlim(left=-0.05, right=max(1.0, right.get_xlim()[1]))
    right.set_yscale("log")
    right.set_xlabel("draft-token combinations")
    right.set_ylabel("target tokens")
    right.set_title("how many tokens have how many", fontsize=10)
    figure.suptitle(title, fontsize=11)
    return figure


SHARE_SHOWN = 0.995  # of the tokens; a few runs of blanks are far longer than the rest


def _most_shown(by_length: Sequence[OfLength]) -> int:
    """The length up to which nearly all tokens lie."""
    left = SHARE_SHOWN * sum(one.tokens for one in by_length)
    for one in by_length:
        left -= one.tokens
        if left <= 0:
            return one.letters
    return 0


def _powers_of_ten(axis: "Axis", largest: float) -> None:
    """Ticks at whole powers, of exponents up to `largest`."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8 if largest > 1 else 1, integer=True))
    axis.set_major_formatter(lambda exponent, _: f"$10^{{{exponent:g}}}$")


def _figure(width: float, height: float, panels: int) -> "tuple[Figure, list[Axes]]":
    """A figure of so many inches, with panels side by side; drawn by Agg, whatever the display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes


def save_picture(figure: "Figure", path: Path) -> None:
    """Writes it; raises CommandFailed."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise CommandFailed(f"cannot write the picture: {error}") from error
