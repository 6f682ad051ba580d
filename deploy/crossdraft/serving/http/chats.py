"""What all bodies of requests are made of, and the parts of those with a chat: messages, tools, use of the template."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from crossdraft.text.answers import Function
from crossdraft.types.request import Chat, Message, Prompt

MAX_TOKENS = 2**20  # of an output; the context of the target is shorter
MAX_DEPTH = 128  # objects and lists in each other: far from where recursion ends
MAX_ENTRIES = 1024  # of `logit_bias` and `metadata`
MAX_FIELDS = 128  # of an object: more than any has
MAX_MESSAGES = 4096
MAX_TOOLS = 512
EMPTY: Sequence[object] = (False, "", [], {})  # 0 is equal to the first
# Fields of OpenAI's and vLLM's requests, and values with which they ask for nothing. Those that are neither here nor
# served are taken for mistakes.
UNSERVED: Mapping[str, Sequence[object]] = dict.fromkeys(
    (
        "add_special_tokens", "audio", "chat_template", "context_management", "conversation",
        "disable_additional_properties", "documents", "early_stopping", "echo", "functions", "kv_transfer_params",
        "logits_processors", "max_tool_calls", "mm_processor_kwargs", "moderation", "prediction",
        "previous_response_id", "priority", "prompt_embeds", "request_id", "return_tokens_as_token_ids",
        "structural_tag", "suffix", "top_logprobs", "use_beam_search", "vllm_xargs", "web_search_options",
    ), EMPTY,
) | {
    "best_of": (1,), "function_call": ("none", "auto"), "include_reasoning": (False, True), "length_penalty": (1,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "verbosity": ("medium",),
}  # fmt: skip


def deep(value: object) -> bool:
    """Whether it is nested deeper than anything may be."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [part for within in parts for part in within]
    return bool(level)


def unicode(text: str) -> str:
    """JSON can bring halves of surrogate pairs, which UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it is not Unicode text: {error.reason} at character {error.start}") from None
    return text


def _no_boolean(value: object) -> object:
    """Refuses true and false, which pydantic would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("it must be a number, not true or false")
    return value


def few(value: object) -> object:
    """Refuses many entries before each of them is found wrong by itself."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"it must have at most {MAX_ENTRIES} entries, not {len(value)}")
    return value


Text = Annotated[str, AfterValidator(unicode)]
Some = Annotated[str, Field(min_length=1), AfterValidator(unicode)]  # in this order an empty one is still "a string"
NO_BOOLEAN = BeforeValidator(_no_boolean)
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), NO_BOOLEAN]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
# Of a long list only the first fault is wanted.
MaybeIds = Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


def _nothing(value: object) -> None:
    if value:
        raise ValueError("it is not served: leave it out")


Nothing = Annotated[object, AfterValidator(_nothing), Field(description="Not served.")]


class Body(BaseModel):
    """A JSON object; unknown fields are errors, and null or a neutral value means that a field is left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _what_asks(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        asking = (
            (name, value)
            for name, value in data.items()
            if value is not None and (name in cls.model_fields or value not in UNSERVED.get(name, ()))
        )
        return dict(islice(asking, MAX_FIELDS))  # more than it has: one of them is unknown


class Part(Body):
    """A part of a chat. What it has besides, such as an answer that is sent again, is not for the model."""

    model_config = ConfigDict(extra="ignore")


class FunctionBody(Part):
    """What a model may call."""

    name: Annotated[Some, Field(max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object; by default it has nothing.")
    strict: StrictBool | None = Field(None, description="With tool_choice auto: arguments are by the schema.")

    @field_validator("parameters")
    @classmethod
    def _of_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters is not None and parameters.get("type", "object") != "object":
            raise ValueError('its type must be "object": arguments are one')
        return parameters

    def function(self, any_object: bool = False) -> Function:
        """With the schema of its arguments, or that of any object."""
        none: dict[str, Any] = {"properties": {}, "additionalProperties": False}
        asked = {} if any_object else none if self.parameters is None else self.parameters
        return Function(self.name, json.dumps({"type": "object"} | asked))


class ToolType(Part):
    """The type of a tool."""

    type: Literal["function"]


class ToolBody(ToolType):
    """A tool."""

    function: FunctionBody


def read_choice(value: Any) -> tuple[str, list[str]]:
    """What `tool_choice` says, in the form of chats or of /v1/responses: none, auto, required, named or allowed, the
    last one with `auto` or `required`, and the functions that it names. Raises ValueError."""
    try:
        if value in ("none", "auto", "required"):
            return value, []
        inner = value.get("allowed_tools", value)
        named = {"function": [value], "allowed_tools": inner.get("tools")}[value["type"]]
        mode = "named" if value["type"] == "function" else f"allowed {inner['mode']}"
        names = [one.get("function", one)["name"] for one in named]
        known = mode in ("named", "allowed auto", "allowed required")
        if names and known and all(isinstance(name, str) for name in names):
            return mode, names
    except (AttributeError, KeyError, TypeError):
        pass  # it is none of these
    raise ValueError(
        'it must be "none", "auto", "required", or an object: of type "function", with the name of one, or of type '
        '"allowed_tools", with mode "auto" or "required" and tools'
    )


def _choice(value: object) -> object:
    read_choice(value)
    return value


ToolChoice = Annotated[str | dict[str, Any], BeforeValidator(_choice)]


class CalledFunction(Part):
    """What was called."""

    name: Some
    arguments: Text | dict[str, Any] | None = Field(None, description="JSON, as the model has written it.")


class CallBody(Part):
    """A call in a message of the assistant."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def shown(self) -> dict[str, Any]:
        """As chat templates read it, with arguments as an object, if they are one."""
        arguments: object = self.function.arguments or {}
        with suppress(ValueError, RecursionError):  # the model may have written something else: it is shown as it is
            found = json.loads(arguments) if isinstance(arguments, str) else arguments
            arguments = arguments if deep(found) else found
        called = {"name": self.function.name, "arguments": arguments}
        return ({} if self.id is None else {"id": self.id}) | {"type": self.type, "function": called}


class TextPart(Part):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class MessageBody(Part):
    """A message of a chat."""

    role: Annotated[Some, Field(max_length=100)]
    content: Text | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] | None = Field(
        None, validate_default=True, description="May be null in messages of the assistant."
    )
    name: str | None = Field(None, description="Of a tool; of others it is not shown to the model.")
    tool_calls: Annotated[list[CallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = Field(None, description="Of the call whose result this is.")
    reasoning: object = Field(None, description="Of the assistant; templates show it as they like.")
    reasoning_content: object = Field(None, description="Its older name.")
    function_call: Nothing = None
    audio: Nothing = None

    @field_validator("content")
    @classmethod
    def _of_assistant(cls, content: object, info: ValidationInfo) -> object:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("it is required")
        return content

    @property
    def message(self) -> Message:
        """Its parts joined; `developer` is OpenAI's newer name of `system`, which chat templates do not know."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        given: dict[str, object] = {}  # what else the template may show
        if self.role == "tool":
            given = {"tool_call_id": self.tool_call_id, "name": self.name}
        elif self.role == "assistant":
            reasoning = self.reasoning or self.reasoning_content
            calls = [call.shown for call in self.tool_calls or ()]
            given = {"tool_calls": calls, "reasoning_content": reasoning if isinstance(reasoning, str) else ""}
        shown = {name: value for name, value in given.items() if value}
        role = "system" if self.role == "developer" else self.role
        return Message(role, text, json.dumps(shown) if shown else "")


Messages = Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateFields(Body):
    """How the chat template is used."""

    add_generation_prompt: StrictBool = Field(True, description="Begin an answer after the last message.")
    continue_final_message: StrictBool = Field(False, description="Go on with the last message.")
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(few)] | None = None
    reasoning_effort: Effort | None = Field(None, description="For the template; none: enable_thinking is false, too.")
    tools: list[ToolBody] = Field([], max_length=MAX_TOOLS, fail_fast=True)

    @field_validator("tools")
    @classmethod
    def _differ(cls, tools: list[ToolBody]) -> list[ToolBody]:
        if twice := [name for name, count in Counter(tool.function.name for tool in tools).items() if count > 1]:
            raise ValueError(f"their names must differ, and {twice[0]!r} is there more than once")
        return tools

    @property
    def usable(self) -> list[FunctionBody]:
        """What the model is told that it may call."""
        return [tool.function for tool in self.tools]

    def chat_of(self, messages: Sequence[MessageBody]) -> Chat:
        tools = [{"type": "function", "function": one.model_dump(exclude_none=True)} for one in self.usable]
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        effort |= {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        given = {**effort, **(self.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        settings = json.dumps(given) if given else ""
        said = tuple(body.message for body in messages)
        return Chat(said, self.add_generation_prompt, self.continue_final_message, settings)


class TokenizeBody(TemplateFields):
    """POST /tokenize: of a text, or of a chat."""

    model: str | None = Field(None, max_length=500)
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool = Field(True, description="For a prompt; a chat template writes them itself.")
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    @property
    def asked(self) -> Prompt:
        return self.prompt if self.prompt is not None else self.chat_of(self.messages or ())


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=500)
    tokens: MaybeIds
