"""A job of the model thread: it asks for works, is told their logits, and has a result for who submitted it."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from torch import Tensor

from crossdraft.models.feeds import Work
from crossdraft.models.reading import Likeness, Reading, groups
from crossdraft.models.spans import Span

T = TypeVar("T")


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


Job = Generator[Work | Reading[Any], Any, T]
"""Yields works and receives an `Answer` to each, yields readings of the logits, returns its result.

Runs in the model thread, all of it. A pass of the target yields one work, a draft of k tokens k of them.
"""


@dataclass(frozen=True, eq=False)
class Asked:
    """What a job wants to know of logits."""

    reading: Reading[Any]
    likeness: Likeness


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
