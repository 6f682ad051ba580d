"""The log of a process on standard error: plain lines, or one JSON object a line, with the ids of the client's request,
the session and the peer.

These are a context variable, so that tasks inherit them. A request's id is sent with each session that is opened for
it, so that one id finds the lines of all processes.
"""

import json
import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TextIO

from crossdraft.config.service import LogFormat, LogLevel
from crossdraft.rpc.errors import BadMessage

REQUEST_ID = "x-request-id"  # header of HTTP, key of gRPC's metadata
MAX_LENGTH = 128  # characters of a request's id
VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")  # a header, a word of a log line, a file's name
ROOT = "crossdraft"  # the logger of all packages
HUB = "huggingface_hub"  # a logger with a handler of its own, which would write each line a second time


@dataclass(frozen=True)
class LogContext:
    """Fields are empty where nothing is known."""

    request: str = ""  # id of the client's request
    session: str = ""  # of a service: its role, and a number in its process
    peer: str = ""  # address of the other side


_current: ContextVar[LogContext] = ContextVar("log_context", default=LogContext())  # noqa: B039 - it is frozen


class RequestIdError(BadMessage):
    """A request's id is not valid; the text says what is allowed."""


def current() -> LogContext:
    return _current.get()


@contextmanager
def about(**changes: str) -> Iterator[LogContext]:
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def request_id(given: str | None = None) -> str:
    """The id that a client gave its request, checked; a new one if it gave none.

    Raises RequestIdError: it is empty or too long, or has characters that a file's name should not have.
    """
    if given is None:
        return secrets.token_hex(16)
    if len(given) > MAX_LENGTH or VALID.fullmatch(given) is None:
        raise RequestIdError(
            f"a request's id ({REQUEST_ID}) has 1 to {MAX_LENGTH} characters, letters, digits and . _ : -, "
            "and begins with a letter or a digit"
        )
    return given


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and ids of request, session and peer where known."""

    def format(self, record: logging.LogRecord) -> str:
        """Always one line: JSON escapes line ends, also those that clients sent."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {"request_id" if name == "request" else name: value for name, value in vars(current()).items() if value}
        figures = getattr(record, "figures", None)
        line |= {"figures": figures} if figures else {}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainFormatter(logging.Formatter):
    """The package that says it, the message, then in brackets the ids that are known."""

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage().splitlines())
        known = ", ".join(f"{name} {value}" for name, value in vars(current()).items() if value)
        source = record.name.partition(".")[0]  # crossdraft, or whose warning it is
        line = f"{source}: {text} [{known}]" if known else f"{source}: {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@contextmanager
def logged(
    form: LogFormat = LogFormat.PLAIN, level: LogLevel = LogLevel.INFO, stream: TextIO | None = None
) -> Iterator[None]:
    """Within the block, logs to a stream, by default standard error: crossdraft from `level` on, others' warnings."""
    root, logger, handler = logging.getLogger(), logging.getLogger(ROOT), logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else PlainFormatter())
    before, hub = logger.level, logging.getLogger(HUB)
    root.addHandler(handler)
    theirs, hub.handlers = hub.handlers, []
    logger.setLevel(level.value.upper())
    try:
        yield
    finally:
        hub.handlers = theirs
        logger.setLevel(before)
        root.removeHandler(handler)
