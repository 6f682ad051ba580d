"""One running generation: an asynchronous iterator over its tokens, then its text and figures."""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.driver import Driver
from crossdraft.pipeline.events import Emitted, Finished, Reason
from crossdraft.pipeline.experience import Member
from crossdraft.pipeline.explanation import Decision, Explained
from crossdraft.pipeline.governing import Told
from crossdraft.pipeline.ports import Services
from crossdraft.pipeline.recorder import FileRecorder, Recorder, Together
from crossdraft.pipeline.session import Session
from crossdraft.pipeline.shown import Shown
from crossdraft.pipeline.statistics import Statistics, statistics_of
from crossdraft.rpc.errors import TimedOut
from crossdraft.text.letters import to_bytes
from crossdraft.verification.walk import Kind

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """A committed token."""

    id: int  # target id
    text: str  # what can be shown since the token before: whole characters, nothing that a stop string may take back
    raw: bytes  # the token's own bytes; empty for a control symbol
    kind: Kind
    log_probability: float | None  # nats, of the model itself; None if it was drawn from a row
    # The most probable ids in its place, each with its bytes and log-probability, if the request asked for logprobs.
    top: tuple[tuple[int, bytes, float], ...] = ()


class Generation:
    """Iterate over it for tokens; afterwards `text`, `ids`, `reason` and `statistics` are set.

    Where a request goes on after `committed` ids, all of these are of what came after.

    Use it as a context manager, or exhaust it: leaving it early cancels the sessions. When there is no target left,
    the iteration raises the last one's ServiceError; a drafter that fails does not end it.

    Args:
        assignment: what it works from.
        services: where it works.
        k: proposals in each lock-step round, for the statistics; 0: epochs are run in other ways.
        recorder: makes what takes down the session; called when it begins.
        watch: is told the same, while it runs.
        member: its place among outputs that learn for each other.
    """

    def __init__(
        self,
        assignment: Assignment,
        services: Services,
        k: int = 0,
        recorder: Callable[[], FileRecorder] | None = None,
        watch: Recorder | None = None,
        member: Member | None = None,
    ) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.reason: Reason | None = None
        self.statistics: Statistics | None = None
        self._assignment = assignment
        self._k = k
        self._services = services
        self._make_recorder = recorder
        self._recorder: FileRecorder | None = None
        self._watch = watch
        self._member = member
        self._told: Told | None = None  # the latest
        self._driver: Driver | None = None
        self._shown = Shown(assignment)
        self._queue: asyncio.Queue[Emitted | None] = asyncio.Queue()
        self._task: asyncio.Task[Finished] | None = None
        self._over = False  # nothing more will come
        self._context = contextvars.copy_context()  # of who made it: what it is about (`rpc.subject`)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def tell(self, told: Told) -> None:
        """Another output has learnt something of the same services."""
        self._told = told
        if self._driver is not None:
            self._driver.tell(told)

    async def aclose(self) -> None:
        """Cancel what is still running and close its sessions."""
        self._over = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._written()

    @property
    def decisions(self) -> list[Decision]:
        """How the epochs were run, if the request asked to explain it."""
        governor = self._assignment.governor
        return governor.decisions if isinstance(governor, Explained) else []

    @property
    def estimates(self) -> Sequence[str]:
        """What the governor believes of its services, in lines for people, if the request asked to explain it."""
        governor = self._assignment.governor
        return governor.estimates if isinstance(governor, Explained) else ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if self._task is None and not self._over:
            self._task = self._begin()
        emitted = None if self._over else await self._queue.get()
        if emitted is None:
            over, self._over = self._over, True
            if not over and self._task is not None:
                await self._written()
                self._end(self._task.result())
            raise StopAsyncIteration
        return self._token(emitted)

    def _begin(self) -> asyncio.Task[Finished]:
        self._recorder = None if self._make_recorder is None else self._make_recorder()
        told = Together(self._recorder, self._watch) if self._recorder or self._watch else None
        self._driver = Driver(Session(self._assignment), self._services, told, self._member)
        if self._told is not None:
            self._driver.tell(self._told)
        task = asyncio.create_task(self._driver.run(self._queue.put_nowait), context=self._context)
        task.add_done_callback(lambda _: self._queue.put_nowait(None))
        return task

    async def _written(self) -> None:
        """The record is on the disk, or why it is not is said."""
        if self._recorder is not None:
            self._recorder.close()  # a session that was cancelled before its first step has not
            fault = await asyncio.to_thread(self._recorder.wait)
            if fault:
                log.warning("the flight record is not whole: %s", fault)

    def _token(self, emitted: Emitted) -> Token:
        self.ids.append(emitted.token)
        shown = self._shown.add(emitted.letters, emitted.kept)
        self.text += shown
        letters = self._assignment.pair.target.letters
        top = tuple((token, to_bytes(letters[token]), value) for token, value in emitted.likely)
        return Token(emitted.token, shown, to_bytes(emitted.letters), emitted.kind, emitted.log_probability, top)

    def _end(self, finished: Finished) -> None:
        """The session is over: figures, and its error if it has one."""
        self.reason = finished.reason
        given = self._assignment
        assert self._driver is not None
        prompt_tokens = len(given.open_target.prompt)
        self.statistics = statistics_of(
            given.method.name, self._k, prompt_tokens, finished.counts, self._driver.times()
        )
        if isinstance(finished.error, TimeoutError):
            raise TimedOut(str(finished.error)) from finished.error
        if finished.error is not None:
            raise finished.error
