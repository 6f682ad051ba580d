"""What the API answers: OpenAI's objects, and `crossdraft` in them if a trace was asked for.

Fields without a default are always there, if only as null; the others only where they are set.
"""

from typing import Literal

from pydantic import BaseModel

from crossdraft.pipeline import Kind, Statistics
from crossdraft.pipeline.trips import LaneFigures
from crossdraft.pipeline.watching import Span


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
    proposals: int
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
    proposed_at: list[int]  # by place in a round, from the first on: rounds with a proposal there
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
