"""The page of a timeline: one file with everything in it, which needs neither a network nor, but to zoom, a script."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

from crossdraft.trace.page.scene import LEGEND, MARKS, NUMBERS, Box, Line, Scene, Shape, Stamp

AXIS = 26.0  # pixels below the lanes
LETTER = 7.0  # pixels of a letter of a label
STEPS = (1, 2, 5)  # of ticks, times powers of ten
TICK_EVERY = 90.0  # pixels at least
LEAST = 1.5  # pixels of a box at least


def page_of(scene: Scene, title: str, figures: Sequence[tuple[str, str]], scale: float, begin: float) -> str:
    """The page as HTML.

    Args:
        figures: name and value of each.
        scale: pixels a second, at first.
        begin: what is seen first, seconds.
    """
    parts = {name: _part(f"page.{name}") for name in ("css", "js")}
    return Template(_part("page.html")).substitute(
        parts,
        title=escape(title),
        figures="\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures),
        lanes=_lanes(scene),
        scene=_svg(scene, scale),
        legend="\n".join(_legend(scene)),
        scale=f"{scale:.3f}",
        begin=f"{begin:.6f}",
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _lanes(scene: Scene) -> str:
    names = "".join(
        f'<text x="104" y="{(lane.top + lane.bottom) / 2:g}" dy="0.35em">{lane.name}</text>' for lane in scene.lanes
    )
    height = scene.height + AXIS
    return f'<svg class="names" width="112" height="{height:g}">{names}<text x="104" y="{height - 8:g}">ms</text></svg>'


def _svg(scene: Scene, scale: float) -> str:
    width, height = scene.end * scale, scene.height + AXIS
    bands = "".join(
        f'<rect class="band" data-t="0 {scene.end:.6f}" x="0" width="{width:.1f}" y="{lane.top:g}" '
        f'height="{lane.height:g}"/>'
        for lane in scene.lanes
    )
    ticks = "".join(
        f'<g><line x1="{at * scale:.1f}" x2="{at * scale:.1f}" y1="0" y2="{scene.height + 5:g}"/>'
        f'<text x="{at * scale:.1f}" y="{height - 8:g}">{at * 1000:,.10g}</text></g>'
        for at in ticks_of(scene.end, scale)
    )
    shapes = "\n".join(_shape(shape, scale) for shape in scene.shapes)
    return (
        f'<svg id="scene" width="{width:.0f}" height="{height:g}" data-end="{scene.end:.6f}" '
        f'data-height="{scene.height:g}" role="img" aria-label="lanes over time">{HATCHES}{bands}'
        f'<g id="ticks">{ticks}</g>\n{shapes}\n</svg>'
    )


HATCHES = """<defs>
<pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line x1="0" y1="0" x2="0" y2="7" stroke="#808080" stroke-width="1.6"/></pattern>
<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse">
<circle cx="3" cy="3" r="1" fill="#444"/></pattern>
</defs>"""


def ticks_of(end: float, scale: float) -> list[float]:
    """Where the axis has a number, in seconds: round ones, not too close."""
    step = 1e-5
    while not (fitting := [one * step for one in STEPS if one * step * scale >= TICK_EVERY]):
        step *= 10
    return [place * fitting[0] for place in range(int(end / fitting[0]) + 1)]


def _shape(shape: Shape, scale: float) -> str:
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    match shape:
        case Box():
            return _box(shape, scale, title)
        case Line(begin, top, end, bottom, style):
            return (
                f'<line class="{style}" data-t="{begin:.6f} {end:.6f}" x1="{begin * scale:.2f}" '
                f'x2="{end * scale:.2f}" y1="{top:g}" y2="{bottom:g}">{title}</line>'
            )
        case Stamp(at, top, width, height, style, _, ""):
            return (
                f'<rect class="{style}" data-t="{at:.6f}" data-w="{width:g}" x="{at * scale - width / 2:.2f}" '
                f'y="{top:g}" width="{width:g}" height="{height:g}">{title}</rect>'
            )
        case Stamp(at, top, _, height, style, _, sign):
            return (
                f'<text class="sign {style}" data-t="{at:.6f}" x="{at * scale:.2f}" y="{top + height / 2:g}" '
                f'dy="0.35em">{sign}{title}</text>'
            )


def _box(box: Box, scale: float, title: str) -> str:
    width = max(LEAST, (box.end - box.begin) * scale)
    place = f'data-t="{box.begin:.6f} {box.end:.6f}" x="{box.begin * scale:.2f}" width="{width:.2f}"'
    place += f' y="{box.top:g}" height="{box.height:g}"'
    drawn = f'<rect class="{box.style}" {place}>{title}</rect>'
    pattern = {"late": "stripes", "wait": "stripes", "miss": "dots"}.get(box.style.split()[-1])
    if pattern:
        drawn += f'<rect class="hatch" fill="url(#{pattern})" {place}/>'
    if box.label:
        need = (len(box.label) + 1) * LETTER
        hidden = "" if width > need else ' display="none"'
        drawn += (
            f'<text class="label" data-t="{box.begin:.6f} {box.end:.6f}" data-need="{need:g}" '
            f'x="{(box.begin + box.end) / 2 * scale:.2f}" y="{box.top + box.height / 2:g}" dy="0.35em"{hidden}>'
            f"{escape(box.label)}</text>"
        )
    return drawn


def _legend(scene: Scene) -> Iterator[str]:
    used = {one for shape in scene.shapes for one in shape.style.split()}
    signs = {kind.name.lower() for kind in MARKS}
    for style, text in LEGEND:
        if style.split()[-1] in used:
            swatch = "" if style in signs else f'<span class="swatch {style}"></span>'
            yield f"<li>{swatch}{escape(text)}</li>"
    yield from (f"<li>{text}</li>" for text in NUMBERS)
