"""The messages of a generation, kept on their way, and what their codecs cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from crossdraft.pipeline.ports import StreamPort
from crossdraft.pipeline.stopwatches import TrafficCount
from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.handlers import DRAFTER, TARGET, Role

REPEATS = 5  # the fastest counts

Opening = TypeVar("Opening")
OpeningIn = TypeVar("OpeningIn", contravariant=True)
Request = TypeVar("Request")
RequestIn = TypeVar("RequestIn", contravariant=True)
Reply = TypeVar("Reply")
ReplyOut = TypeVar("ReplyOut", covariant=True)


class Port(Protocol[OpeningIn, RequestIn, ReplyOut]):
    """A client of either service."""

    async def open(self, request: OpeningIn, /) -> StreamPort[RequestIn, ReplyOut]:
        """Begin a session."""
        ...


@dataclass(frozen=True, eq=False)
class Recorder(Generic[Opening, Request, Reply]):
    """A port that keeps what passes through its streams, the opening and its answer left out."""

    port: Port[Opening, Request, Reply]
    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    async def open(self, request: Opening) -> "RecordedStream[Request, Reply]":
        """Begin a session."""
        return RecordedStream(await self.port.open(request), self.requests, self.replies)


@dataclass(frozen=True, eq=False)
class RecordedStream(Generic[Request, Reply]):
    """An open session of a recorder."""

    stream: StreamPort[Request, Reply]
    requests: list[Request]
    replies: list[Reply]

    @property
    def traffic(self) -> TrafficCount:
        """What was sent and received so far."""
        return self.stream.traffic

    async def send(self, request: Request, /) -> None:
        """As the stream's own."""
        self.requests.append(request)
        await self.stream.send(request)

    async def receive(self) -> Reply:
        """As the stream's own."""
        reply = await self.stream.receive()
        self.replies.append(reply)
        return reply

    async def close(self) -> None:
        """As the stream's own."""
        await self.stream.close()


@dataclass(frozen=True)
class Codecs:
    """Both halves of one service's conversions: what is written on one side is read on the other."""

    role: Role[Any, Any, Any]
    write_request: Callable[[Any], Any]
    read_reply: Callable[[Any, int], object]

    def seconds(self, recorder: Recorder[Any, Any, Any], vocabulary_size: int) -> float:
        """To encode and decode all recorded messages once."""
        return min(self._once(recorder, vocabulary_size) for _ in range(REPEATS))

    def _once(self, recorder: Recorder[Any, Any, Any], vocabulary_size: int) -> float:
        began = time.perf_counter()
        for request in recorder.requests:
            self.role.read(self.write_request(request).SerializeToString(), vocabulary_size)
        for reply in recorder.replies:
            message = self.role.write(reply)
            self.read_reply(type(message).FromString(message.SerializeToString()), vocabulary_size)
        return time.perf_counter() - began


TARGET_CODECS = Codecs(TARGET, target_codec.encode_request, target_codec.decode_reply)
DRAFTER_CODECS = Codecs(DRAFTER, drafter_codec.encode_request, drafter_codec.decode_reply)
