"""Frames of links: what they have beside the messages of sessions, how they are made and read, and what waits for one.

A link is one stream between two processes, and a frame one message of it: messages of any number of sessions, each with
its session's number. `Direction` makes frames of them, and reads them from frames; `roles` says which messages those of
the two services are.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from crossdraft.rpc import codec
from crossdraft.rpc.errors import BadMessage, TooLarge
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.transport import MessageLimit
from crossdraft.types.messages import Sample
from crossdraft.types.rows import Ids, Row

Opening = TypeVar("Opening")  # the message that begins a session
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Sent = TypeVar("Sent")
Received = TypeVar("Received")
Waiting = TypeVar("Waiting")
Join = Callable[[Waiting, Waiting], Waiting | None]
OPEN = "open"  # the field of an entry with which a session begins
MAX_MESSAGES = 256  # of a frame
MAX_SHARED = 2 << 20  # bytes of a frame that has more messages than one
# Messages that wait for a stream before its other direction is read no more: 64 sessions have some hundred, and whoever
# reads nothing must not fill the memory.
MAX_WAITING_MESSAGES = 4096
# Bytes of a frame that is read in the loop, in 3 ms if it has rows. Frames of 64 sessions have hardly more, and a
# thread would have to wait for the loop's turn.
MAX_IN_LOOP = 1 << 18


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
    """Frames of one direction of a role's links."""

    frame: type[Message]
    entries: str  # the field that has the messages
    kinds: Sequence[Kind]
    # Reads those of a frame, for a vocabulary of so many ids; raises BadMessage.
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
            if kind.field == OPEN:
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
        if len(entries) > MAX_MESSAGES:
            raise BadMessage(f"the frame has {len(entries)} messages; at most {MAX_MESSAGES} are taken")
        if len(entries) > 1 and len(raw) > MAX_SHARED:
            raise BadMessage(f"the frame has {len(raw)} bytes; {len(entries)} messages may have {MAX_SHARED} together")
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
                yield entry.session, replace(value, request_id=entry.request_id) if field == OPEN else value
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


def too_large(what: str, raw: bytes, limit: MessageLimit) -> TooLarge:
    return TooLarge(f"a {what} of {len(raw)} bytes is over the {limit.frame_bytes} that this side's {limit} allows")


class Inbox:
    """Reads frames, of which one peer's must not hold up those of others."""

    def __init__(self, codec: FrameCodec[Any, Any], limit: MessageLimit) -> None:
        self._codec = codec
        self._limit = limit
        self._beside = Beside("frames", small=MAX_IN_LOOP)

    async def read(self, raw: bytes) -> list[tuple[int, Any]]:
        """The messages of a frame; a large one is read in a thread. Raises TooLarge or BadMessage."""
        if len(raw) > self._limit.frame_bytes:
            raise too_large("frame", raw, self._limit)
        try:
            return await self._beside.run(len(raw), lambda: list(self._codec.decode(raw)))
        except DecodeError as error:
            raise BadMessage(f"not a frame of this link: {error}") from error


class Outbox(Generic[Waiting]):
    """Messages of many sessions that wait for the stream.

    A frame takes all that wait, up to MAX_MESSAGES and MAX_SHARED. `refused` is told of a message that is over the
    limit alone, or cannot be encoded; it is dropped, and with it what waits of its session: later messages mean nothing
    without it.
    """

    def __init__(
        self,
        codec: FrameCodec[Waiting, Any],
        limit: MessageLimit,
        refused: Callable[[int, TooLarge | ValueError], None],
    ) -> None:
        self._codec = codec
        self._limit = limit
        self._shared = min(limit.frame_bytes, MAX_SHARED)
        self._refused = refused
        self._waiting: dict[int, list[tuple[Waiting, int]]] = {}  # by session, with their weights
        self._count = 0  # messages that wait
        self._weight = 0  # of all of them, as the codec says
        self._room = asyncio.Event()  # set when fewer wait than before
        self._news = asyncio.Event()
        self._finished = False
        self._later: tuple[float, asyncio.Handle] | None = None  # when it sets `_news`, in seconds of the loop's clock

    def put(self, session: int, message: Waiting, within: float = 0.0, join: Join[Waiting] | None = None) -> int:
        """Adds a message, which leaves within so many seconds (0: at once); returns how many of its session wait.

        `join` makes one message of the session's latest that waits and this one, or returns None.
        """
        waiting = self._waiting.setdefault(session, [])
        if join is not None and waiting and (joined := join(waiting[-1][0], message)) is not None:
            message = joined
            self._count_out([waiting.pop()])
        weight = self._codec.weight(message)
        waiting.append((message, weight))
        self._count += 1
        self._weight += weight
        if not self._news.is_set():
            if within <= 0:
                self._news.set()
            else:
                self._leave_within(within)
        return len(waiting)

    def _leave_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if self._later is not None:
            if self._later[0] <= due:
                return
            self._later[1].cancel()
        self._later = due, loop.call_at(due, self._news.set)

    def finish(self) -> None:
        self._finished = True
        self._news.set()

    def drop(self, session: int) -> list[Waiting]:
        if dropped := self._waiting.pop(session, []):
            self._count_out(dropped)
        return [message for message, _ in dropped]

    def over(self, limits: int) -> bool:
        """Whether more waits than this many message limits, each of its bytes or of MAX_WAITING_MESSAGES messages."""
        return self._count > limits * MAX_WAITING_MESSAGES or self._weight > limits * self._limit.bytes

    async def room(self) -> None:
        """Returns when no more than a message limit waits, and no more than MAX_WAITING_MESSAGES messages."""
        while self.over(1):
            self._room.clear()
            await self._room.wait()

    async def write(
        self, send: Callable[[bytes], Awaitable[None]], left: Callable[[int, Waiting, float, float], None]
    ) -> None:
        """Sends frames as there are messages, up to `finish`. Raises what `send` raises.

        Before a frame is sent, `left` is told of each of its messages, with its share of the frame's bytes and of the
        seconds that making it took.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self._later is not None:
                self._later[1].cancel()
                self._later = None
            while self._waiting:
                began = time.perf_counter()
                messages, raw = self._frame(self._taken())
                parts = max(1, len(messages))
                shares = len(raw) / parts, (time.perf_counter() - began) / parts
                for session, message in messages:
                    left(session, message, *shares)
                if messages:
                    await send(raw)
            if self._finished:
                return

    def _taken(self) -> list[tuple[int, Waiting]]:
        taken: list[tuple[int, Waiting]] = []
        room = self._shared // 4  # weights are lower bounds: rows have up to three times theirs
        if self._count <= MAX_MESSAGES and self._weight < room:  # nearly always
            taken = [(session, message) for session, waiting in self._waiting.items() for message, _ in waiting]
            self._waiting, self._count, self._weight = {}, 0, 0
            self._room.set()
        while self._waiting and len(taken) < MAX_MESSAGES and room > 0:
            session = next(iter(self._waiting))
            messages = self._waiting.pop(session)
            before = len(taken)
            for message, weight in messages[: MAX_MESSAGES - before]:
                if room > 0:
                    room -= weight
                    taken.append((session, message))
            count = len(taken) - before
            self._count_out(messages[:count])
            if count < len(messages):
                self._waiting[session] = messages[count:]  # behind the others
        return taken

    def _frame(self, messages: list[tuple[int, Waiting]]) -> tuple[list[tuple[int, Waiting]], bytes]:
        """A frame of the messages, or of the first of them if all cannot be one; the others wait again."""
        while True:
            try:
                return messages, self._encoded(messages)
            except (ValueError, TooLarge) as fault:
                if len(messages) == 1:
                    self.drop(messages[0][0])
                    self._refused(messages[0][0], fault)
                    return [], b""
            messages, back = messages[: len(messages) // 2], messages[len(messages) // 2 :]
            self._put_back(back)

    def _encoded(self, messages: list[tuple[int, Waiting]]) -> bytes:
        """A frame; raises TooLarge or ValueError."""
        raw = self._codec.encode(messages)
        if len(raw) > (self._shared if len(messages) > 1 else self._limit.frame_bytes):
            raise too_large(type(messages[0][1]).__name__, raw, self._limit)
        return raw

    def _put_back(self, messages: list[tuple[int, Waiting]]) -> None:
        first: dict[int, list[tuple[Waiting, int]]] = {}
        for session, message in messages:
            weight = self._codec.weight(message)
            first.setdefault(session, []).append((message, weight))
            self._count += 1
            self._weight += weight
        later, self._waiting = self._waiting, first
        for session, waiting in later.items():
            self._waiting.setdefault(session, []).extend(waiting)

    def _count_out(self, messages: list[tuple[Waiting, int]]) -> None:
        self._count -= len(messages)
        self._weight -= sum([weight for _, weight in messages])
        self._room.set()
