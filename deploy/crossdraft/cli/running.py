"""Runs a command's coroutine to its end; signals cancel it, and errors become one line for the user."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from crossdraft.cli.failures import CommandFailed, Interrupted, Misused
from crossdraft.pipeline import RequestError
from crossdraft.rpc.errors import ServiceError

# Each would end Python at once, or in the middle of anything, and leave started services behind.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Run = Callable[[Coroutine[Any, Any, None]], None]

# uvloop makes processes by fork, and gRPC's handlers of that crash the child now and then where channels are open.
# asyncio makes them by vfork, which runs no handlers.
STARTS_PROCESSES: Run = asyncio.run


def run_to_end(work: Coroutine[Any, Any, None], run: Run = uvloop.run) -> None:
    """Runs `work`; a signal cancels it, so that it cleans up. What starts processes beside open channels is run by
    STARTS_PROCESSES.

    Raises:
        Misused: the request cannot be served by this pair of models.
        CommandFailed: a service failed.
        Interrupted: after a signal.
    """
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
