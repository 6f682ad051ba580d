"""Connects a session's state machine to its services: the main loop, and no decision of its own."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from crossdraft.pipeline.events import (
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
from crossdraft.pipeline.experience import Member
from crossdraft.pipeline.governing import Told
from crossdraft.pipeline.lanes import OpenedLane
from crossdraft.pipeline.ports import Machine, Services
from crossdraft.pipeline.recorder import Recorder
from crossdraft.pipeline.recording import Step
from crossdraft.pipeline.stopwatches import Clock, Times, traffic
from crossdraft.pipeline.trips import BLAMED
from crossdraft.rpc.errors import Internal, ServiceError, Unreachable
from crossdraft.verification.exchange import OpenDrafter, OpenTarget

AnyLane = OpenedLane[Any, Any, Any]  # of a target or of a drafter
Emit = Callable[[Emitted], None]


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
