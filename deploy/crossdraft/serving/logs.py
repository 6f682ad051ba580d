"""The log of a process on standard error: plain lines, or one JSON object a line, with the ids of `rpc.log_context`."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from crossdraft.config.service import LogFormat, LogLevel
from crossdraft.rpc.log_context import current

ROOT = "crossdraft"  # the logger of all packages
HUB = "huggingface_hub"  # a logger with a handler of its own, which would write each line a second time


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
        about = ", ".join(f"{name} {value}" for name, value in vars(current()).items() if value)
        source = record.name.partition(".")[0]  # crossdraft, or whose warning it is
        line = f"{source}: {text} [{about}]" if about else f"{source}: {text}"
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
