"""Clients of the two services: each has a channel to one, gets its model's description, and begins sessions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import codec
from crossdraft.rpc.errors import BadMessage, Internal, NotServed, from_status
from crossdraft.rpc.frames import RoleCodec
from crossdraft.rpc.links import Link, LinkSession, Listener
from crossdraft.rpc.memory import HOST, MemoryChannel, codec_of
from crossdraft.rpc.roles import DRAFTER, TARGET
from crossdraft.rpc.security import ClientCredentials, RenewedCredentials
from crossdraft.rpc.transport import Channel, MessageLimit, client_options
from crossdraft.types.messages import Description, OpenDrafter, OpenTarget
from crossdraft.v1 import common_pb2

OPTIONS = {"reply_seconds": "--reply-wait-seconds", "target_seconds": "--target-wait-seconds"}
REACHABLE: Mapping[grpc.ChannelConnectivity, bool] = {
    grpc.ChannelConnectivity.READY: True,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE: False,
    grpc.ChannelConnectivity.SHUTDOWN: False,
}
OpenRequest = TypeVar("OpenRequest", OpenTarget, OpenDrafter)


@dataclass(frozen=True)
class Patience:
    """How long a client waits before it calls a service lost.

    Raises:
        ValueError: a wait is not above 0.
    """

    describe_seconds: float = 5.0
    reply_seconds: float = 30.0  # that a reply is owed without a sign that the service works on it
    target_seconds: float = 30.0  # of an output without any target, before it fails
    lives: Callable[[str], bool] = lambda address: False  # its process is known to run: it is asked until it answers

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "lives" and not value > 0:
                raise ValueError(f"{OPTIONS.get(name, name)} must be above 0, got {value:g}")


@dataclass(eq=False)
class _Client(Generic[OpenRequest]):
    """One channel to one service. Must be made in a running event loop, and closed."""

    address: str  # host:port
    patience: Patience = field(default_factory=Patience)
    limit: MessageLimit = field(default_factory=MessageLimit)
    tls: ClientCredentials | RenewedCredentials | None = None  # None: plaintext
    _credentials: ClientCredentials | None = field(default=None, init=False, repr=False)  # of the channel
    _channel: Channel = field(init=False, repr=False)  # for what begins now
    _channels: WeakSet[Channel] = field(default_factory=WeakSet, init=False, repr=False)  # with those before
    _description: Description | None = field(default=None, init=False, repr=False)
    _identity: str = field(default="", init=False, repr=False)  # of that description
    _link: Link | None = field(default=None, init=False, repr=False)
    _links: WeakSet[Link] = field(default_factory=WeakSet, init=False, repr=False)  # all that still run

    role: ClassVar[RoleCodec[Any, Any, Any]]

    def __post_init__(self) -> None:
        self._connect(self.tls.now() if isinstance(self.tls, RenewedCredentials) else self.tls)

    def _connect(self, credentials: ClientCredentials | None) -> None:
        """Another channel for what begins now. Open sessions keep theirs, which closes itself with the last of them."""
        options = client_options(self.tls is not None) + self.limit.options()
        self._credentials = credentials
        if self.address.startswith(f"{HOST}:"):
            self._channel = MemoryChannel(self.address)
        elif credentials is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(self.address, credentials, options=options)
        self._channels.add(self._channel)
        self._retire()

    @property
    def channel(self) -> Channel:
        """For what begins now: with the credentials that the files have now."""
        if isinstance(self.tls, RenewedCredentials) and (credentials := self.tls.now()) is not self._credentials:
            self._connect(credentials)
        return self._channel

    def _retire(self) -> None:
        if self._link is not None:
            self._link.retire()
            self._link = None

    @property
    def outdated(self) -> bool:
        """Whether the service has refused a session because it is to be described again."""
        return self._link is not None and self._link.outdated

    @property
    def service(self) -> str:
        return f"{self.role.name} at {self.address}"

    async def describe(self) -> Description:
        """What the service says of its model now.

        Raises:
            ServiceError: it did not say so within `patience.describe_seconds`.
        """
        method = self.channel.unary_unary(f"/{self.role.service}/Describe", bytes, bytes)
        try:
            # The request has no fields.
            raw = await method(b"", timeout=self.patience.describe_seconds)
            self._description = codec.decode_description(common_pb2.Description.FromString(raw))
            identity, self._identity = self._identity, codec.identity_of(raw)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                what = f"what listens at {self.address} is no {self.role.name}"
                raise NotServed(f"{what} (is it the {self.role.other}? check the addresses)") from error
            raise from_status(error.code(), error.details(), self.service) from error
        except (BadMessage, DecodeError) as error:
            raise Internal(f"{self.service} sent a description that cannot be decoded: {error}") from error
        if self.outdated or identity != self._identity:
            self._retire()
        return self._description

    def begin(self, request: OpenRequest, listener: Listener) -> LinkSession:
        """Begins a session whose listener is told what happens; the service must have been described."""
        channel, description = self.channel, self._description
        assert description is not None
        link = self._link
        if link is None or link.ended:
            link = self._link = Link(
                channel,
                f"/{self.role.service}/{self.role.stream}",
                codec_of(channel, self.role.client(description.vocabulary_size)),
                self.limit,
                self.service,
                description.fingerprint,
                self._identity,
                self.patience.reply_seconds,
            )
            self._links.add(link)
        return link.begin(request, listener)

    def reachable(self) -> bool | None:
        """Whether the service can be reached; None: not known yet. Reconnects if the connection was lost.

        Pings tell within seconds that a service is dead, frozen or cut off.
        """
        return REACHABLE.get(self.channel.get_state(try_to_connect=True))

    async def close(self) -> None:
        for link in list(self._links):
            await link.close()
        for channel in list(self._channels):
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class TargetClient(_Client[OpenTarget]):
    """A target at an address."""

    role = TARGET


class DrafterClient(_Client[OpenDrafter]):
    """A drafter at an address."""

    role = DRAFTER
