"""Links as tests see them: services that do as they are told, and peers that say what none of ours would; and
a link that can be cut without a word."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import numpy as np

from crossdraft.rpc import codec
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.frames import TARGET, FrameCodec, RoleCodec
from crossdraft.rpc.handlers import Replies
from crossdraft.rpc.memory import HOST, MemoryChannel, MemoryEndpoint, codec_of
from crossdraft.rpc.server import Endpoint, Listening
from crossdraft.types import messages as plain
from crossdraft.types.rows import Row
from crossdraft.types.trees import TokenTree

SIZE = 100  # of the vocabulary
PORT: int | None = 0  # of the services of a test; None: over memory, as the fixture `transport` sets it
SLOW = 15  # a committed id: `answered` does not answer
DESCRIPTION = plain.Description("toy", "{}", ((0, "END_OF_SEQUENCE"),), (0,), SIZE, 64, "f1")
OPEN = plain.OpenTarget((1,), plain.SamplingOptions(), None)
AT_ONCE = Listening(grace_seconds=0)
# Of a channel: whoever does not read holds up the other side after some KiB.
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 16 * 1024), ("grpc.http2.bdp_probe", 0))
ROW = Row(np.array([1, 2]), np.array([0.5, 0.25]), 0.25)


def one_pass(number: int, *committed: int, nodes: int = 0) -> plain.Pass:
    """A pass whose reply has one row more than its tree has nodes."""
    return plain.Pass(number, committed, TokenTree((1,) * nodes, (-1,) * nodes))


class News:
    def __init__(self) -> None:
        self._news = asyncio.Event()

    def changed(self) -> None:
        self._news.set()

    async def until(self, holds: Callable[[], object]) -> None:
        """Returns when it holds; only one task at a time may wait."""
        while not holds():
            self._news.clear()
            await self._news.wait()


@dataclass(eq=False)
class PuppetSession:
    """One session: what it was asked, and where its replies go."""

    service: "PuppetService"
    opening: Any
    replies: Replies[Any]
    asked: list[Any] = field(default_factory=list)
    left_replies: list[Any] = field(default_factory=list)
    closed: int = 0

    def receive(self, request: Any) -> None:
        self.asked.append(request)
        self.service.news.changed()
        if self.service.answer is not None:
            self.service.answer(self, request)

    def left(self, reply: Any) -> None:
        self.left_replies.append(reply)
        self.service.news.changed()

    def close(self) -> None:
        self.closed += 1
        self.service.news.changed()


def answered(session: PuppetSession, request: Any) -> None:
    """What a target replies: the same row again and again."""
    if isinstance(request, plain.Pass):
        if SLOW not in request.committed:
            session.replies.send(plain.PassDone(request.number, (ROW,) * len(request.answered), 0.001))
    elif isinstance(request, plain.FetchRow):
        session.replies.send(plain.RowFetched(request.number, request.node, ROW))
    else:
        assert isinstance(request, plain.RunTo | plain.Advance)


@dataclass(eq=False)
class PuppetService:
    """Sessions that do nothing but `answer`."""

    answer: Callable[[PuppetSession, Any], None] | None = answered
    description: plain.Description = DESCRIPTION
    sessions: list[PuppetSession] = field(default_factory=list)
    news: News = field(default_factory=News)
    openings: int = 0  # that have begun
    opens: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: openings wait
    refuses: BaseException | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.opens.set()

    @property
    def closed(self) -> int:
        return sum(session.closed for session in self.sessions)

    async def open(self, request: Any, replies: Replies[Any]) -> PuppetSession:
        self.openings += 1
        self.news.changed()
        await self.opens.wait()
        if self.refuses is not None:
            raise self.refuses
        session = PuppetSession(self, request, replies)
        self.sessions.append(session)
        self.news.changed()
        return session

    async def close(self) -> None:
        self.ended = True

    async def wait_closed(self, count: int) -> None:
        await self.news.until(lambda: self.closed == count)


class RawLink:
    """A client's side of a link, which sends whatever a test wants."""

    def __init__(self, address: str, role: RoleCodec[Any, Any, Any] = TARGET, options: Any = (), known: str = ""):
        self._address = address
        self._metadata = ((codec.DESCRIBED, known),) if known else ()
        self._options = (("grpc.use_local_subchannel_pool", 1), *options)
        self._path = f"/{role.service}/{role.stream}"
        self._codec: FrameCodec[Any, Any] = role.client(None)
        self._channel: Any
        self._came: deque[tuple[int, Any]] = deque()

    async def __aenter__(self) -> Self:
        if self._address.startswith(HOST):
            self._channel = MemoryChannel(self._address)
        else:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
        self._codec = codec_of(self._channel, self._codec)
        self.call = self._channel.stream_stream(self._path, bytes, bytes)(None, metadata=self._metadata)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def send(self, *messages: tuple[int, Any]) -> None:
        await self.send_raw(self.frame(*messages))

    def frame(self, *messages: tuple[int, Any]) -> bytes:
        return self._codec.encode(messages)

    async def finish(self) -> None:
        if isinstance(self._channel, MemoryChannel):
            self.call._requests.put_nowait(None)
        else:
            await self.call.done_writing()

    async def send_raw(self, raw: bytes) -> None:
        await self.call.write(raw)

    async def receive(self) -> tuple[int, Any]:
        """The next message, with its session's number; raises AioRpcError or EOFError when the link is over."""
        while not self._came:
            raw = await self.call.read()
            if not isinstance(raw, bytes):
                raise EOFError
            self._came.extend(self._codec.decode(raw))
        return self._came.popleft()

    async def received(self, count: int) -> list[tuple[int, Any]]:
        return [await self.receive() for _ in range(count)]

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """How the link ends, with whatever comes before."""
        with suppress(grpc.aio.AioRpcError, EOFError):
            while True:
                await self.receive()
        return await self.call.code(), await self.call.details() or ""


@dataclass(eq=False)
class RawService:
    """A service's side of links, which sends whatever a test wants."""

    role: RoleCodec[Any, Any, Any]
    came: "asyncio.Queue[tuple[RawStream, list[tuple[int, Any]]]]" = field(default_factory=asyncio.Queue)  # frames

    async def describe(self, request: bytes, context: Any) -> bytes:
        return codec.encode_description(DESCRIPTION).SerializeToString()

    async def link(self, requests: AsyncIterator[bytes], context: Any) -> None:
        stream = RawStream(codec_of(context, self.role.server(None)), context)

        async def read() -> None:
            async for raw in requests:
                self.came.put_nowait((stream, list(stream.codec.decode(raw))))

        reading = asyncio.create_task(read())
        try:
            code, text = await stream.over
            if code is not grpc.StatusCode.OK:
                await context.abort(code, text)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def frame(self) -> tuple["RawStream", list[tuple[int, Any]]]:
        """The next frame of any client."""
        return await self.came.get()


class RawStream:
    def __init__(self, codec: FrameCodec[Any, Any], context: Any) -> None:
        self.codec = codec
        self.over: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()
        self._context = context

    async def send(self, *messages: tuple[int, Any]) -> None:
        await self._context.write(self.codec.encode(messages))

    async def send_raw(self, raw: bytes) -> None:
        await self._context.write(raw)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, text: str = "") -> None:
        self.over.set_result((code, text))


@asynccontextmanager
async def raw_service(role: RoleCodec[Any, Any, Any] = TARGET) -> AsyncIterator[tuple[RawService, str]]:
    """One that listens, and its address."""
    service = RawService(role)
    if PORT is None:
        here = MemoryEndpoint(service)
        here.start()
        yield service, here.address
        await here.drain(0)
        return
    handlers = {"Describe": grpc.unary_unary_rpc_method_handler(service.describe)}
    handlers |= {role.stream: grpc.stream_stream_rpc_method_handler(service.link)}
    endpoint = Endpoint(AT_ONCE, {role.service: grpc.method_handlers_generic_handler(role.service, handlers)})
    address = await endpoint.start()
    try:
        yield service, address
    finally:
        await endpoint.drain()


@dataclass(eq=False)
class Heard:
    """A listener that notes what it is told."""

    news: News = field(default_factory=News)
    is_open: bool = False
    replies: list[Any] = field(default_factory=list)
    errors: list[ServiceError] = field(default_factory=list)

    def opened(self) -> None:
        assert not self.is_open
        assert not self.errors
        self.is_open = True
        self.news.changed()

    def received(self, reply: Any) -> None:
        assert self.is_open
        assert not self.errors
        self.replies.append(reply)
        self.news.changed()

    def lost(self, error: ServiceError) -> None:
        assert not self.errors
        self.errors.append(error)
        self.news.changed()


async def all_lost(heard: Iterable[Heard]) -> list[ServiceError]:
    for one in heard:
        await one.news.until(lambda one=one: one.errors)  # type: ignore[misc]
    return [error for one in heard for error in one.errors]


class Direct:
    """A service's session without a link, whose replies wait until the test takes them; it is told as `Replies` are.
    `make` makes the session, which tells its replies here."""

    def __init__(self, make: Callable[["Direct"], Any]) -> None:
        self.waiting: list[Any] = []
        self.error: BaseException | None = None
        self.signs = 0  # that it works
        self.news = News()
        self.session = make(self)

    def send(self, reply: Any, within: float = 0.0, join: Callable[[Any, Any], Any] | None = None) -> None:
        joined = join(self.waiting[-1], reply) if join is not None and self.waiting else None
        self.waiting[-1:] = [*self.waiting[-1:], reply] if joined is None else [joined]
        self.news.changed()

    def working(self) -> None:
        self.signs += 1
        self.news.changed()

    def drop(self) -> None:
        self.waiting.clear()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.news.changed()

    def ask(self, *requests: Any) -> None:
        for request in requests:
            self.session.receive(request)

    async def receive(self) -> Any:
        """The next reply, which leaves now; raises what the session failed with."""
        await self.news.until(lambda: self.waiting or self.error)
        if not self.waiting:
            raise self.error
        reply = self.waiting.pop(0)
        self.session.left(reply)
        return reply

    async def answer(self, request: Any) -> Any:
        self.ask(request)
        return await self.receive()

    def close(self) -> None:
        self.session.close()


class Noted(tuple[Any, ...]):
    """Notes the thread in which it is gone through."""

    def __new__(cls, items: Any, threads: list[int]) -> "Noted":
        noted = super().__new__(cls, items)
        noted.threads = threads  # type: ignore[attr-defined]
        return noted

    def __iter__(self) -> Iterator[Any]:
        self.threads.append(threading.get_ident())  # type: ignore[attr-defined]
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        self.threads.append(threading.get_ident())  # type: ignore[attr-defined]
        return super().__getitem__(key)

    def __hash__(self) -> int:
        self.threads.append(threading.get_ident())  # type: ignore[attr-defined]
        return super().__hash__()


class Link:
    """Forwards connections to an address, both ways, until it is cut."""

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    def cut(self) -> None:
        """From now on nothing arrives; no socket is closed."""
        self._whole.clear()

    def mend(self) -> None:
        """What was held back arrives, and what follows."""
        self._whole.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection(self._host, self._port)
        self._tasks.add(asyncio.create_task(self._forward(near_in, far_out)))
        self._tasks.add(asyncio.create_task(self._forward(far_in, near_out)))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._whole.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass  # one side is gone
        finally:
            sink.close()
