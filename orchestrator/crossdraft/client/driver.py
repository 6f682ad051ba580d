"""Connects a session's state machine to its services. Decides nothing itself.

The driver carries out the session's commands and feeds back what happens as events. Each lane (an opened session with
one service) has a task that reads and one that writes, so that a slow service delays its own lane only.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from crossdraft.client.measurements import BLAMED, Clock, LaneWatch, TrafficCount, traffic
from crossdraft.rpc.errors import Internal, ServiceError, Unreachable, name_of
from crossdraft.session.events import (
    Cancelled,
    Close,
    Command,
    Emitted,
    Event,
    Expired,
    Finished,
    IllegalEventError,
    Lane,
    Lost,
    Open,
    Ready,
    Replied,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.session.session import Session
from crossdraft.trace.recording import Recorder, Step
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Score,
    Scored,
)
from crossdraft.types.statistics import Times

FORGIVEN_SECONDS = 30.0  # after its last failure a service is preferred no less than any other

Opening = TypeVar("Opening", contravariant=True)
Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)
Service = TypeVar("Service")


class StreamPort(Protocol[Request, Reply]):
    """An open session with a service. All methods raise ServiceError when the service fails."""

    @property
    def traffic(self) -> TrafficCount:
        """Bytes sent and received so far."""
        ...

    async def send(self, request: Request, /) -> None:
        """Send without waiting for the reply."""

    async def receive(self) -> Reply:
        """The next reply; raises Closed when the service has ended the session in order."""
        ...

    async def close(self) -> None:
        """End the session."""


class ServicePort(Protocol[Opening, Request, Reply]):
    """A service; `crossdraft.rpc.clients` has the real ones."""

    async def open(self, request: Opening, /) -> StreamPort[Request, Reply]:
        """Begin a session; raises ServiceError."""
        ...


# A service may break the protocol with a second Opened; the driver then gives it up.
TargetPort = ServicePort[OpenTarget, OpenTarget | Pass | FetchRow | RunTo, Opened | PassDone | RowFetched]
DrafterPort = ServicePort[OpenDrafter, OpenDrafter | Draft | Advance | Score, Opened | Drafted | Scored]


@dataclass
class _Place(Generic[Service]):
    """One service of a roster."""

    service: Service
    failed_at: float | None = None  # seconds; None: it never failed
    sessions: int = 0  # that it has now
    leaving: bool = False  # no session is opened there any more


class Roster(Generic[Service]):
    """The services of one role by address, and which of them the next session is opened with.

    All generations of a pipeline share it, so that each knows what failed for another. It is told the time, in seconds
    of a monotonic clock.
    """

    def __init__(self, role: str) -> None:
        self.role = role  # "target" or "drafter", for error texts
        self._places: dict[str, _Place[Service]] = {}

    def __len__(self) -> int:
        return sum(not place.leaving for place in self._places.values())

    def __getitem__(self, address: str) -> Service:
        return self._places[address].service

    def __contains__(self, address: str) -> bool:
        """Whether sessions are opened there, or still go on."""
        return address in self._places

    def add(self, address: str, service: Service) -> None:
        """Add a service; an address that is there already keeps its service."""
        place = self._places.setdefault(address, _Place(service))
        if place.leaving:
            place.service, place.leaving, place.failed_at = service, False, None

    def remove(self, address: str) -> None:
        """Open no session there any more; those that are open go on."""
        if address in self._places:
            self._places[address].leaving = True
            self._forget(address)

    def take(self, used: Collection[str], blamed: Collection[str], now: float) -> str | None:
        """The address where the next session is opened; `give_back` when it has ended.

        Args:
            used: where this generation has sessions already: only taken if no other is left.
            blamed: where this generation opens none again.
            now: seconds.

        Returns:
            The address that failed least recently, and of several such the one with the fewest sessions; None if no
            address is left.
        """

        def cost(address: str) -> tuple[bool, float, int]:
            place = self._places[address]
            forgiven = place.failed_at is None or now - place.failed_at >= FORGIVEN_SECONDS
            return address in used, -inf if forgiven or place.failed_at is None else place.failed_at, place.sessions

        free = (address for address, place in self._places.items() if not place.leaving and address not in blamed)
        chosen = min(free, key=cost, default=None)
        if chosen is not None:
            self._places[chosen].sessions += 1
        return chosen

    def give_back(self, address: str) -> None:
        """A session there has ended."""
        self._places[address].sessions -= 1
        self._forget(address)

    def failed(self, address: str, now: float) -> None:
        """A session there failed, or its service was blamed."""
        if address in self._places:
            self._places[address].failed_at = now

    def _forget(self, address: str) -> None:
        place = self._places[address]
        if place.leaving and not place.sessions:
            del self._places[address]


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


Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class ServiceLane:
    """A session with a service: being opened, open, or over. Requests and replies travel side by side.

    Args:
        number: of the lane.
        roster: of its role, a Roster[TargetPort] or Roster[DrafterPort].
        opening: the first message.
        report: is told what happens there.
    """

    def __init__(
        self, number: Lane, roster: Roster[Any], opening: OpenTarget | OpenDrafter, report: Callable[[Event], None]
    ) -> None:
        self.roster = roster
        self.address: str | None = None  # once that is decided
        self.blamed = False  # this generation does not use its service again
        self.watch = LaneWatch(roster.role)
        self._closed = False
        self._number = number
        self._opening = opening
        self._listener = report
        self._requests: asyncio.Queue[object] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def live(self) -> bool:
        """Whether it is not over yet."""
        return self._task is not None and not self._task.done()

    def begin(self, spawn: Spawn, take: Callable[[], str], after: float) -> None:
        """Open the session after some seconds, at the address that `take` gives; reports Ready and replies, or Lost.

        `take` raises ServiceError if no address is left. With an empty roster the loss is not final: a service may
        still be added.
        """
        self._task = spawn(self._run(take, after))

    def send(self, request: object) -> None:
        """Queue a request; never waits."""
        if not self._closed:
            self.watch.asked(request, time.monotonic())
            self._requests.put_nowait(request)

    def close(self) -> None:
        """End it; nothing is sent or reported any more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    def _report(self, event: Event) -> None:
        if not self._closed:
            self._listener(event)

    async def _run(self, take: Callable[[], str], after: float) -> None:
        await asyncio.sleep(after)
        try:
            self.address = take()
        except ServiceError as error:
            self._report(Lost(self._number, error, elsewhere=not len(self.roster)))
            return
        self.watch.address = self.address
        try:
            await self._session(self.roster[self.address])
        except ServiceError as error:
            self.watch.lost = name_of(error)
            self.roster.failed(self.address, time.monotonic())
            self._report(Lost(self._number, error, error.lost))
        finally:
            self.watch.closed(time.monotonic())
            self.roster.give_back(self.address)

    async def _session(self, service: ServicePort[Any, Any, Any]) -> None:
        stream = await service.open(self._opening)
        try:
            self.watch.opened(stream.traffic, time.monotonic())
            self._report(Ready(self._number))
            await self._exchange(stream)
        finally:
            await stream.close()

    async def _exchange(self, stream: StreamPort[Any, Any]) -> None:
        """Write and read until one of them fails."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._write(stream))
                both.create_task(self._read(stream))
        except* ServiceError as errors:
            failure = errors.exceptions[0]
        if failure is not None:
            raise failure

    async def _write(self, stream: StreamPort[Any, Any]) -> None:
        while True:
            await stream.send(await self._requests.get())

    async def _read(self, stream: StreamPort[Any, Any]) -> None:
        while True:
            reply = await stream.receive()
            if isinstance(reply, Opened):
                raise Internal(f"the {self.roster.role} opened the session twice")
            self.watch.answered(reply, time.monotonic())
            self._report(Replied(self._number, reply))


Emit = Callable[[Emitted], None]


class Driver:
    """Runs one session from its first command to its last.

    Args:
        session: not begun.
        services: where it may open lanes.
        recorder: is told every step.
    """

    def __init__(self, session: Session, services: Services, recorder: Recorder | None = None) -> None:
        self._session = session
        self._services = services
        self._recorder = recorder
        self._events: asyncio.Queue[tuple[Event, float]] = asyncio.Queue()  # with the time of each one's arrival
        self._lanes: dict[Lane, ServiceLane] = {}
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._failures: dict[str, ServiceError] = {}  # by role, the latest
        self._clock = Clock()

    def times(self) -> Times:
        """The measurements so far."""
        return self._clock.times([lane.watch for lane in self._lanes.values()])

    async def run(self, emit: Emit) -> Finished:
        """Carry out commands and feed back events until the session is finished; `emit` gets its tokens.

        Cancelling this coroutine cancels the session. All lanes are closed at the end in any case.
        """
        async with asyncio.TaskGroup() as group:
            try:
                self._clock.begin()
                return await self._loop(group, emit)
            except asyncio.CancelledError:
                self._advance(Cancelled(), time.monotonic())
                raise
            finally:
                self._clock.end()
                self._release()

    async def _loop(self, group: asyncio.TaskGroup, emit: Emit) -> Finished:
        commands = self._advance(None, time.monotonic())
        while (finished := self._carry_out(commands, group, emit)) is None:
            commands = self._handle(*await self._events.get())
        return finished

    def _handle(self, event: Event, now: float) -> list[Command]:
        """A reply that the session does not allow is a failure of its service, which is not used again."""
        try:
            return self._advance(event, now)
        except IllegalEventError as error:
            if not isinstance(event, Ready | Replied):
                raise
            lane = self._lanes[event.lane]
            failure = Internal(f"the {lane.roster.role} broke the protocol: {error}")
            self._close(lane, str(failure))
            self._failures[lane.roster.role] = failure
            return self._advance(Lost(event.lane, failure), now)

    def _advance(self, event: Event | None, now: float) -> list[Command]:
        """One call of the state machine, measured and recorded; without an event it is started."""
        commands: list[Command] = []
        try:
            with self._clock.verification():
                commands = self._session.start(now) if event is None else self._session.handle(event, now)
        finally:
            self._record(event, now, commands)
        return commands

    def _record(self, event: Event | None, now: float, commands: list[Command]) -> None:
        """Record a step; one that the session refuses or fails at has no commands."""
        if self._recorder is not None:
            sent, received = traffic([lane.watch for lane in self._lanes.values()])
            spent, misses = self._clock.latest, self._session.counts.row_misses
            bytes_out, bytes_in = sum(sent.values()), sum(received.values())
            made, self._session.choices = tuple(self._session.choices), []
            self._recorder.record(Step(now, event, tuple(commands), spent, misses, bytes_out, bytes_in, made))

    def _carry_out(self, commands: list[Command], group: asyncio.TaskGroup, emit: Emit) -> Finished | None:
        """Never waits: what takes time has its own task. Returns Finished if it is among the commands."""
        for command in commands:
            match command:
                case Emitted():
                    self._clock.token()
                    emit(command)
                case Open():
                    self._open(command, group)
                case Send(lane, request):
                    self._lanes[lane].send(request)
                case Close(lane, blame):
                    self._close(self._lanes[lane], blame)
                case SetTimer():
                    self._set_timer(command)
                case Finished():
                    return command
        return None

    def _open(self, command: Open, group: asyncio.TaskGroup) -> None:
        target = isinstance(command.request, OpenTarget)
        roster: Roster[Any] = self._services.targets if target else self._services.drafters
        lane = ServiceLane(command.lane, roster, command.request, self._report)
        self._lanes[command.lane] = lane
        lane.begin(group.create_task, lambda: self._take(lane), command.after)

    def _take(self, lane: ServiceLane) -> str:
        """The address where a lane is opened; raises the role's latest ServiceError if none is left."""
        others = [other for other in self._lanes.values() if other is not lane and other.roster is lane.roster]
        used = {other.address for other in others if other.live and other.address is not None}
        blamed = {other.address for other in others if other.blamed and other.address is not None}
        address = lane.roster.take(used, blamed, time.monotonic())
        if address is None:
            role = lane.roster.role
            raise self._failures.get(role, Unreachable(f"there is no {role}"))
        return address

    def _close(self, lane: ServiceLane, blame: str) -> None:
        lane.close()
        if blame and lane.address is not None:
            lane.blamed, lane.watch.lost = True, lane.watch.lost or BLAMED
            lane.roster.failed(lane.address, time.monotonic())

    def _set_timer(self, command: SetTimer) -> None:
        if command.timer in self._timers:
            self._timers[command.timer].cancel()
        expired = Expired(command.timer, command.number)
        loop = asyncio.get_running_loop()
        self._timers[command.timer] = loop.call_later(command.seconds, self._report, expired)

    def _report(self, event: Event) -> None:
        """Queue an event that happened now."""
        if isinstance(event, Lost) and isinstance(event.error, ServiceError):
            self._failures[self._lanes[event.lane].roster.role] = event.error
        self._events.put_nowait((event, time.monotonic()))

    def _release(self) -> None:
        """Stop timers, lanes and recorder; the tasks of the lanes end with their group."""
        for timer in self._timers.values():
            timer.cancel()
        for lane in self._lanes.values():
            lane.close()
        if self._recorder is not None:
            self._recorder.close()
