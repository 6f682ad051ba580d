"""The client's side of a session: one bidirectional stream, requests out without waiting, replies in, waits bounded."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage, Closed, Internal, NotServed, ServiceError, TimedOut, TooLarge, from_status
from crossdraft.rpc.log_context import to_metadata
from crossdraft.rpc.transport import MessageLimit
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Opened,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Score,
    Scored,
)

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Expected = TypeVar("Expected")

GRPC_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError)  # raised by using a call


@dataclass
class Traffic:
    """What a session has sent and received so far, requests and replies only."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0  # serialized, before HTTP/2 frames
    bytes_received: int = 0
    seconds_waited: float = 0.0  # for replies
    codec_seconds: float = 0.0  # making messages of requests, and replies of messages


class Outstanding(ABC, Generic[Request, Reply]):
    """The replies that are due in one session. While one is, the client's patience runs."""

    @property
    @abstractmethod
    def due(self) -> bool:
        """Whether a reply is due."""

    @abstractmethod
    def sent(self, request: Request) -> bool:
        """Counts a request; returns whether the wait for a reply begins with it."""

    @abstractmethod
    def received(self, reply: Reply) -> None:
        """Counts a reply."""


class TargetOutstanding(Outstanding[target_codec.Request, target_codec.Reply]):
    """A target owes one reply for each request, in order: the wait begins with the oldest that has none.

    For a run it owes several, each within the time of one; for `RunTo` it owes none.
    """

    def __init__(self) -> None:
        self._unanswered = 0

    @property
    def due(self) -> bool:
        return self._unanswered > 0

    def sent(self, request: target_codec.Request) -> bool:
        if isinstance(request, RunTo):
            return False
        self._unanswered += 1
        return self._unanswered == 1

    def received(self, reply: target_codec.Reply) -> None:
        if not (isinstance(reply, PassDone) and reply.more):
            self._unanswered = max(0, self._unanswered - 1)


class DrafterOutstanding(Outstanding[drafter_codec.Request, drafter_codec.Reply]):
    """A drafter owes the newest `Draft` a first reply, and each `Score` since then one.

    It owes nothing for older requests, for an `Advance`, nor the later replies of an epoch: how long draft tokens are
    worth waiting for is decided by the session.
    """

    def __init__(self) -> None:
        self._opening = False
        self._epoch = 0
        self._draft = False
        self._scores = 0

    @property
    def due(self) -> bool:
        return self._opening or self._draft or self._scores > 0

    def sent(self, request: drafter_codec.Request) -> bool:
        before = self.due
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
        return self.due and not before

    def received(self, reply: drafter_codec.Reply) -> None:
        match reply:
            case Opened():
                self._opening = False
            case Drafted(epoch=self._epoch):
                self._draft = False
            case Scored(epoch=self._epoch):
                self._scores = max(0, self._scores - 1)


@dataclass(frozen=True)
class StreamMethod(Generic[Request, Reply]):
    """A bidirectional method: how its messages become bytes and are read from them, and which replies are due."""

    path: str  # such as /crossdraft.v1.Target/Verify
    limit: MessageLimit
    write: Callable[[Request], Message]
    read: Callable[[bytes], Reply]  # raises BadMessage, or protobuf's DecodeError
    outstanding: Callable[[], Outstanding[Request, Reply]]  # of a new session


class Stream(Generic[Request, Reply]):
    """An open stream. `send` does not wait for replies, and `receive` returns whatever comes next.

    While a reply is due (`Outstanding`), `receive` waits for a limited time: counted from its call, or from the request
    that made the reply due if that was sent later. While none is due it waits as long as the stream lives, which may be
    hours; gRPC's keepalive tells when the link is cut or the service hangs. After any error the stream is closed.
    """

    def __init__(
        self, channel: grpc.aio.Channel, method: StreamMethod[Request, Reply], service: str, reply_seconds: float
    ) -> None:
        self.traffic = Traffic()
        self.service = service  # what error texts call it
        self._channel = channel  # kept: gRPC closes a channel that nobody refers to
        self._method = method
        self._reply_seconds = reply_seconds
        self._outstanding = method.outstanding()
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._closed = False
        self._receiving = False
        self._timer: asyncio.TimerHandle | None = None  # runs while `receive` waits for a reply that is due
        self._timed_out = False
        # Bytes, not messages: their sizes are counted here.
        call = channel.stream_stream(method.path, bytes, bytes)
        self._call = call(None, metadata=to_metadata())  # no iterator: requests are written one by one

    async def send(self, request: Request) -> None:
        """Sends one request, after those that other tasks are sending; does not wait for a reply.

        Raises:
            TooLarge: it is over the client's limit; nothing was sent.
            ServiceError: the stream is closed; the error says why.
        """
        began = time.perf_counter()
        raw = self._method.write(request).SerializeToString()
        self.traffic.codec_seconds += time.perf_counter() - began
        if len(raw) > self._method.limit.bytes:
            raise TooLarge(f"a {type(request).__name__} of {len(raw)} bytes is over this client's {self._method.limit}")
        if self._outstanding.sent(request) and self._receiving:
            self._restart_timer()
        async with self._writing:
            try:
                await self._call.write(raw)
            except GRPC_ERRORS as error:
                raise await self._meaning(error) from error
        self.traffic.messages_sent += 1
        self.traffic.bytes_sent += len(raw)

    async def receive(self) -> Reply:
        """The next reply.

        Raises:
            TimedOut: it did not come in time.
            Closed: the session was ended in order, by the service or by `close`.
            ServiceError: the stream is broken, or the reply cannot be decoded.
        """
        began = time.monotonic()
        self._receiving = True
        if self._outstanding.due:
            self._restart_timer()
        try:
            raw = await self._call.read()
        except GRPC_ERRORS as error:
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
        self._outstanding.received(reply)
        return reply

    async def ask(self, request: Request) -> Reply:
        """Sends a request and waits for the next reply; only for sessions that have no other request under way."""
        await self.send(request)
        return await self.receive()

    async def close(self) -> None:
        """Ends the session; the service frees what it held."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Reply:
        try:
            return await self.receive()
        except Closed:
            raise StopAsyncIteration from None

    def _restart_timer(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._reply_seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        """Ends the call, and `receive` with it."""
        self._timed_out = True
        self._call.cancel()

    def _decoded(self, raw: bytes) -> Reply:
        try:
            return self._method.read(raw)
        except (BadMessage, DecodeError) as error:
            self._call.cancel()
            raise Internal(f"{self.service} sent a reply that cannot be decoded: {error}") from error

    async def _meaning(self, error: BaseException) -> ServiceError:
        """The error for what gRPC has raised; raises it again if it is the cancellation of the task itself."""
        if isinstance(error, asyncio.CancelledError):
            # gRPC raises it in every task that uses a call that was cancelled elsewhere.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise error
        return await self._reason()

    async def _reason(self) -> ServiceError:
        """Why the call, which has ended, did so."""
        if self._timed_out:
            return TimedOut(f"{self.service}: no reply within {self._reply_seconds:g} s")
        code = await self._call.code()
        if self._closed or code is grpc.StatusCode.OK:
            return Closed(f"the session with the {self.service} was ended")
        return from_status(code, await self._call.details(), self.service)


class TargetSession(Stream[target_codec.Request, target_codec.Reply]):
    """An open session with a target. Each reply is checked against what was asked."""

    async def run(self, request: Pass) -> PassDone:
        """One pass; raises ServiceError."""
        done = _expect(await self.ask(request), PassDone, self.service)
        _expect_number(done.number, request.number, "pass", self.service)
        if len(done.nodes) != len(request.answered):
            raise Internal(f"{self.service} answered {len(done.nodes)} of {len(request.answered)} nodes")
        return done

    async def draw(self, request: Pass) -> AsyncGenerator[PassDone, None]:
        """The replies to a run, as they come; raises ServiceError."""
        await self.send(request)
        more = True
        while more:
            done = _expect(await self.receive(), PassDone, self.service)
            _expect_number(done.number, request.number, "pass", self.service)
            more = done.more
            yield done

    async def fetch(self, request: FetchRow) -> RowFetched:
        """More of the row of one node of the latest pass; raises ServiceError."""
        fetched = _expect(await self.ask(request), RowFetched, self.service)
        _expect_number(fetched.node, request.node, "node", self.service)
        return fetched


class DrafterSession(Stream[drafter_codec.Request, drafter_codec.Reply]):
    """An open session with a drafter. `draft` and `score` are for callers that wait for each reply."""

    async def draft(self, request: Draft) -> Drafted:
        """The first reply of an epoch: all of it, unless the request asks for smaller chunks; raises ServiceError."""
        await self.send(request)
        while True:
            drafted = _expect(await self.receive(), Drafted, self.service)
            if drafted.epoch >= request.epoch:  # else it was under way when the request was sent
                break
        _expect_number(drafted.epoch, request.epoch, "epoch", self.service)
        return drafted

    async def score(self, request: Score) -> Scored:
        """How probable strings are as the beginning of the epoch's draft; raises ServiceError."""
        scored = _expect(await self.ask(request), Scored, self.service)
        _expect_number(scored.epoch, request.epoch, "epoch", self.service)
        if len(scored.probabilities) != len(request.strings):
            raise Internal(f"{self.service} scored {len(scored.probabilities)} of {len(request.strings)} strings")
        return scored


async def open_session(session: Stream[Request, Reply], request: Request, fingerprint: str) -> None:
    """Opens a session, and checks that the model is the one with this fingerprint. Raises ServiceError."""
    try:
        opened = _expect(await session.ask(request), Opened, session.service)
        if opened.fingerprint != fingerprint:
            raise NotServed(f"{session.service} serves another model than it described; describe it again")
    except BaseException:
        await session.close()
        raise


def _expect(reply: object, kind: type[Expected], service: str) -> Expected:
    if not isinstance(reply, kind):
        raise Internal(f"{service} sent {type(reply).__name__} where {kind.__name__} was due")
    return reply


def _expect_number(got: int, due: int, name: str, service: str) -> None:
    if got != due:
        raise Internal(f"{service} answered {name} {got} where {due} was due")
