"""What the API answers: OpenAI's objects, and `crossdraft` in them if a trace was asked for.

Fields without a default are always there, if only as null; the others only where they are set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import BaseModel

from crossdraft.client import Kind, Reason, Statistics, Token
from crossdraft.serving.http.requests import Asking
from crossdraft.serving.outputs import Ended
from crossdraft.trace.live_spans import Span
from crossdraft.types.statistics import LaneFigures


class Usage(BaseModel):
    """Tokens of prompts and outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @staticmethod
    def of(prompt: int, completion: int) -> "Usage":
        """Their sum, too."""
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


Finish = Literal["stop", "length"]


class Lane(BaseModel):
    """What one session with a service cost. Where the service is stays with the server."""

    role: Literal["target", "drafter"]
    bytes_sent: int  # serialized
    bytes_received: int
    trip_counts: list[int]  # questions by the length of their round trip, without the model: `pipeline.trips.BOUNDS`
    trip_seconds: float  # of all together
    queued_seconds: float  # of these, waiting for the model
    model_seconds: float  # in the model, for all answers
    codec_seconds: float  # in which the orchestrator made and read messages
    open_seconds: float
    idle_seconds: float  # of these, without anything asked that was not answered
    lost: str  # how the service failed

    @staticmethod
    def of(lane: LaneFigures) -> "Lane":
        """Of one session."""
        trips = lane.trips
        figures: dict[str, object] = {"trip_counts": trips.counts, "trip_seconds": trips.seconds}
        figures["queued_seconds"] = trips.queued_seconds
        others = Lane.model_fields.keys() - figures.keys()
        return Lane.model_validate(figures | {name: getattr(lane, name) for name in others})


class Figures(BaseModel):
    """What an output cost, and how often the drafter was right."""

    method: str
    tokens: int
    passes: int
    epochs: int
    draft_tokens: int
    accepted: int
    corrected: int
    bonus: int
    row_misses: int
    tokens_per_pass: float
    acceptance: float  # share of the judged tokens
    seconds: float
    first_token_seconds: float
    tokens_per_second: float
    drafter_seconds: float  # in the drafter's model
    target_seconds: float
    wire_seconds: float
    verification_seconds: float
    idle_share: float  # of the target's time
    wire_bytes: int
    proposed_at: list[int]  # by place in a round, from the first on: rounds with a draft token there
    judged_at: list[int]  # ... in which it was accepted or refused
    accepted_at: list[int]  # ... in which it was accepted
    lanes: list[Lane]  # sessions with services, in the order of their opening
    branches_tried: int
    branches_hit: int
    drafter_lost: str
    drafters_lost: int
    targets_lost: int

    @staticmethod
    def of(statistics: Statistics) -> "Figures":
        """Those of an output."""
        wire = statistics.bytes_sent + statistics.bytes_received
        lanes = [Lane.of(lane) for lane in statistics.lanes]
        names = Figures.model_fields.keys() - {"wire_bytes", "lanes"}
        return Figures(wire_bytes=wire, lanes=lanes, **{name: getattr(statistics, name) for name in names})


class Trace(BaseModel):
    """How a token was made, or at the end what the output cost."""

    milliseconds: float  # since the request was read
    kind: Kind | None = None
    bytes: list[int] | None = None  # the token's own; its text may come later, in whole characters
    spans: list[Span] | None = None  # what the session has done since the chunk before
    statistics: Figures | None = None


class CompletionLogprobs(BaseModel):
    """Of each token of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters


class CompletionChoice(BaseModel):
    """One output, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    crossdraft: Trace | None = None


class Completion(BaseModel):
    """The answer of /v1/completions, or a chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    crossdraft: Trace | None = None


class LikelyToken(BaseModel):
    """A token and how probable it was."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(LikelyToken):
    """One that came out, and what else might have."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """Of each token of a message."""

    content: list[ChatToken]
    refusal: None = None


class ChatMessage(BaseModel):
    """What the model has said."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One output."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    crossdraft: Trace | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class Delta(BaseModel):
    """A piece of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one output."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(BaseModel):
    """A chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    crossdraft: Trace | None = None


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int  # tokens, as vLLM has it
    drafters: list[str]  # that `speculative` may name, the default first
    methods: list[str]
    chats: bool  # it has a chat template of its own


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Alive(BaseModel):
    """The answer of /health."""

    status: Literal["ok"]


class Ready(BaseModel):
    """The answer of /ready."""

    status: Literal["ready"]
    models: list[str]


# OpenAI's two formats, each for whole answers and for chunks of a stream.


@dataclass
class Written:
    """What there is of an output."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    begun: bool = False  # a chunk of it was sent
    ended: Ended | None = None

    def add(self, token: Token) -> None:
        """The next one."""
        self.text += token.text
        self.tokens.append(token)


class Format(Protocol):
    """How outputs are shown to a client. `trace` is set only where it was asked for."""

    def whole(self, written: Sequence[Written], usage: Usage) -> BaseModel:
        """All outputs, which have ended."""
        ...

    def piece(self, choice: int, before: Written, token: Token, trace: Trace | None) -> BaseModel:
        """A token; `before` is the output without it."""
        ...

    def end(self, choice: int, before: Written, ended: Ended, trace: Trace | None) -> BaseModel:
        """The end of an output."""
        ...

    def usage(self, usage: Usage | None) -> BaseModel:
        """The last chunk."""
        ...


class CompletionFormat:
    """Of /v1/completions."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def whole(self, written: Sequence[Written], usage: Usage) -> BaseModel:
        """As Format says."""
        return self._object([self._choice(index, one) for index, one in enumerate(written)], usage=usage)

    def piece(self, choice: int, before: Written, token: Token, trace: Trace | None) -> BaseModel:
        """As Format says; the first one has the echo."""
        echo = "" if before.begun else self._asking.echo(choice)
        known = of_completion([token], len(before.text)) if self._asking.logprobs else None
        return self._chunk(choice, echo + token.text, known, None, trace)

    def end(self, choice: int, before: Written, ended: Ended, trace: Trace | None) -> BaseModel:
        """As Format says."""
        echo = "" if before.begun else self._asking.echo(choice)
        return self._chunk(choice, echo, None, finish(ended), trace)

    def usage(self, usage: Usage | None) -> BaseModel:
        """As Format says."""
        return self._object([], usage=usage)

    def _choice(self, index: int, one: Written) -> CompletionChoice:
        assert one.ended is not None
        return CompletionChoice(
            index=index,
            text=self._asking.echo(index) + one.text,
            logprobs=of_completion(one.tokens, 0) if self._asking.logprobs else None,
            finish_reason=finish(one.ended),
            **_traced(figures_of(one.ended) if self._asking.trace else None),
        )

    def _chunk(
        self,
        index: int,
        text: str,
        known: CompletionLogprobs | None,
        reason: Finish | None,
        trace: Trace | None,
    ) -> Completion:
        choice = CompletionChoice(index=index, text=text, logprobs=known, finish_reason=reason)
        return self._object([choice], **_traced(trace), **_no_usage(self._asking))

    def _object(self, choices: list[CompletionChoice], **more: BaseModel | None) -> Completion:
        asking = self._asking
        fields = {"id": f"cmpl-{asking.id}", "created": asking.created, "model": asking.model, "choices": choices}
        return Completion.model_validate({"object": "text_completion", **fields, **more})


class ChatFormat:
    """Of /v1/chat/completions."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def whole(self, written: Sequence[Written], usage: Usage) -> BaseModel:
        """As Format says."""
        choices = [self._choice(index, one) for index, one in enumerate(written)]
        kept = self._head | {"object": "chat.completion", "choices": choices, "usage": usage}
        return ChatCompletion.model_validate(kept)

    def piece(self, choice: int, before: Written, token: Token, trace: Trace | None) -> BaseModel:
        """As Format says; the first one has the role."""
        known = of_chat([token]) if self._asking.logprobs else None
        return self._chunk(choice, _delta(before, token.text), known, None, trace)

    def end(self, choice: int, before: Written, ended: Ended, trace: Trace | None) -> BaseModel:
        """As Format says."""
        delta = Delta() if before.begun else _delta(before, "")
        return self._chunk(choice, delta, None, finish(ended), trace)

    def usage(self, usage: Usage | None) -> BaseModel:
        """As Format says."""
        return self._object([], usage=usage)

    @property
    def _head(self) -> dict[str, object]:
        asking = self._asking
        return {"id": f"chatcmpl-{asking.id}", "created": asking.created, "model": asking.model}

    def _choice(self, index: int, one: Written) -> ChatChoice:
        assert one.ended is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content=one.text, refusal=None),
            logprobs=of_chat(one.tokens) if self._asking.logprobs else None,
            finish_reason=finish(one.ended),
            **_traced(figures_of(one.ended) if self._asking.trace else None),
        )

    def _chunk(
        self,
        index: int,
        delta: Delta,
        known: ChatLogprobs | None,
        reason: Finish | None,
        trace: Trace | None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=known, finish_reason=reason)
        return self._object([choice], **_traced(trace), **_no_usage(self._asking))

    def _object(self, choices: list[ChatChunkChoice], **more: BaseModel | None) -> ChatChunk:
        kept = self._head | {"object": "chat.completion.chunk", "choices": choices, **more}
        return ChatChunk.model_validate(kept)


def finish(ended: Ended) -> Finish:
    """OpenAI's word for the end of an output."""
    return "stop" if ended.reason is Reason.STOP else "length"


def figures_of(ended: Ended) -> Trace:
    """What an output cost, for an answer that is no stream."""
    figures = Figures.of(ended.statistics)
    return Trace(milliseconds=1000 * figures.seconds, statistics=figures)


def _delta(before: Written, text: str) -> Delta:
    return Delta(content=text) if before.begun else Delta(role="assistant", content=text)


def _traced(trace: Trace | None) -> dict[str, Trace]:
    return {} if trace is None else {"crossdraft": trace}


def _no_usage(asking: Asking) -> dict[str, None]:
    """With usage asked for, chunks before the last say that they have none."""
    return {"usage": None} if asking.include_usage else {}


# Log-probabilities in OpenAI's two shapes.

NEVER = -9999.0  # OpenAI's for what has no probability worth a number; JSON has no infinity


def shown(token: int, raw: bytes) -> str:
    """A token as text, unlike any other's: its characters, else its bytes in OpenAI's spelling, else its id."""
    if not raw:
        return f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def of_chat(tokens: Sequence[Token]) -> ChatLogprobs:
    """Of the tokens of a message, or of a piece of it."""
    return ChatLogprobs(content=[_chat_token(token) for token in tokens])


def _chat_token(token: Token) -> ChatToken:
    likely = [_likely(other, raw, value) for other, raw, value in token.top]
    own = _likely(token.id, token.raw, token.log_probability)
    return ChatToken(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=likely)


def _likely(token: int, raw: bytes, value: float | None) -> LikelyToken:
    return LikelyToken(token=shown(token, raw), logprob=_finite(value), bytes=list(raw) or None)


def of_completion(tokens: Sequence[Token], offset: int) -> CompletionLogprobs:
    """Of tokens of a completion; `offset` characters of its text come before them."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return CompletionLogprobs(
        tokens=[shown(token.id, token.raw) for token in tokens],
        token_logprobs=[_finite(token.log_probability) for token in tokens],
        top_logprobs=[{shown(other, raw): _finite(value) for other, raw, value in token.top} for token in tokens],
        text_offset=offsets,
    )


def _finite(value: float | None) -> float:
    return NEVER if value is None else max(NEVER, value)
