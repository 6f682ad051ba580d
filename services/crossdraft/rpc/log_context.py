"""What the work at hand is about, for log lines: the client's request, the session, and who is on the other side.

It is a context variable, so that tasks inherit it, and a request's id goes with each session that is opened for it:
one id then finds the lines of all processes.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

REQUEST_ID = "x-request-id"  # header of HTTP, key of gRPC's metadata
LONGEST = 128  # characters of a request's id
GOOD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")  # a header, a word of a log line, a file's name
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Subject:
    """Empty where nothing is known."""

    request: str = ""  # id of the client's request
    session: str = ""  # of a service: its role, and a number in its process
    peer: str = ""  # address of the other side


_subject: ContextVar[Subject] = ContextVar("subject", default=Subject())  # noqa: B039 - it is frozen


class RequestIdError(ValueError):
    """A request's id that cannot be used; the text says what is allowed."""


def current() -> Subject:
    """What this task is about."""
    return _subject.get()


@contextmanager
def about(**changes: str) -> Iterator[Subject]:
    """The block, and the tasks that it begins, are about this; fields of Subject that are not named stay."""
    token = _subject.set(replace(_subject.get(), **changes))
    try:
        yield _subject.get()
    finally:
        _subject.reset(token)


def request_id(given: str | None = None) -> str:
    """A client's id for its request, checked; a new one if it gave none.

    Raises:
        RequestIdError: it is empty or too long, or has characters that a file's name should not have.
    """
    if given is None:
        return secrets.token_hex(16)
    if len(given) > LONGEST or GOOD.fullmatch(given) is None:
        raise RequestIdError(
            f"a request's id ({REQUEST_ID}) has 1 to {LONGEST} characters, letters, digits and . _ : -, "
            "and begins with a letter or a digit"
        )
    return given


def to_metadata() -> Metadata:
    """What a session that is opened now says of the request."""
    request = current().request
    return ((REQUEST_ID, request),) if request else ()


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The request's id that a caller sent, or empty; raises RequestIdError if it cannot be used."""
    given = next((value for key, value in metadata or () if key == REQUEST_ID), None)
    if given is None:
        return ""
    return request_id(given if isinstance(given, str) else given.decode("ascii", "replace"))
