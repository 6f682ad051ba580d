"""Errors in OpenAI's shape, the one map from all other errors to them, and what is said of a body that is refused."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from http import HTTPStatus
from math import ceil
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from crossdraft.config.request import ALIASES, Speculation
from crossdraft.rpc import errors
from crossdraft.serving.backend import MIN_RETRY_SECONDS, UnknownDrafterError, UnknownModelError
from crossdraft.serving.http.chats import UNSERVED, Body
from crossdraft.types.request import PromptTooLongError, RequestError

log = logging.getLogger(__name__)
NO_OBJECT = "it must be a JSON object, sent with `content-type: application/json`"
SHOWN = 60  # characters of a value
ALIKE = 0.81  # of names, from 0 to 1, as difflib has it: one was meant; max_tokens and min_tokens are less alike
# What to do in place of a field that is not served.
INSTEAD = {
    "best_of": "use n, and choose among the outputs", "function_call": "use tool_choice", "functions": "use tools",
    "chat_template": "start the target with --chat-template FILE", "request_id": "use the header x-request-id",
}  # fmt: skip


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


INVALID = "invalid_request_error"
BUSY = "rate_limit_error"
WRONG = RefusedError(400, "", INVALID)
TOO_LONG = RefusedError(400, "", INVALID, "context_length_exceeded")
# What clients are told; without a text the error's own. What names addresses of services goes into the log only.
ABSENT = RefusedError(503, "no target can be reached now; try again later", "server_error", "service_unavailable")
LATE = RefusedError(504, "no target answered in time; try again later", "server_error", "timeout")
REPLACED = RefusedError(503, "the model was replaced meanwhile; ask again", "server_error", "model_replaced")
ENDS = RefusedError(503, "the server ends; ask again later", "server_error", "service_unavailable")
BUG = RefusedError(500, "the server failed; its log says why", "server_error", "internal_error")
# The first class that an error is an instance of decides: subclasses stand before their bases.
MEANINGS: Mapping[type[Exception], RefusedError] = {
    PromptTooLongError: TOO_LONG,
    RequestError: WRONG,
    UnknownDrafterError: RefusedError(404, "", INVALID, "drafter_not_found"),
    UnknownModelError: RefusedError(404, "", INVALID, "model_not_found"),
    **dict.fromkeys((errors.BadMessage, errors.ProtocolBroken, errors.CannotListen), BUG),
    errors.BadRequest: WRONG,
    errors.ContextTooLong: TOO_LONG,
    errors.TooLarge: RefusedError(
        413, "the prompt is too large for the target; shorten it", INVALID, "request_too_large"
    ),
    errors.NameUnknown: RefusedError(404, "", INVALID, "model_not_found"),
    errors.Replaced: REPLACED,
    errors.Full: RefusedError(429, "all targets are at their limit of sessions; ask again later", BUSY, "overloaded"),
    errors.Overloaded: RefusedError(429, "", BUSY, "overloaded"),
    errors.TimedOut: LATE,
    **dict.fromkeys((errors.NotServed, errors.KeyRefused, errors.NotAllowed, errors.Unreachable), ABSENT),
    **dict.fromkeys((errors.Cancelled, errors.Closed, errors.Internal), ABSENT),
}
FOREIGN = tuple(MEANINGS)
# Fields that other errors than RequestError are about.
PARAMS = {UnknownDrafterError: "speculative.drafter", UnknownModelError: "model", errors.NameUnknown: "model"}
FieldOf = Callable[[RequestError], str | None]
SPECULATIVE = re.compile(rf"(?<![\w.'])({'|'.join(one.name for one in fields(Speculation) if '_' in one.name)})\b")
# OpenAI's codes for errors of the framework, by status.
CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def refusal_of(error: Exception, request_id: str, field_of: FieldOf = lambda error: error.field) -> RefusedError:
    """The reply to one of the FOREIGN errors; `request_id` is for the log, `field_of` names the body's field."""
    if isinstance(error, RefusedError):
        return error
    meaning = next((MEANINGS[kind] for kind in FOREIGN if isinstance(error, kind)), BUG)
    if meaning.message or isinstance(error, errors.ServiceError):
        level = logging.WARNING if meaning.message else logging.INFO
        log.log(level, "%s: %s: %s", request_id, type(error).__name__, error)
    text = errors.without_addresses(str(error)) if isinstance(error, errors.ServiceError) else str(error)
    after = error.after if isinstance(error, errors.Overloaded) else MIN_RETRY_SECONDS
    text = SPECULATIVE.sub(r"speculative.\g<0>", text)  # fields as they are named in a body
    param = next((name for kind, name in PARAMS.items() if isinstance(error, kind)), None)
    param = (field_of(error) or None) if isinstance(error, RequestError) else param
    return replace(
        meaning, message=meaning.message or text, param=param, after=after if meaning.status == 429 else None
    )


def refusal_of_status(error: HTTPException, path: str) -> RefusedError:
    """The reply to an error of the framework: an unknown path, a wrong method, a body that is refused or too large."""
    if isinstance(error.__cause__, RefusedError):  # raised while the body was read
        return error.__cause__
    allowed = (error.headers or {}).get("Allow", "")
    text = f"there is nothing at {path}" if error.detail == HTTPStatus.NOT_FOUND.phrase else str(error.detail)
    text = f"{path} takes {allowed}" if allowed else text
    return RefusedError(error.status_code, text, INVALID, CODES.get(error.status_code), allow=allowed)


def refusal_of_faults(faults: Sequence[Any], body: object, kind: type[BaseModel] = Body) -> RefusedError:
    """The reply to a body of a kind that pydantic refused, by its ErrorDetails: the first fault.

    Of a union type pydantic reports a fault for each alternative; a too long list counts, else the longest path.
    """
    placed = [(one, tuple(_in_body(one["loc"], body))) for one in faults]
    named = placed[0][1][:1]

    def rank(fault: tuple[Any, tuple[str, ...]]) -> tuple[bool, bool, int, bool]:
        what, where = fault[0]["type"], fault[1]
        return where[:1] == named, what == "too_long", len(where), not what.endswith("_type")

    first, where = max(placed, key=rank)
    param, code = ".".join(where) or None, None if first["type"] == "extra_forbidden" else "invalid_value"
    return RefusedError(400, _complaint(first, param, isinstance(body, dict), kind), INVALID, code, param)


def _complaint(fault: Any, param: str | None, named: bool, kind: type[BaseModel]) -> str:
    """What is wrong, in this server's words: those of the validator are about its own types."""
    limits, value = fault.get("ctx", {}), fault["input"]
    if param is None:
        return f"the body: {_plain(fault['msg'])}" if named else f"the body: {NO_OBJECT}"
    name = param.rpartition(".")[2]
    if fault["type"] == "extra_forbidden" and name in UNSERVED:
        return f"{param} is not served: {INSTEAD.get(name, 'leave it out')}"
    if fault["type"] == "extra_forbidden":
        return f"Unrecognized request argument supplied: {param}{_meant(param, kind)}"
    if fault["type"] == "literal_error":
        expected = limits["expected"].replace("False", "false")  # as JSON has it
        return f"{param} {json.dumps(value, default=str)[:SHOWN]} is not served: it may be {expected}"
    return f"{param}: {_plain(fault['msg'])}"


def _meant(param: str, kind: type[BaseModel]) -> str:
    """What may be meant by an unknown field of a body, to be said behind its name; empty: that is not known."""
    if param.startswith("guided_"):
        return "; vLLM calls it structured_outputs since 0.12"
    for outer, field in kind.model_fields.items():  # a client may write a field of an object beside that
        for part in (field.annotation, *get_args(field.annotation)) if get_origin(field.annotation) is not list else ():
            inner = part.model_fields if isinstance(part, type) and issubclass(part, Body) else {}
            if param in {one.alias or name for name, one in inner.items()} or (param in ALIASES and "method" in inner):
                return f"; it belongs to {outer}: {outer}.{param}"
    close = get_close_matches(param, kind.model_fields, 1, ALIKE) if "." not in param else ()
    return f"; did you mean {close[0]}?" if close else ""


def _plain(text: str) -> str:
    text = re.sub("(Input|String|List|Dictionary|Data) should", "it must", text)
    text = re.sub(r"valid dictionary( or instance of \w+)?", "JSON object", text)
    return (
        text.replace(" after validation", "").replace("Field required", "it is required").removeprefix("Value error, ")
    )


def _in_body(where: Sequence[int | str], body: object) -> Iterator[str]:
    """The steps of a validator's path that exist in the body: the others name alternatives of a union."""
    for part in where:
        if isinstance(body, dict) and (part in body or (part == where[-1] and str(part).isidentifier())):
            yield str(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            yield str(part)
            body = body[part]
