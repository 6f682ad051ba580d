"""Services seen by a benchmark: which generations have sessions with them now, and what they were given to do."""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Generic

from crossdraft.cli.recording import Opening, Port, Reply, Request
from crossdraft.pipeline.ports import Services, StreamPort
from crossdraft.pipeline.roster import Roster
from crossdraft.pipeline.stopwatches import TrafficCount
from crossdraft.rpc.clients import DrafterClient, TargetClient
from crossdraft.verification.exchange import OpenDrafter, OpenTarget, Pass, PassDone


@dataclass(eq=False)
class Watched(Generic[Opening, Request, Reply]):
    """A port that is watched."""

    port: Port[Opening, Request, Reply]
    live: list[int] = field(default_factory=list)  # `NoiseKey.choice` of each open session; 0 without keyed noise
    nodes: int = 0  # of the trees of all passes
    busy: float = 0.0  # seconds from passes that were sent to their return, of all sessions

    async def open(self, request: Opening) -> "WatchedStream[Request, Reply]":
        """Begin a session."""
        stream = await self.port.open(request)
        assert isinstance(request, OpenTarget | OpenDrafter)
        choice = 0 if request.noise is None else request.noise.choice
        self.live.append(choice)
        return WatchedStream(stream, self, choice)


@dataclass(eq=False)
class WatchedStream(Generic[Request, Reply]):
    """An open session of a watched port."""

    stream: StreamPort[Request, Reply]
    port: Watched[Any, Request, Reply]
    choice: int
    sent_at: float = 0.0  # when the latest pass left, in seconds

    @property
    def traffic(self) -> TrafficCount:
        """What was sent and received so far."""
        return self.stream.traffic

    async def send(self, request: Request, /) -> None:
        """As the stream's own."""
        if isinstance(request, Pass):
            self.sent_at = time.monotonic()
            self.port.nodes += len(request.tree)
        await self.stream.send(request)

    async def receive(self) -> Reply:
        """As the stream's own."""
        reply = await self.stream.receive()
        if isinstance(reply, PassDone):  # of a run, since the answer before
            now = time.monotonic()
            self.port.busy, self.sent_at = self.port.busy + now - self.sent_at, now
        return reply

    async def close(self) -> None:
        """As the stream's own."""
        self.port.live.remove(self.choice)
        await self.stream.close()


AnyWatched = Watched[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Watch:
    """All services of a benchmark."""

    services: Services
    ports: dict[str, AnyWatched]  # by address

    @staticmethod
    async def of(targets: Sequence[str], drafters: Sequence[str], stack: AsyncExitStack) -> "Watch":
        """Clients of these addresses, which are closed with the stack."""
        services, ports = Services(Roster("target"), Roster("drafter")), dict[str, AnyWatched]()
        for address in targets:
            ports[address] = Watched(await stack.enter_async_context(TargetClient(address)))
            services.targets.add(address, ports[address])
        for address in drafters:
            ports[address] = Watched(await stack.enter_async_context(DrafterClient(address)))
            services.drafters.add(address, ports[address])
        return Watch(services, ports)

    def busy(self, addresses: Sequence[str]) -> tuple[float, ...]:
        """Seconds that each was at work since this was last asked."""
        found = tuple(self.ports[address].busy for address in addresses)
        for address in addresses:
            self.ports[address].busy = 0.0
        return found
