"""The application: the API, and what watches it."""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from crossdraft.serving.http.answers import Alive, Ready
from crossdraft.serving.http.api import FAULTS, router_of
from crossdraft.serving.http.errors import (
    ABSENT,
    BUG,
    FOREIGN,
    RefusedError,
    refusal_of,
    refusal_of_body,
    refusal_of_status,
)
from crossdraft.serving.http.gate import ID_KEY, Gate, reply_of
from crossdraft.serving.http.leaving import ClientGoneError
from crossdraft.serving.http.options import HttpOptions
from crossdraft.serving.orders import Outputs, ServedModel
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
