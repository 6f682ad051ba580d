"""What travels on a link beside the messages of sessions: how sessions begin and end there.

A link is one stream between two processes, and a frame one message of it: messages of any number of sessions, each with
its session's number. The codecs of the two roles make frames of them, and read them from frames.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from crossdraft.rpc.errors import BadMessage
from crossdraft.v1 import common_pb2 as pb

Opening = TypeVar("Opening")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Sent = TypeVar("Sent")
Received = TypeVar("Received")
MOST_MESSAGES = 256  # of a frame


@dataclass(frozen=True)
class Begin(Generic[Opening]):
    """The client begins a session."""

    opening: Opening
    request_id: str = ""  # of its client's request, for log lines; empty: none


@dataclass(frozen=True)
class Close:
    """The client ends a session."""


@dataclass(frozen=True)
class Ended:
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


def encode_end(end: Ended) -> pb.SessionEnded:
    """As it travels."""
    return pb.SessionEnded(code=end.code, text=end.text)


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
