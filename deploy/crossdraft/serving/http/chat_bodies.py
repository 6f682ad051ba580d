"""The bodies of /v1/chat/completions."""

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from crossdraft.serving.http.bodies import MOST_TOKENS, Asked, Body, Likely, Text, Tokens

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
