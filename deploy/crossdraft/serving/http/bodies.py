"""A request's body, from bytes to a checked model, and what is said of one that is refused.

Large bodies are read in a thread. The JSON decoder keeps the interpreter for as long as it takes, up to 0.4 s for 4 MB
of small lists, and nothing else runs meanwhile: bodies with more parts than any request has are refused before.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from crossdraft.rpc.event_loop import Beside
from crossdraft.serving.http.chats import MAX_DEPTH, UNSERVED, deep
from crossdraft.serving.http.errors import INVALID, RefusedError

ModelT = TypeVar("ModelT", bound=BaseModel)
Fault = Any  # pydantic's ErrorDetails
NO_OBJECT = "it must be a JSON object, sent with `content-type: application/json`"
NO_TEXT = "the body is not JSON: it is not UTF-8, is nested too deeply, or has a number of too many digits"
MAX_PARTS = 100_000  # strings, lists and objects of a body, which are made in less than 0.1 s
TOO_MANY = f"the body has more than {MAX_PARTS} strings, lists and objects; send less"
SHOWN = 60  # characters of a value


def route_class(beside: Beside) -> type[APIRoute]:
    """The class of routes that read their bodies beside the event loop; FastAPI would do it in the loop."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle, params = super().get_route_handler(), self.dependant.body_params
            if not params:
                return handle
            kind: Any = params[0].field_info.annotation

            class BodyRequest(Request):
                async def json(self) -> Any:
                    raw = await self.body()
                    return await beside.run(len(raw), lambda: parsed(raw, kind))

            async def read(request: Request) -> Response:
                response: Response = await handle(BodyRequest(request.scope, request.receive))
                return response

            return read

    return BodyRoute


def parsed(raw: bytes, kind: type[ModelT]) -> ModelT:
    """A body; raises RefusedError, about the first fault, if it is not one of this kind.

    Lists are checked up to their first fault: pydantic keeps the interpreter for 2 s over 300,000 of them.
    """
    found = _parsed(raw, kind)
    if isinstance(found, RefusedError):  # raised where nothing else is at hand: its traceback keeps what is, for long
        raise found
    return found


def _parsed(raw: bytes, kind: type[ModelT]) -> ModelT | RefusedError:
    try:
        text = raw.decode(json.detect_encoding(raw), "surrogatepass")
        if _parts(text) > MAX_PARTS:
            return RefusedError(400, TOO_MANY, INVALID, "invalid_value")
        body = json.loads(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and deep(body):
            return RefusedError(400, NO_TEXT, INVALID, "invalid_json")
    except json.JSONDecodeError as error:
        text = f"the body is not JSON: {error.msg} at character {error.pos}"
        return RefusedError(400, text, INVALID, "invalid_json")
    except (ValueError, RecursionError):
        return RefusedError(400, NO_TEXT, INVALID, "invalid_json")
    try:
        return kind.model_validate(body)
    except RefusedError as error:
        return error.with_traceback(None)
    except ValidationError as error:
        return refusal_of_faults(error.errors(include_url=False), body)


def _parts(text: str) -> int:
    """How many strings, lists and objects a JSON text has; exact up to MAX_PARTS."""
    if len(text) <= MAX_PARTS:
        return 0
    outside = text.replace("\\\\", "").replace('\\"', "").split('"', 2 * MAX_PARTS)[::2]
    return len(outside) + sum(one.count("[") + one.count("{") for one in outside)


def refusal_of_faults(faults: Sequence[Fault], body: object) -> RefusedError:
    """The reply to a body that pydantic refused: the first fault.

    Where a field has a union type, pydantic reports one fault for each alternative; a too long list counts, else
    the one whose path into the body is the longest.
    """
    placed = [(one, tuple(_in_body(one["loc"], body))) for one in faults]
    named = placed[0][1][:1]

    def rank(fault: tuple[Fault, tuple[str, ...]]) -> tuple[bool, bool, int, bool]:
        kind, where = fault[0]["type"], fault[1]
        return where[:1] == named, kind == "too_long", len(where), not kind.endswith("_type")

    first, where = max(placed, key=rank)
    param = ".".join(where) or None
    return RefusedError(400, _complaint(first, param, isinstance(body, dict)), INVALID, _code(first), param)


def _code(fault: Fault) -> str | None:
    return None if fault["type"] == "extra_forbidden" else "invalid_value"


def _complaint(fault: Fault, param: str | None, named: bool) -> str:
    """What is wrong, in this server's words: those of the validator are about its own types."""
    limits, value = fault.get("ctx", {}), fault["input"]
    if param is None:
        return f"the body: {_plain(fault['msg'])}" if named else f"the body: {NO_OBJECT}"
    if fault["type"] == "extra_forbidden" and param.rpartition(".")[2] not in UNSERVED:
        return f"Unrecognized request argument supplied: {param}"
    if fault["type"] == "extra_forbidden" or limits.get("max_length") == 0 or limits.get("expected") == "''":
        return f"{param} is not served: leave it out"
    if fault["type"] == "literal_error":
        return f"{param} {json.dumps(value, default=str)[:SHOWN]} is not served: it may be {limits['expected']}"
    return f"{param}: {_plain(fault['msg'])}"


def _plain(text: str) -> str:
    for theirs in ("Input should", "String should", "List should", "Dictionary should", "Data should"):
        text = text.replace(theirs, "it must")
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
