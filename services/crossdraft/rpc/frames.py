"""What travels on a link beside the messages of sessions: how they begin and end there; and the two roles of a service.

A link is one stream between two processes, and a frame one message of it: messages of any number of sessions, each with
its session's number. The codecs of the two roles make frames of them, and read them from frames.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from crossdraft.rpc.errors import BadMessage
from crossdraft.types.messages import (
    Draft,
    Drafted,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    Sample,
    Score,
    Scored,
)
from crossdraft.types.rows import Row

Opening = TypeVar("Opening")  # the message that begins a session
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Sent = TypeVar("Sent")
Received = TypeVar("Received")
MOST_MESSAGES = 256  # of a frame
MOST_SHARED = 2 << 20  # bytes of a frame that has more messages than one


@dataclass(frozen=True)
class BeginSession(Generic[Opening]):
    """The client begins a session."""

    opening: Opening
    request_id: str = ""  # of its client's request, for log lines; empty: none


@dataclass(frozen=True)
class EndSession:
    """The client ends a session."""


@dataclass(frozen=True)
class SessionEnded:
    """The service ends a session."""

    code: int  # a status code of gRPC; 0: in order
    text: str = ""


@dataclass(frozen=True)
class FrameCodec(Generic[Sent, Received]):
    """How one side of a role's link writes its frames and reads those of the other side."""

    # Raises ValueError if a message is none, or columns are too long. The messages of a session are in order.
    encode: Callable[[Sequence[tuple[int, Sent]]], bytes]
    # What is wrong with one session's message only is returned as that message.
    # Raises BadMessage if the frame itself is wrong, or protobuf's DecodeError.
    decode: Callable[[bytes], Iterable[tuple[int, Received | BadMessage]]]
    weight: Callable[[Sent], int]  # about how many bytes a message will have, at least


@dataclass(frozen=True)
class RoleCodec(Generic[Opening, Ask, Answer]):
    """One of the two services of the protos, and how its frames are written and read."""

    name: str
    other: str  # the role that an address could be of by mistake
    service: str  # full name in the protos
    stream: str  # name of its bidirectional method
    encode_requests: Callable[[Sequence[tuple[int, Any]]], bytes]
    decode_requests: Callable[[bytes, int | None], Iterable[tuple[int, Any]]]
    encode_replies: Callable[[Sequence[tuple[int, Any]]], bytes]
    decode_replies: Callable[[bytes, int | None], Iterable[tuple[int, Any]]]

    def client(self, vocabulary_size: int | None) -> FrameCodec[Any, Any]:
        """Of the client's side, for a vocabulary of so many ids; None: not known."""
        return FrameCodec(self.encode_requests, lambda raw: self.decode_replies(raw, vocabulary_size), weight_of)

    def server(self, vocabulary_size: int | None) -> FrameCodec[Any, Any]:
        """Of the service's side."""
        return FrameCodec(self.encode_replies, lambda raw: self.decode_requests(raw, vocabulary_size), weight_of)


def weight_of(message: object) -> int:
    """About how many bytes a message will have, at least."""
    match message:
        case BeginSession(OpenTarget() as opening):
            return len(opening.prompt)
        case BeginSession(OpenDrafter() as opening):
            return len(opening.prompt) + (0 if opening.allowed is None else len(opening.allowed))
        case Pass():
            return len(message.committed) + len(message.tree) + sum(map(len, message.listed))
        case Draft():
            return len(message.letters)
        case Score():
            return sum(map(len, message.strings))
        case PassDone(nodes=nodes) | PromptScored(tokens=nodes):
            return sum(map(_weight_of_node, nodes))
        case RowFetched():
            return 4 * len(message.row.ids)
        case Drafted():
            return sum(1 if token.row is None else 2 * len(token.row.ids) for token in message.draft_tokens)
        case Scored():
            return 8 * len(message.probabilities)
    return 0  # the others are small


def _weight_of_node(node: Row | Sample) -> int:
    likely = 5 * len(node.likely)
    if isinstance(node, Sample):
        return 5 + likely
    return len(node.ids) * (2 if node.log_probabilities is None else 3) + likely


class MemoryFrame(bytes):
    """In place of a frame: no bytes, but the messages, with their sessions' numbers."""

    messages: tuple[tuple[int, Any], ...]

    @staticmethod
    def of(messages: Sequence[tuple[int, Any]]) -> "MemoryFrame":
        frame = MemoryFrame()
        frame.messages = tuple(messages)
        return frame


MEMORY_CODEC: FrameCodec[Any, Any] = FrameCodec(MemoryFrame.of, lambda frame: vars(frame)["messages"], weight_of)


def check_frame(raw: bytes, messages: Sequence[object]) -> None:
    """Raises BadMessage if a frame has more messages than it may, or more bytes than these may have together."""
    if len(messages) > MOST_MESSAGES:
        raise BadMessage(f"the frame has {len(messages)} messages; at most {MOST_MESSAGES} are taken")
    if len(messages) > 1 and len(raw) > MOST_SHARED:
        raise BadMessage(f"the frame has {len(raw)} bytes; {len(messages)} messages may have {MOST_SHARED} together")


class Shares(Generic[Received]):
    """Columns of a frame, which its messages take their shares of, one after another."""

    def __init__(self, values: Sequence[Received], name: str) -> None:
        self._values = values
        self._name = name
        self._taken = 0

    def take(self, count: int) -> Sequence[Received]:
        """The next ones; raises BadMessage if there are fewer."""
        end = self._taken + count
        if end > len(self._values):
            raise BadMessage(f"the frame has {len(self._values)} {self._name}; its messages name more")
        taken, self._taken = self._values[self._taken : end], end
        return taken

    def check(self) -> None:
        """Raises BadMessage unless all are taken."""
        if self._taken != len(self._values):
            raise BadMessage(f"the frame has {len(self._values)} {self._name}; its messages name {self._taken}")
