"""One lane as the driver runs it: a session with a service that a roster chose, read and written side by side."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from crossdraft.pipeline.events import Event, Lane, Lost, Ready, Replied, Reply
from crossdraft.pipeline.ports import ServicePort, StreamPort
from crossdraft.pipeline.roster import Roster
from crossdraft.pipeline.stopwatches import LaneWatch
from crossdraft.rpc.codec import Opened
from crossdraft.rpc.errors import Internal, ServiceError, name_of

Opening = TypeVar("Opening")
Request = TypeVar("Request")
Answer = TypeVar("Answer", bound=Opened | Reply)
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class OpenedLane(Generic[Opening, Request, Answer]):
    """A session that is being opened, is open, or was."""

    def __init__(
        self,
        number: Lane,
        roster: Roster[ServicePort[Opening, Request, Answer]],
        opening: Opening,
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
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
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

    def send(self, request: Request) -> None:
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

    async def _session(self, service: ServicePort[Opening, Request, Answer]) -> None:
        stream = await service.open(self._opening)
        try:
            self.watch.opened(stream.traffic, time.monotonic())
            self._report(Ready(self._number))
            await self._exchange(stream)
        finally:
            await stream.close()

    async def _exchange(self, stream: StreamPort[Request, Answer]) -> None:
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

    async def _write(self, stream: StreamPort[Request, Answer]) -> None:
        while True:
            await stream.send(await self._requests.get())

    async def _read(self, stream: StreamPort[Request, Answer]) -> None:
        while True:
            reply = await stream.receive()
            if isinstance(reply, Opened):
                raise Internal(f"the {self.roster.role} opened the session twice")
            self.watch.answered(reply, time.monotonic())
            self._report(Replied(self._number, reply))
