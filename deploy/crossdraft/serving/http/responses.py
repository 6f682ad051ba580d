"""What the API answers: OpenAI's objects, with `crossdraft` in them if a trace was asked for.

Fields without a default are always written, if only as null; the others only where they are set.
"""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_origin, get_type_hints

from pydantic import AliasPath, BaseModel, Field, create_model

from crossdraft.client import Kind, Reason, Statistics, Token
from crossdraft.rpc.errors import without_addresses
from crossdraft.rpc.generation import Committed, OutputEnded, PromptTokens
from crossdraft.serving.http.requests import ChatBody, CompletionBody, GenerationBody
from crossdraft.text.answers import AnswerParser, Said, What
from crossdraft.trace.timeline import Span
from crossdraft.types.output import Names, PromptToken


class Usage(BaseModel):
    """Tokens of prompts and outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @staticmethod
    def of(prompt: int, completion: int) -> "Usage":
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


Finish = Literal["stop", "length", "tool_calls"]


class Lane(BaseModel, from_attributes=True):
    """What one session with a service cost, without the service's address."""

    # Made from `types.statistics.LaneFigures`, where figures of round trips are in `trips`.

    role: Literal["target", "drafter"]
    bytes_sent: int  # serialized
    bytes_received: int
    # Requests by round trip time without the model, in the buckets of `types.statistics.BOUNDS`.
    trip_counts: Annotated[list[int], Field(validation_alias=AliasPath("trips", "counts"))]
    trip_seconds: Annotated[float, Field(validation_alias=AliasPath("trips", "seconds"))]  # of all together
    # Of these, waiting for the model.
    queued_seconds: Annotated[float, Field(validation_alias=AliasPath("trips", "queued_seconds"))]
    model_seconds: float  # in the model, for all replies
    codec_seconds: float  # encoding and decoding messages, in the orchestrator
    open_seconds: float
    idle_seconds: float  # of these, without a request in flight
    lost: str  # how the service failed


# Of these `types.statistics` says what they are; sequences are lists here.
SHOWN_FIGURES = (
    "method", "tokens", "passes", "epochs", "draft_tokens", "accepted", "corrected", "bonus", "row_misses",
    "tokens_per_pass", "acceptance", "seconds", "first_token_seconds", "tokens_per_second", "drafter_seconds",
    "target_seconds", "wire_seconds", "verification_seconds", "idle_share", "wire_bytes", "drafted_at", "judged_at",
    "accepted_at", "lanes", "branches_tried", "branches_hit", "drafter", "drafter_lost", "undrafted", "drafters_lost",
    "targets_lost",
)  # fmt: skip


def _kind(name: str) -> Any:
    """Of a figure, which is a field of Statistics, or a property of it."""
    kind = get_type_hints(Statistics).get(name, float)
    return {"lanes": list[Lane], "wire_bytes": int}.get(name, list[int] if get_origin(kind) is tuple else kind)


class Figures(create_model("_Figures", **{name: (_kind(name), ...) for name in SHOWN_FIGURES})):  # type: ignore[misc]
    """What an output cost, and how often the drafter was right."""

    @staticmethod
    def of(statistics: Statistics) -> "Figures":
        wire = statistics.bytes_sent + statistics.bytes_received
        lost = without_addresses(statistics.drafter_lost)
        values = {name: getattr(statistics, name, None) for name in SHOWN_FIGURES}
        return Figures(**values | {"wire_bytes": wire, "drafter_lost": lost})


class Trace(BaseModel):
    """How a token was made; in the last chunk, what the output cost."""

    milliseconds: float  # since the request was read
    kind: Kind | None = None
    bytes: list[int] | None = None  # of the token; its text may come with a later one, in whole characters
    spans: list[Span] | None = None  # what the session has done since the chunk before
    statistics: Figures | None = None


class PromptLogprob(BaseModel):
    """Of a token at a place of the prompt, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # for each token of the prompt, by id; the first has none


class CompletionLogprobs(BaseModel):
    """Log-probabilities of each token of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters


class CompletionChoice(BaseModel):
    """One output, or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    crossdraft: Trace | None = None


class Completion(BaseModel):
    """The answer of /v1/completions, or a chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None  # `speculative_decoding`
    crossdraft: Trace | None = None


class LikelyToken(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(LikelyToken):
    """An emitted token, and the most probable ones in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of each token of a message."""

    content: list[ChatToken]
    refusal: None = None


class CalledFunction(BaseModel):
    """What is called; in a chunk, a part of it."""

    name: str | None = None
    arguments: str  # JSON, as the model writes it


class ToolCall(BaseModel):
    """A call of a tool; in a chunk, a part of it."""

    index: int | None = None  # in a chunk
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One output."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = None
    crossdraft: Trace | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None  # `speculative_decoding`
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(BaseModel):
    """A chunk of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(BaseModel):
    """A chunk of one output."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None  # `speculative_decoding`
    prompt_token_ids: list[int] | None = None
    crossdraft: Trace | None = None


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the model's first name
    max_model_len: int  # tokens, as vLLM has it
    drafters: list[str]  # that `speculative` may name
    auto: str | None  # of them, the one that `auto` stands for now; others are tried now and then
    methods: list[str]
    chats: bool  # it has a chat template of its own
    detail: list[str]  # what its targets and drafters cannot do now, and why


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Alive(BaseModel):
    """The answer of /health."""

    status: Literal["ok"]


class Tokenized(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class Ready(BaseModel):
    """The answer of /ready."""

    status: Literal["ready"]
    models: list[str]
    detail: list[str] | None = None  # what is not as it should be, though models can be served


BodyT = TypeVar("BodyT", bound=GenerationBody)
Shown = PromptTokens | Committed | OutputEnded
FINISH: dict[Reason, Finish] = {Reason.STOP: "stop"}  # all others are "length"


@dataclass
class PartialOutput:
    """What has come of an output."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt: list[PromptToken] = field(default_factory=list)
    begun: bool = False  # a chunk of it was sent
    ended: OutputEnded | None = None
    answer: AnswerParser | None = None  # reads what its text consists of, if it may have parts
    said: list[Said] = field(default_factory=list)  # those parts
    new: Sequence[Said] = ()  # of them, what the latest item brought

    def hear(self, item: "Shown") -> None:
        """Reads the parts in what comes next."""
        if self.answer is not None:
            tokens, marks = item.tokens if isinstance(item, Committed) else (), self.answer.form.marks
            text = "".join(token.text or _mark(token, marks) for token in tokens)
            self.new = self.answer.end() if isinstance(item, OutputEnded) else self.answer.feed(text)
            self.said += self.new

    def take(self, item: "Shown", echoed: bool) -> None:
        """What comes next; with the prompt's tokens the text begins if they are echoed."""
        match item:
            case PromptTokens():
                self.text += text_of(item.tokens) if echoed else ""
                self.prompt += item.tokens
            case Committed():
                self.text += text_of(item.tokens)
                self.tokens += item.tokens
            case OutputEnded():
                self.ended = item


class Format(ABC, Generic[BodyT]):
    """Writes the replies to one request."""

    PREFIX: ClassVar[str]  # of ids

    def __init__(
        self, body: BodyT, model: str, request_id: str, prompts: Sequence[Sequence[int]] = (), measured: bool = False
    ) -> None:
        self.body = body
        self._prompts = prompts
        self._measured = measured
        self._head: dict[str, Any] = {"id": f"{self.PREFIX}-{request_id}", "created": int(time.time()), "model": model}

    def output(self) -> PartialOutput:
        """One that begins."""
        return PartialOutput()

    @abstractmethod
    def whole(self, outputs: Sequence[PartialOutput]) -> BaseModel:
        """The reply with all outputs, which have ended."""

    @abstractmethod
    def chunk(self, index: int, before: PartialOutput, item: Shown, trace: Trace | None) -> BaseModel:
        """Tokens or the end of an output; `before` is the output without them, `trace` set if it was asked for."""

    @abstractmethod
    def usage_chunk(self, outputs: Sequence[PartialOutput]) -> BaseModel:
        """The last chunk of a stream with `include_usage`."""

    def totals(self, outputs: Sequence[PartialOutput]) -> dict[str, Any]:
        """Usage, and metrics where they are wanted."""
        figures = [one.ended.statistics for one in outputs if one.ended is not None]
        measured = self._measured and len(figures) == 1 and figures[0].drafted_at
        metrics = {"metrics": {"speculative_decoding": _speculative_decoding(figures[0])}} if measured else {}
        prompts = sum(one.prompt_tokens for one in figures[:: self.body.n])
        return metrics | {"usage": Usage.of(prompts, sum(one.tokens for one in figures))}

    def _chunk_fields(self, index: int, before: PartialOutput, tokens: int, trace: Trace | None) -> dict[str, Any]:
        """With `include_usage`, chunks before the last one have `usage: null`, or the usage of their choice so far."""
        if self.body.continuous_usage:
            prompt = len(self._prompts[index // self.body.n])
            return _traced(trace) | {"usage": Usage.of(prompt, len(before.tokens) + tokens)}
        return _traced(trace) | ({"usage": None} if self.body.include_usage else {})

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        wanted = self.body.return_token_ids
        return {"prompt_token_ids": list(self._prompts[index // self.body.n])} if wanted else {}

    def _token_ids(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"token_ids": [token.id for token in tokens]} if self.body.return_token_ids else {}

    def _choice_fields(self, index: int, output: PartialOutput) -> dict[str, Any]:
        assert output.ended is not None
        figures = Figures.of(output.ended.statistics)
        trace = Trace(milliseconds=1000 * figures.seconds, statistics=figures) if self.body.speculative.trace else None
        ids = self._token_ids(output.tokens)
        return {"index": index, "finish_reason": _finish(output.ended, output), **ids, **_traced(trace)}

    def _prompt_fields(self, output: PartialOutput) -> dict[str, Any]:
        count = self.body.prompt_logprobs
        return {} if count is None else {"prompt_logprobs": [_scores(token, count) for token in output.prompt]}


class CompletionFormat(Format[CompletionBody]):
    """Replies of /v1/completions."""

    PREFIX = "cmpl"

    def whole(self, outputs: Sequence[PartialOutput]) -> BaseModel:
        choices = [
            CompletionChoice(
                text=self.body.echo_of(index) + one.text,
                logprobs=self._logprobs([*(one.prompt if self.body.echoes_tokens else ()), *one.tokens]),
                **self._prompt_ids(index),
                **self._choice_fields(index, one),
                **self._prompt_fields(one),
            )
            for index, one in enumerate(outputs)
        ]
        return self._completion(choices, **self.totals(outputs))

    def chunk(self, index: int, before: PartialOutput, item: Shown, trace: Trace | None) -> BaseModel:
        """As `Format.chunk`; the first one begins with the echo."""
        echo = "" if before.begun else self.body.echo_of(index)
        tokens = () if isinstance(item, OutputEnded) else item.tokens
        committed = item.tokens if isinstance(item, Committed) else ()
        choice = CompletionChoice(
            index=index,
            text=echo + text_of(tokens),
            logprobs=self._logprobs(tokens, len(before.text)) if tokens else None,
            finish_reason=_finish(item),
            **self._token_ids(committed),
            **({} if before.begun else self._prompt_ids(index)),
        )
        return self._completion([choice], **self._chunk_fields(index, before, len(committed), trace))

    def usage_chunk(self, outputs: Sequence[PartialOutput]) -> BaseModel:
        return self._completion([], **self.totals(outputs))

    def _logprobs(self, tokens: Sequence[Token | PromptToken], offset: int = 0) -> CompletionLogprobs | None:
        count = self.body.num_logprobs
        return None if count is None else of_completion(tokens, offset, count)

    def _completion(self, choices: list[CompletionChoice], **more: object) -> Completion:
        return Completion.model_validate({**self._head, "object": "text_completion", "choices": choices, **more})


class ChatFormat(Format[ChatBody]):
    """Replies of /v1/chat/completions."""

    PREFIX = "chatcmpl"

    def output(self) -> PartialOutput:
        """As `Format.output`."""
        form = self.body.form
        return PartialOutput(answer=None if form.plain else AnswerParser(form))

    def whole(self, outputs: Sequence[PartialOutput]) -> BaseModel:
        choices = [
            ChatChoice(
                message=ChatMessage(role="assistant", refusal=None, **self._message(one)),
                logprobs=self._logprobs(one.tokens),
                **self._choice_fields(index, one),
            )
            for index, one in enumerate(outputs)
        ]
        fields = {"object": "chat.completion", "choices": choices, **self.totals(outputs), **self._prompt_ids(0)}
        return ChatCompletion.model_validate(self._head | fields | self._prompt_fields(outputs[0]))

    def chunk(self, index: int, before: PartialOutput, item: Shown, trace: Trace | None) -> BaseModel:
        """As `Format.chunk`; the first one has the role."""
        tokens = item.tokens if isinstance(item, Committed) else ()
        text = self._delta(before, tokens)
        delta = Delta(**text) if before.begun else Delta(role="assistant", **{"content": "", **text})
        logprobs = self._logprobs(tokens) if tokens else None
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=_finish(item, before), **self._token_ids(tokens)
        )
        prompt = {} if before.begun else self._prompt_ids(index)
        return self._chunk([choice], **prompt, **self._chunk_fields(index, before, len(tokens), trace))

    def _message(self, output: PartialOutput) -> dict[str, Any]:
        """What a whole answer consists of."""
        if output.answer is None:
            return {"content": output.text}
        parts = self._parts(output.said)
        for call in parts.get("tool_calls", ()):
            call.pop("index")
        return {"content": None if parts else "", **parts}

    def _delta(self, before: PartialOutput, tokens: Sequence[Token]) -> dict[str, Any]:
        if before.answer is None:
            return {"content": text_of(tokens)} if tokens else {}
        return self._parts(before.new)

    def _parts(self, said: Sequence[Said]) -> dict[str, Any]:
        """Content, reasoning and calls, those that there are."""
        texts, calls = defaultdict[What, list[str]](list), dict[int, dict[str, Any]]()
        for one in said:
            match one.what:
                case What.CALL:
                    called = {"name": one.text, "arguments": ""}
                    calls[one.call] = {"index": one.call, "id": one.id, "type": "function", "function": called}
                case What.ARGUMENTS:
                    call = calls.setdefault(one.call, {"index": one.call, "function": {"arguments": ""}})
                    call["function"]["arguments"] += one.text
                case _:
                    texts[one.what].append(one.text)
        names = ("reasoning", "reasoning_content") if self.body.include_reasoning else ()
        parts: dict[str, Any] = {"tool_calls": [*calls.values()]} if calls else {}
        for what, shown in ((What.CONTENT, ("content",)), (What.REASONING, names)):
            parts |= dict.fromkeys(shown, "".join(texts[what])) if texts[what] else {}
        return parts

    def usage_chunk(self, outputs: Sequence[PartialOutput]) -> BaseModel:
        return self._chunk([], **self.totals(outputs))

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        return None if self.body.num_logprobs is None else of_chat(tokens)

    def _chunk(self, choices: list[ChatChunkChoice], **more: object) -> ChatChunk:
        return ChatChunk.model_validate({**self._head, "object": "chat.completion.chunk", "choices": choices, **more})


def text_of(tokens: Sequence[Token | PromptToken]) -> str:
    return "".join(token.text for token in tokens)


def _speculative_decoding(figures: Statistics) -> dict[str, Any]:
    """What drafting brought an output, as vLLM has it; a step is a lock-step round, or an epoch with overlap."""
    reached = (figures.drafted_at[0], *figures.accepted_at, 0)
    steps, accepted, drafted = reached[0], sum(figures.accepted_at), sum(figures.drafted_at)
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": [before - after for before, after in pairwise(reached)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(figures.drafted_at),
    }


def _mark(token: Token, marks: Sequence[str]) -> str:
    """The name of a control symbol that is one of these marks."""
    name = dict(token.names).get(token.id, "")
    return name if name in marks else ""


def _scores(token: PromptToken, count: int) -> dict[str, PromptLogprob] | None:
    """The token itself and the `count` most probable ids."""
    if token.log_probability is None:
        return None
    names, each = token.names, [(token.id, token.raw, token.log_probability, token.rank)]
    each += [(id, raw, value, rank) for rank, (id, raw, value) in enumerate(token.top[:count], 1) if id != token.id]
    return {
        str(id): PromptLogprob(logprob=_finite(value), rank=rank, decoded_token=shown(id, raw, names))
        for id, raw, value, rank in each
    }


def _finish(item: Shown, output: PartialOutput | None = None) -> Finish | None:
    """OpenAI's word for the end of an output; None for tokens."""
    if not isinstance(item, OutputEnded):
        return None
    calls = output is not None and output.answer is not None and output.answer.calls
    return "tool_calls" if calls and item.reason is Reason.STOP else FINISH.get(item.reason, "length")


def _traced(trace: Trace | None) -> dict[str, Any]:
    return {} if trace is None else {"crossdraft": trace}


NEVER = -9999.0  # OpenAI's value for log 0: JSON has no infinity


def shown(token: int, raw: bytes, names: Names = ()) -> str:
    """A token as text: its characters, else its bytes in OpenAI's spelling, else its name, else its id."""
    if not raw:
        return dict(names).get(token) or f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def of_chat(tokens: Sequence[Token]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatToken(
                **_likely(token.id, token.raw, token.log_probability, token.names),
                top_logprobs=[LikelyToken(**_likely(*candidate, token.names)) for candidate in token.top],
            )
            for token in tokens
        ]
    )


def _likely(token: int, raw: bytes, value: float | None, names: Names) -> dict[str, Any]:
    return {"token": shown(token, raw, names), "logprob": _finite(value), "bytes": list(raw) or None}


def of_completion(tokens: Sequence[Token | PromptToken], offset: int, count: int) -> CompletionLogprobs:
    """Log-probabilities of tokens of a completion; `offset` characters of its text come before them.

    The first token of a prompt has none.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return CompletionLogprobs(
        tokens=[shown(token.id, token.raw, token.names) for token in tokens],
        token_logprobs=[None if _first(token) else _finite(token.log_probability) for token in tokens],
        top_logprobs=[
            None if _first(one) else {shown(id, raw, one.names): _finite(value) for id, raw, value in one.top[:count]}
            for one in tokens
        ],
        text_offset=offsets,
    )


def _first(token: Token | PromptToken) -> bool:
    return isinstance(token, PromptToken) and not token.rank


def _finite(value: float | None) -> float:
    return NEVER if value is None else max(NEVER, value)
