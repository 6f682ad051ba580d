"""A counter on stderr, for commands that take minutes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def counted(total: int, of: str) -> Iterator[Callable[[], None]]:
    """Gives what is called after each one of `total`."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(of, total=total)
        yield lambda: progress.advance(task)
