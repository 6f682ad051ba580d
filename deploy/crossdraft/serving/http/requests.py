"""The bodies of requests: OpenAI's fields, vLLM's extensions by vLLM's names, and `speculative`.

What is neither a list nor OpenAI's alone is stated in `config.request`. A body is checked by pydantic and then makes
its `OutputRequest`s, one for each prompt and choice.
"""

import dataclasses
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from crossdraft.client import GenerationRequest, RequestError, SamplingOptions
from crossdraft.config import MOST_LIKELY
from crossdraft.config.fields import LeftOut, LeftOutInt, typed
from crossdraft.config.request import ALIASES, Output, Reading, Sampling, Speculation
from crossdraft.serving.backend import DECODE_PLAINLY, OutputRequest
from crossdraft.text.answers import AnswerForm, Function, Reasoning, ToolFormat
from crossdraft.types.request import Chat, Grammar, Message, Prompt

MAX_TOKENS = 2**20  # of an output; the context of the target is shorter
WHAT_FITS = LeftOutInt(MAX_TOKENS)
MAX_STOPS = 16
MAX_IDS = 1024  # of stop_token_ids, and of bad_words
MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
MAX_TOOLS = 512
DEEPEST = 128  # objects and lists in each other: far from where recursion ends
MAX_ENTRIES = 1024  # of `logit_bias` and `metadata`
MAX_FIELDS = 128  # of an object: more than any has
PLAIN_DECODING = "none"  # for `speculative.drafter`: decode without one
ONE_KIND = "one kind of structured outputs constraint"
OLDER = ("json", "regex", "choice", "grammar")  # kinds that vLLM called guided_json and so on
EMPTY: Sequence[object] = (False, "", [], {})  # 0 is equal to the first
# Fields of OpenAI's and vLLM's requests, and values with which they ask for nothing. Those that are neither here nor
# served are taken for mistakes.
UNSERVED: Mapping[str, Sequence[object]] = dict.fromkeys(
    (
        "add_special_tokens", "audio", "chat_template", "context_management", "conversation",
        "disable_additional_properties", "documents", "early_stopping", "echo", "functions", "kv_transfer_params",
        "logits_processors", "max_tool_calls", "mm_processor_kwargs", "moderation", "prediction",
        "previous_response_id", "priority", "prompt_embeds", "request_id", "return_tokens_as_token_ids",
        "structural_tag", "top_logprobs", "use_beam_search", "vllm_xargs", "web_search_options",
    ), EMPTY,
) | {
    "function_call": ("none", "auto"), "include_reasoning": (False, True), "length_penalty": (1,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "verbosity": ("medium",),
}  # fmt: skip


def deep(value: object) -> bool:
    """Whether it is nested deeper than anything may be."""
    level = [value]
    for _ in range(DEEPEST):
        parts = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [part for within in parts for part in within]
    return bool(level)


def _unicode(text: str) -> str:
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


def _schema(value: object) -> object:
    if not isinstance(value, str | dict):
        raise ValueError("it must be a JSON schema: an object, or the text of one")
    return value


def _few(value: object) -> object:
    """Refuses many entries before each of them is found wrong by itself."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"it must have at most {MAX_ENTRIES} entries, not {len(value)}")
    return value


Text = Annotated[str, AfterValidator(_unicode)]
Schema = Annotated[Text | dict[str, Any], BeforeValidator(_schema)]
Name = Annotated[str, Field(max_length=1000), AfterValidator(_unicode)]
NO_BOOLEAN = BeforeValidator(_no_boolean)
Whole = Annotated[int, NO_BOOLEAN]
# Where a type is nested in another, Field must stand before NO_BOOLEAN: else pydantic writes `ge` and `le` into the
# OpenAPI document instead of JSON Schema's `minimum` and `maximum`.
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False), NO_BOOLEAN]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), NO_BOOLEAN]
Likely = Annotated[int, Field(ge=0, le=MOST_LIKELY), NO_BOOLEAN]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
# Of a long list only the first fault is wanted.
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Some = Annotated[str, Field(min_length=1), AfterValidator(_unicode)]  # in this order an empty one is still "a string"


def _nothing(value: object) -> object:
    """Refuses what is not served."""
    if value:
        raise PydanticKnownError("too_long", {"field_type": "List", "max_length": 0, "actual_length": 1})
    return None


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


def _body_of(*records: type, without: tuple[str, ...] = ()) -> Any:
    """A body with the options of dataclasses: what is left out, or null, has the default of these."""
    found = {one.name: (one, kinds) for record in records for one, kinds, _ in typed(record)}
    made = {name: _field(one, kinds) for name, (one, kinds) in found.items() if name not in without}
    return create_model("Options", __base__=Body, **made)


def _field(option: "dataclasses.Field[Any]", kinds: tuple[Any, ...]) -> Any:
    (kind, *_), said = kinds, option.metadata
    ranges = {name: said[name] for name in ("ge", "gt", "le") if name in said}
    if kind in (int, float):
        kind = Annotated[kind, Field(**ranges, allow_inf_nan=False if kind is float else None), NO_BOOLEAN]
    else:
        kind = {bool: StrictBool, str: Name}.get(kind, kind)
    left_out = option.default is None or isinstance(option.default, LeftOut)
    names = [option.name, *(short for short, name in ALIASES.items() if name == option.name)]
    return kind | None if left_out else kind, Field(
        None if left_out else option.default,
        validation_alias=AliasChoices(*names) if names[1:] else None,
        description=said["description"],
    )


class Speculative(_body_of(Speculation)):  # type: ignore[misc]  # made when it is imported
    """How an output is made; whatever it says, exact methods keep the model's distribution."""

    drafter: str | None = Field(None, max_length=200, description='A drafter\'s name, "none", or "auto": the fastest.')
    trace: StrictBool = Field(False, description="Report how each token was made, and what the output cost.")


class StreamOptions(Body):
    """What a stream contains besides its tokens."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = Field(False, description="With include_usage: in each chunk.")
    include_obfuscation: StrictBool = False  # accepted, and without effect


class JsonSchema(Body):
    """Of which an answer is to be."""

    name: Name
    description: str | None = None
    asked: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = Field(None, description="Without effect: every schema is kept to.")


class ResponseFormat(Body):
    """What an answer is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.asked is None):
            raise ValueError("json_schema must be provided when type is 'json_schema', with a schema")
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """As of `StructuredOutputs`."""
        schema = self.json_schema.asked if self.json_schema is not None else None
        asked: dict[str, dict[str, Any]] = {"json_object": {"json_object": True}, "json_schema": {"json": schema}}
        return asked.get(self.type, {})


class StructuredOutputs(Body):
    """What an output is to be, one of the first five."""

    json_schema: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    grammar: Text | None = Field(None, description="Lark as llguidance has it, or GBNF.")
    json_object: StrictBool | None = None
    whitespace_pattern: Text | None = Field(None, description="Of JSON: what may stand between its parts.")
    disable_any_whitespace: StrictBool = Field(False, description="Of JSON: nothing may.")
    disable_fallback: StrictBool = False  # accepted, and without effect

    @property
    def asked(self) -> dict[str, Any]:
        """Those of the first five that are given."""
        given = self.model_dump(by_alias=True, exclude_defaults=True)
        return {name: given[name] for name in (*OLDER, "json_object") if given.get(name, False) is not False}


class GenerationBody(_body_of(Sampling, Output, Reading, without=("max_tokens",))):  # type: ignore[misc]
    """The fields that both endpoints have."""

    model: str | None = Field(None, max_length=500, description="May be left out where only one is served.")
    n: Whole = Field(1, ge=1, le=128)
    logit_bias: Annotated[dict[Annotated[int, Field(ge=0, lt=2**31)], Bias], BeforeValidator(_few)] | None = None
    stop: Some | Annotated[list[Some], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_IDS, fail_fast=True)
    allowed_token_ids: Ids | None = None
    bad_words: list[Some] = Field([], max_length=MAX_IDS, fail_fast=True)
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool = Field(False, description="Also the ids of prompt and output.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(None, description="vLLM's older name of structured_outputs.json.")
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    speculative: Speculative = Speculative.model_validate({})
    # Accepted, and without effect on the output.
    guided_decoding_backend: str | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("`prompt_logprobs` are not available when `stream=True`.")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def asks_of_prompts(self) -> bool:
        """Whether the reply tells how the prompts were tokenized."""
        return self.return_token_ids or self.continuous_usage

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """One by one."""

    @property
    @abstractmethod
    def max_output_tokens(self) -> int:
        """Of each output."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Candidates that are reported for each token; None: no log-probabilities at all."""

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_logprobs`, for each token of the prompt."""
        return cast("int | None", self.prompt_logprobs)

    @property
    def echoes_tokens(self) -> bool:
        """Whether the output begins with the tokens of the prompt, as they were read."""
        return False

    def echo_of(self, index: int) -> str:
        """The prompt that the text of a choice begins with, if that was asked for."""
        return ""

    def output_requests(self, model: str, request_id: str) -> tuple[OutputRequest, ...]:
        """One for each choice, those of the first prompt first.

        Raises:
            RequestError: fields do not go together.
        """
        first, *others = self.prompts
        generation = self._generation(first)
        different = [generation, *(replace(generation, prompt=prompt) for prompt in others)]
        each = [one.unchecked(choice=choice) for one in different for choice in range(self.n)]
        ids = [request_id] if len(each) == 1 else [f"{request_id}.{index}" for index in range(len(each))]
        chosen = self.speculative.drafter
        drafter, trace = (DECODE_PLAINLY if chosen == PLAIN_DECODING else chosen), self.speculative.trace
        return tuple(OutputRequest(id, model, one, drafter, trace) for id, one in zip(ids, each, strict=True))

    def _generation(self, prompt: Prompt) -> GenerationRequest:
        sampling: dict[str, Any] = given_of(SamplingOptions, self) | {
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
        }
        try:
            options = SamplingOptions(**sampling | {"grammar": self._grammar()})
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error)) from error
        changed: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": self.max_output_tokens,
            "options": options,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
        }
        return GenerationRequest(
            **given_of(GenerationRequest, self) | given_of(GenerationRequest, self.speculative) | changed
        )

    def _grammar(self) -> Grammar | None:
        """What the output is to be, whichever way it is said; raises ValueError."""
        format, outputs = self.response_format, self.structured_outputs
        older = {name: value for name in OLDER if (value := getattr(self, f"guided_{name}")) is not None}
        ways = [older, {} if format is None else format.asked, {} if outputs is None else outputs.asked]
        given = [one for way in ways for one in way.items()]
        if outputs is not None and not given:
            raise RequestError(f"You must use {ONE_KIND} but none are specified", "structured_outputs")
        if len(given) > 1:
            kinds = ", ".join(name for name, _ in given)
            raise RequestError(f"You can only use {ONE_KIND} but multiple are specified: {kinds}", "structured_outputs")
        pattern = (outputs and outputs.whitespace_pattern) or self.guided_whitespace_pattern
        space: dict[str, Any] = {} if pattern is None else {"whitespace_pattern": pattern}
        space |= {"whitespace_flexible": False} if outputs is not None and outputs.disable_any_whitespace else {}
        for kind, value in given:
            if kind in ("json", "json_object"):
                return Grammar.json({"type": "object"} if kind == "json_object" else value, **space)
            return Grammar.choice(value) if kind == "choice" else Grammar(kind, value)
        return None


def given_of(record: type, body: Body) -> dict[str, Any]:
    """What a body gives of the fields of a record, lists as tuples; what is left out is missing."""
    named = ((one.name, getattr(body, one.name)) for one in fields(record) if one.name in type(body).model_fields)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in named if value is not None}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), NO_BOOLEAN] | None = 16
    logprobs: Likely | None = None
    echo: StrictBool = False
    add_special_tokens: StrictBool = Field(True, description="Those that every prompt begins with, before a text.")
    best_of: Whole | None = Field(None, description="Not served: must be n, or be left out.")
    suffix: Literal[""] | None = Field(None, description="Not served.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _of_any_kind(cls, prompt: object) -> object:
        if not isinstance(prompt, str | list):
            raise ValueError("it must be a text, a list of token ids, or a list of either")
        return prompt

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not served: leave it out, or make it n")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):  # then all are: looking at each of a million would hold up the event loop
            return [tuple(self.prompt)]
        return [part if isinstance(part, str) else tuple(part) for part in self.prompt]

    @property
    def max_output_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        likely = super().num_prompt_logprobs
        return max(self.logprobs or 0, likely or 0) if self.echoes_tokens else likely

    @property
    def echoes_tokens(self) -> bool:
        texts = self.truncate_prompt_tokens is None and all(isinstance(prompt, str) for prompt in self.prompts)
        return self.echo and (self.logprobs is not None or not texts)

    def echo_of(self, index: int) -> str:
        """As `GenerationBody.echo_of`; empty if it is of tokens."""
        return str(self.prompts[index // self.n]) if self.echo and not self.echoes_tokens else ""


class FunctionBody(Part):
    """What a model may call."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object; by default it has nothing.")
    strict: StrictBool | None = Field(
        None, description="With tool_choice auto: arguments are by the schema, not any object."
    )

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
        if names and known and all(isinstance(one, str) for one in names):
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

    name: Text
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

    role: Annotated[Text, Field(min_length=1, max_length=100)]
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
            calls = [one.shown for one in self.tool_calls or ()]
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
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_few)] | None = None
    reasoning_effort: Effort | None = Field(None, description="For the template; none: enable_thinking is false, too.")
    tools: list[ToolBody] = Field([], max_length=MAX_TOOLS, fail_fast=True)

    @field_validator("tools")
    @classmethod
    def _differ(cls, tools: list[ToolBody]) -> list[ToolBody]:
        if twice := [name for name, count in Counter(one.function.name for one in tools).items() if count > 1]:
            raise ValueError(f"their names must differ, and {twice[0]!r} is there more than once")
        return tools

    @property
    def usable(self) -> list[FunctionBody]:
        """What the model is told that it may call."""
        return [one.function for one in self.tools]

    def chat_of(self, messages: Sequence[MessageBody]) -> Chat:
        tools = [{"type": "function", "function": one.model_dump(exclude_none=True)} for one in self.usable]
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        effort |= {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        given = {**effort, **(self.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}
        settings = json.dumps(given) if given else ""
        said = tuple(one.message for one in messages)
        return Chat(said, self.add_generation_prompt, self.continue_final_message, settings)


class ChatBody(TemplateFields, GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Tokens | None = Field(None, description="By default the model's own setting, or what fits.")
    max_tokens: Tokens | None = Field(None, description="The older name of the same.")
    logprobs: StrictBool = False
    top_logprobs: Likely | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = Field(None, description="false: at most one call.")
    include_reasoning: StrictBool = True
    _form: AnswerForm = PrivateAttr(default_factory=AnswerForm)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self._mode not in ("none", "auto") and not self.tools:
            raise ValueError("When using `tool_choice`, `tools` must be set.")
        if not {*self._named} <= {one.function.name for one in self.tools}:
            raise ValueError("The tool specified in `tool_choice` does not match any of the specified `tools`")
        return self

    @property
    def usable(self) -> list[FunctionBody]:
        """As of `TemplateFields`."""
        if self._mode.startswith("allowed"):
            return [one for one in super().usable if one.name in self._named]
        return [] if self._mode == "none" else super().usable

    @property
    def form(self) -> AnswerForm:
        """How the answers are written."""
        return self._form

    def write(self, tools: ToolFormat | None, reasoning: Reasoning | None) -> None:
        """Says how the model writes calls, and its reasoning after this prompt."""
        most = 1 if self.parallel_tool_calls is False or self._mode == "named" else None
        self._form = AnswerForm(tools if self.usable else None, reasoning, most=most)

    @property
    def _mode(self) -> str:
        """As of `read_choice`."""
        return read_choice(self.tool_choice or "auto")[0]

    @property
    def _named(self) -> list[str]:
        """Functions that `tool_choice` names."""
        return read_choice(self.tool_choice or "auto")[1]

    def _grammar(self) -> Grammar | None:
        """With `required` and a name the calls are by the schemas; with `auto` those of strict functions, and others
        have any object as arguments. Names too many for a grammar are left to the model then."""
        content, must = super()._grammar(), self._mode in ("required", "named", "allowed required")
        self._form = replace(self._form, bare=must or content is not None, must=must)
        chosen = [one for one in self.usable if not self._named or one.name in self._named]
        functions = [one.function(not (must or one.strict)) for one in chosen]
        try:
            return self._form.grammar(functions, not must, content)
        except ValueError:
            if must or content is not None or any(one.strict for one in chosen):
                raise
            return None

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """As `GenerationBody.prompts`: takes as long as they are large."""
        return [self.chat_of(self.messages)]

    @property
    def num_outputs(self) -> int:
        """As `GenerationBody.num_outputs`."""
        return self.n

    @property
    def max_output_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or WHAT_FITS

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


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
    tokens: Ids
