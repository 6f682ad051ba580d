"""The bodies of requests: OpenAI's fields, vLLM's further ones by its names, and `speculative`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from crossdraft.client import GenerationRequest, Overlap, RequestError, SamplingOptions
from crossdraft.serving.http.errors import INVALID, RefusedError
from crossdraft.serving.outputs import Order
from crossdraft.types.messages import MOST_DRAFT_TOKENS, MOST_LIKELY
from crossdraft.types.request import Chat, Message

MOST_TOKENS = 2**20  # of an output; its target's context ends it before
MOST_STOPS = 16
MOST_PROMPTS = 2048


def _unicode(text: str) -> str:
    """JSON can write half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it is not Unicode text: {error.reason} at character {error.start}") from None
    return text


def _no_boolean(value: object) -> object:
    """Python counts true as 1."""
    if isinstance(value, bool):
        raise ValueError("it must be a number, not true or false")
    return value


Text = Annotated[str, AfterValidator(_unicode)]
NO_BOOLEAN = BeforeValidator(_no_boolean)
Number = Annotated[float, NO_BOOLEAN, Field(allow_inf_nan=False)]
Whole = Annotated[int, NO_BOOLEAN]
# Within another type limits come before what is checked first, or the document of the API has other names for them.
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False), NO_BOOLEAN]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), NO_BOOLEAN]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), NO_BOOLEAN]
Likely = Annotated[int, Field(ge=0, le=MOST_LIKELY), NO_BOOLEAN]
DraftTokens = Annotated[StrictInt, Field(ge=1, le=MOST_DRAFT_TOKENS)]
MaybeDraftTokens = Annotated[StrictInt, Field(ge=0, le=MOST_DRAFT_TOKENS)]
Ids = Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Some = Annotated[str, Field(min_length=1), AfterValidator(_unicode)]  # in this order a short one is called a string


class Body(BaseModel):
    """A JSON object in which every field is known. A field that is null is as one that is left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class Speculative(Body):
    """How an output is made; whatever it says, exact methods have the model's distribution."""

    method: str | None = Field(None, max_length=40, description="By default the best for the request.")
    k: DraftTokens = Field(5, description="Draft tokens in a lock-step round.")
    drafter: str | None = Field(None, max_length=200, description='One of the model\'s drafters, or "none".')
    drafter_temperature: Temperature | None = Field(None, description="By default the target's.")
    overlap: Overlap = Field(Overlap.AUTO, description="Whether the drafter drafts on while the target verifies.")
    window: DraftTokens | None = Field(None, description="Most draft tokens ahead of what is verified.")
    wait: MaybeDraftTokens | None = Field(None, description="Draft tokens that a pass waits for.")
    branches: MaybeDraftTokens | None = Field(None, description="Draft tokens of each prepared continuation.")
    branch_width: DraftTokens | None = Field(None, description="Prepared continuations for each draft token.")
    paths: Whole = Field(2, ge=1, le=16, description="Most guessed paths in a pass.")
    allow_inexact: StrictBool = Field(False, description="Let a method change the distribution.")
    trace: StrictBool = Field(False, description="Say of every token how it was made, and what the output cost.")


class StreamOptions(Body):
    """What a stream says besides its tokens."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # taken, and without effect


class Asked(Body):
    """What both kinds of request have."""

    model: str | None = Field(None, max_length=500, description="May be left out where only one is served.")
    n: Whole = Field(1, ge=1, le=128)
    temperature: Number = Field(1.0, ge=0)
    top_p: Number = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=-1, lt=2**31, description="0 or -1 is all.")
    min_p: Number = Field(0.0, ge=0, le=1)
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Annotated[Literal[0], NO_BOOLEAN] = Field(0, description="Not served: must be 0.")
    repetition_penalty: Number = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[Annotated[int, Field(ge=0, lt=2**31)], Bias] | None = None
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Some | Annotated[list[Some], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    speculative: Speculative = Speculative.model_validate({})
    # Taken, and without effect on the output.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Asked):
    """POST /v1/completions."""

    prompt: Some | Ids | Annotated[list[Some | Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    max_tokens: Tokens | None = 16
    logprobs: Likely | None = None
    echo: StrictBool = False
    best_of: Whole | None = Field(None, description="Not served: must be n, or be left out.")
    suffix: Literal[""] | None = Field(None, description="Not served.")

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not served: leave it out, or make it n")
        if self.echo and (self.logprobs is not None or not all(isinstance(prompt, str) for prompt in self.prompts)):
            raise ValueError("echo is served for prompts of text and without logprobs: leave one of them out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


# The bodies of /v1/chat/completions.

MOST_MESSAGES = 4096


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class MessageBody(Body):
    """What one side has said."""

    role: Annotated[Text, Field(min_length=1, max_length=100)]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None  # taken, and not shown to the model

    @property
    def text(self) -> str:
        """Its parts together."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Body):
    """Only text is served."""

    type: Literal["text"]


class ChatBody(Asked):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Tokens | None = Field(None, description="By default what fits.")
    max_tokens: Tokens | None = Field(None, description="The older name of the same.")
    logprobs: StrictBool = False
    top_logprobs: Likely | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[object], Field(max_length=0)] | None = Field(None, description="Not served.")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None  # taken, and without effect

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def most_tokens(self) -> int:
        """Of each output."""
        return self.max_completion_tokens or self.max_tokens or MOST_TOKENS


# From the bodies of requests to orders.

NO_DRAFTER = "none"


@dataclass(frozen=True)
class Asking:
    """A client's request, as orders and what to know for its reply."""

    id: str
    model: str
    orders: tuple[Order, ...]  # one for each choice, in the order of their indices
    prompts: int  # the choices of the first prompt come first
    include_usage: bool
    trace: bool
    logprobs: bool
    echoes: tuple[str, ...] = ()  # the prompts, if each choice begins with its own
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def echo(self, choice: int) -> str:
        """What a choice's text begins with."""
        return self.echoes[choice * self.prompts // len(self.orders)] if self.echoes else ""


def asking_completions(body: CompletionBody, model: str, request: str, most: int) -> Asking:
    """One order for each prompt and choice.

    Args:
        body: what the client sent.
        model: that is asked.
        request: its id.
        most: orders.

    Raises:
        RequestError: fields do not go together.
        RefusedError: there are too many choices.
    """
    prompts = [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompts]
    asked = _requests(body, prompts, body.max_tokens or 1, body.logprobs, most)
    echoes = tuple(prompt for prompt in prompts if isinstance(prompt, str)) if body.echo else ()
    orders = _orders(body, asked, model, request)
    trace = body.speculative.trace
    return Asking(request, model, orders, len(prompts), body.include_usage, trace, body.logprobs is not None, echoes)


def asking_chat(body: ChatBody, model: str, request: str, most: int) -> Asking:
    """The same for a chat."""
    chat = Chat(tuple(Message(_role(one.role), one.text) for one in body.messages))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = _requests(body, [chat], body.most_tokens, logprobs, most)
    orders = _orders(body, asked, model, request)
    return Asking(request, model, orders, 1, body.include_usage, body.speculative.trace, body.logprobs)


def _role(name: str) -> str:
    """OpenAI's newer name of the system is not known to templates."""
    return "system" if name == "developer" else name


def _requests(
    body: Asked, prompts: Sequence[str | tuple[int, ...] | Chat], max_tokens: int, logprobs: int | None, most: int
) -> list[GenerationRequest]:
    if len(prompts) * body.n > most:
        text = f"n and the number of prompts make {len(prompts) * body.n} outputs; at most {most} in one request"
        raise RefusedError(400, text, INVALID, "too_many_choices", "n")
    how = body.speculative
    try:
        options = _options(body)
    except ValueError as error:
        raise RequestError(str(error)) from error
    first = GenerationRequest(
        prompts[0],
        method=how.method,
        k=how.k,
        max_tokens=max_tokens,
        options=options,
        drafter_temperature=how.drafter_temperature,
        seed=None if body.seed is None else body.seed % 2**64,
        ignore_eos=body.ignore_eos,
        stop=body.stops,
        allow_inexact=how.allow_inexact,
        overlap=how.overlap,
        window=how.window,
        wait=how.wait,
        branches=how.branches,
        branch_width=how.branch_width,
        paths=how.paths,
        logprobs=logprobs,
    )
    return [replace(first, prompt=prompt, choice=choice) for prompt in prompts for choice in range(body.n)]


def _options(body: Asked) -> SamplingOptions:
    return SamplingOptions(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=tuple((body.logit_bias or {}).items()),
    )


def _orders(body: Asked, asked: Sequence[GenerationRequest], model: str, request: str) -> tuple[Order, ...]:
    drafter = "" if body.speculative.drafter == NO_DRAFTER else body.speculative.drafter
    names = [request] if len(asked) == 1 else [f"{request}.{place}" for place in range(len(asked))]
    return tuple(
        Order(name, model, one, drafter, body.speculative.trace) for name, one in zip(names, asked, strict=True)
    )
