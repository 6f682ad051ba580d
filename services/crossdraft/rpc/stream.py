"""One bidirectional stream as a session: requests out without waiting, replies in, both counted, waiting bounded."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from crossdraft.rpc.dues import Dues
from crossdraft.rpc.errors import BadMessage, Closed, Internal, ServiceError, TimedOut, TooLarge, from_status
from crossdraft.rpc.subject import to_metadata
from crossdraft.rpc.transport import MessageLimit

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
