"""The model thread: all sessions' jobs step together, one batched forward a step, away from the event loop."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from torch import Tensor

from crossdraft.models.engine import Engine
from crossdraft.models.feeds import Work

T = TypeVar("T")
Forward = Callable[[Sequence[Work]], list[Tensor]]  # as `Engine.forward`
Job = Generator[Work, Tensor, T]
"""Yields requests, receives their logits (rows, V), returns its result. Runs in the model thread, all of it.

A pass of the target yields once, a draft of k tokens k times: it draws between its yields.
"""


class ModelThreadClosedError(RuntimeError):
    """The model thread takes no more jobs."""


class ModelThread:
    """Runs jobs on one engine in one thread.

    What waits is collected: a step is one `Engine.forward` for all live jobs, and a job that arrives during a step
    takes part in the next one. An error, of a job or of its request, reaches only that job's submitter.

    Args:
        engine: what the thread runs.
        forward: what a step calls in place of the engine's own `forward`, which it ends in; None: that itself.
    """

    def __init__(self, engine: Engine, forward: Forward | None = None) -> None:
        self.engine = engine  # to be used in this thread's jobs only
        self._forward = engine.forward if forward is None else forward
        self.steps = 0  # forwards so far, of however many jobs
        self.seconds = 0.0  # in them, and in what their jobs did next
        self.batches: Counter[int] = Counter()  # by number of jobs: steps that had so many
        self._arrivals: SimpleQueue[_Running[Any] | None] = SimpleQueue()  # None: finish what is live and end
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    async def run(self, job: Job[T]) -> T:
        """The job's result. Cancelling stops the job before its next step.

        Raises:
            ModelThreadClosedError: `close` was called before.
            BaseException: what the job raised, or what `Engine.forward` raised for its request.
        """
        running = _Running(job, asyncio.get_running_loop())
        with self._closing:
            if self._closed:
                raise ModelThreadClosedError("the model thread is closed")
            self._arrivals.put(running)
        return await running.future

    async def close_session(self, session: Hashable) -> None:
        """Frees the slot of a session, after the steps that are under way."""
        await self.run(_closing(self.engine, session))

    def close(self) -> None:
        """Takes no more jobs and waits until those submitted are done. Not to be called from a job."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._arrivals.put(None)
        self._thread.join()

    def _run(self) -> None:
        live: list[_Running[Any]] = []
        open_ = True
        while open_ or live:
            arrived, open_ = self._arrived(wait=not live, open_=open_)
            for running in arrived:
                running.start()
            live = [running for running in (*live, *arrived) if running.wants(self.engine)]
            if live:
                self._step(live)

    def _arrived(self, wait: bool, open_: bool) -> "tuple[list[_Running[Any]], bool]":
        """The jobs that have arrived, at least one if `wait`; and whether more may come."""
        arrived: list[_Running[Any]] = []
        while open_:
            try:
                running = self._arrivals.get(block=wait and not arrived)
            except Empty:
                break
            if running is None:
                open_ = False
            else:
                arrived.append(running)
        return arrived, open_

    def _step(self, live: "list[_Running[Any]]") -> None:
        """One forward for all; where it fails the jobs take the step one by one, so that only the guilty fail."""
        began = time.perf_counter()
        self.steps += 1
        self.batches[len(live)] += 1
        logits: list[Tensor] = []
        if len(live) > 1:
            with _Delivering(*live), suppress(RuntimeError, MemoryError):
                logits = self._forward([running.work for running in live])
        for index, running in enumerate(live):
            running.step(logits[index] if logits else None, self._forward)
        self.seconds += time.perf_counter() - began


class _Running(Generic[T]):
    """A job under way, and where its result goes."""

    def __init__(self, job: Job[T], loop: asyncio.AbstractEventLoop) -> None:
        self.work: Work
        self.future: asyncio.Future[T] = loop.create_future()
        self._job = job
        self._loop = loop
        self._live = True

    def start(self) -> None:
        """Runs the job up to its first request."""
        with _Delivering(self):
            self.work = next(self._job)

    def wants(self, engine: Engine) -> bool:
        """Whether the job is to take the next step: it is not over, not cancelled, and its request is right."""
        with _Delivering(self):
            if self._live and self.future.cancelled():
                raise asyncio.CancelledError
            if self._live:
                engine.check(self.work)
        return self._live

    def step(self, logits: Tensor | None, forward: Forward) -> None:
        """Hands the logits to the job and runs it up to its next request; without logits it computes them alone."""
        if not self._live:
            return
        with _Delivering(self):
            self.work = self._job.send(forward([self.work])[0] if logits is None else logits)

    def finish(self, error: BaseException) -> None:
        """The job is over: its result, or the error, goes to the submitter."""
        self._live = False
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


class _Delivering:
    """Whatever ends jobs inside goes to their submitters: nothing may end the thread that others wait for."""

    def __init__(self, *jobs: _Running[Any]) -> None:
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


def _closing(engine: Engine, session: Hashable) -> Job[None]:
    """A job without a step."""
    engine.close(session)
    yield from ()
