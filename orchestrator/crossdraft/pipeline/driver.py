"""Connects a session's state machine to its services: the main loop, and no decision of its own."""

import asyncio
from collections.abc import Awaitable, Callable

from crossdraft.pipeline.events import (
    Command,
    DrafterLost,
    DrafterOpened,
    Emitted,
    Event,
    Expired,
    Finished,
    SetTimer,
    TargetLost,
    TargetOpened,
)
from crossdraft.pipeline.ports import DrafterPort, DrafterStream, StreamPort, TargetPort, TargetStream
from crossdraft.pipeline.session import Session
from crossdraft.rpc.errors import ServiceError, Unreachable
from crossdraft.verification.exchange import Draft, FetchRow, OpenDrafter, OpenTarget, Pass

Lost = Callable[[ServiceError], Event]


class Driver:
    """Runs one session from its first command to its last."""

    def __init__(self, session: Session, target: TargetPort, drafter: DrafterPort | None) -> None:
        self._session = session
        self._target = target
        self._drafter = drafter
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._target_stream: TargetStream | None = None
        self._drafter_stream: DrafterStream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._processing_seconds = 0.0

    @property
    def processing_seconds(self) -> float:
        """Time spent in the state machine: planning, verification, bookkeeping."""
        return self._processing_seconds

    async def run(self, emit: Callable[[Emitted], None]) -> Finished:
        """Carry out commands and feed back events until the session is finished.

        Cancelling this coroutine cancels the session; services are told in any case.
        """
        async with asyncio.TaskGroup() as group:
            try:
                return await self._loop(group, emit)
            finally:
                for task in self._tasks:
                    task.cancel()
                await self._close()

    async def _loop(self, group: asyncio.TaskGroup, emit: Callable[[Emitted], None]) -> Finished:
        self._tasks: list[asyncio.Task[None]] = []
        commands = self._timed(self._session.start)
        while True:
            for command in commands:
                match command:
                    case Emitted():
                        emit(command)
                    case Finished():
                        return command
                    case _:
                        await self._carry_out(command, group)
            event = await self._events.get()
            commands = self._timed(lambda event=event: self._session.handle(event))  # type: ignore[misc]

    def _timed(self, step: Callable[[], list[Command]]) -> list[Command]:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            return step()
        finally:
            self._processing_seconds += clock() - began

    async def _carry_out(self, command: Command, group: asyncio.TaskGroup) -> None:
        match command:
            case OpenTarget():
                self._tasks.append(group.create_task(self._run_target(command)))
            case OpenDrafter():
                self._tasks.append(group.create_task(self._run_drafter(command)))
            case Draft() if self._drafter_stream is not None:
                await self._guarded(self._drafter_stream.send(command), drafter_lost)
            case Pass() | FetchRow() if self._target_stream is not None:
                await self._guarded(self._target_stream.send(command), TargetLost)
            case SetTimer(timer, seconds):
                self._set_timer(timer, seconds)

    def _set_timer(self, timer: int, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._events.put_nowait, Expired(timer))

    async def _run_target(self, opening: OpenTarget) -> None:
        async def session() -> None:
            self._target_stream = await self._target.open(opening)
            self._events.put_nowait(TargetOpened())
            await self._read(self._target_stream, "the target")

        await self._guarded(session(), TargetLost)

    async def _run_drafter(self, opening: OpenDrafter) -> None:
        async def session() -> None:
            assert self._drafter is not None
            self._drafter_stream = await self._drafter.open(opening)
            self._events.put_nowait(DrafterOpened())
            await self._read(self._drafter_stream, "the drafter")

        await self._guarded(session(), drafter_lost)

    async def _guarded(self, work: Awaitable[None], lost: Lost) -> None:
        """A service's failure is an event like any other."""
        try:
            await work
        except ServiceError as error:
            self._events.put_nowait(lost(error))

    async def _read(self, stream: StreamPort[object, Event], name: str) -> None:
        while True:
            try:
                reply = await stream.receive()
            except StopAsyncIteration:
                raise Unreachable(f"{name} ended the session") from None
            self._events.put_nowait(reply)

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for stream in (self._target_stream, self._drafter_stream):
            if stream is not None:
                await stream.close()


def drafter_lost(error: ServiceError) -> Event:
    """The session needs to know why, not how."""
    return DrafterLost(str(error))
