"""Connects a session's state machine to its services: the main loop, and no decision of its own."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from crossdraft.client.measurements import BLAMED, Clock, LaneWatch, TrafficCount, traffic
from crossdraft.rpc.codec import Opened
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
from crossdraft.session.events import Reply as Reply_of_events
from crossdraft.speculation.choice import Told
from crossdraft.speculation.shared import Member
from crossdraft.trace.recording import Recorder, Step
from crossdraft.types.messages import (
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
from crossdraft.types.statistics import Counts, Times

# One lane as the driver runs it: a session with a service that a roster chose, read and written side by side.

OpeningT = TypeVar("OpeningT")
RequestT = TypeVar("RequestT")
Answer = TypeVar("Answer", bound=Opened | Reply_of_events)
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


# What the driver needs of a service and of a session; `crossdraft.rpc` has the real services, tests have fakes.

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)


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


Opening = TypeVar("Opening", contravariant=True)


class ServicePort(Protocol[Opening, Request, Reply]):
    """A service."""

    async def open(self, request: Opening, /) -> StreamPort[Request, Reply]:
        """Begin a session; raises ServiceError."""
        ...


# The services of one role, and which of them the next session is opened with. Pure: it is told the time.

Service = TypeVar("Service")


class Roster(Generic[Service]):
    """Services by address. All generations of a pipeline share one, so that what failed for one is known to all."""

    def __init__(self, role: str) -> None:
        self.role = role  # "target" or "drafter", for error texts
        self._places: dict[str, _Place[Service]] = {}

    def __len__(self) -> int:
        return sum(not place.leaving for place in self._places.values())

    def __getitem__(self, address: str) -> Service:
        return self._places[address].service

    def add(self, address: str, service: Service) -> None:
        """One more; an address that is there already keeps its place."""
        place = self._places.setdefault(address, _Place(service))
        if place.leaving:
            place.service, place.leaving, place.failed_at = service, False, None

    def remove(self, address: str) -> None:
        """No session is opened there any more; those that are go on."""
        if address in self._places:
            self._places[address].leaving = True
            self._forget(address)

    def __contains__(self, address: str) -> bool:
        """Whether sessions are opened there, or still go on."""
        return address in self._places

    def take(self, used: Collection[str], blamed: Collection[str], now: float) -> str | None:
        """The address where the next session is opened; `give_back` when it has ended.

        Args:
            used: where this generation has sessions already: only taken if no other is left.
            blamed: where this generation opens none again.
            now: seconds of a monotonic clock.

        Returns:
            Of the others the one that failed least recently, and of those the one with the fewest sessions; None if
            no address is left.
        """

        def cost(address: str) -> tuple[bool, float, int]:
            place = self._places[address]
            failed_at = (
                -inf if place.failed_at is None or now - place.failed_at >= FORGIVEN_SECONDS else place.failed_at
            )
            return (address in used, failed_at, place.sessions)

        staying = (address for address, place in self._places.items() if not place.leaving)
        chosen = min((address for address in staying if address not in blamed), key=cost, default=None)
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


class OpenedLane(Generic[OpeningT, RequestT, Answer]):
    """A session that is being opened, is open, or was."""

    def __init__(
        self,
        number: Lane,
        roster: Roster[ServicePort[OpeningT, RequestT, Answer]],
        opening: OpeningT,
        report: Callable[[Event], None],
    ) -> None:
        self.roster = roster
        self.address: str | None = None  # where it is, once that is decided
        self.blamed = False  # its service is not to be used again
        self.watch = LaneWatch(roster.role)
        self._closed = False
        self._number = number
        self._opening = opening
        self._listener = report
        self._requests: asyncio.Queue[RequestT] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def live(self) -> bool:
        """Whether it is not over yet."""
        return self._task is not None and not self._task.done()

    def begin(self, spawn: Spawn, take: Callable[[], str], after: float) -> None:
        """Opens it at the address that `take` gives after some seconds; reports Ready and replies, or Lost.

        `take` raises ServiceError if there is no address left; that is final where there are any, and others may come
        where there are none.
        """
        self._task = spawn(self._run(take, after))

    def send(self, request: RequestT) -> None:
        """Never waits: a service that is slow to read delays its own lane only."""
        if not self._closed:
            self.watch.asked(request, time.monotonic())
            self._requests.put_nowait(request)

    def close(self) -> None:
        """Ends it; nothing is sent or reported any more."""
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

    async def _session(self, service: ServicePort[OpeningT, RequestT, Answer]) -> None:
        stream = await service.open(self._opening)
        try:
            self.watch.opened(stream.traffic, time.monotonic())
            self._report(Ready(self._number))
            await self._exchange(stream)
        finally:
            await stream.close()

    async def _exchange(self, stream: StreamPort[RequestT, Answer]) -> None:
        """Writes and reads until one of them fails."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._write(stream))
                both.create_task(self._read(stream))
        except* ServiceError as errors:
            failure = errors.exceptions[0]
        if failure is not None:
            raise failure

    async def _write(self, stream: StreamPort[RequestT, Answer]) -> None:
        while True:
            await stream.send(await self._requests.get())

    async def _read(self, stream: StreamPort[RequestT, Answer]) -> None:
        while True:
            reply = await stream.receive()
            if isinstance(reply, Opened):
                raise Internal(f"the {self.roster.role} opened the session twice")
            self.watch.answered(reply, time.monotonic())
            self._report(Replied(self._number, reply))


AnyLane = OpenedLane[Any, Any, Any]  # of a target or of a drafter
Emit = Callable[[Emitted], None]

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


class Driver:
    """Runs one session from its first command to its last."""

    def __init__(
        self, session: Machine, services: Services, recorder: Recorder | None = None, member: Member | None = None
    ) -> None:
        self._session = session
        self._services = services
        self._recorder = recorder
        self._member = member
        self._events: asyncio.Queue[tuple[Event, float]] = asyncio.Queue()  # with the time of each one's arrival
        self._lanes: dict[Lane, AnyLane] = {}
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._failures: dict[str, ServiceError] = {}  # by role, the latest
        self._clock = Clock()

    def times(self) -> Times:
        """What was measured so far."""
        return self._clock.times([lane.watch for lane in self._lanes.values()])

    async def run(self, emit: Emit) -> Finished:
        """Carry out commands and feed back events until the session is finished.

        Cancelling this coroutine cancels the session. In any case all lanes are closed at the end.
        """
        async with asyncio.TaskGroup() as group:
            try:
                self._clock.begin()
                if self._member is not None:
                    self._member.begin()
                return await self._loop(group, emit)
            except asyncio.CancelledError:
                self._advance(Cancelled(), time.monotonic())
                raise
            finally:
                self._clock.end()
                self._release()

    def tell(self, told: Told) -> None:
        """Another output has learnt something."""
        self._report(told)

    async def _loop(self, group: asyncio.TaskGroup, emit: Emit) -> Finished:
        commands = self._advance(None, time.monotonic())
        while (finished := self._carry_out(commands, group, emit)) is None:
            commands = self._handle(*await self._events.get())
        return finished

    def _handle(self, event: Event, now: float) -> list[Command]:
        """An answer that nobody asked for is a failure of the service that sent it, which is not used again."""
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
        """One call of the state machine, measured and recorded; `event` None starts it."""
        commands: list[Command] = []
        try:
            with self._clock.verification():
                commands = self._session.start(now) if event is None else self._session.handle(event, now)
        finally:
            self._record(event, now, commands)
        if self._member is not None:
            self._member.look()
        return commands

    def _record(self, event: Event | None, now: float, commands: list[Command]) -> None:
        """What the session refuses, or fails at, is recorded as well: without commands."""
        if self._recorder is not None:
            sent, received = traffic([lane.watch for lane in self._lanes.values()])
            spent, misses = self._clock.latest, self._session.counts.row_misses
            bytes_out, bytes_in = sum(sent.values()), sum(received.values())
            self._recorder.record(Step(now, event, tuple(commands), spent, misses, bytes_out, bytes_in))

    def _carry_out(self, commands: list[Command], group: asyncio.TaskGroup, emit: Emit) -> Finished | None:
        """Never waits: whatever takes time has a task of its own. Returns the end if it is among them."""
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
        lane: AnyLane
        match command.request:
            case OpenTarget() as opening:
                lane = OpenedLane(command.lane, self._services.targets, opening, self._report)
            case OpenDrafter() as opening:
                lane = OpenedLane(command.lane, self._services.drafters, opening, self._report)
        self._lanes[command.lane] = lane
        lane.begin(group.create_task, lambda: self._take(lane), command.after)

    def _take(self, lane: AnyLane) -> str:
        """The address where a lane is opened; raises ServiceError if none is left."""
        others = [other for other in self._lanes.values() if other is not lane and other.roster is lane.roster]
        used = {other.address for other in others if other.live and other.address is not None}
        blamed = {other.address for other in others if other.blamed and other.address is not None}
        address = lane.roster.take(used, blamed, time.monotonic())
        if address is None:
            role = lane.roster.role
            raise self._failures.get(role, Unreachable(f"there is no {role}"))
        return address

    def _close(self, lane: AnyLane, blame: str) -> None:
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
        """Something happened now."""
        if isinstance(event, Lost) and isinstance(event.error, ServiceError):
            self._failures[self._lanes[event.lane].roster.role] = event.error
        self._events.put_nowait((event, time.monotonic()))

    def _release(self) -> None:
        """Nothing may be left behind; the tasks of the lanes end with their group."""
        for timer in self._timers.values():
            timer.cancel()
        for lane in self._lanes.values():
            lane.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._member is not None:
            self._member.close()


FORGIVEN_SECONDS = 30.0  # after its last failure a service is taken like any other


@dataclass
class _Place(Generic[Service]):
    """One of them."""

    service: Service
    failed_at: float | None = None  # seconds; None: it never failed
    sessions: int = 0  # that it has now
    leaving: bool = False  # no session is opened there any more
