"""Tables on standard output."""

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

COLUMNS = 120  # that a file or a pipe has at least


def print_whole(table: Table) -> None:
    """Prints it; where that is no terminal it is as wide as it needs to be, and nothing in it is cut."""
    console = Console()
    if not sys.stdout.isatty():
        needed = Measurement.get(console, console.options.update(width=10_000), table).maximum
        console = Console(width=max(COLUMNS, needed))
    console.print(table, highlight=False)
