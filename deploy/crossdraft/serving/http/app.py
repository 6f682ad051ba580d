"""The application: OpenAI's routes under /v1, and those by which it is watched.

Large bodies are read in a thread. The JSON decoder keeps the interpreter for as long as it takes, up to 0.4 s for 4 MB
of small lists, and nothing else runs meanwhile: bodies with more parts than any request has are refused before.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from crossdraft.client.api import software
from crossdraft.config.api import SpeculativeMetrics, ToolCallParser
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.logs import REQUEST_ID
from crossdraft.serving.backend import Backend, OutputRequest, UnknownModelError, model_of
from crossdraft.serving.http.chats import MAX_DEPTH, DetokenizeBody, TokenizeBody, deep
from crossdraft.serving.http.errors import (
    ABSENT,
    BUG,
    FOREIGN,
    INVALID,
    FaultReply,
    RefusedError,
    refusal_of,
    refusal_of_faults,
    refusal_of_status,
)
from crossdraft.serving.http.middleware import GUARDED, ID_KEY, LOAD_KEY, Gate, HttpOptions, reply_of
from crossdraft.serving.http.requests import ChatBody, CompletionBody, GenerationBody
from crossdraft.serving.http.response_api import ResponsesBody, ResponseWriter
from crossdraft.serving.http.responses import (
    JSON,
    ChatFormat,
    CompletionFormat,
    Format,
    Json,
    ModelCard,
    ModelList,
    Writer,
)
from crossdraft.serving.http.streaming import ClientGoneError, EventStream, merged, unless_gone
from crossdraft.serving.limits import scope_of
from crossdraft.serving.page import mount
from crossdraft.text.answers import REASONINGS, TOOL_FORMATS, Reasoning, ToolFormat, after
from crossdraft.types.output import ServedModel

CLIENT_CLOSED = 499  # nginx's status for a client that has left; nobody reads it
OWNER = "crossdraft"
FIELD_KEY = "crossdraft.field_of"  # in the scope: as of `GenerationBody`
FAULTS: dict[int | str, dict[str, Any]] = {"4XX": {"model": FaultReply}, "5XX": {"model": FaultReply}}
OPENAIS: dict[str, Any] = {
    "description": "OpenAI's object, or events with its chunks",
    "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
}
NONE_YET = "no model can be served yet"
NO_TEXT = (
    "the body is not JSON: it is compressed or not UTF-8, is nested too deeply, or has a number of too many digits"
)
NO_CHARACTER = "the body has half of a surrogate pair, which is no character: escape both halves, or none"
MAX_PARTS = 100_000  # strings, lists and objects of a body, which are made in less than 0.1 s
TOO_MANY = f"the body has more than {MAX_PARTS} strings, lists and objects; send less"
ModelT = TypeVar("ModelT", bound=BaseModel)
Key = Security(HTTPBearer(auto_error=False, description="Needed if the server has API keys."))


def make_app(backend: Backend, options: HttpOptions | None = None) -> FastAPI:
    options = options or HttpOptions()
    app = FastAPI(title="crossdraft", docs_url=None, redoc_url=None, responses={**FAULTS})
    app.add_middleware(Gate, options=options)
    if options.http.cors:  # before all others: a browser's first question has no key
        app.add_middleware(CORSMiddleware, expose_headers=[REQUEST_ID], **options.http.cors)
    app.include_router(router_of(backend, options, Beside("bodies")))
    _watch(app, backend, options)
    for kind in (*FOREIGN, RefusedError, RequestValidationError, HTTPException, ClientGoneError, Exception):
        app.add_exception_handler(kind, _refused)
    mount(app)
    return app


def _watch(app: FastAPI, backend: Backend, options: HttpOptions) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    app.add_api_route("/ping", health)
    app.add_api_route("/ping", health, methods=["POST"], include_in_schema=False)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Of this server."""
        return {"version": software()}

    @app.get("/load")
    async def load(request: Request) -> dict[str, int]:
        """How many requests for outputs are under way."""
        return {"server_load": request.scope[LOAD_KEY]}

    @app.get("/ready")
    async def ready() -> Json:
        """A model can be served; if not, the error says why."""
        models = await backend.models()
        names = [model.name for model in models if model.there]
        if not names:
            raise replace(ABSENT, message=_absence(models, backend))
        detail = _detail(models) + _absent(models, backend)  # though models can be served
        return {"status": "ready", "models": names} | ({"detail": detail} if detail else {})

    text_of = options.metrics
    if text_of is not None:

        @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
        async def metrics(request: Request) -> Response:
            """For Prometheus."""
            text, kind = text_of(request.headers.get("accept", ""))
            return Response(text, headers={"content-type": kind})


def _absence(models: Sequence[ServedModel], backend: Backend) -> str:
    """Why nothing can be served, without the addresses of targets."""
    names = ", ".join(model.name for model in models)
    gone = f"no target of {names} can be reached any more; they are tried again" if names else NONE_YET
    return ". ".join((gone, *_detail(models), *_absent(models, backend)))


def _absent(models: Sequence[ServedModel], backend: Backend) -> list[str]:
    there = {model.name for model in models}
    return [f"{name}: {why}" for name, why in backend.absent.items() if name not in there]


def _detail(models: Sequence[ServedModel]) -> list[str]:
    return [f"{model.name}: {line}" for model in models if not model.root for line in model.detail]


async def _refused(request: Request, error: Exception) -> Response:
    """The reply to a request that ended with an error."""
    match error:
        case ClientGoneError():
            return Response(status_code=CLIENT_CLOSED)
        case RequestValidationError():
            faults = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
            return reply_of(refusal_of_faults(faults, error.body))
        case HTTPException():
            return reply_of(refusal_of_status(error, request.url.path))
    known = isinstance(error, (*FOREIGN, RefusedError))  # of others the server logs the error itself
    own = (request.scope[FIELD_KEY],) if FIELD_KEY in request.scope else ()
    reply = reply_of(refusal_of(error, request.scope[ID_KEY], *own) if known else BUG)
    reply.headers[REQUEST_ID] = request.scope[ID_KEY]  # that of a bug comes by no gate
    return reply


class Outputs:
    """Answers requests for outputs."""

    def __init__(self, backend: Backend, options: HttpOptions, beside: Beside) -> None:
        self._backend, self._options, self._beside = backend, options, beside

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Outputs that go on from prompts."""
        return await self._reply(request, body, CompletionFormat)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Outputs that go on with a chat."""
        return await self._reply(request, body, ChatFormat)

    async def responses_(self, body: ResponsesBody, request: Request) -> Response:
        """An answer to a chat, as items; nothing is stored."""
        request.scope[FIELD_KEY] = body.field_of
        model, requests = await self._ordered(request, body.chat)
        return await self._sent(request, body, requests, ResponseWriter(body, model, request.scope[ID_KEY]))

    async def _reply(self, request: Request, body: GenerationBody, kind: type[Format[Any]]) -> Response:
        request_id = request.scope[ID_KEY]
        request.scope[FIELD_KEY] = body.field_of
        model, requests = await self._ordered(request, body)
        told = body.return_token_ids or body.continuous_usage  # how prompts were tokenized
        asked = [one.generation for one in requests[:: body.n]] if told else []
        prompts = [(await self._backend.written(model, one)).ids for one in asked]
        measured = self._options.http.per_request_spec_decode_metrics is not SpeculativeMetrics.none
        return await self._sent(request, body, requests, kind(body, model, request_id, self._beside, prompts, measured))

    async def _ordered(self, request: Request, body: GenerationBody) -> tuple[str, tuple[OutputRequest, ...]]:
        """The model of a request, and its outputs."""
        model, most = model_of(self._backend, body.model), self._options.http.max_choices
        if body.num_outputs > most:
            outputs = f"n and the number of prompts make {body.num_outputs} outputs"
            raise RefusedError(400, f"{outputs}; at most {most} in one request", INVALID, "too_many_choices", "n")
        body.cache_salt = scope_of(request.headers.get("authorization"), body.cache_salt, self._options.keys)
        size = len(await request.body())
        if isinstance(body, ChatBody):
            await self._beside.run(size, lambda: body.prompts)
            body.write(await self._tool_format(body, model), await self._reasoning(body, model))
        return model, await self._beside.run(size, body.output_requests, model, request.scope[ID_KEY])

    async def _tool_format(self, body: ChatBody, model: str) -> ToolFormat | None:
        name: str = self._options.http.tool_call_parser
        if not body.usable:
            return None
        if name == ToolCallParser.auto:
            if all(served.name != model for served in await self._backend.models()):  # its target was not there yet
                await self._backend.written(model, "", special=False)
            name = next((served.tool_format for served in await self._backend.models() if served.name == model), "")
        found = TOOL_FORMATS[name or ToolCallParser.json]
        if found.spelled and not (await self._backend.written(model, found.begin, special=False)).plain:
            found = replace(found, spelled=False)  # here the mark is a control symbol
        return found

    async def _reasoning(self, body: ChatBody, model: str) -> Reasoning | None:
        """How an answer to this prompt has it."""
        marks = REASONINGS.get(self._options.http.reasoning_parser)
        return None if marks is None else after(marks, (await self._backend.written(model, body.prompts[0])).text)

    async def _sent(
        self, request: Request, body: GenerationBody | ResponsesBody, requests: Sequence[OutputRequest], writer: Writer
    ) -> Response:
        coming = merged([self._backend.stream(one) for one in requests])
        if not body.stream:
            answer = await unless_gone(request.receive, writer.whole(coming))
            return Response(answer, media_type="application/json")
        # An error before the first item has a status of its own.
        first = await unless_gone(request.receive, anext(coming))
        return EventStream(writer.stream(first, coming), writer.fault, self._options.rates.stalled_seconds)


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
        return RefusedError(400, f"the body is not JSON: {error.msg} at character {error.pos}", INVALID, "invalid_json")
    except (ValueError, RecursionError):
        return RefusedError(400, NO_TEXT, INVALID, "invalid_json")
    try:
        found = kind.model_validate(body)
        text.encode()
        if "\\ud" in text or "\\uD" in text:  # to search by a pattern takes ten times as long
            json.dumps(body, ensure_ascii=False).encode()
        return found
    except RefusedError as error:
        return error.with_traceback(None)
    except UnicodeEncodeError:  # a reply that shows it could not be written
        return RefusedError(400, NO_CHARACTER, INVALID, "invalid_value")
    except ValidationError as error:
        return refusal_of_faults(error.errors(include_url=False), body, kind)


def _parts(text: str) -> int:
    """How many strings, lists and objects a JSON text has; exact up to MAX_PARTS."""
    if len(text) <= MAX_PARTS:
        return 0
    outside = text.replace("\\\\", "").replace('\\"', "").split('"', 2 * MAX_PARTS)[::2]
    return len(outside) + sum(one.count("[") + one.count("{") for one in outside)


def router_of(backend: Backend, options: HttpOptions, beside: Beside) -> APIRouter:
    """Outputs, what is served, and how a model's tokenizer writes text, which vLLM has outside of /v1."""
    outputs = Outputs(backend, options, beside)
    router = APIRouter(dependencies=[Key], route_class=route_class(beside))
    for path, answer in (
        ("completions", outputs.completions),
        ("chat/completions", outputs.chat_completions),
        ("responses", outputs.responses_),
    ):
        router.add_api_route(f"{GUARDED}/{path}", answer, methods=["POST"], responses={200: OPENAIS})

    @router.get(f"{GUARDED}/models/", include_in_schema=False)  # else a model with an empty name
    @router.get(f"{GUARDED}/models")
    async def models() -> ModelList:
        """What is served."""
        found = await backend.models()
        return ModelList(object="list", data=[_card(model) for model in found], detail=_absent(found, backend))

    @router.get(f"{GUARDED}/models/{{model:path}}")
    async def model_named(model: str) -> ModelCard:
        """One of them."""
        found = {one.name: one for one in await backend.models()}
        if (own := backend.names.get(model)) is not None and model not in found:
            raise replace(ABSENT, message=f"{own}: {backend.absent.get(own, NONE_YET)}")
        if model not in found:
            raise UnknownModelError(f"there is no model {model!r}; there is {', '.join(found) or 'none'}")
        return _card(found[model])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a text or a chat."""
        model = model_of(backend, body.model)
        written = await backend.written(model, body.asked, body.add_special_tokens)
        context = next((one.context for one in await backend.models() if one.name == model), 0)
        pieces = written.pieces if body.return_token_strs else None
        answer = {"count": len(written.ids), "max_model_len": context, "tokens": written.ids, "token_strs": pieces}
        return await reply(answer, len(written.text))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of tokens."""
        model = model_of(backend, body.model)
        request.scope[FIELD_KEY] = lambda _: "tokens"
        written = await backend.written(model, tuple(body.tokens))
        return await reply({"prompt": written.text}, len(written.text))

    async def reply(answer: Json, size: int) -> Response:
        return Response(await beside.run(size, JSON.dump_json, answer), media_type="application/json")

    return router


def _card(model: ServedModel) -> ModelCard:
    own = {"id": model.name, "object": "model", "owned_by": OWNER, "root": model.root or model.name}
    auto = model.auto or next(iter(model.drafters), None)
    return ModelCard.model_validate(vars(model) | own | {"max_model_len": model.context, "auto": auto})
