"""A link: the stream that all sessions with one service share; the outbox of either side; and the clients that open it.

A client has a channel to one service, and gets its model's description. A session's listener is called in the event
loop, in the order in which its messages came. What sessions send while the loop is busy leaves as one frame.
"""

import asyncio
import contextvars
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, takewhile
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import codec, frames
from crossdraft.rpc.errors import BadMessage, Closed, Internal, NotServed, ServiceError, TimedOut, TooLarge, from_status
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.logs import current
from crossdraft.rpc.memory import HOST, MemoryChannel, codec_of
from crossdraft.rpc.security import ClientCredentials, RenewedCredentials
from crossdraft.rpc.transport import MessageLimit, channel_to, client_options
from crossdraft.session.ledger import Ledger
from crossdraft.types.messages import Description, OpenDrafter, Opened, OpenTarget
from crossdraft.v1 import common_pb2

Waiting = TypeVar("Waiting")
Join = Callable[[Waiting, Waiting], Waiting | None]
# Messages that wait for a stream before its other direction is read no more: 64 sessions have some hundred, and whoever
# reads nothing must not fill the memory.
MAX_WAITING_MESSAGES = 4096
# Bytes of a frame that is read in the loop, in 3 ms if it has rows. Frames of 64 sessions have hardly more, and a
# thread would have to wait for the loop's turn.
MAX_IN_LOOP = 1 << 18
now = time.monotonic
TURN_SECONDS = 0.005  # the messages of a frame are handled for so long at a time: other tasks must not wait for all
Channel = grpc.aio.Channel | MemoryChannel
OpenRequest = TypeVar("OpenRequest", OpenTarget, OpenDrafter)


def too_large(what: str, raw: bytes, limit: MessageLimit) -> TooLarge:
    return TooLarge(f"a {what} of {len(raw)} bytes is over the {limit.frame_bytes} that this side's {limit} allows")


async def read(
    raw: bytes, codec: frames.FrameCodec[Any, frames.Received], limit: MessageLimit, beside: Beside
) -> list[tuple[int, Any]]:
    """The messages of a frame; a large one is read in a thread: one peer's must not hold up those of others. Raises
    TooLarge or BadMessage."""
    if len(raw) > limit.frame_bytes:
        raise too_large("frame", raw, limit)
    try:
        return await beside.run(len(raw), lambda: list(codec.decode(raw)))
    except DecodeError as error:
        raise BadMessage(f"not a frame of this link: {error}") from error


@dataclass(eq=False)
class Outbox(Generic[Waiting]):
    """Messages of many sessions that wait for the stream.

    A frame takes all that wait, up to MAX_MESSAGES and MAX_SHARED.
    """

    codec: frames.FrameCodec[Waiting, Any]
    limit: MessageLimit
    # Told of a message that is over the limit alone, or cannot be encoded; it is dropped, and with it what waits of its
    # session: later messages mean nothing without it.
    refused: Callable[[int, TooLarge | ValueError], None]

    def __post_init__(self) -> None:
        self._shared = min(self.limit.frame_bytes, frames.MAX_SHARED)
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
        weight = self.codec.weight(message)
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

    def drop(self, session: int) -> list[Waiting]:
        if dropped := self._waiting.pop(session, []):
            self._count_out(dropped)
        return [message for message, _ in dropped]

    def over(self, limits: int) -> bool:
        """Whether more waits than this many message limits, each of its bytes or of MAX_WAITING_MESSAGES messages."""
        return self._count > limits * MAX_WAITING_MESSAGES or self._weight > limits * self.limit.bytes

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
                messages, raw = self._frame()
                parts = max(1, len(messages))
                shares = len(raw) / parts, (time.perf_counter() - began) / parts
                for session, message in messages:
                    left(session, message, *shares)
                if messages:
                    await send(raw)
            if self._finished:
                return

    def _frame(self) -> tuple[list[tuple[int, Waiting]], bytes]:
        """The next messages, and a frame of them; fewer of them, if all that leave together cannot be one."""
        messages = self._next()
        while True:
            try:
                raw = self._encoded(messages)
                break
            except (ValueError, TooLarge) as fault:
                if len(messages) == 1:
                    self.drop(messages[0][0])
                    self.refused(messages[0][0], fault)
                    return [], b""
                messages = messages[: len(messages) // 2]
        self._remove(messages)
        return messages, raw

    def _next(self) -> list[tuple[int, Waiting]]:
        """What leaves together, as far as weights say: these are lower bounds, rows have up to three times theirs."""
        room = self._shared // 4
        if self._count <= frames.MAX_MESSAGES and self._weight < room:  # nearly always
            return [(session, message) for session, waiting in self._waiting.items() for message, _ in waiting]
        every = ((session, *one) for session, waiting in self._waiting.items() for one in waiting)
        first = [*islice(every, frames.MAX_MESSAGES)]
        before = accumulate((weight for *_, weight in first), initial=0)
        fitting = takewhile(lambda pair: pair[1] < room, zip(first, before, strict=False))
        return [(session, message) for (session, message, _), _ in fitting]

    def _remove(self, left: list[tuple[int, Waiting]]) -> None:
        """What remains of their sessions is behind the others."""
        if len(left) == self._count:
            self._waiting, self._count, self._weight = {}, 0, 0
            self._room.set()
            return
        for session, count in Counter(session for session, _ in left).items():
            waiting = self._waiting.pop(session)
            self._count_out(waiting[:count])
            if waiting[count:]:
                self._waiting[session] = waiting[count:]

    def _encoded(self, messages: list[tuple[int, Waiting]]) -> bytes:
        """A frame; raises TooLarge or ValueError."""
        raw = self.codec.encode(messages)
        if len(raw) > (self._shared if len(messages) > 1 else self.limit.frame_bytes):
            raise too_large(type(messages[0][1]).__name__, raw, self.limit)
        return raw

    def _count_out(self, messages: list[tuple[Waiting, int]]) -> None:
        self._count -= len(messages)
        self._weight -= sum([weight for _, weight in messages])
        self._room.set()


@dataclass(frozen=True)
class Patience:
    """How long a client waits before it calls a service lost. Raises ValueError: a wait is not above 0."""

    describe_seconds: float = 5.0
    reply_seconds: float = 30.0  # that a reply is owed without a sign that the service works on it
    target_seconds: float = 30.0  # of an output without any target, before it fails
    # Whether a service's process is known to run: it is asked until it answers. Its `repr` differs between processes.
    lives: Callable[[str], bool] = field(default=lambda address: False, repr=False)

    def __post_init__(self) -> None:
        for name in ("describe_seconds", "reply_seconds", "target_seconds"):
            if not (seconds := getattr(self, name)) > 0:
                raise ValueError(f"{name} must be above 0, got {seconds:g}")


@dataclass(eq=False)
class Traffic:
    """What a session has sent and received so far; of the bytes of a frame each of its messages has the same share."""

    bytes_sent: float = 0.0  # serialized, before HTTP/2 frames
    bytes_received: float = 0.0
    codec_seconds: float = 0.0  # making frames of messages and messages of frames, shared in the same way


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
        self._link.end(self._number)


class Link:
    """One stream to a service. It begins at once, and ends with the first error; then all its sessions are lost.

    While a session is owed something (`Ledger`), it is lost if nothing comes for `reply_seconds`: with a further
    `Opened` a service says that it works. While nothing is due it lives as long as the stream does, which may be hours;
    gRPC's keepalive tells when the link is cut or the service hangs. The channel is kept, as gRPC closes one that
    nobody refers to.
    """

    def __init__(self, client: "ServiceClient[Any]", channel: Channel) -> None:
        role, limit, about = client.role, client.limit, client.description
        assert about is not None
        self.channel = channel
        self.ended = False
        self.outdated = False  # the service serves another model than it has described
        self._fingerprint = about.fingerprint
        self._service = client.service
        self._reply_seconds = client.patience.reply_seconds  # without a sign of life
        self._sessions: dict[int, LinkSession] = {}
        self._latest = 0  # number of a session
        self._retired = False
        self._codec, self._limit = codec_of(channel, role.client(about.vocabulary_size)), limit
        self._beside = Beside("frames", small=MAX_IN_LOOP)
        self._outbox: Outbox[Any] = Outbox(self._codec, limit, self._refuse)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # of the reply that is due the longest
        # No iterator: frames are written one by one.
        self._call = channel.stream_stream(f"/{role.service}/{role.stream}", bytes, bytes)(
            None, metadata=((codec.DESCRIBED, client.identity),)
        )
        # Tasks without a context: log lines of all sessions must not name the request of the first.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    def begin(self, opening: OpenTarget | OpenDrafter, listener: Listener) -> LinkSession:
        self._latest += 1
        session = self._sessions[self._latest] = LinkSession(self, self._latest, listener)
        self._outbox.put(self._latest, replace(opening, request_id=current().request))
        self._note_sent(session, opening)
        return session

    def put(self, number: int, request: Any) -> None:
        session = self._sessions.get(number)
        if session is not None:
            self._outbox.put(number, request)
            self._note_sent(session, request)

    def end(self, number: int, error: ServiceError | None = None, tell: bool = True) -> None:
        """Drops a session. Its listener is told of an error, and the service that it is over, unless it has said so."""
        self.outdated = self.outdated or isinstance(error, NotServed)
        session = self._sessions.pop(number, None)
        if session is None:
            return
        self._outbox.drop(number)
        if self._retired and not self._sessions:
            self._task.cancel()
        if error is not None:
            session.listener.lost(error)
        if tell:
            self._outbox.put(number, frames.EndSession())

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
        if self._timer is None and session.ledger.owes:
            self._timer = self._loop.call_later(self._reply_seconds, self._check)

    def _check(self) -> None:
        """Loses the sessions whose replies are overdue; looks again when the next one would be."""
        before = now() - self._reply_seconds
        late = [n for n, one in self._sessions.items() if one.ledger.since is not None and one.ledger.since <= before]
        for number in late:
            self.end(number, TimedOut(f"{self._service}: no reply within {self._reply_seconds:g} s"))
        left = [session.ledger.since for session in self._sessions.values() if session.ledger.since is not None]
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
                self.end(number, error, tell=False)

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
                messages = await read(raw, self._codec, self._limit, self._beside)
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
        ledger = session.ledger
        if isinstance(message, frames.SessionEnded):
            self.end(number, self._meaning(message), tell=False)
        elif isinstance(message, BadMessage):
            self.end(number, Internal(f"{self._service} sent a reply that cannot be decoded: {message}"))
        elif not isinstance(message, Opened):
            if session.is_open:
                if ledger.take(message, at := now()) is None:
                    ledger.heard(at)
                session.listener.received(message)
            else:
                what = type(message).__name__
                self.end(number, Internal(f"{self._service} sent {what} where Opened was due"))
        elif message.fingerprint != self._fingerprint:
            self.end(number, NotServed(f"{self._service} serves another model than it described; describe it again"))
        elif session.is_open:
            ledger.heard(now())  # a sign that the service works
        else:
            session.is_open = True
            ledger.opened(now())
            session.listener.opened()

    def _meaning(self, ended: frames.SessionEnded) -> ServiceError:
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
        """A message of it cannot be sent: it fails."""
        self.end(number, fault if isinstance(fault, TooLarge) else BadMessage(f"it cannot be sent: {fault}"))


@dataclass(eq=False)
class ServiceClient(Generic[OpenRequest]):
    """One channel to one service. Must be made in a running event loop, and closed."""

    address: str  # host:port
    patience: Patience = field(default_factory=Patience)
    limit: MessageLimit = field(default_factory=MessageLimit)
    tls: RenewedCredentials | None = None  # None: plaintext
    _credentials: ClientCredentials | None = field(default=None, init=False, repr=False)  # of the channel
    _channel: Channel = field(init=False, repr=False)  # for what begins now
    _channels: WeakSet[Channel] = field(default_factory=WeakSet, init=False, repr=False)  # with those before
    description: Description | None = field(default=None, init=False, repr=False)  # the latest
    identity: str = field(default="", init=False, repr=False)  # of that description: the service refuses another
    _link: Link | None = field(default=None, init=False, repr=False)
    _links: WeakSet[Link] = field(default_factory=WeakSet, init=False, repr=False)  # all that still run

    role: ClassVar[frames.RoleCodec[Any, Any, Any]]

    def __post_init__(self) -> None:
        self.connect()

    def connect(self) -> None:
        """Another channel for what begins now. Open sessions keep theirs, which closes itself with the last of them."""
        options = client_options(self.tls is not None) + self.limit.options()
        self._credentials = None if self.tls is None else self.tls.now()
        if self.address.startswith(f"{HOST}:"):
            self._channel = MemoryChannel(self.address)
        else:
            self._channel = channel_to(self.address, self._credentials, options)
        self._channels.add(self._channel)
        self._retire()

    @property
    def channel(self) -> Channel:
        """For what begins now: with the credentials that the files have now."""
        if self.tls is not None and self.tls.now() is not self._credentials:
            self.connect()
        return self._channel

    def _retire(self) -> None:
        if self._link is not None:
            self._link.retire()
            self._link = None

    @property
    def outdated(self) -> bool:
        """Whether the service has refused a session because it is to be described again."""
        return self._link is not None and self._link.outdated

    @property
    def service(self) -> str:
        return f"{self.role.name} at {self.address}"

    async def describe(self) -> Description:
        """What the service says of its model now.

        Raises ServiceError: it did not say so within `patience.describe_seconds`.
        """
        method = self.channel.unary_unary(f"/{self.role.service}/Describe", bytes, bytes)
        try:
            # The request has no fields.
            raw = await method(b"", timeout=self.patience.describe_seconds)
            self.description = codec.decode_description(common_pb2.Description.FromString(raw))
            identity, self.identity = self.identity, codec.identity_of(raw)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                what = f"what listens at {self.address} is no {self.role.name}"
                raise NotServed(f"{what} (is it the {self.role.other}? check the addresses)") from error
            raise from_status(error.code(), error.details(), self.service) from error
        except (BadMessage, DecodeError) as error:
            raise Internal(f"{self.service} sent a description that cannot be decoded: {error}") from error
        if self.outdated or identity != self.identity:
            self._retire()
        return self.description

    def begin(self, request: OpenRequest, listener: Listener) -> LinkSession:
        """Begins a session whose listener is told what happens; the service must have been described."""
        channel, link = self.channel, self._link
        if link is None or link.ended:
            link = self._link = Link(self, channel)
            self._links.add(link)
        return link.begin(request, listener)

    def reachable(self) -> bool | None:
        """Whether the service can be reached; None: not known yet. Reconnects if the connection was lost.

        Pings tell within seconds that a service is dead, frozen or cut off.
        """
        state, states = self.channel.get_state(try_to_connect=True), grpc.ChannelConnectivity
        return None if state in (states.IDLE, states.CONNECTING) else state is states.READY

    async def close(self) -> None:
        for link in list(self._links):
            await link.close()
        for channel in list(self._channels):
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class TargetClient(ServiceClient[OpenTarget]):
    """A target at an address."""

    role = frames.TARGET


class DrafterClient(ServiceClient[OpenDrafter]):
    """A drafter at an address."""

    role = frames.DRAFTER
