"""The context of log lines: the client's request, the session, and the peer.

It is a context variable, so that tasks inherit it. A request's id is sent with each session that is opened for it, so
that one id finds the lines of all processes.
"""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from crossdraft.rpc.errors import BadMessage

REQUEST_ID = "x-request-id"  # header of HTTP, key of gRPC's metadata
MAX_LENGTH = 128  # characters of a request's id
VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")  # a header, a word of a log line, a file's name


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
