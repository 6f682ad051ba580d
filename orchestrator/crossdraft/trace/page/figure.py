"""The picture of a timeline, drawn by matplotlib, which is imported when it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crossdraft.trace.page.scene import FILLS, HATCHES, INK, LEGEND, MARK_COLOURS, NUMBERS, Box, Line, Scene, Stamp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

DOTS_PER_INCH = 150
WIDTH = 13.0  # inches
SCALE = 72.0  # of the scene's pixels to an inch
FIGURES_A_LINE = 6
LETTER = 6.0  # pixels of a letter of a label
BELOW = 0.5  # inches from the lanes to the legend, for the axis between


def draw(path: Path, scene: Scene, title: str, figures: Sequence[tuple[str, str]], begin: float, end: float) -> None:
    """Writes the part from `begin` to `end` (seconds).

    Raises:
        OSError: the file cannot be written.
    """
    figure_of(scene, title, figures, begin, end).savefig(path, dpi=DOTS_PER_INCH)


def figure_of(scene: Scene, title: str, figures: Sequence[tuple[str, str]], begin: float, end: float) -> "Figure":
    """The same, not yet written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, scene.height / SCALE + 2.1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(begin * 1000, end * 1000)
    axes.set_ylim(scene.height + 4, -4)
    pixel = (end - begin) * 1000 / (WIDTH * SCALE * 0.9)  # milliseconds
    for lane in scene.lanes:
        axes.axhspan(lane.top, lane.bottom, color=INK["lane"], zorder=0, linewidth=0)
    for shape in scene.shapes:
        if _shown(shape, begin, end):
            _draw(axes, shape, pixel)
    _finish(axes, scene, title, figures)
    return figure


def _shown(shape: Box | Line | Stamp, begin: float, end: float) -> bool:
    first, last = (shape.at, shape.at) if isinstance(shape, Stamp) else (shape.begin, shape.end)
    return first <= end and last >= begin


def _draw(axes: "Axes", shape: Box | Line | Stamp, pixel: float) -> None:
    style = shape.style.split()
    match shape:
        case Box(begin, end, top, height):
            _box(axes, (begin * 1000, top, max(1.5 * pixel, (end - begin) * 1000), height), style)
            if shape.label and (end - begin) * 1000 > (len(shape.label) + 0.5) * LETTER * pixel:
                middle = (begin + end) * 500, top + height / 2
                axes.text(*middle, shape.label, ha="center", va="center", fontsize=8, color=INK["label"], clip_on=True)
        case Line(begin, top, end, bottom):
            width = {"message": 1.2, "small": 0.6, "border": 0.6}.get(style[0], 1.4)
            colour = MARK_COLOURS.get(style[0]) or FILLS[style[-1]]
            axes.plot([begin * 1000, end * 1000], [top, bottom], color=colour, linewidth=width, zorder=1)
        case Stamp(at, top, width, height, _, _, ""):
            _box(axes, (at * 1000 - width * pixel / 2, top, width * pixel, height), style)
        case Stamp(at, top, _, height, _, _, sign):
            middle = at * 1000, top + height / 2
            colour = MARK_COLOURS[style[0]]
            axes.text(*middle, sign, ha="center", va="center", fontsize=9, color=colour, zorder=5, clip_on=True)


def _box(axes: "Axes", place: tuple[float, float, float, float], style: list[str]) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = place
    box = Rectangle((left, top), width, height, zorder=2)
    _paint(box, style)
    axes.add_patch(box)


def _paint(patch: "Patch", style: list[str]) -> "Patch":
    hatch = next((HATCHES[one] for one in style if one in HATCHES), None)
    patch.set(facecolor=FILLS[style[0]], edgecolor=INK["hatch"] if hatch else INK["edge"], linewidth=0.4, hatch=hatch)
    return patch


def _finish(axes: "Axes", scene: Scene, title: str, figures: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    lines = [figures[begin : begin + FIGURES_A_LINE] for begin in range(0, len(figures), FIGURES_A_LINE)]
    words = ["     ".join(f"{name}: {value}" for name, value in line) for line in lines]

    axes.set_yticks([(lane.top + lane.bottom) / 2 for lane in scene.lanes], [lane.name for lane in scene.lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("ms since the session began")
    axes.set_title("\n".join([title, *words]), fontsize=10, loc="left")
    used = {one for shape in scene.shapes for one in shape.style.split()}
    handles = [
        _paint(Patch(label=text), style.split())
        for style, text in LEGEND
        if style.split()[-1] in used and style not in MARK_COLOURS
    ]
    said = [text for style, text in LEGEND if style in used and style in MARK_COLOURS]
    signs = [Patch(facecolor="none", edgecolor="none", label=text) for text in (*said, *NUMBERS)]
    axes.legend(
        handles=[*handles, *signs],
        loc="upper left",
        bbox_to_anchor=(0.0, -BELOW * SCALE / scene.height),
        ncols=4,
        frameon=False,
        fontsize=8,
        borderaxespad=0.0,
    )
