"""The bodies of requests: OpenAI's fields, vLLM's extensions by vLLM's names, and `speculative`.

What is neither a list nor OpenAI's alone is stated in `config.request`. A body is checked by pydantic and then makes
its `OutputRequest`s, one for each prompt and choice.
"""

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from crossdraft.client import GenerationRequest, RequestError, SamplingOptions
from crossdraft.config import MOST_LIKELY
from crossdraft.config.fields import LeftOut, LeftOutInt, typed
from crossdraft.config.request import ALIASES, Output, Reading, Sampling, Speculation
from crossdraft.serving.backend import OutputRequest
from crossdraft.serving.http.chats import (
    MAX_TOKENS,
    NO_BOOLEAN,
    Body,
    FunctionBody,
    Ids,
    Messages,
    Some,
    TemplateFields,
    Text,
    TokenId,
    Tokens,
    ToolChoice,
    few,
    read_choice,
    unicode,
)
from crossdraft.text.answers import AnswerForm, Reasoning, ToolFormat
from crossdraft.types.request import Grammar, Prompt

WHAT_FITS = LeftOutInt(MAX_TOKENS)
MAX_STOPS = 16
MAX_IDS = 1024  # of stop_token_ids, and of bad_words
MAX_PROMPTS = 2048
GRAMMAR = "structured_outputs"  # the field of a request that errors of grammars are about
OF_FUNCTION = re.compile(r"\bfunction_(\d{1,4})_\w*_arguments\b")  # a rule of `text.answers`, in an error
ONE_KIND = "one kind of structured outputs constraint"
KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of constraints


def _schema(value: object) -> object:
    if not isinstance(value, str | dict):
        raise ValueError("it must be a JSON schema: an object, or the text of one")
    return value


Schema = Annotated[Some | dict[str, Any], BeforeValidator(_schema)]
Name = Annotated[str, Field(max_length=1000), AfterValidator(unicode)]
Whole = Annotated[int, NO_BOOLEAN]
# Where a type is nested in another, Field must stand before NO_BOOLEAN: else pydantic writes `ge` and `le` into the
# OpenAPI document instead of JSON Schema's `minimum` and `maximum`.
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False), NO_BOOLEAN]
Likely = Annotated[int, Field(ge=0, le=MOST_LIKELY), NO_BOOLEAN]


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

    @model_validator(mode="before")
    @classmethod
    def _named_once(cls, given: Any) -> Any:
        for short, name in ALIASES.items():
            if isinstance(given, dict) and short in given and name in given:
                raise ValueError(f"{short} is a short name of {name}: give one of them")
        return given


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
    regex: Some | None = None
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    grammar: Some | None = Field(None, description="Lark as llguidance has it, or GBNF.")
    json_object: StrictBool | None = None
    whitespace_pattern: Text | None = Field(None, description="Of JSON: what may stand between its parts.")
    disable_any_whitespace: StrictBool = Field(False, description="Of JSON: nothing may.")
    disable_fallback: StrictBool = False  # accepted, and without effect

    @property
    def asked(self) -> dict[str, Any]:
        """Those of the first five that are given."""
        given = self.model_dump(by_alias=True, exclude_defaults=True)
        return {name: given[name] for name in KINDS if given.get(name, False) is not False}


class GenerationBody(_body_of(Sampling, Output, Reading, without=("max_tokens",))):  # type: ignore[misc]
    """The fields that both endpoints have."""

    model: str | None = Field(None, max_length=500, description="May be left out where only one is served.")
    n: Whole = Field(1, ge=1, le=128)
    logit_bias: Annotated[dict[Annotated[int, Field(ge=0, lt=2**31)], Bias], BeforeValidator(few)] | None = None
    stop: Some | Annotated[list[Some], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_IDS, fail_fast=True)
    allowed_token_ids: Ids | None = None
    bad_words: list[Some] = Field([], max_length=MAX_IDS, fail_fast=True)
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool = Field(False, description="Also the ids of prompt and output.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: Speculative = Speculative.model_validate({})
    # Accepted, and without effect on the output.
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(few)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    _grammar_in: str = PrivateAttr(GRAMMAR)  # the field that says what the output is to be
    _form: AnswerForm = PrivateAttr(default_factory=AnswerForm)

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
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def form(self) -> AnswerForm:
        """How the answers are written."""
        return self._form

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
    def echoes_tokens(self) -> bool:
        """Whether the output begins with the tokens of the prompt, as they were read."""
        return False

    def echo_of(self, index: int) -> str:
        """The prompt that the text of a choice begins with, if that was asked for."""
        return ""

    def output_requests(self, model: str, request_id: str) -> tuple[OutputRequest, ...]:
        """One for each choice, those of the first prompt first. Raises RequestError: fields do not go together."""
        first, *others = self.prompts
        generation = self._generation(first)
        different = [generation, *(replace(generation, prompt=prompt) for prompt in others)]
        each = [one.unchecked(choice=choice) for one in different for choice in range(self.n)]
        ids = [request_id] if len(each) == 1 else [f"{request_id}.{index}" for index in range(len(each))]
        drafter, trace = self.speculative.drafter, self.speculative.trace
        return tuple(OutputRequest(id, model, one, drafter, trace) for id, one in zip(ids, each, strict=True))

    def field_of(self, error: RequestError) -> str | None:
        """The path of the field that an error is about; None if it is about none, or several."""
        if error.field in Speculative.model_fields:
            return f"speculative.{error.field}"
        return self._grammar_in if error.field == GRAMMAR else error.field or None

    def _generation(self, prompt: Prompt) -> GenerationRequest:
        sampling: dict[str, Any] = given_of(SamplingOptions, self) | {
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
        }
        try:
            sampling["grammar"] = self._grammar()
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error), GRAMMAR) from error
        likely, echoed = self.prompt_logprobs, self.num_logprobs or 0
        changed: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": self.max_output_tokens,
            "options": SamplingOptions(**sampling),
            "stop": self.stops,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": max(echoed, likely or 0) if self.echoes_tokens else likely,
        }
        return GenerationRequest(**given_of(GenerationRequest, self, self.speculative) | changed)

    def _grammar(self) -> Grammar | None:
        """What the output is to be, whichever way it is said; raises ValueError."""
        format, outputs = self.response_format, self.structured_outputs
        formed = {} if format is None else format.asked
        given = [*formed.items(), *({} if outputs is None else outputs.asked).items()]
        if outputs is not None and not given:
            raise RequestError(f"You must use {ONE_KIND} but none are specified", GRAMMAR)
        if len(given) > 1:
            kinds = ", ".join(name for name, _ in given)
            raise RequestError(f"You can only use {ONE_KIND} but multiple are specified: {kinds}", GRAMMAR)
        self._grammar_in = "response_format" if formed else GRAMMAR
        space: dict[str, Any] = {}
        if outputs is not None and outputs.whitespace_pattern:
            space["whitespace_pattern"] = outputs.whitespace_pattern
        if outputs is not None and outputs.disable_any_whitespace:
            space["whitespace_flexible"] = False
        for kind, value in given:
            if kind in ("json", "json_object"):
                return Grammar.json({"type": "object"} if kind == "json_object" else value, **space)
            return Grammar.choice(value) if kind == "choice" else Grammar(kind, value)
        return None


def given_of(record: type, *bodies: Body) -> dict[str, Any]:
    """What bodies give of the fields of a record, lists as tuples; what is left out is missing."""
    known = ((one.name, body) for one in fields(record) for body in bodies if one.name in type(body).model_fields)
    named = ((name, getattr(body, name)) for name, body in known)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in named if value is not None}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), NO_BOOLEAN] | None = 16
    logprobs: Likely | None = None
    echo: StrictBool = False
    add_special_tokens: StrictBool = Field(True, description="Those that every prompt begins with, before a text.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _of_any_kind(cls, prompt: object) -> object:
        if not isinstance(prompt, str | list):
            raise ValueError("it must be a text, a list of token ids, or a list of either")
        return prompt

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
    def echoes_tokens(self) -> bool:
        texts = self.truncate_prompt_tokens is None and all(isinstance(prompt, str) for prompt in self.prompts)
        return self.echo and (self.logprobs is not None or not texts)

    def echo_of(self, index: int) -> str:
        """As `GenerationBody.echo_of`; empty if it is of tokens."""
        return str(self.prompts[index // self.n]) if self.echo and not self.echoes_tokens else ""


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

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @field_validator("tool_choice")
    @classmethod
    def _of_tools(cls, choice: Any, info: ValidationInfo) -> Any:
        """Of those that are given; where one of these is wrong itself, that is said."""
        mode, names = read_choice(choice)
        tools = info.data.get("tools")
        if mode not in ("none", "auto") and tools == []:
            raise ValueError("When using `tool_choice`, `tools` must be set.")
        if tools is not None and not {*names} <= {tool.function.name for tool in tools}:
            raise ValueError("The tool specified in `tool_choice` does not match any of the specified `tools`")
        return choice

    @property
    def usable(self) -> list[FunctionBody]:
        """As of `TemplateFields`."""
        mode, named = self._choice
        if mode.startswith("allowed"):
            return [one for one in super().usable if one.name in named]
        return [] if mode == "none" else super().usable

    def write(self, tools: ToolFormat | None, reasoning: Reasoning | None) -> None:
        """Says how the model writes calls, and its reasoning after this prompt."""
        most = 1 if self.parallel_tool_calls is False or self._choice[0] == "named" else None
        self._form = AnswerForm(tools if self.usable else None, reasoning, most=most)

    @property
    def _choice(self) -> tuple[str, list[str]]:
        """As of `read_choice`."""
        return read_choice(self.tool_choice or "auto")

    def _grammar(self) -> Grammar | None:
        """With `required` and a name the calls are by the schemas; with `auto` those of strict functions, and others
        have any object as arguments. Names too many for a grammar are left to the model then."""
        content, must = super()._grammar(), self._choice[0] in ("required", "named", "allowed required")
        self._form = replace(self._form, bare=must or content is not None, must=must)
        chosen = self._chosen
        self._grammar_in = self._grammar_in if content is not None else "tools"
        functions = [one.function(not (must or one.strict)) for one in chosen]
        try:
            return self._form.grammar(functions, not must, content)
        except ValueError:
            if must or content is not None or any(one.strict for one in chosen):
                raise
            return None

    def field_of(self, error: RequestError) -> str | None:
        """As of `GenerationBody`; of a schema of a tool it is that."""
        found = OF_FUNCTION.search(str(error)) if error.field == GRAMMAR and self._grammar_in == "tools" else None
        if found is None or int(found[1]) >= len(self._chosen):
            return super().field_of(error)
        at = [tool.function for tool in self.tools].index(self._chosen[int(found[1])])
        return f"tools.{at}.function.parameters"

    @property
    def _chosen(self) -> list[FunctionBody]:
        """What may be called, or must be."""
        _, named = self._choice
        return [one for one in self.usable if not named or one.name in named]

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
