"""What travels on a link beside the messages of sessions: how they begin and end there; and how frames are made.

A link is one stream between two processes, and a frame one message of it: messages of any number of sessions, each with
its session's number. `Direction` makes frames of them, and reads them from frames; `roles` says which messages those of
the two services are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from crossdraft.rpc import codec
from crossdraft.rpc.errors import BadMessage
from crossdraft.types.messages import Sample
from crossdraft.types.rows import Ids, Row

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


class Written:
    """Columns of a frame that is written: what its messages have of one kind stands together."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.samples: list[Sample] = []
        self.listed: list[Ids] = []
        self.branches = 0  # of drafts


class Shares(Generic[Received]):
    """A column of a frame that is read, of which its messages take their shares one after another."""

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


NOTHING_SHARED: Sequence[Any] = ()


@dataclass(frozen=True)
class Kind:
    """One kind of message of a direction."""

    value: type  # plain
    field: str  # of the entry of a frame
    write: Callable[[Any, Written], Message]  # of a plain value; raises ValueError
    read: Callable[[Any, Sequence[Any], int | None], Any]  # of the message, its share and the vocabulary's size
    weight: Callable[[Any], int] = lambda value: 0  # about how many bytes it has, at least; most are small
    share: Callable[[Any, Sequence[Shares[Any]]], Sequence[Any]] | None = None  # that the message has of the columns


@dataclass(frozen=True)
class Direction:
    """Frames of one direction of a role's links.

    Args:
        frame: its protobuf message.
        entries: the field of it that has the messages.
        kinds: of messages.
        columns: reads those of a frame, for a vocabulary of so many ids; raises BadMessage.
    """

    frame: type[Message]
    entries: str
    kinds: Sequence[Kind]
    columns: Callable[[Any, int | None], Sequence[Shares[Any]]] = lambda frame, size: ()

    @cached_property
    def _by_value(self) -> dict[type, Kind]:
        return {kind.value: kind for kind in self.kinds}

    @cached_property
    def _by_field(self) -> dict[str | None, Kind]:
        return {kind.field: kind for kind in self.kinds}

    def encode(self, messages: Sequence[tuple[int, Any]]) -> bytes:
        """A frame; raises ValueError."""
        frame: Any = self.frame()
        entries, written, kinds = getattr(frame, self.entries), Written(), self._by_value
        for session, value in messages:
            kind = kinds[type(value)]
            entry = {"session": session, kind.field: kind.write(value, written)}
            if kind.value is BeginSession:
                entry["request_id"] = value.request_id
            entries.add(**entry)
        if written.rows:
            frame.rows.CopyFrom(codec.encode_rows(written.rows))
        if written.samples:
            frame.samples.CopyFrom(codec.encode_samples(written.samples))
        if written.listed:
            frame.listed.CopyFrom(codec.encode_lists(codec.joined(written.listed)))
        raw: bytes = frame.SerializeToString()
        return raw

    def decode(self, raw: bytes, size: int | None) -> Iterator[tuple[int, Any]]:
        """The messages of a frame, for a vocabulary of so many ids; raises BadMessage or DecodeError."""
        frame = self.frame.FromString(raw)
        entries, kinds = getattr(frame, self.entries), self._by_field
        check_frame(raw, entries)
        columns = self.columns(frame, size)
        for entry in entries:
            field = entry.WhichOneof("message")
            kind = kinds.get(field)
            if kind is None:
                *fields, last = kinds
                yield entry.session, BadMessage(f"a message must be one of {', '.join(map(str, fields))} and {last}")
                continue
            message = getattr(entry, field)
            share = NOTHING_SHARED if kind.share is None else kind.share(message, columns)
            try:
                value = kind.read(message, share, size)
                yield entry.session, BeginSession(value, entry.request_id) if kind.value is BeginSession else value
            except BadMessage as error:
                yield entry.session, error
        for column in columns:
            column.check()

    def weight(self, value: object) -> int:
        """About how many bytes a message will have, at least."""
        return self._by_value[type(value)].weight(value)


@dataclass(frozen=True)
class RoleCodec(Generic[Opening, Ask, Answer]):
    """One of the two services of the protos, and its frames."""

    name: str
    other: str  # the role that an address could be of by mistake
    service: str  # full name in the protos
    stream: str  # name of its bidirectional method
    requests: Direction
    replies: Direction

    def client(self, vocabulary_size: int | None) -> FrameCodec[Any, Any]:
        """Of the client's side, for a vocabulary of so many ids; None: not known."""
        return _side(self.requests, self.replies, vocabulary_size)

    def server(self, vocabulary_size: int | None) -> FrameCodec[Any, Any]:
        """Of the service's side."""
        return _side(self.replies, self.requests, vocabulary_size)


def _side(writes: Direction, reads: Direction, size: int | None) -> FrameCodec[Any, Any]:
    return FrameCodec(writes.encode, partial(reads.decode, size=size), writes.weight)


def check_frame(raw: bytes, messages: Sequence[object]) -> None:
    """Raises BadMessage if a frame has more messages than it may, or more bytes than these may have together."""
    if len(messages) > MOST_MESSAGES:
        raise BadMessage(f"the frame has {len(messages)} messages; at most {MOST_MESSAGES} are taken")
    if len(messages) > 1 and len(raw) > MOST_SHARED:
        raise BadMessage(f"the frame has {len(raw)} bytes; {len(messages)} messages may have {MOST_SHARED} together")
