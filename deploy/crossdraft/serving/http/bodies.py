"""The bodies of requests: OpenAI's fields, vLLM's further ones by its names, and `speculative`."""

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

from crossdraft.pipeline import Overlap
from crossdraft.verification.exchange import MOST_LIKELY, MOST_PROPOSALS

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
Proposals = Annotated[StrictInt, Field(ge=1, le=MOST_PROPOSALS)]
MaybeProposals = Annotated[StrictInt, Field(ge=0, le=MOST_PROPOSALS)]
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
    k: Proposals = Field(5, description="Proposals in a lock-step round.")
    drafter: str | None = Field(None, max_length=200, description='One of the model\'s drafters, or "none".')
    drafter_temperature: Temperature | None = Field(None, description="By default the target's.")
    overlap: Overlap = Field(Overlap.AUTO, description="Whether the drafter drafts on while the target verifies.")
    window: Proposals | None = Field(None, description="Most proposals ahead of what is verified.")
    wait: MaybeProposals | None = Field(None, description="Proposals that a pass waits for.")
    branches: MaybeProposals | None = Field(None, description="Proposals of each prepared continuation.")
    branch_width: Proposals | None = Field(None, description="Prepared continuations for each proposal.")
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
