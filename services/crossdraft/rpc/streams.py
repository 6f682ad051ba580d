"""One bidirectional stream as a session: requests out without waiting, replies in, both counted, waiting bounded."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.codec import Opened
from crossdraft.rpc.errors import BadMessage, Closed, Internal, NotServed, ServiceError, TimedOut, TooLarge, from_status
from crossdraft.rpc.log_context import to_metadata
from crossdraft.rpc.transport import MessageLimit
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Score,
    Scored,
)

Request = TypeVar("Request")
Reply = TypeVar("Reply")

FOREIGN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError)  # what using a call raises


@dataclass
class Traffic:
    """What a session has sent and received so far, requests and replies only."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0  # serialized, before HTTP/2 frames
    bytes_received: int = 0
    seconds_waited: float = 0.0  # for replies
    codec_seconds: float = 0.0  # in which messages were made of requests, and replies of messages


# Which requests of a session still wait for a reply: what a client's patience is measured against.

Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_contra = TypeVar("Reply_contra", contravariant=True)


class Dues(Protocol[Request_contra, Reply_contra]):
    """What a service owes one session."""

    @property
    def owed(self) -> bool:
        """Whether a reply is due."""
        ...

    def sent(self, request: Request_contra) -> bool:
        """Counts a request; returns whether the wait for a reply begins with it."""
        ...

    def came(self, reply: Reply_contra) -> None:
        """Counts a reply."""
        ...


@dataclass(frozen=True)
class Wire(Generic[Request, Reply]):
    """How the two kinds of messages of one method become bytes and are read from them."""

    method: str  # full path
    limit: MessageLimit
    write: Callable[[Request], Message]
    read: Callable[[bytes], Reply]  # raises BadMessage, or protobuf's DecodeError
    dues: Callable[[], Dues[Request, Reply]]  # of a new session


class Stream(Generic[Request, Reply]):
    """An open stream. `send` does not wait for replies, and `receive` takes whatever comes next.

    While a reply is due (`Dues`), `receive` waits for a limited time: counted from its call, or from the request that
    made the reply due if that was sent later. While none is due it waits as long as the stream lives, which may be
    hours; gRPC's keepalive tells when the link is cut or the service hangs. After any error the stream is closed.
    """

    def __init__(
        self, channel: grpc.aio.Channel, wire: Wire[Request, Reply], service: str, reply_seconds: float
    ) -> None:
        self.traffic = Traffic()
        self._channel = channel  # that nobody refers to any more closes itself
        self._wire = wire
        self.service = service
        self._reply_seconds = reply_seconds
        self._dues = wire.dues()
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._closed = False
        self._receiving = False
        self._timer: asyncio.TimerHandle | None = None  # runs while `receive` waits for a reply that is due
        self._late = False  # ... and has run out
        # Bytes, not messages: their sizes are counted here.
        method = channel.stream_stream(wire.method, bytes, bytes)
        self._call = method(None, metadata=to_metadata())  # no iterator: requests are written one by one

    async def send(self, request: Request) -> None:
        """Sends one request, after those that other tasks are sending; does not wait for a reply.

        Raises:
            TooLarge: it is over the client's limit; nothing was sent.
            ServiceError: the stream is closed; the error says why.
        """
        began = time.perf_counter()
        raw = self._wire.write(request).SerializeToString()
        self.traffic.codec_seconds += time.perf_counter() - began
        if len(raw) > self._wire.limit.bytes:
            raise TooLarge(f"a {type(request).__name__} of {len(raw)} bytes is over this client's {self._wire.limit}")
        if self._dues.sent(request) and self._receiving:
            self._wait_anew()
        async with self._writing:
            try:
                await self._call.write(raw)
            except FOREIGN as error:
                raise await self._meaning(error) from error
        self.traffic.messages_sent += 1
        self.traffic.bytes_sent += len(raw)

    async def receive(self) -> Reply:
        """The next reply.

        Raises:
            TimedOut: it did not come in time.
            Closed: the session was ended in order, by the service or by `close`.
            ServiceError: the stream is broken, or the reply means nothing.
        """
        began = time.monotonic()
        self._receiving = True
        if self._dues.owed:
            self._wait_anew()
        try:
            raw = await self._call.read()
        except FOREIGN as error:
            raise await self._meaning(error) from error
        finally:
            self._receiving = False
            self._stop_timer()
            self.traffic.seconds_waited += time.monotonic() - began
        if not isinstance(raw, bytes):  # gRPC's mark of the end
            raise await self._reason()
        self.traffic.messages_received += 1
        self.traffic.bytes_received += len(raw)
        began = time.perf_counter()
        reply = self._decoded(raw)
        self.traffic.codec_seconds += time.perf_counter() - began
        self._dues.came(reply)
        return reply

    async def ask(self, request: Request) -> Reply:
        """Sends a request and waits for the next reply; only for sessions that have no other request under way."""
        await self.send(request)
        return await self.receive()

    async def close(self) -> None:
        """Ends the session; the service gives back what it held."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Reply:
        try:
            return await self.receive()
        except Closed:
            raise StopAsyncIteration from None

    def _wait_anew(self) -> None:
        """From now on a reply is due."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._reply_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Ends the call, and `receive` with it."""
        self._late = True
        self._call.cancel()

    def _decoded(self, raw: bytes) -> Reply:
        try:
            return self._wire.read(raw)
        except (BadMessage, DecodeError) as error:
            self._call.cancel()
            raise Internal(f"{self.service} sent a reply that means nothing: {error}") from error

    async def _meaning(self, error: BaseException) -> ServiceError:
        """What it means that gRPC has raised this; raises it again if it is the task's own cancellation."""
        if isinstance(error, asyncio.CancelledError):
            # gRPC raises it in every task that uses a call that somebody else has cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise error
        return await self._reason()

    async def _reason(self) -> ServiceError:
        """Why the call, which has ended, did so."""
        if self._late:
            return TimedOut(f"{self.service}: no reply within {self._reply_seconds:g} s")
        code = await self._call.code()
        if self._closed or code is grpc.StatusCode.OK:
            return Closed(f"the session with the {self.service} was ended")
        return from_status(code, await self._call.details(), self.service)


# Open sessions with a service: requests and replies as plain values, each reply checked against what was asked.

Expected = TypeVar("Expected")


class TargetSession(Stream[target_codec.Request, target_codec.Reply]):
    """An open session with a target."""

    async def run(self, request: Pass) -> PassDone:
        """One pass; raises ServiceError."""
        done = _expected(await self.ask(request), PassDone, self.service)
        _same(done.number, request.number, "pass", self.service)
        if len(done.nodes) != len(request.answered):
            raise Internal(f"{self.service} answered {len(done.nodes)} of {len(request.answered)} nodes")
        return done

    async def draw(self, request: Pass) -> AsyncGenerator[PassDone, None]:
        """The replies to a run, as they come; raises ServiceError."""
        await self.send(request)
        more = True
        while more:
            done = _expected(await self.receive(), PassDone, self.service)
            _same(done.number, request.number, "pass", self.service)
            more = done.more
            yield done

    async def fetch(self, request: FetchRow) -> RowFetched:
        """More of the row of one node of the latest pass; raises ServiceError."""
        fetched = _expected(await self.ask(request), RowFetched, self.service)
        _same(fetched.node, request.node, "node", self.service)
        return fetched


class DrafterSession(Stream[drafter_codec.Request, drafter_codec.Reply]):
    """An open session with a drafter. `draft` and `score` are for those who want one thing at a time."""

    async def draft(self, request: Draft) -> Drafted:
        """The first reply of an epoch: all of it, unless the request asks for smaller chunks; raises ServiceError."""
        await self.send(request)
        while True:
            drafted = _expected(await self.receive(), Drafted, self.service)
            if drafted.epoch >= request.epoch:  # else the drafter did not know yet
                break
        _same(drafted.epoch, request.epoch, "epoch", self.service)
        return drafted

    async def score(self, request: Score) -> Scored:
        """How probable strings are as the beginning of the epoch's draft; raises ServiceError."""
        scored = _expected(await self.ask(request), Scored, self.service)
        _same(scored.epoch, request.epoch, "epoch", self.service)
        if len(scored.probabilities) != len(request.strings):
            raise Internal(f"{self.service} scored {len(scored.probabilities)} of {len(request.strings)} strings")
        return scored


async def open_session(session: Stream[Request, Reply], request: Request, fingerprint: str) -> None:
    """Opens a session, and sees that the model is the one that was described."""
    try:
        opened = _expected(await session.ask(request), Opened, session.service)
        if opened.fingerprint != fingerprint:
            raise NotServed(f"{session.service} serves another model than it described; describe it again")
    except BaseException:
        await session.close()
        raise


def _expected(reply: object, kind: type[Expected], service: str) -> Expected:
    if not isinstance(reply, kind):
        raise Internal(f"{service} sent {type(reply).__name__} where {kind.__name__} was due")
    return reply


def _same(got: int, due: int, name: str, service: str) -> None:
    if got != due:
        raise Internal(f"{service} answered {name} {got} where {due} was due")


class TargetDues:
    """A target owes one reply for each request, in order: the wait begins with the oldest that has none.

    For a run it owes several, each within the time of one; to `RunTo` it owes none.
    """

    def __init__(self) -> None:
        self._unanswered = 0

    @property
    def owed(self) -> bool:
        """As in `Dues`."""
        return self._unanswered > 0

    def sent(self, request: target_codec.Request) -> bool:
        """As in `Dues`."""
        if isinstance(request, RunTo):
            return False
        self._unanswered += 1
        return self._unanswered == 1

    def came(self, reply: target_codec.Reply) -> None:
        """As in `Dues`."""
        if not (isinstance(reply, PassDone) and reply.more):
            self._unanswered = max(0, self._unanswered - 1)


class DrafterDues:
    """A drafter owes the newest Draft a first reply, and each Score since then one. Older requests are owed nothing.

    It owes nothing for an Advance, nor the later replies of an epoch: how long draft tokens are worth waiting for is
    for the session to say.
    """

    def __init__(self) -> None:
        self._opening = False
        self._epoch = 0
        self._draft = False
        self._scores = 0

    @property
    def owed(self) -> bool:
        """As in `Dues`."""
        return self._opening or self._draft or self._scores > 0

    def sent(self, request: drafter_codec.Request) -> bool:
        """As in `Dues`."""
        before = self.owed
        match request:
            case OpenDrafter():
                self._opening = True
            case Draft():
                self._epoch, self._draft, self._scores = request.epoch, True, 0
                return True
            case Score():
                self._scores += 1
            case Advance():
                pass
        return self.owed and not before

    def came(self, reply: drafter_codec.Reply) -> None:
        """As in `Dues`; what belongs to another epoch than the newest counts for nothing."""
        match reply:
            case Opened():
                self._opening = False
            case Drafted(epoch=self._epoch):
                self._draft = False
            case Scored(epoch=self._epoch):
                self._scores = max(0, self._scores - 1)


# Takes messages as they arrive, whatever else is under way.

Item = TypeVar("Item")
UNREAD = 64  # messages that wait to be taken; a source that has more is held back


@asynccontextmanager
async def inbox(source: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Reads a source while the block runs, and yields what it had, in order, up to its end.

    Raises:
        BaseExceptionGroup: of what the block raised, or of what the source did: that ends the block at once.
    """
    waiting: asyncio.Queue[Item | None] = asyncio.Queue(UNREAD)

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
