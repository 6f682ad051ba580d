"""The log of a process on standard error: plain lines, or one JSON object a line; each says what it is about."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

from crossdraft.rpc.log_context import LogContext, current

ROOT = "crossdraft"  # the logger of all packages


class LogFormat(StrEnum):
    """How lines look."""

    PLAIN = "plain"
    JSON = "json"


class LogLevel(StrEnum):
    """The least level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and request, session and peer where they are known."""

    def format(self, record: logging.LogRecord) -> str:
        """Never more than one line: JSON escapes line ends, whoever sent them."""
        subject = current()
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {"request_id": subject.request} if subject.request else {}
        line |= {"session": subject.session} if subject.session else {}
        line |= {"peer": subject.peer} if subject.peer else {}
        figures = getattr(record, "figures", None)
        line |= {"figures": figures} if figures else {}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainFormatter(logging.Formatter):
    """The message, and in brackets what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, unless there is an exception to show."""
        text = " ".join(record.getMessage().splitlines())
        about = _in_words(current())
        line = f"crossdraft: {text} [{about}]" if about else f"crossdraft: {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {
    LogFormat.PLAIN: PlainFormatter,
    LogFormat.JSON: JsonFormatter,
}


@contextmanager
def logged(
    form: LogFormat = LogFormat.PLAIN, level: LogLevel = LogLevel.INFO, stream: TextIO | None = None
) -> Iterator[None]:
    """Writes what is logged within the block, to standard error unless a stream is given: what these packages say from
    `level` on, and warnings of others."""
    root, logger, handler = logging.getLogger(), logging.getLogger(ROOT), logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[form]())
    before = logger.level
    root.addHandler(handler)
    logger.setLevel(level.value.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        root.removeHandler(handler)


def _in_words(subject: LogContext) -> str:
    known = (("request", subject.request), ("session", subject.session), ("peer", subject.peer))
    return ", ".join(f"{name} {value}" for name, value in known if value)
