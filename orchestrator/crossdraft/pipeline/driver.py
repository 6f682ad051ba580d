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
from crossdraft.pipeline.ports import DrafterPort, DrafterStream, TargetPort, TargetStream
from crossdraft.pipeline.rules import IllegalEventError
from crossdraft.pipeline.session import Session
from crossdraft.pipeline.statistics import DRAFTER, TARGET, Clock, Times
from crossdraft.rpc.codec import Opened
from crossdraft.rpc.errors import Internal, ServiceError
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
        self._tasks: list[asyncio.Task[None]] = []
        self._clock = Clock()

    def times(self) -> Times:
        """What was measured so far."""
        streams = [stream for stream in (self._target_stream, self._drafter_stream) if stream is not None]
        return self._clock.times([stream.traffic for stream in streams])

    async def run(self, emit: Callable[[Emitted], None]) -> Finished:
        """Carry out commands and feed back events until the session is finished.

        Cancelling this coroutine cancels the session; services are told in any case.
        """
        async with asyncio.TaskGroup() as group:
            try:
                self._clock.begin()
                return await self._loop(group, emit)
            finally:
                self._clock.end()
                for task in self._tasks:
                    task.cancel()
                await self._close()

    async def _loop(self, group: asyncio.TaskGroup, emit: Callable[[Emitted], None]) -> Finished:
        with self._clock.verification():
            commands = self._session.start()
        while True:
            for command in commands:
                match command:
                    case Emitted():
                        self._clock.token()
                        emit(command)
                    case Finished():
                        return command
                    case _:
                        await self._carry_out(command, group)
            event = await self._events.get()
            with self._clock.verification():
                commands = self._handle(event)

    def _handle(self, event: Event) -> list[Command]:
        """An answer that nobody asked for is a failure of the service that sent it."""
        try:
            return self._session.handle(event)
        except IllegalEventError as error:
            match event:
                case Drafted() | Scored():
                    return self._session.handle(DrafterLost(f"the drafter broke the protocol: {error}"))
                case PassDone() | RowFetched():
                    return self._session.handle(TargetLost(Internal(f"the target broke the protocol: {error}")))
            raise

    async def _carry_out(self, command: Command, group: asyncio.TaskGroup) -> None:
        match command:
            case OpenTarget():
                self._tasks.append(group.create_task(self._run_target(command)))
            case OpenDrafter():
                self._tasks.append(group.create_task(self._run_drafter(command)))
            case Draft() | Score() if self._drafter_stream is not None:
                self._clock.asked(DRAFTER)
                await self._guarded(self._drafter_stream.send(command), drafter_lost)
            case Pass() | FetchRow() if self._target_stream is not None:
                self._clock.asked(TARGET)
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

    async def _read(self, stream: TargetStream | DrafterStream, name: str) -> None:
        while True:
            reply = await stream.receive()
            if isinstance(reply, Opened):
                raise Internal(f"{name} opened the session twice")
            self._clock.answered(reply)
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
