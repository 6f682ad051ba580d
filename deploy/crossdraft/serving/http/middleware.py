"""ASGI middleware before the API: request ids, keys, rate limits, and the size of bodies."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crossdraft.config.api import HttpSettings
from crossdraft.rpc.errors import KeyRefused
from crossdraft.rpc.event_loop import MEDIUM
from crossdraft.rpc.logs import REQUEST_ID, RequestIdError, about, request_id
from crossdraft.serving.backend import MIN_RETRY_SECONDS
from crossdraft.serving.http.errors import BUSY, ENDS, INVALID, RefusedError
from crossdraft.serving.limits import GenerationOptions, Rates

MIB = 2**20
GUARDED = "/v1"
TOKENIZING = ("/tokenize", "/detokenize")  # vLLM has them outside, too; as they cost work, a key is needed
LOAD_KEY = "crossdraft.load"  # in the scope: requests for outputs that were under way
ID_KEY = "crossdraft.request"  # in the scope


@dataclass(frozen=True)
class HttpOptions(GenerationOptions):
    """Of clients under /v1, the API and its metrics."""

    http: HttpSettings = field(default_factory=HttpSettings)
    # For /metrics: from the header `Accept` to the text and its type.
    metrics: Callable[[str], tuple[bytes, str]] | None = None


class Gate:
    """Paths under /v1 need a key, if there are keys, and count for the client's rate limit; all bodies have a limit.

    A request's id is the client's header `x-request-id`, else a random one; every reply that is made here has it.
    """

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        self._app = app
        self._options = options
        self._rates = Rates(options.rates)
        self._most, self._most_held = int(options.http.max_body_mib * MIB), options.http.max_bodies_mib * MIB
        self._load = 0
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[ID_KEY] = name = _named(headers.get(REQUEST_ID))
        if scope["method"] == "HEAD":  # the server sends no body then
            scope = {**scope, "method": "GET"}
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        try:
            self._check(scope, headers)
        except RefusedError as error:
            await reply_of(error)(scope, receive, send_named)
        else:
            peer = ":".join(map(str, scope.get("client") or ()))
            with about(request=name, peer=peer), self._under_way(scope), self._counted(receive) as counted:
                try:
                    await self._app(scope, counted, send_named)
                except asyncio.CancelledError as ended:
                    if begun or ended.args != (ENDS.message,):
                        raise
                    await reply_of(ENDS)(scope, receive, send_named)

    @contextmanager
    def _under_way(self, scope: Scope) -> Iterator[None]:
        counts = scope["method"] == "POST" and _path(scope).startswith(GUARDED)
        self._load += counts
        scope[LOAD_KEY] = self._load
        try:
            yield
        finally:
            self._load -= counts

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = _path(scope)
        if path == GUARDED or path.startswith(GUARDED + "/") or path in TOKENIZING:
            try:
                holder = self._options.keys.holder(headers.get("authorization"))
            except KeyRefused as error:
                raise RefusedError(401, str(error), "authentication_error", "invalid_api_key") from error
            if wait := self._rates.take(holder or (scope.get("client") or ("",))[0], time.monotonic()):
                text = "too many requests; wait as long as Retry-After says"
                raise RefusedError(429, text, "rate_limit_error", "rate_limit_exceeded", after=wait)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._most:
            raise self._too_large()

    @contextmanager
    def _counted(self, receive: Receive) -> Iterator[Receive]:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += (new := len(message.get("body", b"")))
            self._held += new
            if size > self._most:
                raise HTTPException(413) from self._too_large()
            if size > MEDIUM and self._held > self._most_held:
                text = "the requests under way are as large as this server takes; ask again later"
                raise HTTPException(429) from RefusedError(429, text, BUSY, "overloaded", after=MIN_RETRY_SECONDS)
            return message

        try:
            yield counted
        finally:
            self._held -= size

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"a body may have {self._most} bytes; send less", INVALID, "request_too_large")


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _named(given: str | None) -> str:
    """The client's id, or a new one in place of one that is not valid."""
    try:
        return request_id(given)
    except RequestIdError:
        return request_id()


def reply_of(refusal: RefusedError) -> Response:
    return Response(refusal.body.model_dump_json(), refusal.status, refusal.headers, "application/json")
