"""/v1/responses, without state: a request is a chat, and its answer is items."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, create_model, model_validator

from crossdraft.client import Reason, RequestError
from crossdraft.rpc.generation import Committed, OutputEnded
from crossdraft.serving.backend import OutputItem, TraceSpans
from crossdraft.serving.http.chats import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Effort,
    FunctionBody,
    Part,
    Some,
    Text,
    Tokens,
    ToolChoice,
    ToolType,
)
from crossdraft.serving.http.errors import RefusedError, refusal_of_faults
from crossdraft.serving.http.requests import ChatBody, GenerationBody, JsonSchema
from crossdraft.serving.http.responses import JSON, Json, PartialOutput, Writer
from crossdraft.text.answers import AnswerParser, Said, What

NEEDED = {  # of an item, by its type
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
KINDS = {What.CONTENT: "message", What.REASONING: "reasoning"}  # types of items; of others it is function_call
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
# Fields of a request that its response has, too.
ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "tool_choice",
    "tools", "top_p", "user",
)  # fmt: skip
# Of what completions and chats have: what is not here, or in another form. Chats have some of the rest for themselves.
NOT_HERE = ("n", "stream_options", "return_token_ids", "response_format", "prompt_logprobs", "store", "max_tokens")
SHARED = (
    *(name for name in GenerationBody.model_fields if name not in NOT_HERE),
    *("parallel_tool_calls", "chat_template_kwargs"),
)


class TextItem(Part):
    """A part of a message, or of a result."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: Text


Content = Text | Annotated[list[TextItem], Field(fail_fast=True)]


class Item(Part):
    """A message, a call of the assistant, its result, or what the assistant has thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: Text | None = None
    name: Some | None = None
    arguments: Text | None = None
    output: Content | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if missing := [name for name in NEEDED[self.type] if getattr(self, name) is None]:
            raise ValueError(f"{missing[0]} is required in a {self.type}")
        return self


class FunctionTool(FunctionBody, ToolType):
    """A tool, whose type is looked at first."""


class ReasoningOptions(Body):
    """How much the model is to think."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Without effect.")


class TextFormat(JsonSchema):
    """What a message is to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text = "answer"


class TextOptions(Body):
    """Of messages."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


_shared: dict[str, Any] = {
    name: (ChatBody.model_fields[name].annotation, ChatBody.model_fields[name]) for name in SHARED
}


class ResponsesBody(create_model("_Shared", __base__=Body, **_shared)):  # type: ignore[misc]  # made when it is imported
    """POST /v1/responses."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Tokens | None = None
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice = "auto"
    text: TextOptions = TextOptions()
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
            faults = [{**one, "loc": _here(".".join(map(str, one["loc"]))).split(".")} for one in error.errors()]
            raise refusal_of_faults(faults, self.model_dump()) from None
        return self

    @property
    def chat(self) -> ChatBody:
        """The same as a chat."""
        return self._made

    def field_of(self, error: RequestError) -> str | None:
        """As of `GenerationBody`, by the names here."""
        return _here(self._made.field_of(error) or "") or None

    def _as_chat(self) -> dict[str, Any]:
        shape = self.text.format
        return {name: getattr(self, name) for name in SHARED} | {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": tool.type, "function": tool.model_dump(exclude={"type"})} for tool in self.tools],
            "tool_choice": self.tool_choice,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": shape
            and {"type": shape.type, "json_schema": shape.model_dump(exclude={"type"}, by_alias=True)},
        }

    def _messages(self) -> list[dict[str, Any]]:
        """Items of the assistant that follow each other are one message."""
        said: list[dict[str, Any]] = []
        if self.instructions is not None:
            said.append({"role": "system", "content": self.instructions})
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            content = item.output if item.type == "function_call_output" else item.content
            text = content or "" if isinstance(content, str | None) else "".join(part.text for part in content)
            if item.type == "function_call_output":
                said.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            elif item.type == "message" and item.role != "assistant":
                said.append({"role": item.role, "content": text})
            elif item.type == "function_call":
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                _assistant(said).setdefault("tool_calls", []).append(call)
            elif item.type == "message":
                _assistant(said, "content")["content"] = text
            else:
                _assistant(said, "reasoning", "content", "tool_calls")["reasoning"] = text
        return said


def _here(field: str) -> str:
    """A field of a chat by the name that it has here."""
    return {"response_format": "text.format"}.get(field, field).replace(".function.", ".")


def _assistant(said: list[dict[str, Any]], *without: str) -> dict[str, Any]:
    """The latest message, if it is the assistant's and has none of these yet, or else a new one."""
    if not said or said[-1]["role"] != "assistant" or any(said[-1].get(name) for name in without):
        said.append({"role": "assistant"})
    return said[-1]


class ResponseWriter(Writer):
    """Writes the reply item by item: as events, whose last one has the whole."""

    def __init__(self, body: ResponsesBody, model: str, request_id: str) -> None:
        self.request_id, self.field_of = request_id, body.field_of
        self._output = PartialOutput(answer=AnswerParser(body.chat.form))
        self._number = 0  # of events
        self._thought = 0  # tokens of reasoning
        self._open = ""  # the text of the last item, which has not ended
        shown = body.model_dump(mode="json", by_alias=True, include={*ECHOED})
        form = body.text.format or TextFormat.model_validate({"type": "text"})
        format = form.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude=set() if form.asked else {"name"}
        )
        shown |= {"text": {"format": format}}
        shown |= {"metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False}
        self._items: list[Json] = []
        head: Json = {"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time())}
        head |= {"status": "in_progress", "model": model, "output": self._items, "usage": None}
        self._response = head | {"incomplete_details": None, "error": None, "store": False} | shown

    async def body(self) -> bytes:
        return JSON.dump_json(self._response)

    def fault(self, refusal: RefusedError) -> bytes:
        return self._sent("error", code=refusal.code, message=refusal.message, param=refusal.param)

    def events(self, index: int, item: OutputItem) -> Iterator[bytes]:
        if not self._number:
            for name in ("response.created", "response.in_progress"):
                yield self._sent(name, response=self._response)
        if isinstance(item, TraceSpans):
            return
        self._output.hear(item)
        new = self._output.new
        if isinstance(item, Committed) and new and all(said.what is What.REASONING for said in new):
            self._thought += len(item.tokens)
        for said in new:
            items, kind = self._items, KINDS.get(said.what, "function_call")
            if said.what is What.CALL or not items or items[-1]["type"] != kind:
                yield from self._end()
                yield from self._begin(kind, said)
            if said.what is not What.CALL:
                self._open += said.text
                yield self._of_item(f"response.{PARTS.get(kind, 'function_call_arguments')}.delta", delta=said.text)
        if isinstance(item, OutputEnded):
            if not self._items:
                yield from self._begin("message")
            answer = self._output.answer  # a stop string may have ended it within a call
            whole = item.reason is Reason.STOP and not (answer is not None and answer.within)
            yield from self._end("completed" if whole else "incomplete")
            yield self._finished(item)

    def _begin(self, kind: str, said: Said | None = None) -> Iterator[bytes]:
        item: Json = {"id": f"{kind}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        if kind == "function_call" and said is not None:
            item |= {"call_id": said.id, "name": said.text, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        yield self._of_item("response.output_item.added", item=item)
        if kind in PARTS:
            yield self._of_item("response.content_part.added", part=self._part(kind))

    def _end(self, status: str = "completed") -> Iterator[bytes]:
        """Of the last item, if there is one."""
        if not self._items:
            return
        item = self._items[-1]
        if (kind := item["type"]) in PARTS:
            item["content"] = [part := self._part(kind)]
            yield self._of_item(f"response.{PARTS[kind]}.done", text=self._open)
            yield self._of_item("response.content_part.done", part=part)
        else:
            item["arguments"] = self._open
            yield self._of_item("response.function_call_arguments.done", arguments=self._open, name=item["name"])
        item["status"], self._open = status, ""
        yield self._of_item("response.output_item.done", item=item)

    def _finished(self, ended: OutputEnded) -> bytes:
        status, why = ("completed", None) if ended.reason is Reason.STOP else ("incomplete", "max_output_tokens")
        self._response |= {"status": status, "incomplete_details": why and {"reason": why}}
        read, made = ended.statistics.prompt_tokens, ended.statistics.tokens
        self._response["usage"] = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made} | {
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": self._thought},
        }
        return self._sent(f"response.{status}", response=self._response)

    def _part(self, kind: str) -> dict[str, Any]:
        return {"type": PARTS[kind], "text": self._open} | ({"annotations": []} if kind == "message" else {})

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        """An event of the last item."""
        items = self._items
        if "item" not in fields:
            fields |= {"item_id": items[-1]["id"], "content_index": 0, "logprobs": []}
        return self._sent(name, output_index=len(items) - 1, **fields)

    def _sent(self, name: str, /, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(event)}\n\n".encode()
