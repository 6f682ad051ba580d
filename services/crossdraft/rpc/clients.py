"""Clients of the two services: they describe themselves, and open sessions that speak in plain values."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import codec, drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage, Internal, NotServed, from_status
from crossdraft.rpc.security import ClientCredentials, Shown
from crossdraft.rpc.streams import DrafterDues, DrafterSession, TargetDues, TargetSession, Wire, open_session
from crossdraft.rpc.transport import MessageLimit, ServiceChannel
from crossdraft.types.messages import Description, OpenDrafter, OpenTarget
from crossdraft.v1 import common_pb2, drafter_pb2, target_pb2


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
class _Client:
    """One channel to one service. Must be made in a running event loop, and closed."""

    address: str  # host:port
    patience: Patience = field(default_factory=Patience)
    limit: MessageLimit = field(default_factory=MessageLimit)
    tls: ClientCredentials | Shown | None = None  # None: plaintext
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
            raise Internal(f"{self.service} describes itself in a way that means nothing: {error}") from error
        return self._description

    async def described(self) -> Description:
        """What the service said when it was last asked; asks if it never was."""
        return self._description or await self.describe()

    def reachable(self) -> bool | None:
        """As `ServiceChannel.reachable`."""
        return self._channel.reachable()

    async def close(self) -> None:
        """Closes the channel, and with it all its sessions."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class TargetClient(_Client):
    """A target at an address."""

    role = "target"
    other = "drafter"
    describe_method = "/crossdraft.v1.Target/Describe"

    async def open(self, request: OpenTarget) -> TargetSession:
        """An open session; raises ServiceError. Close it, or use `session`."""
        description = await self.described()
        size = description.vocabulary_size
        wire = Wire(
            "/crossdraft.v1.Target/Verify",
            self.limit,
            target_codec.encode_request,
            lambda raw: target_codec.decode_reply(target_pb2.VerifyReply.FromString(raw), size),
            TargetDues,
        )
        session = TargetSession(self.channel, wire, self.service, self.patience.reply_seconds)
        await open_session(session, request, description.fingerprint)
        return session

    @asynccontextmanager
    async def session(self, request: OpenTarget) -> AsyncIterator[TargetSession]:
        """An open session that is closed at the end of the block; raises ServiceError."""
        async with await self.open(request) as session:
            yield session


class DrafterClient(_Client):
    """A drafter at an address."""

    role = "drafter"
    other = "target"
    describe_method = "/crossdraft.v1.Drafter/Describe"

    async def open(self, request: OpenDrafter) -> DrafterSession:
        """An open session; raises ServiceError. Close it, or use `session`."""
        description = await self.described()
        # With `redistribute` it speaks in the target's ids, which this client does not know.
        size = None if request.redistribute else description.vocabulary_size
        wire = Wire(
            "/crossdraft.v1.Drafter/Draft",
            self.limit,
            drafter_codec.encode_request,
            lambda raw: drafter_codec.decode_reply(drafter_pb2.DraftReply.FromString(raw), size),
            DrafterDues,
        )
        session = DrafterSession(self.channel, wire, self.service, self.patience.reply_seconds)
        await open_session(session, request, description.fingerprint)
        return session

    @asynccontextmanager
    async def session(self, request: OpenDrafter) -> AsyncIterator[DrafterSession]:
        """An open session that is closed at the end of the block; raises ServiceError."""
        async with await self.open(request) as session:
            yield session
