"""The commands for recorded sessions, and their options."""

from pathlib import Path
from typing import Annotated

import typer

Recorded = Annotated[Path, typer.Argument(metavar="FILE", help="Written by `crossdraft generate --record FILE`.")]


def replay(file: Recorded) -> None:
    """Run verification again from a recording, and compare its verdicts."""
    from crossdraft.cli import replay as command

    command.replay(file)


def timeline(
    file: Recorded,
    output: Annotated[Path, typer.Option("--output", "-o", help="A page (.html), or a picture (.png, .svg, .pdf).")],
    first: Annotated[int, typer.Option(min=1, help="The round that is seen first.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are seen at once; a page has them all.")] = 15,
) -> None:
    """Draw a recording: who worked when, what was on its way, what came of it."""
    from crossdraft.cli import timeline as command

    command.timeline(file, output, first, rounds)


def register(app: typer.Typer) -> None:
    """Adds them to the command line."""
    app.command()(replay)
    app.command()(timeline)
