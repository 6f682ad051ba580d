"""What the driver needs of a service; `crossdraft.rpc` has the real ones, tests have fakes."""

from typing import Protocol, TypeVar

from crossdraft.pipeline.statistics import TrafficCount
from crossdraft.rpc.codec import Opened
from crossdraft.verification.exchange import (
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

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)
Opening = TypeVar("Opening", contravariant=True)


class StreamPort(Protocol[Request, Reply]):
    """An open session with a service. All methods raise ServiceError when the service fails."""

    @property
    def traffic(self) -> TrafficCount:
        """What was sent and received so far."""
        ...

    async def send(self, request: Request, /) -> None:
        """Send without waiting for the reply."""

    async def receive(self) -> Reply:
        """The next reply; raises Closed when the service has ended the session in order."""
        ...

    async def close(self) -> None:
        """End the session."""


# A service may break the protocol with a second Opened; the driver then gives it up.
TargetStream = StreamPort[OpenTarget | Pass | FetchRow, Opened | PassDone | RowFetched]
DrafterStream = StreamPort[OpenDrafter | Draft | Score, Opened | Drafted | Scored]


class TargetPort(Protocol):
    """A target service."""

    async def open(self, request: OpenTarget) -> TargetStream:
        """Begin a session."""
        ...


class DrafterPort(Protocol):
    """A drafter service."""

    async def open(self, request: OpenDrafter) -> DrafterStream:
        """Begin a session."""
        ...
