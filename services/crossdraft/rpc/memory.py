"""Links within a process: the other side is handed the messages themselves, without gRPC, protobuf or a socket.

What is here takes the place of gRPC's channel, of its calls, and of their contexts in the service. `links` and
`handlers` are the two sides of such a link as of any other. Rows of a target are rounded as on a wire: with the same
random numbers an output is the same wherever its services run.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import grpc
import numpy as np

from crossdraft.rpc import codec
from crossdraft.types.messages import PassDone, RowFetched
from crossdraft.types.rows import Row

if TYPE_CHECKING:
    from crossdraft.rpc.frames import FrameCodec

HOST = "in-process"  # in place of a host's name; the port is a number of the service
Metadata = Sequence[tuple[str, str]]
Status = tuple[grpc.StatusCode, str]
STOPPED: Status = grpc.StatusCode.UNAVAILABLE, "it was stopped"
_numbers = count(1)
_endpoints: "WeakValueDictionary[str, MemoryEndpoint]" = WeakValueDictionary()  # those that serve, by address


class MemoryFrame(bytes):
    """In place of a frame: no bytes, but the messages, with their sessions' numbers."""

    messages: Sequence[tuple[int, Any]]

    @staticmethod
    def of(messages: Sequence[tuple[int, Any]]) -> "MemoryFrame":
        """Raises ValueError where the codec of a wire would because of rows."""
        frame, found = MemoryFrame(), [message for _, message in messages if _has_rows(message)]
        if found:
            sent: list[Any] = [node for done in found if isinstance(done, PassDone) for node in done.nodes]
            rows = iter(codec.rounded(sent) if sent else ())
            messages = [(number, _rounded(message, rows)) for number, message in messages]
        frame.messages = messages
        return frame


def _has_rows(message: Any) -> bool:
    kind = type(message)
    return kind is RowFetched or (kind is PassDone and isinstance(message.nodes[0] if message.nodes else None, Row))


def _rounded(message: Any, rows: Iterator[Row]) -> Any:
    if isinstance(message, RowFetched):
        row = message.row
        if row.whole:
            return replace(message, row=replace(row, probabilities=row.probabilities.astype(np.float32).astype(float)))
        return replace(message, row=codec.rounded([row])[0])
    return replace(message, nodes=tuple(islice(rows, len(message.nodes)))) if _has_rows(message) else message


def codec_of(side: object, otherwise: "FrameCodec[Any, Any]") -> "FrameCodec[Any, Any]":
    """Of a link on this channel, or in this handler's context."""
    if not isinstance(side, MemoryChannel | MemoryContext):
        return otherwise

    def weight(message: object) -> int:  # of what is rounded, which holds up the loop; the rest takes no more memory
        return otherwise.weight(message) if _has_rows(message) else 0

    return replace(otherwise, encode=MemoryFrame.of, decode=lambda frame: vars(frame)["messages"], weight=weight)


def serves(address: str) -> bool:
    """Whether a service of this process is there."""
    return address in _endpoints


class Pipe(asyncio.Queue[bytes | None]):
    """Frames of one direction; None is their end."""

    async def write(self, frame: bytes) -> None:
        """Returns once it is taken: whoever does not read holds up the other side."""
        self.put_nowait(frame)
        await self.join()

    async def read(self) -> bytes | None:
        frame = await self.get()
        self.task_done()
        if frame is None:
            self.put_nowait(None)  # it stays the end
        return frame

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (frame := await self.read()) is not None:
            yield frame


class MemoryContext:
    """Of the service's handler of a stream, as gRPC's."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], metadata: Metadata) -> None:
        self.write = write
        self.status: Status | None = None  # why the handler has aborted
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer(self) -> str:
        return f"{HOST}:0"

    def peer_identities(self) -> None:
        """There is no certificate."""

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """There is nobody to send it to."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        self.status = code, details
        raise grpc.aio.AbortError


class MemoryCall(asyncio.Task[None]):
    """A client's stream to a service, as gRPC's: the task in which the service handles it."""

    def __init__(self, handling: Any, metadata: Metadata) -> None:
        self._requests, self._replies = Pipe(), Pipe()
        self.write, self.read = self._requests.write, self._replies.read
        self._serving = MemoryContext(self._replies.write, metadata)
        # Without a context: log lines of all sessions must not name the request of the first.
        super().__init__(self._handled(handling), loop=asyncio.get_running_loop(), context=contextvars.Context())
        self.add_done_callback(self._end)  # also of one that is cancelled before it begins

    async def _handled(self, handling: Any) -> None:
        with suppress(grpc.aio.AbortError):
            if handling is None:
                await self._serving.abort(*STOPPED)
            await handling.link(aiter(self._requests), self._serving)

    def _end(self, _: object) -> None:
        for pipe in (self._requests, self._replies):
            pipe.put_nowait(None)

    async def code(self) -> grpc.StatusCode:
        return (await self._status())[0]

    async def details(self) -> str:
        return (await self._status())[1]

    async def _status(self) -> Status:
        await asyncio.wait([self])
        if not self.cancelled() and (fault := self.exception()) is not None:
            return grpc.StatusCode.UNKNOWN, repr(fault)
        return STOPPED if self.cancelled() else self._serving.status or (grpc.StatusCode.OK, "")


class MemoryChannel:
    """A client's to the service with an address, as gRPC's; the service may come later."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        there = self._address in _endpoints
        return grpc.ChannelConnectivity.READY if there else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def unary_unary(self, path: str, *_: object) -> Callable[..., Awaitable[bytes]]:
        return self._described

    def stream_stream(self, path: str, *_: object) -> Callable[..., MemoryCall]:
        return self._called

    async def close(self, grace: float | None = None) -> None:
        """Each call is ended by its link."""

    async def _described(self, request: bytes, **_: float) -> bytes:
        endpoint, nothing = _endpoints.get(self._address), grpc.aio.Metadata()
        if endpoint is None:
            raise grpc.aio.AioRpcError(STOPPED[0], nothing, nothing, STOPPED[1], None)
        raw: bytes = await endpoint.handling.describe(request, None)
        return raw

    def _called(self, _: None, metadata: Metadata) -> MemoryCall:
        endpoint = _endpoints.get(self._address)
        call = MemoryCall(None if endpoint is None else endpoint.handling, metadata)
        if endpoint is not None:
            endpoint.calls.add(call)
            call.add_done_callback(endpoint.calls.discard)
        return call


class MemoryEndpoint:
    """Where this process's own clients find a service."""

    def __init__(self, handling: Any) -> None:
        self.handling = handling  # `handlers.Handlers`
        self.address = f"{HOST}:{next(_numbers)}"
        self.calls: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        _endpoints[self.address] = self

    async def drain(self, grace_seconds: float) -> None:
        """Takes no new call, lets open ones go on for the grace period, and ends."""
        _endpoints.pop(self.address, None)
        if calls := [*self.calls]:
            try:
                await asyncio.wait(calls, timeout=grace_seconds)
            finally:
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)
