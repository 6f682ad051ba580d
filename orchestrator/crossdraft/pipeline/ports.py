"""What the driver needs of a service; `crossdraft.rpc` has the real ones, tests have fakes."""

from typing import Protocol, TypeVar

from crossdraft.verification.exchange import Draft, Drafted, FetchRow, OpenDrafter, OpenTarget, Pass, PassDone, RowFetched

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)
Opening = TypeVar("Opening", contravariant=True)


class StreamPort(Protocol[Request, Reply]):
    """An open session with a service. All methods raise ServiceError when the service fails."""

    async def send(self, request: Request, /) -> None:
        """Send without waiting for the reply."""

    async def receive(self) -> Reply:
        """The next reply; raises StopAsyncIteration when the service has ended the session."""
        ...

    async def close(self) -> None:
        """End the session."""


TargetStream = StreamPort[Pass | FetchRow, PassDone | RowFetched]
DrafterStream = StreamPort[Draft, Drafted]


class TargetPort(Protocol):
    """A target service."""

    async def open(self, opening: OpenTarget, /) -> TargetStream:
        """Begin a session."""
        ...


class DrafterPort(Protocol):
    """A drafter service."""

    async def open(self, opening: OpenDrafter, /) -> DrafterStream:
        """Begin a session."""
        ...
