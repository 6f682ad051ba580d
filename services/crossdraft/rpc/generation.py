"""What clients and the Generation service say to each other, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass

from crossdraft.verification.exchange import SamplingOptions
from crossdraft.verification.walk import Kind


@dataclass(frozen=True)
class LaneCost:
    """What one session with a service cost. The fields are those of the proto."""

    role: str
    bytes_sent: int
    bytes_received: int
    trip_counts: tuple[int, ...]
    trip_seconds: float
    queued_seconds: float
    model_seconds: float
    codec_seconds: float
    open_seconds: float
    idle_seconds: float
    lost: str


Figure = str | int | float | tuple[int, ...] | tuple[LaneCost, ...]


@dataclass(frozen=True)
class Turn:
    """What somebody says in a chat."""

    role: str  # such as system, user, assistant
    content: str


@dataclass(frozen=True)
class Generate:
    """Asks for one output. None: the server's default."""

    prompt: str | tuple[int, ...] | tuple[Turn, ...]  # text, target ids, or a chat; the empty tuple is no ids
    id: str = ""  # of the request; empty: the server makes one
    model: str = ""  # empty: the only one
    drafter: str | None = None  # one of the model's; empty: plain decoding
    options: SamplingOptions | None = None
    method: str | None = None
    k: int | None = None
    max_tokens: int | None = None
    drafter_temperature: float | None = None
    seed: int | None = None
    choice: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] | None = None
    logprobs: int | None = None
    committed: tuple[int, ...] | None = None  # output ids that were delivered already
    allow_inexact: bool | None = None
    audit: bool | None = None
    overlap: str | None = None  # auto, on or off
    window: int | None = None
    wait: int | None = None
    branches: int | None = None
    branch_width: int | None = None
    paths: int | None = None
    speculation: bool | None = None
    row_width: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class Generated:
    """A committed token."""

    id: int
    raw: bytes  # its own; empty for a control symbol
    text: str  # to show since the token before
    kind: Kind
    log_probability: float | None  # nats, of the model itself
    top: tuple[tuple[int, bytes, float], ...]  # id, own bytes, nats; the most probable first
    milliseconds: float  # from the request's arrival until it was committed


@dataclass(frozen=True)
class GenerationEnded:
    """The end of an output, after its tokens."""

    id: str  # of the request
    reason: str  # stop, length, cancelled or failed
    figures: Mapping[str, Figure]  # by their names in the proto


@dataclass(frozen=True)
class Served:
    """A model that outputs can be asked of."""

    name: str
    created: int  # seconds since 1970, when it began to be served
    context: int  # tokens, prompt and output together
    drafters: tuple[str, ...]  # the default one first; none: decoding is plain
    methods: tuple[str, ...]  # that its drafters allow
    chats: bool  # it has a chat template of its own


Reply = Generated | GenerationEnded
