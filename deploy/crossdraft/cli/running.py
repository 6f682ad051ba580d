"""What all commands share: how they run, how they fail, what they print, and where they may write."""

import asyncio
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import fields
from errno import EACCES, EDQUOT, EFBIG, EIO, ENOSPC, EPIPE
from pathlib import Path
from typing import Any, ClassVar

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from crossdraft.config.commands import RequestOptions
from crossdraft.config.fields import OptionError
from crossdraft.config.service import LogLevel

WIDEST = 10_000  # columns of a table in a file or pipe
# Prompts for commands that are given none: beginnings of code and prose, of no file that was trained on.
PROMPTS = (
    'def moving_average(values, window):\n    """Return the mean of each run of `window` values."""\n',
    "class Inventory:\n    def __init__(self, items=None):\n        self.items = dict(items or {})\n\n    def add(self",
    "The first lighthouse on this coast was built of wood, and it burned down twice. The second one was",
    'import csv\nimport sys\n\n\ndef main():\n    with open(sys.argv[1], newline="") as file:\n        for row in',
    "To make bread you need flour, water, salt and yeast. Mix them, and then",
    "    try:\n        connection = self.pool.get(timeout=timeout)\n    except Empty:\n        raise",
)
# Fields of a request, in an error that is about them: `generate` has them as options.
FLAGS = {one.name: one.metadata["flags"] or (f"--{one.name.replace('_', '-')}",) for one in fields(RequestOptions)}
FIELDS = re.compile(rf"\b({'|'.join(name for name in FLAGS if '_' in name)})\b")
Run = Callable[[Coroutine[Any, Any, None]], None]
ProgressCounter = Callable[..., None]  # counts what was done, by default 1; `doing` is what it says from then on
# uvloop makes processes by fork, and gRPC's handlers of that crash the child now and then where channels are open.
# asyncio makes them by vfork, which runs no handlers.
STARTS_PROCESSES: Run = asyncio.run


class CommandFailed(Exception):  # noqa: N818 - the name says what happened
    """A command failed; its arguments, each of them one line, say what to change."""

    exit_code: ClassVar[int] = 1


class UsageError(CommandFailed):
    """The command line itself is wrong."""

    exit_code = 2


class Interrupted(CommandFailed):
    """A signal ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__("")
        self.number = number


def needs_extra(name: str) -> str:
    """The end of an error: what is to be installed."""
    return f"needs the extra `{name}`: in the checkout, run pip install -c constraints.txt -e '.[{name}]'"


def run_to_end(work: Coroutine[Any, Any, None], run: Run = uvloop.run) -> None:
    """Runs `work`, by STARTS_PROCESSES if it does so beside open channels. A signal cancels it, and it cleans up."""
    from crossdraft.rpc.errors import ServiceError  # these import grpc and numpy, which `--help` does without
    from crossdraft.rpc.event_loop import until_signalled
    from crossdraft.rpc.logs import logged
    from crossdraft.types.request import RequestError

    async def whole() -> None:
        if number := await until_signalled(work):
            raise Interrupted(number)

    try:
        with logged(level=LogLevel.WARNING):
            logging.getLogger("crossdraft.engine.served_model").setLevel(logging.INFO)  # it says which models load
            run(whole())
    except RequestError as error:
        raise UsageError(as_typed(error)) from error
    except ServiceError as error:
        raise CommandFailed(str(error)) from error


def interruptible() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt: there is something to clean up."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Signals end the process at once: while it has nothing to clean up, as when it loads models, uninterruptibly."""
    from crossdraft.rpc.event_loop import heard

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def checked_options() -> Iterator[None]:
    """Turns ValueError into UsageError, with the same text."""
    try:
        yield
    except ValueError as error:
        raise UsageError(as_typed(error)) from error


def as_typed(error: ValueError) -> str:
    """Its text; of one that is about a request, with options in place of fields."""
    of_request = isinstance(error, OptionError) or hasattr(error, "field")
    return FIELDS.sub(lambda one: FLAGS[one[0]][0], str(error)) if of_request else str(error)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@contextmanager
def counted(total: int | None, of: str) -> Iterator[ProgressCounter]:
    """A counter on stderr, for commands that take minutes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(of, total=total)

        def advance(count: int = 1, doing: str = "") -> None:
            progress.update(task, advance=count, description=doing or None)

        yield advance


def print_whole(table: Table) -> None:
    """Prints a table on stdout; in a file or pipe it is as wide as it needs to be, so that nothing is cut."""
    Console(width=None if sys.stdout.isatty() else WIDEST).print(table, highlight=False)


def check_output(path: Path, *endings: str) -> None:
    """Raises UsageError if a file cannot be written there, or has none of some endings; called before the work."""
    fault = _fault_of(path)
    if endings and path.suffix.lower() not in endings:
        fault = f"its name must end with {', '.join(endings)}"
    if fault:
        raise UsageError(f"cannot write {path}: {fault}")


def _fault_of(path: Path) -> str:
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return "no such folder"
        return "" if os.access(path if path.exists() else path.parent, os.W_OK) else os.strerror(EACCES)
    except OSError as error:  # a folder on the way may not be looked into
        return error.strerror or str(error)


def write_text(path: Path, text: str) -> None:
    """Writes a report; raises CommandFailed."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"cannot write the results: {error}") from error


def open_standard_files() -> None:
    """Those that are closed, in the order of their numbers, which they get: else a socket would get one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open for as long as the process


def unwritten(error: OSError) -> int:
    """The exit status where stdout's disk is full, or its reader has left; other errors are raised again."""
    if error.filename is not None or error.errno not in (EPIPE, ENOSPC, EDQUOT, EFBIG, EIO):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python still has to write when it ends
    if error.errno != EPIPE:
        print(f"crossdraft: cannot write: {error.strerror}", file=sys.stderr)
    return CommandFailed.exit_code


class PlainConsole(Console):
    """rich's console, but a closed pipe raises, so that the command ends what it started."""

    def on_broken_pipe(self) -> None:
        raise
