"""Clients of the two services: each has a channel, gets the model's description, and opens sessions."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import codec, drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage, Internal, NotServed, from_status
from crossdraft.rpc.security import ClientCredentials, RenewedCredentials
from crossdraft.rpc.streams import (
    DrafterOutstanding,
    DrafterSession,
    Stream,
    StreamMethod,
    TargetOutstanding,
    TargetSession,
    open_session,
)
from crossdraft.rpc.transport import MessageLimit, ServiceChannel
from crossdraft.types.messages import Description, OpenDrafter, OpenTarget
from crossdraft.v1 import common_pb2, drafter_pb2, target_pb2

Open = TypeVar("Open", OpenTarget, OpenDrafter)
Session = TypeVar("Session", bound=Stream[Any, Any])


@dataclass(frozen=True)
class Patience:
    """How long a client waits before it calls a service lost.

    Raises:
        ValueError: a wait is not above 0.
    """

    describe_seconds: float = 5.0
    reply_seconds: float = 30.0  # one pass or draft, the queue before it and the prompt's forward included

    def __post_init__(self) -> None:
        if not (self.describe_seconds > 0 and self.reply_seconds > 0):
            raise ValueError("describe_seconds and reply_seconds must be above 0")


@dataclass(eq=False)
class _Client(ABC, Generic[Open, Session]):
    """One channel to one service. Must be made in a running event loop, and closed."""

    address: str  # host:port
    patience: Patience = field(default_factory=Patience)
    limit: MessageLimit = field(default_factory=MessageLimit)
    tls: ClientCredentials | RenewedCredentials | None = None  # None: plaintext
    _channel: ServiceChannel = field(init=False, repr=False)
    _description: Description | None = field(default=None, init=False, repr=False)

    role = "service"
    other = ""  # the role that its address could be of by mistake
    describe_method = ""

    def __post_init__(self) -> None:
        self._channel = ServiceChannel(self.address, self.limit, self.tls)

    @property
    def channel(self) -> grpc.aio.Channel:
        """For what begins now."""
        return self._channel.current()

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

    async def open(self, request: Open) -> Session:
        """An open session; raises ServiceError. Close it, or use `session`."""
        description = await self.described()
        session = self._stream(request, description.vocabulary_size)
        await open_session(session, request, description.fingerprint)
        return session

    @asynccontextmanager
    async def session(self, request: Open) -> AsyncIterator[Session]:
        """An open session that is closed at the end of the block; raises ServiceError."""
        async with await self.open(request) as session:
            yield session

    @abstractmethod
    def _stream(self, request: Open, vocabulary_size: int) -> Session:
        """A stream on which a session can be opened."""

    def reachable(self) -> bool | None:
        """As `ServiceChannel.reachable`."""
        return self._channel.reachable()

    async def close(self) -> None:
        """Closes the channel, and with it all its sessions."""
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

    def _stream(self, request: OpenTarget, vocabulary_size: int) -> TargetSession:
        method = StreamMethod(
            "/crossdraft.v1.Target/Verify",
            self.limit,
            target_codec.encode_request,
            lambda raw: target_codec.decode_reply(target_pb2.VerifyReply.FromString(raw), vocabulary_size),
            TargetOutstanding,
        )
        return TargetSession(self.channel, method, self.service, self.patience.reply_seconds)


class DrafterClient(_Client[OpenDrafter, DrafterSession]):
    """A drafter at an address."""

    role = "drafter"
    other = "target"
    describe_method = "/crossdraft.v1.Drafter/Describe"

    def _stream(self, request: OpenDrafter, vocabulary_size: int) -> DrafterSession:
        # With `redistribute` the drafter uses the target's ids, which this client does not know.
        size = None if request.redistribute else vocabulary_size
        method = StreamMethod(
            "/crossdraft.v1.Drafter/Draft",
            self.limit,
            drafter_codec.encode_request,
            lambda raw: drafter_codec.decode_reply(drafter_pb2.DraftReply.FromString(raw), size),
            DrafterOutstanding,
        )
        return DrafterSession(self.channel, method, self.service, self.patience.reply_seconds)
