"""The routes under /v1."""

from typing import Any

from fastapi import APIRouter, Request, Security
from fastapi.security import HTTPBearer
from starlette.responses import Response

from crossdraft.serving.http.answers import ChatCompletion, Completion, ModelCard, ModelList
from crossdraft.serving.http.asking import Asking, asking_chat, asking_completions
from crossdraft.serving.http.bodies import CompletionBody
from crossdraft.serving.http.chat_bodies import ChatBody
from crossdraft.serving.http.errors import ABSENT, INVALID, FaultReply, RefusedError
from crossdraft.serving.http.formats import ChatFormat, CompletionFormat, Format
from crossdraft.serving.http.gate import GUARDED, ID_KEY
from crossdraft.serving.http.leaving import EventStream, unless_gone
from crossdraft.serving.http.options import HttpOptions
from crossdraft.serving.http.replying import Chunks, items, whole
from crossdraft.serving.orders import Outputs, ServedModel, UnknownModelError

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
