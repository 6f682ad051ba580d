"""/v1/responses, without state: a request is a chat, and its answer is items."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    PrivateAttr,
    StrictBool,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from crossdraft.client import Reason
from crossdraft.rpc.generation import Committed, OutputEnded
from crossdraft.serving.backend import TraceSpans
from crossdraft.serving.http.errors import FOREIGN, refusal_of
from crossdraft.serving.http.requests import MAX_MESSAGES, MAX_TOOLS, Body, ChatBody, FunctionBody, Part, Text, Tokens
from crossdraft.serving.http.responses import PartialOutput
from crossdraft.serving.http.streaming import IndexedItem
from crossdraft.text.answers import AnswerParser, Said, What

# Of an item that has begun, by its type: the events of its text, and the field that the text is in.
TEXTS = {
    "message": ("response.output_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "reasoning": ("response.reasoning_text", "text"),
}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
KINDS = {
    What.CONTENT: "message",
    What.CALL: "function_call",
    What.ARGUMENTS: "function_call",
    What.REASONING: "reasoning",
}
# Fields of a request that its response has, too.
ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text",
    "tool_choice", "tools", "top_p", "user",
)  # fmt: skip
# Fields of a chat that requests may have here, too, by the same names.
SHARED = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "metadata", "user", "service_tier", "speculative",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "seed", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop", "chat_template_kwargs", "cache_salt",
)  # fmt: skip


class TextItem(Part):
    """A part of a message, or of a result."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: Text


Content = Text | Annotated[list[TextItem], Field(fail_fast=True)]


class MessageItem(Part):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Part):
    """A call of the assistant."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class ResultItem(Part):
    """What a call has brought."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningItem(Part):
    """What the assistant has thought."""

    type: Literal["reasoning"]
    content: Content | None = None


def _type(item: object) -> object:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type, "item", "items of this type are not served"),
]


class ToolType(Part):
    """The type of a tool."""

    type: Literal["function"]


class FunctionTool(FunctionBody, ToolType):
    """A tool, whose type is looked at first."""


class FunctionChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: Text


class TextFormat(Body):
    """What a message is to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: str | None = None
    asked: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = Field(None, description="Without effect: every schema is kept to.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and self.asked is None:
            raise ValueError("schema must be provided when type is 'json_schema'")
        return self


class TextOptions(Body):
    """Of messages."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """Of reasoning."""

    effort: Literal["none"] | None = None
    summary: Literal["auto"] | None = Field(None, description="Without effect: all of it is shown.")


_shared: dict[str, Any] = {
    name: (ChatBody.model_fields[name].annotation, ChatBody.model_fields[name]) for name in SHARED
}


class ResponsesBody(create_model("_Shared", __base__=Body, **_shared)):  # type: ignore[misc]  # made when it is imported
    """POST /v1/responses."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Tokens | None = None
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] = Field([], description="Without effect.", fail_fast=True)
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    stream_options: dict[str, Any] | None = Field(None, description="Without effect.")
    _made: ChatBody = PrivateAttr()

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self._made = ChatBody.model_validate(self._as_chat())
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    @property
    def chat(self) -> ChatBody:
        """The same as a chat."""
        return self._made

    def _as_chat(self) -> dict[str, Any]:
        given = {name: value for name in SHARED if (value := getattr(self, name)) is not None}
        tools = [{"type": one.type, "function": one.model_dump(exclude={"type"})} for one in self.tools]
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        shape, asked = None if self.text is None else self.text.format, None
        if shape is not None:
            schema = {"name": shape.name or "answer", "schema": shape.asked}
            asked = {"type": shape.type} | ({} if shape.asked is None else {"json_schema": schema})
        made = {"messages": self._messages(), "tools": tools, "tool_choice": choice, "response_format": asked}
        return given | made | {"max_completion_tokens": self.max_output_tokens}

    def _messages(self) -> list[dict[str, Any]]:
        """Items of the assistant that follow each other are one message."""
        said: list[dict[str, Any]] = []
        if self.instructions is not None:
            said.append({"role": "system", "content": self.instructions})
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            match item:
                case MessageItem(role="assistant"):
                    self._assistant(said, "content")["content"] = _text(item.content)
                case MessageItem():
                    said.append({"role": item.role, "content": _text(item.content)})
                case CallItem():
                    call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                    self._assistant(said).setdefault("tool_calls", []).append(call)
                case ResultItem():
                    said.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                case ReasoningItem() if item.content:
                    self._assistant(said, "reasoning", "content", "tool_calls")["reasoning"] = _text(item.content)
        return said

    @staticmethod
    def _assistant(said: list[dict[str, Any]], *without: str) -> dict[str, Any]:
        """The latest message, if it is the assistant's and has none of these yet, or else a new one."""
        if not said or said[-1]["role"] != "assistant" or any(said[-1].get(name) for name in without):
            said.append({"role": "assistant"})
        return said[-1]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Response(BaseModel):
    """The answer of /v1/responses, as far as it is made."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    reasoning: dict[str, Any]
    truncation: Literal["disabled"] = "disabled"
    store: Literal[False] = False
    background: Literal[False] = False
    error: None = None
    previous_response_id: None = None
    user: str | None


class ResponseWriter:
    """Writes the reply to one request, item by item: as events, whose last one has the whole."""

    def __init__(self, body: ResponsesBody, model: str, request_id: str) -> None:
        self._request_id = request_id
        self._output = PartialOutput(answer=AnswerParser(body.chat.form))
        self._number = 0  # of events
        self._thought = 0  # tokens of reasoning
        self._open = ""  # the text of the last item, which has not ended
        shown = body.model_dump(mode="json", by_alias=True, include={*ECHOED})
        self.response = Response.model_validate(
            shown
            | {"id": f"resp_{request_id}", "created_at": int(time.time()), "status": "in_progress", "model": model}
            | {"output": [], "tool_choice": shown["tool_choice"] or "auto", "metadata": body.metadata or {}}
            | {"parallel_tool_calls": body.parallel_tool_calls is not False}
            | {"text": shown["text"] or {"format": {"type": "text"}}, "reasoning": shown["reasoning"] or {}}
        )

    async def whole(self, coming: AsyncGenerator[IndexedItem, None]) -> str:
        """The reply, as JSON, once everything has come; raises one of errors.FOREIGN."""
        async with aclosing(coming):
            async for _, item in coming:
                for _ in self._events(item):
                    pass
        return self.response.model_dump_json()

    async def stream(self, first: IndexedItem, rest: AsyncGenerator[IndexedItem, None]) -> AsyncGenerator[bytes, None]:
        """All events, each a server-sent one; an error is an event, too."""
        async with aclosing(rest):
            try:
                for name in ("response.created", "response.in_progress"):
                    yield self._sent(name, response=self.response.model_dump())
                for event in self._events(first[1]):
                    yield event
                async for _, item in rest:
                    for event in self._events(item):
                        yield event
            except FOREIGN as error:
                fault = refusal_of(error, self._request_id).body.error
                yield self._sent("error", code=fault.code, message=fault.message, param=fault.param)

    def _events(self, item: Any) -> Iterator[bytes]:
        if isinstance(item, TraceSpans):
            return
        self._output.hear(item)
        new = self._output.new
        thought = isinstance(item, Committed) and new and all(said.what is What.REASONING for said in new)
        self._thought += len(item.tokens) if thought else 0
        for said in new:
            yield from self._said(said)
        self._output.take(item, echoed=False)
        if isinstance(item, OutputEnded):
            if not self._items:
                yield from self._begin("message")
            yield from self._end()
            yield self._finished(item)

    @property
    def _items(self) -> list[dict[str, Any]]:
        return self.response.output

    def _said(self, said: Said) -> Iterator[bytes]:
        kind = KINDS[said.what]
        if said.what is What.CALL or not self._items or self._items[-1]["type"] != kind:
            yield from self._end()
            yield from self._begin(kind, said)
        if said.what is not What.CALL:
            self._open += said.text
            yield self._of_item(f"{TEXTS[kind][0]}.delta", delta=said.text)

    def _begin(self, kind: str, said: Said | None = None) -> Iterator[bytes]:
        item: dict[str, Any] = {"id": f"{kind}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        match kind:
            case "function_call":
                assert said is not None
                item |= {"call_id": said.id, "name": said.text, "arguments": ""}
            case "message":
                item |= {"role": "assistant", "content": []}
            case _:
                item |= {"summary": [], "content": []}
        self._items.append(item)
        yield self._sent("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind in PARTS:
            yield self._of_item("response.content_part.added", part=self._part())

    def _end(self) -> Iterator[bytes]:
        """Of the last item, if there is one."""
        if not self._items:
            return
        item = self._items[-1]
        (events, field), text = TEXTS[item["type"]], self._open
        yield self._of_item(f"{events}.done", **{field: text}, **({} if field == "text" else {"name": item["name"]}))
        if item["type"] in PARTS:
            part = self._part()
            yield self._of_item("response.content_part.done", part=part)
            item["content"] = [part]
        else:
            item["arguments"] = text
        item["status"], self._open = "completed", ""
        yield self._sent("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _finished(self, ended: OutputEnded) -> bytes:
        cut = ended.reason is not Reason.STOP
        self.response.status = "incomplete" if cut else "completed"
        self.response.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        read, made = ended.statistics.prompt_tokens, ended.statistics.tokens
        self.response.usage = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made} | {
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": self._thought},
        }
        if cut:
            self._items[-1]["status"] = "incomplete"
        return self._sent(f"response.{self.response.status}", response=self.response.model_dump())

    def _part(self) -> dict[str, Any]:
        kind = PARTS[self._items[-1]["type"]]
        return {"type": kind, "text": self._open} | ({"annotations": []} if kind == "output_text" else {})

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        """An event of the last item."""
        item, index = self._items[-1], len(self._items) - 1
        fields |= {"content_index": 0} if item["type"] in PARTS else {}
        fields |= {"logprobs": []} if name.startswith("response.output_text") else {}
        return self._sent(name, item_id=item["id"], output_index=index, **fields)

    def _sent(self, name: str, /, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(event)}\n\n".encode()
