"""The client's side of a link: one stream to a service, which carries all sessions of a pipeline with it.

A session's listener is called in the event loop, in the order in which its messages came. What sessions send while the
loop is busy leaves as one frame.
"""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc.codec import DESCRIBED
from crossdraft.rpc.errors import BadMessage, Closed, Internal, NotServed, ServiceError, TimedOut, TooLarge, from_status
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.frames import MOST_MESSAGES, MOST_SHARED, BeginSession, EndSession, FrameCodec, SessionEnded
from crossdraft.rpc.log_context import current
from crossdraft.rpc.transport import Channel, MessageLimit
from crossdraft.session.ledger import Ledger
from crossdraft.types.messages import OpenDrafter, Opened, OpenTarget

Message = TypeVar("Message")
Join = Callable[[Message, Message], Message | None]
# Messages that wait for a stream before its other direction is read no more: 64 sessions have some hundred, and whoever
# reads nothing must not fill the memory.
MOST_WAITING_MESSAGES = 4096
# Bytes of a frame that is read in the loop, in 3 ms if it has rows. Frames of 64 sessions have hardly more, and a
# thread would have to wait for the loop's turn.
MOST_IN_LOOP = 1 << 18
now = time.monotonic
TURN_SECONDS = 0.005  # the messages of a frame are handled for so long at a time: other tasks must not wait for all


@dataclass(eq=False)
class Traffic:
    """What a session has sent and received so far; of the bytes of a frame each of its messages has the same share."""

    bytes_sent: float = 0.0  # serialized, before HTTP/2 frames
    bytes_received: float = 0.0
    codec_seconds: float = 0.0  # making frames of messages and messages of frames, shared in the same way


def too_large(what: str, raw: bytes, limit: MessageLimit) -> TooLarge:
    return TooLarge(f"a {what} of {len(raw)} bytes is over the {limit.frame_bytes} that this side's {limit} allows")


class Inbox:
    """Reads frames, of which one peer's must not hold up those of others.

    Args:
        codec: reads them.
        limit: of a frame.
    """

    def __init__(self, codec: FrameCodec[Any, Any], limit: MessageLimit) -> None:
        self._codec = codec
        self._limit = limit
        self._beside = Beside("frames", small=MOST_IN_LOOP)

    async def read(self, raw: bytes) -> list[tuple[int, Any]]:
        """The messages of a frame; a large one is read in a thread. Raises TooLarge or BadMessage."""
        if len(raw) > self._limit.frame_bytes:
            raise too_large("frame", raw, self._limit)
        try:
            return await self._beside.run(len(raw), lambda: list(self._codec.decode(raw)))
        except DecodeError as error:
            raise BadMessage(f"not a frame of this link: {error}") from error


class Outbox(Generic[Message]):
    """Messages of many sessions that wait for the stream.

    A frame takes all that wait, up to MOST_MESSAGES and MOST_SHARED.

    Args:
        codec: makes frames.
        limit: of a frame.
        refused: is told of a message that is over the limit alone, or cannot be encoded; it is dropped, and with it
            what waits of its session: later messages mean nothing without it.
    """

    def __init__(
        self,
        codec: FrameCodec[Message, Any],
        limit: MessageLimit,
        refused: Callable[[int, TooLarge | ValueError], None],
    ) -> None:
        self._codec = codec
        self._limit = limit
        self._shared = min(limit.frame_bytes, MOST_SHARED)
        self._refused = refused
        self._waiting: dict[int, list[tuple[Message, int]]] = {}  # by session, with their weights
        self._count = 0  # messages that wait
        self._weight = 0  # of all of them, as the codec says
        self._room = asyncio.Event()  # set when fewer wait than before
        self._news = asyncio.Event()
        self._finished = False
        self._later: tuple[float, asyncio.Handle] | None = None  # when it sets `_news`, in seconds of the loop's clock

    def put(self, session: int, message: Message, within: float = 0.0, join: Join[Message] | None = None) -> int:
        """Adds a message, which leaves within so many seconds; returns how many of its session wait.

        Args:
            session: whose it is.
            message: the message.
            within: seconds; 0: at once.
            join: makes one message of the session's latest that waits and this one, or returns None.
        """
        waiting = self._waiting.setdefault(session, [])
        joined = None if join is None or not waiting else join(waiting[-1][0], message)
        if joined is not None:
            message = joined
            self._count_out([waiting.pop()])
        weight = self._codec.weight(message)
        waiting.append((message, weight))
        self._count += 1
        self._weight += weight
        if within <= 0:
            self._news.set()
        elif not self._news.is_set():
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

    def drop(self, session: int) -> list[Message]:
        dropped = self._waiting.pop(session, [])
        self._count_out(dropped)
        return [message for message, _ in dropped]

    def over(self, limits: int) -> bool:
        """Whether more waits than this many message limits, each of its bytes or of MOST_WAITING_MESSAGES messages."""
        return self._count > limits * MOST_WAITING_MESSAGES or self._weight > limits * self._limit.bytes

    async def room(self) -> None:
        """Returns when no more than a message limit waits, and no more than MOST_WAITING_MESSAGES messages."""
        while self.over(1):
            self._room.clear()
            await self._room.wait()

    async def write(
        self, send: Callable[[bytes], Awaitable[None]], left: Callable[[int, Message, float, float], None]
    ) -> None:
        """Sends frames as there are messages, up to `finish`. Raises what `send` raises.

        Args:
            send: writes one frame.
            left: is told, before that, of each message in it, and its share of the frame's bytes and of the seconds
                that making it took.
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

    def _taken(self) -> list[tuple[int, Message]]:
        taken: list[tuple[int, Message]] = []
        room = self._shared // 4  # rows have three times their weight
        while self._waiting and len(taken) < MOST_MESSAGES and room > 0:
            session = next(iter(self._waiting))
            messages = self._waiting.pop(session)
            before = len(taken)
            for message, weight in messages[: MOST_MESSAGES - before]:
                if room > 0:
                    room -= weight
                    taken.append((session, message))
            count = len(taken) - before
            self._count_out(messages[:count])
            if count < len(messages):
                self._waiting[session] = messages[count:]  # behind the others
        return taken

    def _frame(self, messages: list[tuple[int, Message]]) -> tuple[list[tuple[int, Message]], bytes]:
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

    def _encoded(self, messages: list[tuple[int, Message]]) -> bytes:
        """A frame; raises TooLarge or ValueError."""
        raw = self._codec.encode(messages)
        if len(raw) > (self._shared if len(messages) > 1 else self._limit.frame_bytes):
            _, first = messages[0]
            what = type(first.opening if isinstance(first, BeginSession) else first).__name__
            raise too_large(what, raw, self._limit)
        return raw

    def _put_back(self, messages: list[tuple[int, Message]]) -> None:
        first: dict[int, list[tuple[Message, int]]] = {}
        for session, message in messages:
            weight = self._codec.weight(message)
            first.setdefault(session, []).append((message, weight))
            self._count += 1
            self._weight += weight
        later, self._waiting = self._waiting, first
        for session, waiting in later.items():
            self._waiting.setdefault(session, []).extend(waiting)

    def _count_out(self, messages: list[tuple[Message, int]]) -> None:
        self._count -= len(messages)
        self._weight -= sum([weight for _, weight in messages])
        self._room.set()


class Listener(Protocol):
    """What is told of a session. Nothing is said any more after `lost`, or after the session was closed here."""

    def opened(self) -> None:
        """The service has opened it."""

    def received(self, reply: Any, /) -> None:
        """A reply came."""

    def lost(self, error: ServiceError, /) -> None:
        """It is over: the service ended it, or it or the link failed."""


class LinkSession:
    """One session of a link."""

    def __init__(self, link: "Link", number: int, listener: Listener) -> None:
        self.traffic = Traffic()
        self.is_open = False
        self.ledger = Ledger()  # in seconds of `now`
        self.listener = listener
        self._link = link
        self._number = number

    def send(self, request: Any) -> None:
        """Queues a request; never waits. Nothing happens if the session is over."""
        self._link.put(self._number, request)

    def close(self) -> None:
        """Ends it; the listener hears nothing more."""
        self._link.close_session(self._number)


class Link:
    """One stream to a service. It begins at once, and ends with the first error; then all its sessions are lost.

    While a session is owed something (`Ledger`), it is lost if nothing comes for `reply_seconds`: with a further
    `Opened` a service says that it works. While nothing is due it lives as long as the stream does, which may be hours;
    gRPC's keepalive tells when the link is cut or the service hangs.

    Args:
        channel: kept, as gRPC closes one that nobody refers to.
        path: of the method, such as /crossdraft.v1.Target/Verify.
        codec: of the client's side.
        limit: of a frame.
        service: what error texts call it.
        fingerprint: of the model that it described.
        identity: of that description; the service refuses the link if its own is another.
        reply_seconds: how long a service may owe a reply without a sign of life.
    """

    def __init__(
        self,
        channel: Channel,
        path: str,
        codec: FrameCodec[Any, Any],
        limit: MessageLimit,
        service: str,
        fingerprint: str,
        identity: str,
        reply_seconds: float,
    ) -> None:
        self.channel = channel
        self.ended = False
        self.outdated = False  # the service serves another model than it has described
        self.fingerprint = fingerprint
        self._service = service
        self._reply_seconds = reply_seconds
        self._sessions: dict[int, LinkSession] = {}
        self._latest = 0  # number of a session
        self._retired = False
        self._inbox = Inbox(codec, limit)
        self._outbox: Outbox[Any] = Outbox(codec, limit, self._refuse)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # of the reply that is due the longest
        # No iterator: frames are written one by one.
        self._call = channel.stream_stream(path, bytes, bytes)(None, metadata=((DESCRIBED, identity),))
        # Tasks without a context: log lines of all sessions must not name the request of the first.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    def begin(self, opening: OpenTarget | OpenDrafter, listener: Listener) -> LinkSession:
        self._latest += 1
        session = self._sessions[self._latest] = LinkSession(self, self._latest, listener)
        self._outbox.put(self._latest, BeginSession(opening, current().request))
        self._note_sent(session, opening)
        return session

    def put(self, number: int, request: Any) -> None:
        session = self._sessions.get(number)
        if session is not None:
            self._outbox.put(number, request)
            self._note_sent(session, request)

    def close_session(self, number: int) -> None:
        if self._forget(number) is not None:
            self._outbox.put(number, EndSession())

    def retire(self) -> None:
        """No session begins any more; ends the stream once there is none."""
        self._retired = True
        if not self._sessions:
            self._task.cancel()

    async def close(self) -> None:
        """Ends the stream; its sessions are lost."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _note_sent(self, session: LinkSession, request: object) -> None:
        session.ledger.sent(request, now())
        if session.ledger.owes and self._timer is None:
            self._timer = self._loop.call_later(self._reply_seconds, self._check)

    def _check(self) -> None:
        """Loses the sessions whose replies are overdue; looks again when the next one would be."""
        before = now() - self._reply_seconds
        late = [n for n, one in self._sessions.items() if one.ledger.since is not None and one.ledger.since <= before]
        for number in late:
            self._fail(number, TimedOut(f"{self._service}: no reply within {self._reply_seconds:g} s"))
        left = [one.ledger.since for one in self._sessions.values() if one.ledger.since is not None]
        self._timer = self._loop.call_later(min(left) - before, self._check) if left else None

    async def _run(self) -> None:
        writing = asyncio.create_task(self._outbox.write(self._call.write, self._left))
        writing.add_done_callback(lambda _: self._call.cancel())
        error: ServiceError = Closed(f"the link to the {self._service} was closed")
        try:
            error = await self._read()
        finally:
            self.ended = True
            writing.cancel()
            self._call.cancel()
            if self._timer is not None:
                self._timer.cancel()
            await asyncio.wait([writing])
            if not writing.cancelled():
                writing.exception()  # reading has told more
            for number in list(self._sessions):
                self._lose(number, error)

    async def _read(self) -> ServiceError:
        """Handles frames until the stream ends; why it did."""
        while True:
            try:
                raw = await self._call.read()
            except grpc.aio.AioRpcError:
                break
            except asyncio.CancelledError:
                if not self._call.cancelled() and not self._call.done():
                    raise
                break
            if not isinstance(raw, bytes):  # gRPC's mark of the end
                break
            began = time.perf_counter()
            try:
                messages = await self._inbox.read(raw)
            except TooLarge as error:
                return error
            except BadMessage as error:
                return Internal(f"{self._service} sent a frame that cannot be decoded: {error}")
            shares = len(raw) / max(1, len(messages)), (time.perf_counter() - began) / max(1, len(messages))
            await self._handle(messages, *shares)
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return Closed(f"the {self._service} ended the link")
        return from_status(code, await self._call.details(), self._service)

    async def _handle(self, messages: list[tuple[int, Any]], size: float, seconds: float) -> None:
        turn = time.perf_counter()
        for number, message in messages:
            session = self._sessions.get(number)
            if session is None:
                continue
            traffic = session.traffic
            traffic.bytes_received += size
            traffic.codec_seconds += seconds
            self._received(number, session, message)
            if time.perf_counter() - turn > TURN_SECONDS:
                await asyncio.sleep(0)
                turn = time.perf_counter()

    def _received(self, number: int, session: LinkSession, message: Any) -> None:
        if isinstance(message, SessionEnded):
            self._lose(number, self._meaning(message))
        elif isinstance(message, BadMessage):
            self._fail(number, Internal(f"{self._service} sent a reply that cannot be decoded: {message}"))
        elif isinstance(message, Opened) and message.fingerprint != self.fingerprint:
            self._fail(number, NotServed(f"{self._service} serves another model than it described; describe it again"))
        elif not (session.is_open or isinstance(message, Opened)):
            what = type(message).__name__
            self._fail(number, Internal(f"{self._service} sent {what} where Opened was due"))
        else:
            at, ledger = now(), session.ledger
            if not isinstance(message, Opened):
                ledger.take(message, at)
                ledger.heard(at)
                session.listener.received(message)
            elif session.is_open:
                ledger.heard(at)  # a sign that the service works
            else:
                session.is_open = True
                ledger.opened(at)
                session.listener.opened()

    def _meaning(self, ended: SessionEnded) -> ServiceError:
        code = next((code for code in grpc.StatusCode if code.value[0] == ended.code), grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            return Closed(f"the session with the {self._service} was ended")
        return from_status(code, ended.text, self._service)

    def _left(self, number: int, message: Any, size: float, seconds: float) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.traffic.bytes_sent += size
            session.traffic.codec_seconds += seconds

    def _refuse(self, number: int, fault: TooLarge | ValueError) -> None:
        self._fail(number, fault if isinstance(fault, TooLarge) else BadMessage(f"it cannot be sent: {fault}"))

    def _fail(self, number: int, error: ServiceError) -> None:
        self._lose(number, error)
        self._outbox.put(number, EndSession())

    def _lose(self, number: int, error: ServiceError) -> None:
        session = self._forget(number)
        self.outdated = self.outdated or isinstance(error, NotServed)
        if session is not None:
            session.listener.lost(error)

    def _forget(self, number: int) -> LinkSession | None:
        session = self._sessions.pop(number, None)
        if session is not None:
            self._outbox.drop(number)
        if self._retired and not self._sessions:
            self._task.cancel()
        return session
