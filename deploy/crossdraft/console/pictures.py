"""Pictures of what was measured, drawn by matplotlib without a display. It is imported only when one is drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

from crossdraft.console.running import CommandFailed, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path | None) -> None:
    """Raises UsageError if a picture cannot be written there, before anything is measured."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot writes {', '.join(FORMATS)} files, got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no folder {path.parent}")


def save_picture(figure: "Figure", path: Path, dots_per_inch: int = DOTS_PER_INCH) -> None:
    """Writes it; raises CommandFailed."""
    try:
        figure.savefig(path, dpi=dots_per_inch)
    except OSError as error:
        raise CommandFailed(f"cannot write the picture: {error}") from error
