"""The server's side of a link: requests in as they arrive, replies out as they are made, errors as status codes.

Sessions are admitted up to a limit, counted while they are open, logged when they begin and end, and ended when silent.
What is wrong with one session ends that session; what is wrong with a frame ends its link.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

import grpc

from crossdraft.config.service import SessionOptions
from crossdraft.rpc import codec, errors, logs
from crossdraft.rpc.errors import BadMessage, ProtocolBroken, ServiceError
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.frames import Answer, Ask, EndSession, Opening, RoleCodec, SessionEnded
from crossdraft.rpc.links import MAX_IN_LOOP, Join, Outbox, read
from crossdraft.rpc.memory import MemoryContext, codec_of
from crossdraft.rpc.transport import MessageLimit
from crossdraft.types import messages

Opening_contra = TypeVar("Opening_contra", contravariant=True)
Ask_contra = TypeVar("Ask_contra", contravariant=True)
Answer_contra = TypeVar("Answer_contra", contravariant=True)
Context = grpc.aio.ServicerContext[bytes, bytes] | MemoryContext
log = logging.getLogger(__name__)
CLOSED = "closed"  # how a session ends in order
MAX_UNREAD_REPLIES = 256  # replies of a session that wait for its client: one that has more does not read them
UNREAD_LIMITS = 4  # message limits of a link's replies that wait: whoever reads as it asks has hardly one
MAX_LINKS = 64  # of one peer, or as many as it may have sessions: each process has one for every model and drafter
MAX_EARLY = 16  # requests of a session that is still being opened
SILENCE_PRECISION = 0.1  # of the silence that is allowed: how exactly it is kept
OK = 0  # gRPC's status code
RARE = messages.OpenTarget, messages.OpenDrafter, EndSession, BadMessage  # messages that are no session's requests


class SessionHandler(Protocol[Ask_contra, Answer_contra]):
    """What a service keeps for one session of a link. Its methods are called in the event loop, and never wait."""

    def receive(self, request: Ask_contra, /) -> None:
        """Takes a request, in the order in which they came. Raises ServiceError, which ends the session."""

    def left(self, reply: Answer_contra, /) -> None:
        """A reply is being written to the stream."""

    def close(self) -> None:
        """Frees what the session holds; called once, when nothing more is wanted of it, for whatever reason."""


class Service(Protocol[Opening_contra, Ask_contra, Answer]):
    """A model that is served."""

    @property
    def description(self) -> messages.Description:
        """What it says of its model."""

    async def open(self, request: Opening_contra, replies: "Replies[Answer]", /) -> SessionHandler[Ask_contra, Answer]:
        """A new session; raises ServiceError. Is cancelled if the session ends before; then it must leave nothing."""

    async def close(self) -> None:
        """Ends what the service runs; called once, when no session is left."""


def counted(text: str) -> int:
    """A count that is a metric, too, with this text."""
    number: int = field(default=0, metadata={"text": text})
    return number


@dataclass
class Tally:
    """What was exchanged in a session."""

    requests: int = counted("Messages of sessions that came.")
    replies: int = counted("Messages of sessions that were sent.")
    bytes_received: float = 0.0  # serialized, before HTTP/2 frames: its shares of the link's frames
    bytes_sent: float = 0.0
    passes: int = counted("Passes that were answered.")
    pass_nodes: int = counted("Nodes of passes that were answered, roots among them.")
    draft_tokens: int = counted("Draft tokens that were sent, without those of branches.")
    branches: int = counted("Prepared continuations that were sent.")
    scores: int = counted("Prefixes whose probability was asked for.")
    model_seconds: float = 0.0  # as replies say; each pass of a batch counts the whole batch

    def received(self, size: float) -> None:
        self.requests += 1
        self.bytes_received += size

    def sent(self, reply: object, size: float) -> None:
        self.replies += 1
        self.bytes_sent += size
        if isinstance(reply, messages.PassDone):
            self.passes += reply.forwards
            self.pass_nodes += len(reply.nodes)
        elif isinstance(reply, messages.Drafted):
            self.draft_tokens += len(reply.draft_tokens)
            self.branches += len(reply.branches)
        elif isinstance(reply, messages.Scored):
            self.scores += len(reply.probabilities)
        self.model_seconds += getattr(reply, "seconds", 0.0)

    def add(self, other: "Tally") -> None:
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))

    def __str__(self) -> str:
        counted = {name: value for name, value in asdict(self).items() if value}
        return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in counted.items())


class Activity:
    """The sessions of one server since it began, which are admitted up to its limits."""

    def __init__(self, role: str, limits: SessionOptions) -> None:
        self.opened = 0
        self.ended: Counter[str] = Counter()  # by how: CLOSED, or the name of an error
        self.seconds = 0.0  # that ended sessions were open
        self._role = role
        self._limits = limits
        self._open: list[Tally] = []
        self._peers: Counter[str] = Counter()  # open sessions of each
        self._past = Tally()  # of ended sessions
        self._moving = threading.Lock()  # so that a session that ends is counted in exactly one of the two

    @property
    def open(self) -> int:
        return len(self._open)

    def total(self) -> Tally:
        """What all sessions have done so far. May be called from any thread."""
        total = Tally()
        with self._moving:
            for tally in (self._past, *self._open):
                total.add(tally)
        return total

    def begin(self, request: str, peer: str, address: str) -> "SessionLog":
        """Counts a session of a peer, until `end`. Raises Full: a limit is reached."""
        limits = self._limits
        if self.open >= limits.max_sessions:
            raise errors.Full(f"{limits.max_sessions} are open (--max-sessions)")
        if limits.max_sessions_per_peer is not None and self._peers[peer] >= limits.max_sessions_per_peer:
            raise errors.Full(f"{limits.max_sessions_per_peer} of {peer} are open (--max-sessions-per-peer)")
        self.opened += 1
        entry = SessionLog(f"{self._role}-{self.opened}", request, peer, address)
        self._open.append(entry.tally)
        self._peers[peer] += 1
        with entry.about():
            log.info("session opened")
        return entry

    def end(self, entry: "SessionLog", outcome: str) -> None:
        seconds, tally = time.monotonic() - entry.began, entry.tally
        with self._moving:
            self._open = [other for other in self._open if other is not tally]
            self._past.add(tally)
        self._peers = self._peers - Counter((entry.peer,))  # without peers that have none
        self.ended[outcome] += 1
        self.seconds += seconds
        figures = {"outcome": outcome, "seconds": round(seconds, 6), **asdict(tally)}
        with entry.about():
            log.info("session ended (%s) after %.3f s: %s", outcome, seconds, tally, extra={"figures": figures})


@dataclass(frozen=True, eq=False)
class SessionLog:
    """A session's tally, and what its log lines name."""

    name: str
    request: str  # id of the client's request
    peer: str  # as sessions are counted
    address: str  # of it
    tally: Tally = field(default_factory=Tally)
    began: float = field(default_factory=time.monotonic)

    def about(self) -> AbstractContextManager[logs.LogContext]:
        return logs.about(request=self.request, session=self.name, peer=self.address)


class Handlers(Generic[Opening, Ask, Answer]):
    """Answers a role's methods with a service. Messages come as bytes, so that malformed ones get the right status."""

    def __init__(
        self,
        role: RoleCodec[Opening, Ask, Answer],
        service: Service[Opening, Ask, Answer],
        limits: SessionOptions,
        limit: MessageLimit,
    ) -> None:
        self.activity = Activity(role.name, limits)
        self.service = service
        self.limit, self.beside = limit, Beside("frames", small=MAX_IN_LOOP)
        self.idle_seconds = limits.idle_seconds
        self._most_links = max(MAX_LINKS, limits.max_sessions_per_peer or limits.max_sessions)
        self.codec = role.server(service.description.vocabulary_size)
        self.draining = False
        self._role = role
        self._links: set[ServerLink] = set()

    def registered(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        return grpc.method_handlers_generic_handler(
            self._role.service,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(self.describe),
                self._role.stream: grpc.stream_stream_rpc_method_handler(self.link),
            },
        )

    async def describe(self, request: bytes, context: Context) -> bytes:
        """The description; the request has no fields."""
        return codec.described(self.service.description)[0]

    async def link(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """All sessions of one client process. Ends with the client's half of the stream, with its cancellation, when a
        frame cannot be read, or when it has had no session for as long as a session may be silent."""
        link = ServerLink(self, context)
        known, described = dict(context.invocation_metadata() or ()), codec.described(self.service.description)[1]
        try:
            if known.get(codec.DESCRIBED, described) != described:  # its ids may mean something else here
                raise errors.NotServed("it serves another model than it described; describe it again")
            if sum(other.peer == link.peer for other in self._links) >= self._most_links:
                what = f"{self._most_links} connections of {link.peer} are open"
                raise errors.Full(f"{what} (--max-sessions, --max-sessions-per-peer)")
            self._links.add(link)
            await context.send_initial_metadata(())  # else a first write that is cancelled keeps the status back
            await link.run(requests)
        except ServiceError as error:
            code, text = errors.to_status(error)
            await context.abort(code, text)
        finally:
            self._links.discard(link)

    def drain(self) -> None:
        """No session begins any more; each link ends with its last one."""
        self.draining = True
        for link in self._links:
            link.end_if_idle()


class ServerLink:
    """One client's stream and its sessions."""

    def __init__(self, handlers: Handlers[Any, Any, Any], context: Context) -> None:
        self._codec = codec_of(context, handlers.codec)
        self.outbox: Outbox[Any] = Outbox(self._codec, handlers.limit, self.end)
        self._handlers = handlers
        self._context = context
        names = iter(context.peer_identities() or ())  # in its certificate; else its address is who the client is
        self.peer = next((name.decode(errors="replace") for name in names), context.peer().rpartition(":")[0])
        self._sessions: dict[int, Replies[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._active = self._loop.time()  # when it last had a session

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Reads and writes until the stream is over; raises ServiceError for a frame that cannot be read."""
        tasks = [
            asyncio.create_task(self._read(requests)),
            asyncio.create_task(self.outbox.write(self._context.write, self._left)),
            asyncio.create_task(self._watch_silence()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for number in list(self._sessions):
                self._forget(number, CLOSED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, number: int, error: BaseException | None) -> None:
        """Ends a session; without an error in order."""
        if number in self._sessions:
            self.outbox.put(number, _ended(error))
            self._forget(number, CLOSED if error is None else errors.name_of(error))

    def end_if_idle(self) -> None:
        if self._handlers.draining and not self._sessions:
            self.outbox.finish()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for raw in requests:
            messages = await read(raw, self._codec, self._handlers.limit, self._handlers.beside)
            share = len(raw) / max(1, len(messages))
            for number, message in messages:
                self._received(number, message, share)
            await asyncio.sleep(0)  # what begins now answers before room is looked for; others get a turn
            await self.outbox.room()

    def _received(self, number: int, message: Any, size: float) -> None:
        session = self._sessions.get(number)
        try:
            if session is not None and not isinstance(message, RARE):
                session.received(message, size)
            elif isinstance(message, messages.OpenTarget | messages.OpenDrafter):
                self._begin(number, message, size)
            elif session is None:
                if isinstance(message, BadMessage):  # perhaps it was to begin one
                    self.outbox.put(number, _ended(message))
            elif isinstance(message, EndSession):
                self._forget(number, CLOSED)
                self.outbox.drop(number)
            else:
                raise message
        except Exception as error:  # a fault in one session, of client or service, ends no other
            self.end(number, error)

    def _begin(self, number: int, opening: messages.OpenTarget | messages.OpenDrafter, size: float) -> None:
        if number in self._sessions:
            raise ProtocolBroken(f"session {number} is open already; give another session another number")
        try:
            if self._handlers.draining:
                raise errors.Unreachable("the service is shutting down")
            request = logs.request_id(opening.request_id) if opening.request_id else ""
            entry = self._handlers.activity.begin(request, self.peer, self._context.peer())
        except ServiceError as error:
            self.outbox.put(number, _ended(error))
        else:
            session = self._sessions[number] = Replies(self, number, entry)
            session.active = self._loop.time()
            session.tally.received(size)
            session.open(self._handlers.service, opening)

    def _forget(self, number: int, outcome: str) -> None:
        session = self._sessions.pop(number)
        session.close()
        self._handlers.activity.end(session.entry, outcome)
        self._active = self._loop.time()
        self.end_if_idle()

    def _left(self, number: int, message: Any, size: float, _: float) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.left(message, size)

    async def _watch_silence(self) -> None:
        """Ends sessions that are silent for too long, and the link when it has had none for as long."""
        allowed = self._handlers.idle_seconds
        while True:
            await asyncio.sleep(SILENCE_PRECISION * allowed)
            before = self._loop.time() - allowed
            for number in [number for number, session in self._sessions.items() if session.active <= before]:
                self.outbox.drop(number)
                self.end(number, None)
            if not self._sessions and self._active <= before:
                return


def _ended(error: BaseException | None) -> SessionEnded:
    """What a client is told of a session's end."""
    if error is None:
        return SessionEnded(OK)
    if isinstance(error, ServiceError):
        code, text = errors.to_status(error)
        return SessionEnded(code.value[0], text)
    log.error("a session failed", exc_info=error)
    return SessionEnded(grpc.StatusCode.UNKNOWN.value[0], f"{type(error).__name__}: {error}")


class Replies(Generic[Answer]):
    """One session of a link, which may still be being opened: to its service, where replies go.

    To be used in the event loop; nothing waits.
    """

    def __init__(self, link: ServerLink, number: int, entry: SessionLog) -> None:
        self.entry = entry
        self.tally = entry.tally
        self.active = 0.0  # seconds of the loop's clock: when the latest message of either side came or left
        self._link = link
        self._number = number
        self._clock = asyncio.get_running_loop().time
        self._session: SessionHandler[Any, Any] | None = None
        self._early: list[Any] = []  # requests that came before it was open
        self._opening: asyncio.Task[None] | None = None
        self._over = False
        self._fingerprint = ""

    def open(self, service: Service[Any, Any, Any], opening: Any) -> None:
        with self.entry.about():
            self._opening = asyncio.create_task(self._open(service, opening))
            self._opening.add_done_callback(self._opened)

    async def _open(self, service: Service[Any, Any, Any], opening: Any) -> None:
        self._session = session = await service.open(opening, self)
        self._fingerprint = service.description.fingerprint
        self.send(messages.Opened(self._fingerprint))
        early, self._early = self._early, []
        for request in early:
            if not self._over:
                session.receive(request)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self.fail(error)

    def received(self, request: Any, size: float) -> None:
        """Takes a request; raises ServiceError."""
        self.active = self._clock()
        self.tally.received(size)
        if self._session is not None:
            self._session.receive(request)
        elif len(self._early) < MAX_EARLY:
            self._early.append(request)
        else:
            raise ProtocolBroken("too many requests before the session is open")

    def send(self, reply: Answer | messages.Opened, within: float = 0.0, join: Join[Any] | None = None) -> None:
        """Sends a reply after those before, within so many seconds; `join` as in `Outbox.put`."""
        if self._over:
            return
        outbox = self._link.outbox
        unread = outbox.put(self._number, reply, within, join)
        if unread > MAX_UNREAD_REPLIES or outbox.over(UNREAD_LIMITS):
            outbox.drop(self._number)
            self.fail(ProtocolBroken(f"{unread} replies wait: the client does not read them"))

    def working(self) -> None:
        """Says that what the client waits for is being worked on."""
        sign = messages.Opened(self._fingerprint)
        self.send(sign, join=lambda before, _: sign if isinstance(before, messages.Opened) else None)

    def drop(self) -> None:
        """Forgets the replies that have not left yet."""
        for reply in self._link.outbox.drop(self._number):
            if isinstance(reply, messages.Opened):  # what was sent at once is answered before that
                self._link.outbox.put(self._number, reply)

    def fail(self, error: BaseException) -> None:
        """Ends the session; a ServiceError is what the client is told, any other error is a fault of the service."""
        if not self._over:
            self._link.end(self._number, error)

    def left(self, reply: Any, size: float) -> None:
        self.active = self._clock()
        self.tally.sent(reply, size)
        if self._session is not None and not isinstance(reply, messages.Opened):
            self._session.left(reply)

    def close(self) -> None:
        self._over = True
        if self._opening is not None:
            self._opening.cancel()  # what has not begun of it never will
        if self._session is not None:
            self._session.close()
            self._session = None  # the two would keep each other, and what the session holds, for the garbage collector
