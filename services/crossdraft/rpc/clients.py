"""Clients of the two services: each has a channel, gets the model's description, and opens sessions."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import codec, drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage, Closed, Internal, NotServed, ServiceError, from_status
from crossdraft.rpc.frames import FrameCodec
from crossdraft.rpc.links import Link, LinkSession, Listener, Traffic
from crossdraft.rpc.security import ClientCredentials, RenewedCredentials
from crossdraft.rpc.transport import MessageLimit, ServiceChannel
from crossdraft.types.messages import (
    Description,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    Score,
    Scored,
)
from crossdraft.v1 import common_pb2

Open = TypeVar("Open", OpenTarget, OpenDrafter)
Session = TypeVar("Session", bound="ServiceSession")
Expected = TypeVar("Expected")


class ServiceSession:
    """An open session for callers that wait for its replies. After any error it is closed."""

    def __init__(self, service: str) -> None:
        self.service = service  # what error texts call it
        self._came: asyncio.Queue[Any] = asyncio.Queue()  # replies, `True` when it is open, the error that ended it
        self._error: ServiceError | None = None
        self._link_session: LinkSession

    def begin(self, session: LinkSession) -> None:
        self._link_session = session

    def opened(self) -> None:
        self._came.put_nowait(True)

    def received(self, reply: Any) -> None:
        self._came.put_nowait(reply)

    def lost(self, error: ServiceError) -> None:
        self._error = error
        self._came.put_nowait(error)

    @property
    def traffic(self) -> Traffic:
        return self._link_session.traffic

    async def ready(self) -> None:
        """Returns when it is open; raises ServiceError."""
        await self.receive()

    async def send(self, request: Any) -> None:
        """Sends one request; does not wait for a reply. Raises ServiceError if the session is over."""
        if self._error is not None:
            raise self._error
        self._link_session.send(request)

    async def receive(self) -> Any:
        """The next reply.

        Raises:
            TimedOut: it did not come in time.
            Closed: the session was ended in order, by the service or by `close`.
            ServiceError: the session or the link is broken, or the reply cannot be decoded.
        """
        came = await self._came.get()
        if isinstance(came, ServiceError):
            self._came.put_nowait(came)
            raise came
        return came

    async def ask(self, request: Any) -> Any:
        """Sends a request and waits for the next reply; only for sessions that have no other request under way."""
        await self.send(request)
        return await self.receive()

    async def close(self) -> None:
        """Ends the session; the service frees what it held."""
        self._link_session.close()
        self.lost(self._error or Closed(f"the session with the {self.service} was ended"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except Closed:
            raise StopAsyncIteration from None


class TargetSession(ServiceSession):
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


class DrafterSession(ServiceSession):
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


@dataclass(frozen=True)
class Patience:
    """How long a client waits before it calls a service lost.

    Raises:
        ValueError: a wait is not above 0.
    """

    describe_seconds: float = 5.0
    reply_seconds: float = 30.0  # one pass or draft, the queue before it and the prompt's forward included
    target_seconds: float = 30.0  # of an output without any target, before it fails

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value:g}")


@dataclass(eq=False)
class _Client(ABC, Generic[Open, Session]):
    """One channel to one service. Must be made in a running event loop, and closed."""

    address: str  # host:port
    patience: Patience = field(default_factory=Patience)
    limit: MessageLimit = field(default_factory=MessageLimit)
    tls: ClientCredentials | RenewedCredentials | None = None  # None: plaintext
    _channel: ServiceChannel = field(init=False, repr=False)
    _description: Description | None = field(default=None, init=False, repr=False)
    _link: Link | None = field(default=None, init=False, repr=False)
    _links: WeakSet[Link] = field(default_factory=WeakSet, init=False, repr=False)  # all that still run

    role = "service"
    other = ""  # the role that its address could be of by mistake
    describe_method = ""
    stream_method = ""

    def __post_init__(self) -> None:
        self._channel = ServiceChannel(self.address, self.limit, self.tls)

    @property
    def channel(self) -> grpc.aio.Channel:
        """For what begins now; a link on one with other credentials ends with its last session."""
        channel = self._channel.current()
        if self._link is not None and self._link.channel is not channel:
            self._link.retire()
            self._link = None
        return channel

    @property
    def service(self) -> str:
        """What error texts call it."""
        return f"{self.role} at {self.address}"

    async def describe(self) -> Description:
        """What the service says of its model now.

        Raises:
            ServiceError: it did not say so within `patience.describe_seconds`.
        """
        method = self.channel.unary_unary(self.describe_method, bytes, bytes)
        try:
            # The request has no fields.
            raw = await method(b"", timeout=self.patience.describe_seconds)
            self._description = codec.decode_description(common_pb2.Description.FromString(raw))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                what = f"what listens at {self.address} is no {self.role}"
                raise NotServed(f"{what} (is it the {self.other}? check the addresses)") from error
            raise from_status(error.code(), error.details(), self.service) from error
        except (BadMessage, DecodeError) as error:
            raise Internal(f"{self.service} sent a description that cannot be decoded: {error}") from error
        return self._description

    async def described(self) -> Description:
        """The latest description; asks for it if there is none."""
        return self._description or await self.describe()

    def begin(self, request: Open, listener: Listener) -> LinkSession:
        """Begins a session whose listener is told what happens; the service must have been described."""
        channel, description = self.channel, self._description
        assert description is not None
        link = self._link
        if link is None or link.ended or link.fingerprint != description.fingerprint:
            if link is not None:
                link.retire()  # of another model
            link = self._link = Link(
                channel,
                self.stream_method,
                self._codec(description.vocabulary_size),
                self.limit,
                self.service,
                description.fingerprint,
                self.patience.reply_seconds,
            )
            self._links.add(link)
        return link.begin(request, listener)

    async def open(self, request: Open) -> Session:
        """An open session, to be used by one task; raises ServiceError. Close it, or use `session`."""
        await self.described()
        session = self._session()
        session.begin(self.begin(request, session))
        try:
            await session.ready()
        except BaseException:
            await session.close()
            raise
        return session

    @asynccontextmanager
    async def session(self, request: Open) -> AsyncIterator[Session]:
        """An open session that is closed at the end of the block; raises ServiceError."""
        async with await self.open(request) as session:
            yield session

    @abstractmethod
    def _codec(self, vocabulary_size: int) -> FrameCodec[Any, Any]:
        """Of this side of the link."""

    @abstractmethod
    def _session(self) -> Session:
        """A session that has not begun."""

    def reachable(self) -> bool | None:
        return self._channel.reachable()

    async def close(self) -> None:
        for link in list(self._links):
            await link.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class TargetClient(_Client[OpenTarget, TargetSession]):
    """A target at an address."""

    role = "target"
    other = "drafter"
    describe_method = "/crossdraft.v1.Target/Describe"
    stream_method = "/crossdraft.v1.Target/Verify"

    def _codec(self, vocabulary_size: int) -> FrameCodec[Any, Any]:
        return target_codec.client_codec(vocabulary_size)

    def _session(self) -> TargetSession:
        return TargetSession(self.service)


class DrafterClient(_Client[OpenDrafter, DrafterSession]):
    """A drafter at an address."""

    role = "drafter"
    other = "target"
    describe_method = "/crossdraft.v1.Drafter/Describe"
    stream_method = "/crossdraft.v1.Drafter/Draft"

    def _codec(self, vocabulary_size: int) -> FrameCodec[Any, Any]:
        return drafter_codec.client_codec(vocabulary_size)

    def _session(self) -> DrafterSession:
        return DrafterSession(self.service)


def _expect(reply: object, kind: type[Expected], service: str) -> Expected:
    if not isinstance(reply, kind):
        raise Internal(f"{service} sent {type(reply).__name__} where {kind.__name__} was due")
    return reply


def _expect_number(got: int, due: int, name: str, service: str) -> None:
    if got != due:
        raise Internal(f"{service} answered {name} {got} where {due} was due")
