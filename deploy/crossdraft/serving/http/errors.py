"""Errors in OpenAI's shape, and the one map from all other errors to them."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from crossdraft.client import RequestError
from crossdraft.rpc import errors
from crossdraft.serving.backend import MIN_RETRY_SECONDS, OverloadedError, UnknownDrafterError, UnknownModelError
from crossdraft.serving.http.requests import Speculative
from crossdraft.serving.limits import KeyRefusedError
from crossdraft.types.request import PromptTooLongError

log = logging.getLogger(__name__)


class Fault(BaseModel):
    """An error: `message` for people, the rest for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class FaultReply(BaseModel):
    """The body of every reply whose status is 400 or more."""

    error: Fault


@dataclass(eq=False)
class RefusedError(Exception):
    """The request is answered with an error."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    after: float | None = None  # seconds until it may be tried again
    allow: str = ""  # methods, where another one was used

    @property
    def body(self) -> FaultReply:
        return FaultReply(error=Fault(message=self.message, type=self.type, param=self.param, code=self.code))

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.after is None else {"Retry-After": str(max(1, ceil(self.after)))}
        found |= {"Allow": self.allow} if self.allow else {}
        found |= {"Connection": "close"} if self.status == HTTPStatus.INTERNAL_SERVER_ERROR else {}  # as uvicorn does
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else {})


@dataclass(frozen=True)
class Meaning:
    """What a client is told of an error; without a text the error's own."""

    status: int
    type: str
    code: str | None = None
    text: str = ""

    def refusal(self, text: str = "", param: str | None = None, after: float | None = None) -> RefusedError:
        """The reply; `text` where it has none of its own."""
        return RefusedError(self.status, self.text or text, self.type, self.code, param, after)


INVALID = "invalid_request_error"
BUSY = "rate_limit_error"
WRONG = Meaning(400, INVALID)
TOO_LONG = Meaning(400, INVALID, "context_length_exceeded")
# The texts of services name addresses, which clients must not see: these go into the log only.
ABSENT = Meaning(503, "server_error", "service_unavailable", "no target can be reached now; try again later")
LATE = Meaning(504, "server_error", "timeout", "no target answered in time; try again later")
REPLACED = Meaning(503, "server_error", "model_replaced", "the model was replaced meanwhile; ask again")
ENDS = Meaning(503, "server_error", "service_unavailable", "the server ends; ask again later")
BUG = Meaning(500, "server_error", "internal_error", "the server failed; its log says why")
# The first class that an error is an instance of decides: subclasses stand before their bases.
MEANINGS: Mapping[type[Exception], Meaning] = {
    PromptTooLongError: TOO_LONG,
    RequestError: WRONG,
    UnknownDrafterError: Meaning(404, INVALID, "drafter_not_found"),
    UnknownModelError: Meaning(404, INVALID, "model_not_found"),
    OverloadedError: Meaning(429, BUSY, "overloaded"),
    KeyRefusedError: Meaning(401, "authentication_error", "invalid_api_key"),
    errors.BadMessage: BUG,
    errors.BadRequest: WRONG,
    errors.ProtocolBroken: BUG,
    errors.ContextTooLong: TOO_LONG,
    errors.TooLarge: Meaning(413, INVALID, "request_too_large", "the prompt is too large for the target; shorten it"),
    errors.NameUnknown: Meaning(404, INVALID, "model_not_found"),
    errors.NotServed: ABSENT,
    errors.KeyRefused: ABSENT,
    errors.NotAllowed: ABSENT,
    errors.Replaced: REPLACED,
    errors.Unreachable: ABSENT,
    errors.Full: Meaning(429, BUSY, "overloaded", "all targets are at their limit of sessions; ask again later"),
    errors.Overloaded: Meaning(429, BUSY, "overloaded"),
    errors.TimedOut: LATE,
    errors.Cancelled: ABSENT,
    errors.Closed: ABSENT,
    errors.Internal: ABSENT,
    errors.CannotListen: BUG,
}
FOREIGN = tuple(MEANINGS)
# Fields that other errors than RequestError are about.
PARAMS = {UnknownDrafterError: "speculative.drafter", UnknownModelError: "model", errors.NameUnknown: "model"}
FieldOf = Callable[[RequestError], str | None]
SPECULATIVE = re.compile(rf"(?<![\w.'])({'|'.join(name for name in Speculative.model_fields if '_' in name)})\b")
# OpenAI's codes for errors of the framework, by status.
CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def refusal_of(error: Exception, request_id: str, field_of: FieldOf = lambda error: error.field) -> RefusedError:
    """The reply to one of the FOREIGN errors; `request_id` is for the log, `field_of` names the body's field."""
    if isinstance(error, RefusedError):
        return error
    meaning = next((MEANINGS[kind] for kind in FOREIGN if isinstance(error, kind)), BUG)
    if meaning.text or isinstance(error, errors.ServiceError):
        level = logging.WARNING if meaning.text else logging.INFO
        log.log(level, "%s: %s: %s", request_id, type(error).__name__, error)
    text = errors.without_addresses(str(error)) if isinstance(error, errors.ServiceError) else str(error)
    after = error.after if isinstance(error, OverloadedError | errors.Overloaded) else MIN_RETRY_SECONDS
    text = SPECULATIVE.sub(r"speculative.\g<0>", text)  # fields as they are named in a body
    param = next((name for kind, name in PARAMS.items() if isinstance(error, kind)), None)
    param = (field_of(error) or None) if isinstance(error, RequestError) else param
    return meaning.refusal(text, param, after if meaning.status == 429 else None)


def refusal_of_status(error: HTTPException, path: str) -> RefusedError:
    """The reply to an error of the framework: an unknown path, a wrong method, a body that is refused or too large."""
    if isinstance(error.__cause__, RefusedError):  # raised while the body was read
        return error.__cause__
    text = f"there is nothing at {path}" if error.detail == HTTPStatus.NOT_FOUND.phrase else str(error.detail)
    allowed = (error.headers or {}).get("Allow", "")
    return RefusedError(error.status_code, text, INVALID, CODES.get(error.status_code), allow=allowed)
