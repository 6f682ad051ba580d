"""The application: the API, and what watches it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import Response

from crossdraft.serving.http.errors import (
    ABSENT,
    BUG,
    FOREIGN,
    INVALID,
    FaultReply,
    RefusedError,
    refusal_of,
    refusal_of_body,
    refusal_of_status,
)
from crossdraft.serving.http.middleware import GUARDED, ID_KEY, Gate, HttpOptions, reply_of
from crossdraft.serving.http.requests import Asking, ChatBody, CompletionBody, asking_chat, asking_completions
from crossdraft.serving.http.responses import (
    Alive,
    ChatCompletion,
    ChatFormat,
    Completion,
    CompletionFormat,
    Format,
    ModelCard,
    ModelList,
    Ready,
)
from crossdraft.serving.http.streaming import Chunks, ClientGoneError, EventStream, items, unless_gone, whole
from crossdraft.serving.outputs import Outputs, ServedModel, UnknownModelError
from crossdraft.serving.page import mount

CLIENT_CLOSED = 499  # nginx's status for a client that has left; nobody reads it
Handler = Callable[[Request, Exception], Awaitable[Response]]


def make_app(outputs: Outputs, options: HttpOptions | None = None) -> FastAPI:
    """OpenAI's API over these outputs, as an ASGI application.

    Args:
        outputs: what makes outputs.
        options: keys, limits, and metrics.
    """
    options = options or HttpOptions()
    app = FastAPI(title="crossdraft", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.add_middleware(Gate, options=options)
    app.include_router(router_of(outputs, options))
    _watch(app, outputs, options)
    for kind, refusal in _refusals().items():
        app.add_exception_handler(kind, _handler(refusal))
    app.add_exception_handler(ClientGoneError, _gone)
    if options.page:
        mount(app)
    return app


def _watch(app: FastAPI, outputs: Outputs, options: HttpOptions) -> None:
    """What a cluster asks."""

    @app.get("/health", responses={**FAULTS})
    async def health() -> Alive:
        """The process is alive."""
        return Alive(status="ok")

    @app.get("/ready", responses={**FAULTS})
    async def ready() -> Ready:
        """A model can be served; if not, the error says why."""
        models = await outputs.models()
        names = [model.name for model in models if model.there]
        if not names:
            raise RefusedError(ABSENT.status, _absence(models), ABSENT.type, ABSENT.code)
        return Ready(status="ready", models=names)

    text_of = options.metrics
    if text_of is not None:

        @app.get("/metrics", responses={**FAULTS, 200: {"content": {"text/plain": {}}}})
        async def metrics(request: Request) -> Response:
            """For Prometheus."""
            text, kind = text_of(request.headers.get("accept", ""))
            return Response(text, headers={"content-type": kind})


def _absence(models: Sequence[ServedModel]) -> str:
    """Why nothing can be served; it does not say where targets are."""
    if not models:
        return "no model can be served yet: no target has answered since the start"
    return f"no target of {', '.join(model.name for model in models)} can be reached any more; they are tried again"


def _refusals() -> dict[type[Exception], Callable[[Request, Exception], RefusedError]]:
    """How each error becomes a reply."""

    def foreign(request: Request, error: Exception) -> RefusedError:
        return refusal_of(error, request.scope[ID_KEY])

    def body(_: Request, error: Exception) -> RefusedError:
        assert isinstance(error, RequestValidationError)
        return refusal_of_body(error)

    def status(request: Request, error: Exception) -> RefusedError:
        assert isinstance(error, HTTPException)
        return refusal_of_status(error, request.url.path)

    def bug(_: Request, __: Exception) -> RefusedError:
        return RefusedError(BUG.status, BUG.text, BUG.type, BUG.code)  # the server logs the error itself

    known: dict[type[Exception], Callable[[Request, Exception], RefusedError]] = dict.fromkeys(FOREIGN, foreign)
    return known | {RefusedError: foreign, RequestValidationError: body, HTTPException: status, Exception: bug}


def _handler(refusal: Callable[[Request, Exception], RefusedError]) -> Handler:
    async def handle(request: Request, error: Exception) -> Response:
        return reply_of(refusal(request, error))

    return handle


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


# The routes under /v1.

OWNER = "crossdraft"
FAULTS: dict[int | str, dict[str, Any]] = {"4XX": {"model": FaultReply}, "5XX": {"model": FaultReply}}
EVENTS: dict[str, Any] = {"content": {"text/event-stream": {}}}  # the events of a stream, with chunks as data
Key = Security(HTTPBearer(auto_error=False, description="Needed if the server has API keys."))


def router_of(outputs: Outputs, options: HttpOptions) -> APIRouter:
    """The routes, over these outputs."""
    router = APIRouter(prefix=GUARDED, dependencies=[Key], responses={**FAULTS})

    @router.post("/completions", responses={200: {"model": Completion, **EVENTS}})
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Outputs that go on from prompts."""
        model = await _named(outputs, body.model)
        asking = asking_completions(body, model, request.scope[ID_KEY], options.most_choices)
        return await reply(request, asking, CompletionFormat(asking), body.stream)

    @router.post("/chat/completions", responses={200: {"model": ChatCompletion, **EVENTS}})
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Outputs that go on with a chat."""
        model = await _named(outputs, body.model)
        asking = asking_chat(body, model, request.scope[ID_KEY], options.most_choices)
        return await reply(request, asking, ChatFormat(asking), body.stream)

    async def reply(request: Request, asking: Asking, format: Format, streamed: bool) -> Response:
        if not streamed:
            answer = await unless_gone(request.receive, whole(outputs, asking, format))
            return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")
        chunks, coming = Chunks(asking, format), items(outputs, asking)
        # An error before the first item has a status of its own.
        first = await unless_gone(request.receive, anext(coming))
        return EventStream(chunks.stream(first, coming), options.stalled_seconds)

    @router.get("/models")
    async def models() -> ModelList:
        """What is served."""
        return ModelList(object="list", data=[_card(model) for model in await outputs.models()])

    @router.get("/models/{model:path}")
    async def model_named(model: str) -> ModelCard:
        """One of them."""
        found = await outputs.models()
        for one in found:
            if one.name == model:
                return _card(one)
        raise UnknownModelError(f"there is no model {model!r}; there is {_names(found)}")

    return router


async def _named(outputs: Outputs, name: str | None) -> str:
    """The model that a body names, or the only one."""
    if name is not None:
        return name
    found = await outputs.models()
    if not found:
        raise RefusedError(ABSENT.status, ABSENT.text, ABSENT.type, ABSENT.code)
    if len(found) > 1:
        raise RefusedError(400, f"say which model: {_names(found)}", INVALID, "missing_model", "model")
    return found[0].name


def _names(models: tuple[ServedModel, ...]) -> str:
    return ", ".join(model.name for model in models) or "none"


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        object="model",
        created=model.created,
        owned_by=OWNER,
        max_model_len=model.context,
        drafters=list(model.drafters),
        methods=list(model.methods),
        chats=model.chats,
    )
