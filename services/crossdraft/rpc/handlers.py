"""The server's side of a session: requests in as they arrive, replies out as they are made, errors as status codes.

Sessions are admitted up to a limit, counted while they are open, logged when they begin and end, and ended when silent.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Generic, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from crossdraft.rpc import codec, drafter_codec, log_context, target_codec
from crossdraft.rpc.errors import BadMessage, Full, ProtocolBroken, ServiceError, name_of, to_status
from crossdraft.types.messages import (
    Advance,
    Description,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Score,
    Scored,
)
from crossdraft.v1 import drafter_pb2, target_pb2

Open = TypeVar("Open")  # the message that begins a session
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Open_contra = TypeVar("Open_contra", contravariant=True)
Ask_contra = TypeVar("Ask_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)
Item = TypeVar("Item")
Context = grpc.aio.ServicerContext[bytes, bytes]
log = logging.getLogger(__name__)
CLOSED = "closed"  # how a session ends in order: a client closes it by cancelling the call
MOST_UNREAD = 64  # requests of a stream that wait for its session; a client that sends more is held back
SILENCE_PRECISION = 0.1  # of the silence that is allowed: how exactly it is kept


class Session(Protocol[Ask_contra, Answer_co]):
    """What a service keeps for one stream. Its methods raise ServiceError, alone or as the first error of a task group;
    that ends this stream only."""

    def converse(self, requests: AsyncIterator[Ask_contra]) -> AsyncGenerator[Answer_co, None]:
        """The replies, whenever one is ready. `requests` yields them as they arrive, and ends with the client's half of
        the stream; replies still due then are sent before the replies end."""
        ...

    async def close(self) -> None:
        """Frees what the session holds; called once, when no reply is awaited any more, for whatever reason."""
        ...


class Service(Protocol[Open_contra, Ask_contra, Answer_co]):
    """A model that is served."""

    @property
    def description(self) -> Description:
        """What it says of its model."""
        ...

    async def open(self, request: Open_contra) -> Session[Ask_contra, Answer_co]:
        """A new session; raises ServiceError."""
        ...

    async def close(self) -> None:
        """Ends what the service runs; called once, when no session is left."""
        ...


@dataclass(frozen=True)
class Role(Generic[Open, Ask, Answer]):
    """One of the two services of the protos, and how its messages are read and written."""

    name: str
    service: str  # full name in the protos
    stream: str  # name of its bidirectional method
    opening: type[Open]
    read: Callable[[bytes, int], Open | Ask]  # raises BadMessage, or protobuf's DecodeError
    write: Callable[[Opened | Answer], Message]


TARGET: Role[OpenTarget, Pass | FetchRow | RunTo, PassDone | RowFetched] = Role(
    name="target",
    service="crossdraft.v1.Target",
    stream="Verify",
    opening=OpenTarget,
    read=lambda raw, size: target_codec.decode_request(target_pb2.VerifyRequest.FromString(raw), size),
    write=target_codec.encode_reply,
)
DRAFTER: Role[OpenDrafter, Draft | Advance | Score, Drafted | Scored] = Role(
    name="drafter",
    service="crossdraft.v1.Drafter",
    stream="Draft",
    opening=OpenDrafter,
    read=lambda raw, size: drafter_codec.decode_request(drafter_pb2.DraftRequest.FromString(raw), size),
    write=drafter_codec.encode_reply,
)


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a server on its clients' sessions.

    Raises:
        ValueError: a value is out of its range.
    """

    sessions: int = 1024  # open at once
    per_peer: int | None = None  # of them with one peer; None: no limit
    idle_seconds: float = 600.0  # a session without a message of either side for so long is ended

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ValueError(f"sessions must be at least 1, got {self.sessions}")
        if self.per_peer is not None and not 1 <= self.per_peer <= self.sessions:
            raise ValueError(
                f"sessions of one peer must be between 1 and those of all, {self.sessions}, got {self.per_peer}"
            )
        if not 0 < self.idle_seconds < float("inf"):
            raise ValueError(f"idle_seconds must be above 0, got {self.idle_seconds}")


class Admission:
    """The sessions of one server, counted by peer."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()

    @contextmanager
    def admitted(self, peer: str) -> Iterator[None]:
        """Counts the block as one session of a peer.

        Raises:
            Full: a limit is reached.
        """
        limits = self._limits
        if self._open.total() >= limits.sessions:
            raise Full(f"{limits.sessions} are open (--max-sessions)")
        if limits.per_peer is not None and self._open[peer] >= limits.per_peer:
            raise Full(f"{limits.per_peer} of {peer} are open (--max-sessions-per-peer)")
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # drops peers without sessions


def peer_of(context: "grpc.aio.ServicerContext[bytes, bytes]") -> str:
    """The client of a call: its certificate's first name where there is one, else its address without the port."""
    identities = context.peer_identities()
    if identities:
        return next(iter(identities)).decode(errors="replace")
    return context.peer().rpartition(":")[0]


@asynccontextmanager
async def ended_when_silent(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """Cancels the block, and ends, once the function that it yields was not called for so many seconds."""
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(seconds) as limit:

            def active() -> None:
                due, now = limit.when(), clock()
                # Rescheduled seldom, as this is called for every message.
                if due is not None and not limit.expired() and now + seconds - due > SILENCE_PRECISION * seconds:
                    limit.reschedule(now + seconds)

            yield active
    except TimeoutError:
        if not limit.expired():
            raise


@asynccontextmanager
async def read_ahead(source: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Reads a source while the block runs, whatever else is under way; yields its items, in order, up to its end.

    Raises:
        BaseExceptionGroup: of what the block raised, or of what the source did: that ends the block at once.
    """
    waiting: asyncio.Queue[Item | None] = asyncio.Queue(MOST_UNREAD)

    async def fill() -> None:
        async for item in source:
            await waiting.put(item)
        await waiting.put(None)

    async def taken() -> AsyncIterator[Item]:
        while (item := await waiting.get()) is not None:
            yield item

    async with asyncio.TaskGroup() as group:
        filling = group.create_task(fill())
        yield taken()
        filling.cancel()


@dataclass
class Tally:
    """What was exchanged in a session."""

    requests: int = 0
    replies: int = 0
    bytes_received: int = 0  # serialized, before HTTP/2 frames
    bytes_sent: int = 0
    passes: int = 0
    nodes: int = 0  # of passes: those that were answered, roots among them
    draft_tokens: int = 0
    branches: int = 0  # prepared continuations
    scores: int = 0  # prefixes
    model_seconds: float = 0.0  # as replies say; each pass of a batch counts the whole batch

    def received(self, raw: bytes) -> None:
        """Counts a request."""
        self.requests += 1
        self.bytes_received += len(raw)

    def sent(self, reply: object, raw: bytes) -> None:
        """Counts a reply."""
        self.replies += 1
        self.bytes_sent += len(raw)
        match reply:
            case PassDone():
                self.passes += reply.forwards
                self.nodes += len(reply.nodes)
                self.model_seconds += reply.seconds
            case Drafted():
                self.draft_tokens += len(reply.draft_tokens)
                self.branches += len(reply.branches)
                self.model_seconds += reply.seconds
            case Scored():
                self.scores += len(reply.probabilities)
                self.model_seconds += reply.seconds

    def add(self, other: "Tally") -> None:
        """Adds another tally."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def __str__(self) -> str:
        counted = {name: value for name, value in asdict(self).items() if value}
        return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in counted.items())


class Activity:
    """The sessions of one server since it began.

    Args:
        role: of the server; sessions are named by it.
    """

    def __init__(self, role: str) -> None:
        self.opened = 0
        self.ended: Counter[str] = Counter()  # by how: CLOSED, or the name of an error
        self.seconds = 0.0  # that ended sessions were open
        self._role = role
        self._open: list[Tally] = []
        self._past = Tally()  # of ended sessions
        self._moving = threading.Lock()  # so that a session that ends is counted in exactly one of the two

    @property
    def open(self) -> int:
        """Sessions that are open now."""
        return len(self._open)

    def total(self) -> Tally:
        """What all sessions have done so far. May be called from any thread."""
        total = Tally()
        with self._moving:
            for tally in (self._past, *self._open):
                total.add(tally)
        return total

    @contextmanager
    def session(self, request: str, peer: str) -> Iterator[Tally]:
        """Counts and logs the block as one session for a client's request; the caller counts messages in the tally."""
        self.opened += 1
        tally, began = Tally(), time.monotonic()
        self._open.append(tally)
        outcome = CLOSED
        with log_context.about(request=request, session=f"{self._role}-{self.opened}", peer=peer):
            log.info("session opened")
            try:
                yield tally
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                outcome = name_of(first_of(error))
                raise
            finally:
                seconds = time.monotonic() - began
                self._end(tally, outcome, seconds)
                figures = {"outcome": outcome, "seconds": round(seconds, 6), **asdict(tally)}
                log.info("session ended (%s) after %.3f s: %s", outcome, seconds, tally, extra={"figures": figures})

    def _end(self, tally: Tally, outcome: str, seconds: float) -> None:
        with self._moving:
            self._open = [other for other in self._open if other is not tally]
            self._past.add(tally)
        self.ended[outcome] += 1
        self.seconds += seconds


def first_of(fault: BaseException) -> BaseException:
    """The first error of an exception group."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault


@dataclass(frozen=True)
class _Call:
    """A session's stream, its tally and its idle timer."""

    context: Context
    tally: Tally
    active: Callable[[], None]  # called with each message of either side

    def received(self, raw: bytes) -> None:
        """Counts a request."""
        self.tally.received(raw)
        self.active()


class Handlers(Generic[Open, Ask, Answer]):
    """Answers a role's methods with a service. Messages come as bytes, so that malformed ones get the right status."""

    def __init__(
        self, role: Role[Open, Ask, Answer], service: Service[Open, Ask, Answer], limits: SessionLimits
    ) -> None:
        self._admission = Admission(limits)
        self._idle_seconds = limits.idle_seconds
        self._role = role
        self._service = service
        self._size = service.description.vocabulary_size
        self.activity = Activity(role.name)

    def registered(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """For `add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            self._role.service,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(self.describe),
                self._role.stream: grpc.stream_stream_rpc_method_handler(self.converse),
            },
        )

    async def describe(self, request: bytes, context: Context) -> bytes:
        """The description; the request has no fields."""
        return codec.encode_description(self._service.description).SerializeToString()

    async def converse(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """One session. It ends with the client's half of the stream, with its cancellation, with an error, or when
        it was silent for too long."""
        try:
            with self._admission.admitted(peer_of(context)):
                async with ended_when_silent(self._idle_seconds) as active:
                    opening = await anext(requests, None)
                    if opening is not None:
                        request = _request_id(context)
                        with self.activity.session(request, context.peer()) as tally:
                            await self._converse(opening, requests, _Call(context, tally, active))
        except (ServiceError, BaseExceptionGroup) as fault:
            error = first_of(fault)
            if not isinstance(error, ServiceError):
                raise error from None
            code, text = to_status(error)
            await context.abort(code, text)

    async def _converse(self, opening: bytes, requests: AsyncIterator[bytes], call: "_Call") -> None:
        call.received(opening)
        first = self._decoded(opening)
        if not isinstance(first, self._role.opening):
            raise ProtocolBroken(f"the first message was {type(first).__name__}; open the session first")
        session = await self._service.open(first)
        try:
            await self._send(Opened(self._service.description.fingerprint), call)
            async with read_ahead(self._asked(requests, call)) as asked, aclosing(session.converse(asked)) as replies:
                async for reply in replies:
                    await self._send(reply, call)
        finally:
            await session.close()

    async def _asked(self, requests: AsyncIterator[bytes], call: "_Call") -> AsyncIterator[Ask]:
        async for raw in requests:
            call.received(raw)
            request = self._decoded(raw)
            if isinstance(request, self._role.opening):
                raise ProtocolBroken("the session is open already; use another stream for another session")
            yield cast(Ask, request)

    def _decoded(self, raw: bytes) -> Open | Ask:
        try:
            return self._role.read(raw, self._size)
        except DecodeError as error:
            raise BadMessage(f"not a message of {self._role.service}/{self._role.stream}: {error}") from error

    async def _send(self, reply: Opened | Answer, call: "_Call") -> None:
        raw = self._role.write(reply).SerializeToString()
        call.tally.sent(reply, raw)
        await call.context.write(raw)
        call.active()


def _request_id(context: Context) -> str:
    """The id of the client's request, or empty; raises BadMessage."""
    try:
        return log_context.from_metadata(context.invocation_metadata())
    except log_context.RequestIdError as error:
        raise BadMessage(str(error)) from error
