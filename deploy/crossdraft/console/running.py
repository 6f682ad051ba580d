"""Runs a command's coroutine to its end; signals cancel it, and errors become one line for the user."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from errno import EACCES
from pathlib import Path
from typing import Any, ClassVar

import uvloop
from rich.console import Console
from rich.measure import Measurement
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Each would end Python at once, or in the middle of anything, and leave started services behind.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Run = Callable[[Coroutine[Any, Any, None]], None]
# uvloop makes processes by fork, and gRPC's handlers of that crash the child now and then where channels are open.
# asyncio makes them by vfork, which runs no handlers.
STARTS_PROCESSES: Run = asyncio.run


def run_to_end(work: Coroutine[Any, Any, None], run: Run = uvloop.run) -> None:
    """Runs `work`; a signal cancels it, so that it cleans up. Pass STARTS_PROCESSES if it starts processes beside open
    channels.

    Raises:
        Misused: the request cannot be served by this pair of models.
        CommandFailed: a service failed.
        Interrupted: after a signal.
    """
    from crossdraft.rpc.errors import ServiceError  # these import grpc and numpy, which `--help` does without
    from crossdraft.types.request import RequestError

    try:
        with warnings_shown():
            run(_cancelled_by_signals(work))
    except RequestError as error:
        raise Misused(str(error)) from error
    except ServiceError as error:
        raise CommandFailed(str(error)) from error


@contextmanager
def warnings_shown() -> Iterator[None]:
    """What the packages warn of goes to stderr like everything else that this command says."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("crossdraft: %(message)s"))
    logger = logging.getLogger("crossdraft")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


async def _cancelled_by_signals(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    received: list[int] = []

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, cancel, number)
    try:
        await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise


@contextmanager
def checked_options() -> Iterator[None]:
    """A value that an options class refuses is a wrong command line.

    Raises:
        Misused: with the same text.
    """
    try:
        yield
    except ValueError as error:
        raise Misused(str(error)) from error


# How a command fails: one line for the user, and an exit code.


class CommandFailed(Exception):  # noqa: N818 - it says what happened
    """What was asked for could not be done; the text says what to change."""

    exit_code: ClassVar[int] = 1


class Misused(CommandFailed):
    """The command line itself is wrong."""

    exit_code = 2


class Interrupted(CommandFailed):
    """A signal ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__("")
        self.number = number


# The methods' names, for help texts and defaults: importing the methods themselves imports numpy.

METHODS = (
    "standard",
    "union",
    "tli",
    "rdk",
    "coupled",
    "coupled-shared",
    "slem",
    "seeded",
    "slrs",
    "tokentiming",
)


# A counter on stderr, for commands that take minutes.


@contextmanager
def counted(total: int, of: str) -> Iterator[Callable[[], None]]:
    """Gives what is called after each one of `total`."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(of, total=total)
        yield lambda: progress.advance(task)


# Tables on standard output.

COLUMNS = 120  # that a file or a pipe has at least


def print_whole(table: Table) -> None:
    """Prints it; where that is no terminal it is as wide as it needs to be, and nothing in it is cut."""
    console = Console()
    if not sys.stdout.isatty():
        needed = Measurement.get(console, console.options.update(width=10_000), table).maximum
        console = Console(width=max(COLUMNS, needed))
    console.print(table, highlight=False)


# Files that a command is to write: checked before anything is done for them.


def check_output(path: Path) -> None:
    """Raises Misused if a file cannot be written there."""
    fault = _fault_of(path)
    if fault:
        raise Misused(f"cannot write {path}: {fault}")


def _fault_of(path: Path) -> str:
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return "no such folder"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else os.strerror(EACCES)
    except OSError as error:  # a folder on the way may not be looked into
        return error.strerror or str(error)


# Texts to go on with where a user gives none: the beginnings of code and prose, of no file that was trained on.

PROMPTS = (
    'def moving_average(values, window):\n    """Return the mean of each run of `window` values."""\n',
    "class Inventory:\n    def __init__(self, items=None):\n        self.items = dict(items or {})\n\n    def add(self",
    "The first lighthouse on this coast was built of wood, and it burned down twice. The second one was",
    'import csv\nimport sys\n\n\ndef main():\n    with open(sys.argv[1], newline="") as file:\n        for row in',
    "To make bread you need flour, water, salt and yeast. Mix them, and then",
    "    try:\n        connection = self.pool.get(timeout=timeout)\n    except Empty:\n        raise",
)


class PlainConsole(Console):
    """rich's console, but a closed pipe is an exception like any other, so that what was started is ended."""

    def on_broken_pipe(self) -> None:
        """Called while the exception is handled."""
        raise
