# ruff: noqa: N818 - the names say what happened; all are errors
"""What can go wrong between an orchestrator and a service, and the one map to and from gRPC's status codes."""

import os
import re
from errno import EADDRNOTAVAIL
from socket import gaierror
from typing import ClassVar, Self

from grpc import StatusCode

# What grpc.aio makes of a call that ends while a request is being written, whatever it ended with: the status is lost.
BROKEN_WRITE = "Internal error from Core"
# How the text of a `Full` begins: its status is also gRPC's own for messages that are too large.
FULL = "no room for another session: "
REPLACED = "{} was replaced by another model while this output was being made; ask again"
# Bytes of a status text, each of which may take three in HTTP/2 headers; over 8 KiB of these end the connection.
MAX_TEXT = 2000
# What a client's gRPC says of a connection that fails in a handshake, and what it means. Only the first fits.
HANDSHAKES: tuple[tuple[str, str], ...] = (
    ("certificate has expired", "its certificate has expired: renew it there (crossdraft certs DIR --renew)"),
    ("certificate is not yet valid", "its certificate is not valid yet: check the clocks of both machines"),
    (
        "Hostname Verification Check failed",
        "its certificate is not for this address: make one that names it (crossdraft certs DIR --host NAME)",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "it does not speak TLS: start it with --tls-ca, --tls-cert and --tls-key, or leave them out here",
    ),
    ("unsupported certificate purpose", "its certificate is not that of a service: give it one of its own"),
    (
        "Tls handshake failed",
        "its certificate is damaged, or not of the CA trusted here (--tls-ca): give both sides certificates of one CA",
    ),
    (
        "http1.x server",
        "it speaks HTTP/1, not gRPC: with --target and --drafter give the port of `serve target` or `serve drafter`, "
        "with --server that of `serve grpc` (or `serve http --grpc-port`)",
    ),
)
# With TLS 1.3 a server that refuses a client's certificate, or a client without TLS, only closes the connection.
CLOSED_AT_ONCE = ("failed to connect to all addresses", "Socket closed")
CLOSED_ADVICE = (
    "it closed the connection at once: if it speaks TLS, it takes only clients with a valid certificate of its CA; "
    "check --tls-ca, --tls-cert and --tls-key, of which the API of `serve grpc` and `serve http` needs --tls-ca alone"
)
# Where a service is, as texts of this package, of gRPC and of Python have it, with the word before it.
ADDRESS = re.compile(
    r"(?: at)?(?: |\b)(?:ipv[46]:)?(?:\[[^\s\]]+\]|%5B\S+?%5D|(?<![\w.-])[\w.-]+):\d{1,5}(?!\w|\.\d)|\('\S+', \d+\)"
)


def without_addresses(text: str) -> str:
    """A text for clients: `target at 10.0.0.1:7001: it is full` is `target: it is full`."""
    return ADDRESS.sub("", text)


class ServiceError(Exception):
    """Base of all of them; the text says what to change."""

    lost: ClassVar[bool] = False  # the service is at fault, not the request: another service may do it


class ServiceFault(ServiceError):
    """Base of those that are the service's fault."""

    lost = True


class BadRequest(ServiceError):
    """The request is not possible with any service of this model."""


class BadMessage(BadRequest):
    """A malformed message: wrong shape, ids outside the vocabulary, bytes that are not letters."""


class ProtocolBroken(ServiceError):
    """A message that is well formed but not due: before open, twice open, or out of order."""


class ContextTooLong(ServiceError):
    """The text does not fit into the model's context."""


class TooLarge(ServiceError):
    """A message over the limit on its size."""


class NotServed(ServiceFault):
    """Something listens there, but not this service, or one of another version or model."""


class NameUnknown(NotServed):
    """There, no model or drafter has this name."""


class NotAllowed(ServiceFault):
    """The service, or something before it, refuses this client."""


class KeyRefused(NotAllowed):
    """The client gave no API key, or one that is not known."""


class Unreachable(ServiceFault):
    """The service cannot be reached."""


class Replaced(Unreachable):
    """Where the text was begun another model is served now, which does not go on with it."""


class Full(ServiceFault):
    """The service has as many sessions as it takes."""


class Overloaded(ServiceFault):
    """There is no room for the request now."""

    def __init__(self, text: str, after: float = 1.0) -> None:
        super().__init__(text)
        self.after = after  # seconds after which to retry


class TimedOut(ServiceFault):
    """No reply in time."""


class Cancelled(ServiceFault):
    """The service ended the call, for instance because it is shutting down."""


class Closed(ServiceFault):
    """The session was ended in order, by this side or by the service."""


class Internal(ServiceFault):
    """The service failed, or sent a malformed reply."""


class CannotListen(ServiceError):
    """A server's address cannot be had."""

    @classmethod
    def at(cls, address: str, error: OSError | None = None, option: str = "") -> Self:
        """At host:port, why if that is known, and the option that sets the port."""
        named = f" ({option})" if option else ""
        port = f"choose another port, or 0 for any that is free{named}"
        host = "choose an address of this machine as the host, such as 127.0.0.1, or 0.0.0.0 for all of them"
        match error:
            case None:
                why = "the port is taken or not allowed, or the host is not of this machine"
                change = f"{port}, or {host}"
            case gaierror():
                why, change = f"the host has no address ({error.strerror})", host
            case _:
                why = os.strerror(error.errno) if error.errno else str(error)
                change = host if error.errno == EADDRNOTAVAIL else port
        return cls(f"cannot listen on {address}: {why}; {change}")


# Every status code but OK, which ends a session in order (`Closed`).
# The first code of a class is the one that it is sent as (`CODES`).
MEANINGS: dict[StatusCode, type[ServiceError]] = {
    StatusCode.INVALID_ARGUMENT: BadRequest,
    StatusCode.FAILED_PRECONDITION: ProtocolBroken,
    StatusCode.ALREADY_EXISTS: ProtocolBroken,
    StatusCode.ABORTED: ProtocolBroken,
    StatusCode.OUT_OF_RANGE: ContextTooLong,
    StatusCode.RESOURCE_EXHAUSTED: TooLarge,
    StatusCode.UNIMPLEMENTED: NotServed,
    StatusCode.NOT_FOUND: NameUnknown,
    StatusCode.PERMISSION_DENIED: NotAllowed,
    StatusCode.UNAUTHENTICATED: KeyRefused,
    StatusCode.UNAVAILABLE: Unreachable,
    StatusCode.DEADLINE_EXCEEDED: TimedOut,
    StatusCode.CANCELLED: Cancelled,
    StatusCode.INTERNAL: Internal,
    StatusCode.UNKNOWN: Internal,
    StatusCode.DATA_LOSS: Internal,
}
CODES: dict[type, StatusCode] = {meaning: code for code, meaning in reversed(MEANINGS.items())}
CODES |= {ServiceError: StatusCode.UNKNOWN, **dict.fromkeys((Full, Overloaded), StatusCode.RESOURCE_EXHAUSTED)}
# What goes with `Overloaded`, and tells it from `TooLarge`: gRPC's own metadata for retries, in milliseconds.
PUSHBACK = "grpc-retry-pushback-ms"
ADVICE: dict[type[ServiceError], str] = {
    Unreachable: "check that the service runs there and that its port is open",
    TimedOut: "the service is overloaded or hangs; wait longer or use another one",
    TooLarge: "raise the message limit of the client and of the service",
    Full: "use another one, or raise its limit",
    NotServed: "check the address, and that client and service are of the same version",
    KeyRefused: "check the API key: --api-key, CROSSDRAFT_API_KEY, or the client's key",
    NotAllowed: "check what stands between the client and the service",
    Cancelled: "the service is probably shutting down; use another one",
    Internal: "see the log of the service",
}


def from_status(code: StatusCode, details: str | None, service: str, pushback: str | bytes = "") -> ServiceError:
    """The error that a status other than OK means, of a service such as "target at host:port"."""
    if code is StatusCode.INTERNAL and details == BROKEN_WRITE:
        code, details = StatusCode.UNAVAILABLE, "the call ended while a request was being sent"
    if code is StatusCode.UNAVAILABLE and (refused := _refused(details or "", service)) is not None:
        return refused
    text = f"{service}: {details or code.name}"
    if code is StatusCode.RESOURCE_EXHAUSTED and pushback.isdigit():
        return Overloaded(text, int(pushback) / 1000)
    full = code is StatusCode.RESOURCE_EXHAUSTED and (details or "").startswith(FULL)
    meaning = Full if full else MEANINGS[code]
    advice = ADVICE.get(meaning)
    return meaning(f"{text} ({advice})" if advice else text)


def _refused(details: str, service: str) -> ServiceError | None:
    """The error of a connection that was not made because one side did not trust the other; None: that is not why."""
    for mark, meaning in HANDSHAKES:
        if mark in details:
            return NotAllowed(f"{service}: {meaning}")
    if all(mark in details for mark in CLOSED_AT_ONCE):
        return Unreachable(f"{service}: {CLOSED_ADVICE}")
    return None


def to_status(error: ServiceError) -> tuple[StatusCode, str]:
    kind = next(kind for kind in type(error).__mro__ if kind in CODES)
    text = FULL * (kind is Full) + str(error)
    return CODES[kind], text.encode(errors="replace")[:MAX_TEXT].decode(errors="ignore")


def to_trailer(error: ServiceError) -> tuple[tuple[str, str], ...]:
    return ((PUSHBACK, str(round(1000 * error.after))),) if isinstance(error, Overloaded) else ()


# "ContextTooLong" is "context_too_long".
NAMES: dict[type[BaseException], str] = {
    meaning: "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in meaning.__name__)[1:]
    for meaning in (*MEANINGS.values(), BadMessage, Full, Closed, CannotListen)
}


def name_of(error: BaseException) -> str:
    """The class of an error in a few words, of which there are as many as classes here: for metrics and logs."""
    kind = next((meaning for meaning in type(error).__mro__ if meaning in NAMES), Internal)
    return NAMES[kind]
