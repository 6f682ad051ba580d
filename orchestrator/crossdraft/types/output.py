"""What clients see of outputs and of models."""

from dataclasses import dataclass

from crossdraft.types import quick_dataclass
from crossdraft.types.statistics import Kind

Names = tuple[tuple[int, str], ...]  # ids of control symbols, and how the tokenizer writes them


@quick_dataclass(frozen=True)
class Token:
    """A committed token."""

    id: int  # target id
    text: str  # newly final text: whole characters, none that may belong to a stop string
    raw: bytes  # the token's own bytes; empty for a control symbol
    kind: Kind
    log_probability: float | None  # nats, of the model itself; None: not known, as the request asked for none
    # The most probable ids in its place, each with its bytes and log-probability, if the request asked for logprobs.
    top: tuple[tuple[int, bytes, float], ...] = ()
    names: Names = ()  # of control symbols among these ids


@dataclass(frozen=True)
class Written:
    """A prompt as a tokenizer writes it."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]  # of the ids, in the tokenizer's own spelling
    text: str  # of the ids, with the names of special tokens
    plain: bool  # none of the ids is a control symbol


@quick_dataclass(frozen=True)
class PromptToken:
    """A token of a prompt, in a request with `prompt_logprobs`."""

    id: int  # target id
    text: str  # whole characters, as in `Token`
    raw: bytes  # as in `Token`
    log_probability: float | None  # nats, of the model itself, after the tokens before; None: of the first
    rank: int = 0  # ids that are at least as probable; 0: of the first
    top: tuple[tuple[int, bytes, float], ...] = ()  # as in `Token`
    names: Names = ()  # as in `Token`


@dataclass(frozen=True)
class ServedModel:
    """A model that is served."""

    name: str
    created: int  # seconds since 1970, when it began to be served
    context: int  # tokens, prompt and output together
    drafters: tuple[str, ...]  # names that a request may choose, the default first; none: plain decoding
    methods: tuple[str, ...]  # of `verification.methods.METHODS`, that its pairs allow
    chats: bool  # it has a chat template of its own
    root: str = ""  # the name of the same model that stands before this one; empty: it is the first
    detail: tuple[str, ...] = ()  # what its services cannot do now, and why; names no address
    auto: str = ""  # the drafter that an output gets which leaves it to the server, as of the latest kind of request
    tool_format: str = ""  # of `text.answers.TOOL_FORMATS`, that its chat template writes; empty: it has none
    there: bool = True  # one of its targets can be reached now; over gRPC the health service says so
