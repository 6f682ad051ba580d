"""Clients of the two services: each has a channel, gets the model's description, and begins sessions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import codec, drafter_codec, target_codec
from crossdraft.rpc.errors import BadMessage, Internal, NotServed, from_status
from crossdraft.rpc.frames import RoleCodec
from crossdraft.rpc.links import Link, LinkSession, Listener, codec_of
from crossdraft.rpc.security import ClientCredentials, RenewedCredentials
from crossdraft.rpc.transport import Channel, MessageLimit, ServiceChannel
from crossdraft.types.messages import Description, OpenDrafter, OpenTarget
from crossdraft.v1 import common_pb2

OPTIONS = {"reply_seconds": "--reply-wait-seconds", "target_seconds": "--target-wait-seconds"}
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
    # Whether a service's process is known to run: it is asked until it answers. Its `repr` differs between processes.
    lives: Callable[[str], bool] = field(default=lambda address: False, repr=False)

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
    _channel: ServiceChannel = field(init=False, repr=False)
    _description: Description | None = field(default=None, init=False, repr=False)
    _identity: str = field(default="", init=False, repr=False)  # of that description
    _link: Link | None = field(default=None, init=False, repr=False)
    _links: WeakSet[Link] = field(default_factory=WeakSet, init=False, repr=False)  # all that still run

    role: ClassVar[RoleCodec[Any, Any, Any]]

    def __post_init__(self) -> None:
        self._channel = ServiceChannel(self.address, self.limit, self.tls)

    @property
    def channel(self) -> Channel:
        """For what begins now; a link on one with other credentials ends with its last session."""
        channel = self._channel.current()
        if self._link is not None and self._link.channel is not channel:
            self._retire()
        return channel

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
        return self._channel.reachable()

    async def close(self) -> None:
        for link in list(self._links):
            await link.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class TargetClient(_Client[OpenTarget]):
    """A target at an address."""

    role = target_codec.ROLE


class DrafterClient(_Client[OpenDrafter]):
    """A drafter at an address."""

    role = drafter_codec.ROLE
