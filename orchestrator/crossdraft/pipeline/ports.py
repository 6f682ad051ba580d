"""What the driver needs of a service and of a session; `crossdraft.rpc` has the real services, tests have fakes."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from crossdraft.pipeline.events import Command, Counts, Event
from crossdraft.pipeline.roster import Roster
from crossdraft.pipeline.stopwatches import TrafficCount
from crossdraft.rpc.codec import Opened
from crossdraft.verification.exchange import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
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


class ServicePort(Protocol[Opening, Request, Reply]):
    """A service."""

    async def open(self, request: Opening, /) -> StreamPort[Request, Reply]:
        """Begin a session; raises ServiceError."""
        ...


# A service may break the protocol with a second Opened; the driver then gives it up.
TargetPort = ServicePort[OpenTarget, OpenTarget | Pass | FetchRow | RunTo, Opened | PassDone | RowFetched]
DrafterPort = ServicePort[OpenDrafter, OpenDrafter | Draft | Advance | Score, Opened | Drafted | Scored]


@dataclass(frozen=True, eq=False)
class Services:
    """Where a generation can open sessions."""

    targets: Roster[TargetPort]
    drafters: Roster[DrafterPort]

    @staticmethod
    def of(target: TargetPort, drafter: DrafterPort | None = None) -> "Services":
        """One of each role, or no drafter."""
        services = Services(Roster("target"), Roster("drafter"))
        services.targets.add("target", target)
        if drafter is not None:
            services.drafters.add("drafter", drafter)
        return services


class Machine(Protocol):
    """A session's state machine."""

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        ...

    def start(self, now: float) -> list[Command]:
        """The first commands."""
        ...

    def handle(self, event: Event, now: float) -> list[Command]:
        """What is to be done after an event; raises IllegalEventError, and has not changed then."""
        ...
