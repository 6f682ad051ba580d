"""Pictures of what is measured. matplotlib is imported when one is drawn, and needs no display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crossdraft.cli.failures import CommandFailed, Misused

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class SpeedCurve:
    """Speed of one drafter and method against the number of proposals; 1 is decoding without a drafter."""

    label: str
    expected: Mapping[int, float]  # by K
    measured: tuple[int, float] | None  # K, and the speed


def check_picture(path: Path | None) -> None:
    """Raises Misused if a picture cannot be written there, before anything is measured."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise Misused(f"--plot writes {', '.join(FORMATS)} files, got {path}")
    if not path.parent.is_dir():
        raise Misused(f"--plot: there is no folder {path.parent}")


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
        if curve.measured is not None:
            axes.plot(*curve.measured, "o", color=colour, markersize=7, markeredgecolor="white")
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle=":")
    axes.annotate("without a drafter", (0.99, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xlabel("K, proposals in a round")
    axes.set_ylabel("speed, of that without a drafter")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{title}\nlines: expected by the cost model; points: measured", fontsize=10, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    _save(figure, path)


def plot_combinations(path: Path, title: str, lengths: Sequence[int], counts: Sequence[int]) -> None:
    """Combinations of draft tokens for each target token: against its length, and how many tokens have how many.

    Args:
        path: of the picture.
        title: above it.
        lengths: letters of each target token, shape (n,).
        counts: ways to write each of them, 0 where there is none, shape (n,); may exceed a float.

    Raises:
        CommandFailed: the file cannot be written.
    """
    from math import log10

    figure, (left, right) = _figure(11.0, 4.5, 2)
    found = [(length, log10(count)) for length, count in zip(lengths, counts, strict=True) if count]
    by_length: dict[int, list[float]] = {}
    for length, exponent in found:
        by_length.setdefault(length, []).append(exponent)
    shown = sorted(length for length in by_length if length <= _most_shown(by_length))
    left.boxplot(
        [by_length[length] for length in shown], positions=shown, widths=0.6, whis=(0, 100), manage_ticks=False
    )
    left.set_xlabel("letters of the target token")
    left.set_ylabel("draft-token combinations")
    left.set_title("by length: median, quartiles, extremes", fontsize=10)
    exponents = [exponent for _, exponent in found]
    right.hist(exponents, bins=40, color="C0")
    right.set_yscale("log")
    right.set_xlabel("draft-token combinations")
    right.set_ylabel("target tokens")
    right.set_title("how many tokens have how many", fontsize=10)
    left.yaxis.set_major_formatter(_power)
    right.xaxis.set_major_formatter(_power)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


SHARE_SHOWN = 0.999  # of the tokens; a few runs of blanks are far longer than the rest


def _most_shown(by_length: Mapping[int, Sequence[float]]) -> int:
    """The length up to which nearly all tokens lie."""
    left = SHARE_SHOWN * sum(map(len, by_length.values()))
    for length in sorted(by_length):
        left -= len(by_length[length])
        if left <= 0:
            return length
    return max(by_length, default=0)


def _power(exponent: float, _: object) -> str:
    return f"$10^{{{exponent:g}}}$"


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


def _save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise CommandFailed(f"cannot write the picture: {error}") from error
