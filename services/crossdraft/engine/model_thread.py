"""The model thread: all sessions' jobs step together, away from the event loop."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from torch import Tensor

from crossdraft.engine.engine import Engine
from crossdraft.engine.requests import Share, Work
from crossdraft.engine.runner import Span
from crossdraft.engine.sampler import Likeness, Reading, groups
from crossdraft.engine.scheduler import Due, Pause, Scheduler, Step, Tenancy

T = TypeVar("T")
Stepping = Callable[[Sequence[Share]], list[Tensor | None]]  # as `Engine.step`
LOOK_AGAIN = 0.02  # seconds between looks whether somebody's turn is over, while nobody can go on


class ModelThreadClosedError(RuntimeError):
    """The model thread takes no more jobs."""


# A job of the model thread: it asks for works, is told their logits, and has a result for who submitted it.


Job = Generator[Work | Reading[Any], Any, T]


@dataclass(frozen=True, eq=False)
class Answer:
    """To one work of a job."""

    logits: Tensor  # (rows, V)
    queued: float  # seconds from when it was asked for to its first step
    began: float  # when its first step did
    span: Span  # of its last step
    sessions: int  # that shared its last step, itself included
    tokens: int  # that this step fed, of all of them

    @property
    def seconds(self) -> float:
        """Of its steps, and between them where they are several. Waits for the device."""
        return self.span.ended - self.began


class Running(Generic[T]):
    """A job under way, and where its result goes. `submitted` and all times: seconds of the thread's clock."""

    def __init__(self, job: Job[T], loop: asyncio.AbstractEventLoop, submitted: float) -> None:
        self.work: Work
        self.asked = submitted  # when it asked for its work
        self.began: float | None = None  # the first step of its work, if there was one
        self.live = True
        self.reading: Asked | None = None  # what it wants to know before it asks for more work
        self.future: asyncio.Future[T] = loop.create_future()
        self._job = job
        self._loop = loop

    def start(self, check: Callable[[Work], None]) -> None:
        """Runs the job up to its first work, or reading."""
        with Delivering(self):
            self._go_on(next(self._job), check)

    def answer(self, answer: Answer, check: Callable[[Work], None], clock: Callable[[], float]) -> None:
        """Hands it the answer to its work, and runs it up to what it wants next."""
        self.began = None
        self.tell(answer, check, clock)

    def tell(self, found: Any, check: Callable[[Work], None], clock: Callable[[], float]) -> None:
        """Hands it what it asked for, and runs it up to what it wants next."""
        with Delivering(self):
            wanted = self._job.send(found)
            self.asked = clock()
            self._go_on(wanted, check)

    def _go_on(self, wanted: Work | Reading[Any], check: Callable[[Work], None]) -> None:
        self.reading = None
        if isinstance(wanted, Reading):
            self.reading = Asked(wanted, Likeness.of(wanted))
        else:
            self.work = wanted
            check(wanted)

    def drop_cancelled(self) -> None:
        """Ends it if nobody waits for its result any more."""
        if self.live and self.future.cancelled():
            self.finish(asyncio.CancelledError())

    def finish(self, error: BaseException) -> None:
        """The job is over: its result, or the error, goes to the submitter."""
        self.live = False
        with suppress(RuntimeError):  # a job that yields again when it is closed is none the less over
            self._job.close()
        with suppress(RuntimeError):  # the submitter's loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._resolve, error)

    def _resolve(self, error: BaseException) -> None:
        if self.future.done():
            return
        if isinstance(error, StopIteration):
            self.future.set_result(error.value)
        else:
            self.future.set_exception(error)


class ModelThread:
    """Runs jobs on one engine in one thread; which of them a step takes, and when, the scheduler decides.

    An error, of a job or of its work, reaches only that job's submitter.

    Args:
        engine: what the thread runs.
        step: what is called in place of the engine's own `step`, which it ends in; None: that itself.
        clock: in seconds.
    """

    def __init__(
        self, engine: Engine, step: Stepping | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine = engine  # to be used in this thread's jobs only
        self.steps = 0  # forwards so far, of however many sessions
        self.seconds = 0.0  # in them, and in what their jobs did next
        self.batches: Counter[int] = Counter()  # by number of sessions: steps that had so many
        self.answers = 0  # works that were answered
        self.queued = 0.0  # seconds that they waited for their first steps
        self._stepping = engine.step if step is None else step
        self._clock = clock
        self._scheduler = Scheduler(engine.chunk)
        self._tenancy = Tenancy(engine)
        self._live: list[Running[Any]] = []
        self._arrivals: SimpleQueue[Running[Any] | None] = SimpleQueue()  # None: no more will come
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def evictions(self) -> int:
        """Sessions that gave their places to others."""
        return self._tenancy.evictions

    async def run(self, job: Job[T]) -> T:
        """The job's result. Cancelling stops the job before its next step.

        Raises:
            ModelThreadClosedError: `close` was called before.
            BaseException: what the job raised, or what the engine raised for its work.
        """
        running = Running(job, asyncio.get_running_loop(), self._clock())
        with self._closing:
            if self._closed:
                raise ModelThreadClosedError("the model thread is closed")
            self._arrivals.put(running)
        return await running.future

    async def close_session(self, session: Hashable) -> None:
        """Frees the places of a session, after the step that is under way."""
        await self.run(self._ending(session))

    def close(self) -> None:
        """Takes no more jobs and waits until those submitted are done. Not to be called from a job."""
        with self._closing:
            self._closed = True
            self._arrivals.put(None)
        self._thread.join()

    def _run(self) -> None:
        pause: float | None = None
        try:
            while self._arrived(pause):
                seated = self._seated()
                decided = self._scheduler.next([self._due(running) for running in seated], self._clock())
                pause = decided.seconds if isinstance(decided, Pause) else self._step(seated, decided)
        finally:
            self._ended()

    def _ended(self) -> None:
        """Nobody waits for a thread that has ended, even if what ended it was not foreseen."""
        with self._closing:
            self._closed = True
        left = [*self._live]
        with suppress(Empty):
            while True:
                left += filter(None, (self._arrivals.get_nowait(),))
        for running in left:
            running.finish(ModelThreadClosedError("the model thread has ended"))

    def _arrived(self, pause: float | None) -> bool:
        """Takes in what comes within so many seconds (None: however long it takes); whether the thread is to go on."""
        if pause is None and self._live:
            pause = LOOK_AGAIN
        with suppress(Empty):
            self._take_in(self._arrivals.get(block=pause != 0, timeout=pause))
            while True:
                self._take_in(self._arrivals.get_nowait())
        for running in self._live:
            running.drop_cancelled()
        self._live = [running for running in self._live if running.live]
        return bool(self._live) or not (self._closed and self._arrivals.empty())

    def _take_in(self, running: Running[Any] | None) -> None:
        if running is not None:
            running.start(self.engine.check)
            read([running], self.engine.check, self._clock)
        if running is not None and running.live:
            self._live.append(running)
            self._scheduler.returns.asked(running.work.session, running.asked)

    def _seated(self) -> list[Running[Any]]:
        """The jobs that can take part in a step now."""
        now = self._clock()
        self._live.sort(key=lambda running: running.asked)
        return self._tenancy.seated(self._live, self._scheduler.returns.expected(now), now)

    def _due(self, running: Running[Any]) -> Due:
        work = running.work
        tokens = self.engine.due(work)
        return Due(work.session, running.asked, tokens, min(tokens, 1 + len(work.tree)), running.began is not None)

    def _step(self, seated: "list[Running[Any]]", step: Step) -> float:
        """Takes a step, and its answers on to the jobs; returns how long to wait for more: not at all."""
        taken = sorted(step.tokens.items())  # the oldest first: places are given in this order
        jobs = [seated[index] for index, _ in taken]
        span, fed = Span(self.engine.device, self._clock), self.engine.fed
        self.steps += 1
        self.batches[len(jobs)] += 1
        found = self._forwarded(jobs, [Share(seated[index].work, tokens) for index, tokens in taken])
        span.end()
        fed = self.engine.fed - fed
        answered = []
        for running, logits in zip(jobs, found, strict=True):
            if not running.live:  # its step failed: what lies in its places is not known, and others can use them
                self._tenancy.close(running.work.session)
            if running.live and (logits is not None or self.engine.admits(running.work)):  # else it was not fed
                self._tenancy.stepped(running.work.session, span.began)
                running.began = span.began if running.began is None else running.began
            if running.live and logits is not None:
                self._answer(running, logits, span, fed, len(jobs))
                answered.append(running)
        self._read(answered)
        with Delivering(*jobs):  # a device that has failed tells whoever waits for it
            self._scheduler.stepped(fed, span.ended - span.began)
        self.seconds += self._clock() - span.began
        return 0.0

    def _forwarded(self, jobs: "list[Running[Any]]", shares: list[Share]) -> list[Tensor | None]:
        """One forward for all; where it fails they take the step one by one, so that only the guilty fail."""
        if len(jobs) > 1:
            with Delivering(*jobs), suppress(RuntimeError, MemoryError):
                return self._stepping(shares)
        found: list[Tensor | None] = [None] * len(jobs)
        for index, running in enumerate(jobs):
            if running.live:
                with Delivering(running):
                    found[index] = self._stepping([shares[index]])[0]
        return found

    def _answer(self, running: Running[Any], logits: Tensor, span: Span, fed: int, sessions: int) -> None:
        """Hands a job its logits."""
        assert running.began is not None
        work, queued = running.work, running.began - running.asked
        self.answers += 1
        self.queued += queued
        self._tenancy.answered(work.session, self._clock(), self._scheduler.costs.seconds(len(work.context)))
        answer = Answer(logits, queued, running.began, span, sessions, fed)
        running.answer(answer, self.engine.check, self._clock)

    def _read(self, answered: "list[Running[Any]]") -> None:
        """Answers what jobs want to know of their logits; each goes on, or is over and may come back."""
        read(answered, self.engine.check, self._clock)
        for running in answered:
            if not running.live:
                self._scheduler.returns.answered(running.work.session, self._clock())

    def _ending(self, session: Hashable) -> Job[None]:
        """A job without a step."""
        self._tenancy.close(session)
        self._scheduler.returns.over(session)
        yield from ()


"""Yields works and receives an `Answer` to each, yields readings of the logits, returns its result.

Runs in the model thread, all of it. A pass of the target yields one work, a draft of k tokens k of them.
"""


@dataclass(frozen=True, eq=False)
class Asked:
    """What a job wants to know of logits."""

    reading: Reading[Any]
    likeness: Likeness


class Delivering:
    """Whatever ends jobs inside goes to their submitters: nothing may end the thread that others wait for."""

    def __init__(self, *jobs: Running[Any]) -> None:
        self._jobs = jobs

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            for running in self._jobs:
                running.finish(error)
        return True


def read(jobs: Sequence[Running[Any]], check: Callable[[Work], None], clock: Callable[[], float]) -> None:
    """Answers what jobs want to know of logits, until each wants work, or is over."""
    while wanting := [(job, job.reading) for job in jobs if job.live and job.reading is not None]:
        for places in groups([asked.likeness for _, asked in wanting]):
            asking = [wanting[place][0] for place in places]
            found = _found(asking, [wanting[place][1].reading for place in places])
            for running, answer in zip(asking, found, strict=True):
                if running.live:
                    running.tell(answer, check, clock)


def _found(asking: Sequence[Running[Any]], readings: Sequence[Reading[Any]]) -> list[Any]:
    """The answers to readings of one kind; where one has none they are answered one by one, so that only it fails."""
    if len(readings) > 1:
        with Delivering(*asking), suppress(RuntimeError, ValueError, IndexError, MemoryError):
            return readings[0].together(readings)
    found: list[Any] = [None] * len(readings)
    for place, (running, reading) in enumerate(zip(asking, readings, strict=True)):
        if running.live:
            with Delivering(running):
                (found[place],) = reading.together([reading])
    return found
