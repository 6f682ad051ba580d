"""The page of a timeline: one file with everything in it, which needs no network.

`lanes.js`, `scene.js` and `lanes.css` draw spans; the page at `/` of a server (`serving.page`) draws with them, too.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template

from crossdraft.trace.timeline import PASSES, Span, Timeline, What

MODULES = ("scene.js", "lanes.js", "timeline.js")  # in the order in which they need each other


def page_of(found: Timeline, title: str, figures: Sequence[tuple[str, str]], first: tuple[float, float]) -> str:
    """The page as HTML.

    Args:
        found: what is drawn.
        title: of the page.
        figures: name and value of each.
        first: what is seen first, from and to, in seconds.
    """
    shown = {"spans": list(map(_drawn, found.spans)), "first": first}
    return Template(_part("timeline.html")).substitute(
        title=escape(title),
        css=_part("lanes.css") + _part("timeline.css"),
        figures="\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures),
        shown=json.dumps(shown).replace("<", r"\u003c"),
        js=_script(),
    )


def _drawn(span: Span) -> dict[str, object]:
    """With the number that its box shows: of a pass that of the tokens that came of it."""
    sign = "miss +" if span.what is What.MISS else "+" if span.what in PASSES else ""
    return asdict(span) | {"number": f"{sign}{span.count}"}


def _script() -> str:
    """The modules as one: a page that is a file can import none."""
    lines = [line for name in MODULES for line in _part(name).splitlines()]
    return "\n".join(line.removeprefix("export ") for line in lines if not line.startswith("import "))


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
