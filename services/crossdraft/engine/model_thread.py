"""The model thread: runs the jobs of all sessions away from the event loop, batching their requests.

A job is a generator. It yields forward requests and receives a `ForwardResult` for each, yields sampler requests about
the logits and receives their results, and returns its result to whoever submitted it. All of it runs in the model
thread. A verification pass of the target is one forward request, a draft of k tokens k of them, or less: while nobody
else waits, what follows a draw or a tree's first row is made on the device alone. What a step's requests find out comes
to the host in one copy, for which alone the host waits.
"""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from crossdraft.engine.device import DeviceTimer, Fetched, Fetching, fetched, finished, on_host
from crossdraft.engine.engine import Engine
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.paths import Paths, rows_of
from crossdraft.engine.sampling.sampler import TOGETHER, DrawRequest, SamplerRequest, TopRequest, TopRow
from crossdraft.engine.scheduler import Admission, Pause, Scheduler
from crossdraft.types import quick_dataclass

T = TypeVar("T")
Job = Generator[ForwardRequest | SamplerRequest[Any], Any, T]
StepFunction = Callable[[Sequence[ForwardRequest]], list[Tensor | None]]  # as `Engine.step`
CloseFunction = Callable[[Hashable], None]  # as `Engine.close`
Check = Callable[..., None]  # as `Engine.check`
WORKING_SECONDS = 1.0  # after which a job's submitter is told again that it waits for a thread that makes steps
FAULTS = RuntimeError, ValueError, IndexError, MemoryError  # of one request, or of many at once
LOOK_AGAIN = 0.02  # seconds between looks whether a session's turn is over, while nobody can go on
CACHED = 1 << 16  # logits that a CPU computes together: more leave its caches, and gain nothing


class ModelThreadClosedError(RuntimeError):
    """The model thread takes no more jobs."""


@quick_dataclass(frozen=True, eq=False)
class ForwardResult:
    """What a job receives for a forward request."""

    logits: Tensor  # (rows, V)
    queued: float  # seconds from the request to its first step
    began: float  # when its first step did
    span: DeviceTimer  # of its last step
    sessions: int  # that shared its last step, itself included
    tokens: int  # that this step computed, for all of them
    hidden: Tensor | None = None  # what the head has read for each row, (rows, width), if that was asked for

    @property
    def seconds(self) -> float:
        """Of its steps, and between them where they are several. Waits for the device."""
        return self.span.ended - self.began


class LoopCalls:
    """Calls that event loops are to make, handed over together: waking a loop costs more than most calls."""

    def __init__(self) -> None:
        self._calls = defaultdict[asyncio.AbstractEventLoop, list[Callable[[], object]]](list)

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        """The loop makes this call after the next `flush`, and after those that were put before."""
        self._calls[loop].append(call)

    def flush(self) -> None:
        while self._calls:
            loop, calls = self._calls.popitem()
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_call_all, loop, calls)


def _call_all(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], object]]) -> None:
    """One that raises must not keep others from being made; the loop hears of it as of calls of its own."""
    for call in calls:
        try:
            call()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            loop.call_exception_handler({"message": f"{call} has failed", "exception": error})


class RunningJob(Generic[T]):
    """A job, what it waits for, and where its result goes. Times are seconds of the thread's clock."""

    def __init__(self, job: Job[T], loop: asyncio.AbstractEventLoop, submitted: float, outbox: LoopCalls) -> None:
        self.request: ForwardRequest
        self.live = True
        self.sampling: SamplerRequest[Any] | None = None  # awaited before any forward
        self.future: asyncio.Future[T] = loop.create_future()
        self._job = job
        self._loop = loop
        self._outbox = outbox
        self.working: Callable[[], object] | None = None
        self.submitted = self._told = submitted  # and when `working` was called last

    def stepped(self, now: float) -> None:
        """A step was made, of whichever jobs."""
        if self.live and self.working is not None and now - max(self._told, self.request.asked) >= WORKING_SECONDS:
            self._told = now
            self._outbox.put(self._loop, self.working)

    def resume(self, result: Any, check: Check, now: float) -> None:
        """Hands it the result of its request, and runs it up to the next one, which it asks for now."""
        try:
            request = self._job.send(result)
            if isinstance(request, ForwardRequest):
                self.request, self.sampling = request, None
                request.asked, request.back, request.began = now, now == self.submitted, None
                check(request)
            else:
                self.sampling = request
        except BaseException as error:  # as `delivering` does, for thousands a second
            self.finish(error)

    def finish(self, error: BaseException) -> None:
        """Ends the job: its result (a StopIteration), or the error, goes to the submitter."""
        self.live = False
        if not isinstance(error, StopIteration):
            with suppress(RuntimeError):  # a job that yields again when it is closed has ended all the same
                self._job.close()
        self._outbox.put(self._loop, partial(self._resolve, error))

    def _resolve(self, error: BaseException) -> None:
        if self.future.done():
            return
        if isinstance(error, StopIteration):
            self.future.set_result(error.value)
        else:
            self.future.set_exception(error)


Jobs = Sequence[RunningJob[Any]]
Launch = tuple[Jobs, Fetching[Sequence[Any]]]  # whose sampler requests run together, and what finds the results


@contextmanager
def delivering(*jobs: RunningJob[Any]) -> Iterator[None]:
    """Delivers whatever ends the jobs to their submitters, so that no error ends the thread itself."""
    try:
        yield
    except BaseException as error:
        for job in jobs:
            job.finish(error)


class ModelThread:
    """Runs jobs on one engine in one thread; the scheduler decides which of them a step serves, and when.

    An error, of a job or of its request, reaches only that job's submitter. `step` is called in place of the engine's
    own, which it calls in turn. CUDA streams of a priority below 0 go before others; 0 is the default stream.
    """

    def __init__(
        self,
        engine: Engine,
        step: StepFunction | None = None,
        name: str = "model",
        clock: Callable[[], float] = time.perf_counter,
        priority: int = 0,
    ) -> None:
        self.engine = engine  # to be used in this thread's jobs only
        self.steps = 0  # forwards so far, of however many sessions
        self.seconds = 0.0  # in them, and in what their jobs did next
        self.batches: Counter[int] = Counter()  # by number of sessions: steps that had so many
        self.answers = 0  # requests that were completed
        self.queued = 0.0  # seconds that they waited for their first steps
        self._engine_step = engine.step if step is None else step
        self._follows_paths = engine.follows and step is None
        self._followed: list[tuple[DeviceTimer, int, int]] = []  # steps after the latest, and tokens of each
        self._clock = clock
        own = priority and engine.device.type == "cuda"
        self._stream = torch.cuda.Stream(engine.device, priority) if own else None
        self._scheduler = Scheduler(engine.chunk, shared=not engine.unbatched)
        self._admission = Admission(engine.admits, engine.close)
        self._outbox = LoopCalls()
        self._live: list[RunningJob[Any]] = []
        self._arrivals: SimpleQueue[RunningJob[Any] | None] = SimpleQueue()  # None: no more will come
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def lead(
        self, step: Callable[[StepFunction], StepFunction], close: Callable[[CloseFunction], CloseFunction]
    ) -> None:
        """Makes of its step, and of the engine's `close`, what is called in place of them. Before the first job."""
        self._follows_paths, self._engine_step = False, step(self._engine_step)
        self._admission.free = close(self._admission.free)

    @property
    def preemptions(self) -> int:
        return self._admission.preemptions

    def submit(self, job: Job[T], working: Callable[[], object] | None = None) -> asyncio.Future[T]:
        """Begins a job; returns its result to come, or what the job or the engine raised. Cancelling that stops the job
        before its next step.

        The loop calls `working` about every WORKING_SECONDS in which steps are made while the job waits for its own,
        such as those of a long prompt. Raises ModelThreadClosedError: `close` was called before.
        """
        running = RunningJob(job, asyncio.get_running_loop(), self._clock(), self._outbox)
        running.working = working
        with self._closing:
            if self._closed:
                raise ModelThreadClosedError("the model thread is closed")
            self._arrivals.put(running)
        return running.future

    def share_device(self) -> None:
        """Another model is on the same device, for the same sessions: `Scheduler.halves`. A CPU has cores for both."""
        self._scheduler.halves = self.engine.device.type != "cpu"

    def on_stream(self) -> AbstractContextManager[None]:
        """Context of other threads that make tensors for it."""
        return torch.cuda.stream(self._stream)

    def call_soon(self, loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
        """For jobs: an event loop is to make this call, in order with what else the step has for it."""
        self._outbox.put(loop, partial(call, *args))

    def close_session(self, session: Hashable) -> None:
        """Frees the KV slots of a session, after the step that is under way."""
        with suppress(ModelThreadClosedError):  # the cache is gone with the thread
            self.submit(self._close_session(session))

    def _close_session(self, session: Hashable) -> Job[None]:
        """A job without a request."""
        self._admission.close(session)
        self._scheduler.returns.over(session)
        yield from ()

    def close(self) -> None:
        """Takes no more jobs and waits until those submitted have ended. Not to be called from a job."""
        with self._closing:
            self._closed = True
            self._arrivals.put(None)
        self._thread.join()

    def _run(self) -> None:
        pause: float | None = None
        try:
            with self.on_stream():
                while self._arrived(pause):
                    now = self._clock()
                    decided = self._scheduler.next(self._admitted(now), now)
                    if isinstance(decided, Pause):
                        pause = decided.seconds
                    else:
                        self._step(decided)
                        pause = 0.0
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
        for job in left:
            job.finish(ModelThreadClosedError("the model thread has ended"))
        self._outbox.flush()

    def _arrived(self, pause: float | None) -> bool:
        """Takes in what arrives within so many seconds (None: no limit); whether the thread is to go on."""
        if pause is None and self._live:
            pause = LOOK_AGAIN
        with suppress(Empty):
            self._take_in(self._arrivals.get(block=pause != 0, timeout=pause))
            while True:
                self._take_in(self._arrivals.get_nowait())
        for job in self._live:
            if job.live and job.future.cancelled():  # nobody waits for its result any more
                job.finish(asyncio.CancelledError())
        self._live = [job for job in self._live if job.live]
        self._outbox.flush()
        return bool(self._live) or not (self._closed and self._arrivals.empty())

    def _take_in(self, job: RunningJob[Any] | None) -> None:
        if job is None:
            return
        job.resume(None, self.engine.check, job.submitted)
        if job.sampling is not None:
            self._sample([job])
        if job.live:
            self._live.append(job)
            self._scheduler.returns.asked(job.request.session, job.request.asked)

    def _admitted(self, now: float) -> list[ForwardRequest]:
        waiting = sorted([job.request for job in self._live], key=attrgetter("asked"))
        admitted = self._admission.admitted(waiting, self._scheduler.returns.expected(now), now)
        for request in admitted:
            request.due = self.engine.remaining(request)
        return admitted

    def _step(self, requests: list[ForwardRequest]) -> None:
        """Runs a step, the oldest first: slots are allocated in this order. Then its jobs up to their next requests."""
        known = {job.request: job for job in self._live}
        jobs = [known[request] for request in requests]
        span, computed = DeviceTimer(self.engine.device, self._clock), self.engine.computed
        began = span.began
        self.steps += 1
        self.batches[len(jobs)] += 1
        found = self._forward(jobs, requests)
        span.end()
        computed, now = self.engine.computed - computed, self._clock()
        answered = [job for job, logits in zip(jobs, found, strict=True) if job.live and logits is not None]
        for job, logits in zip(jobs, found, strict=True):
            self._stepped(job, logits, span.began)
            if job.live and logits is not None:
                self._answer(job, logits, span, computed, len(jobs), now)
        self._sample(answered)
        for job in answered:
            if not job.live:
                self._scheduler.returns.answered(job.request.session, now)
        for job in self._live:
            job.stepped(now)
        self._outbox.flush()
        with delivering(*jobs):  # a device that has failed says so to whoever waits for it
            self._scheduler.stepped(computed, span.ended - span.began)
            followed, self._followed = self._followed, []
            for span, steps, tokens in followed:
                self._scheduler.stepped(tokens, (span.ended - span.began) / steps)
        self.seconds += self._clock() - began

    def _stepped(self, job: RunningJob[Any], logits: Tensor | None, began: float) -> None:
        """Notes that a job took part in a step, if anything was computed for it."""
        session = job.request.session
        if not job.live:  # its step failed: the contents of its slots are unknown, and others can use them
            self._admission.close(session)
        elif logits is not None or self.engine.admits(job.request):
            self._admission.stepped(session, began)
            job.request.began = began if job.request.began is None else job.request.began

    def _forward(self, jobs: Jobs, requests: list[ForwardRequest]) -> list[Tensor | None]:
        """One forward for all; where it fails the jobs run one by one, so that only those at fault fail."""
        if len(jobs) > 1:
            with delivering(*jobs), suppress(RuntimeError, MemoryError):
                return self._engine_step(requests)
        return _one_by_one(jobs, lambda job: self._engine_step([job.request])[0])

    def _answer(
        self, job: RunningJob[Any], logits: Tensor, span: DeviceTimer, computed: int, sessions: int, now: float
    ) -> None:
        request = job.request
        assert request.began is not None
        queued = request.began - request.asked
        self.answers += 1
        self.queued += queued
        self._admission.answered(request, now, self._scheduler.costs)
        hidden = self.engine.hidden.get(request.session)
        answer = ForwardResult(logits, queued, request.began, span, sessions, computed, hidden)
        job.resume(answer, self.engine.check, now)

    def _sample(self, jobs: Jobs) -> None:
        """Runs the sampler requests of jobs until each waits for a forward, or has ended."""
        while asking := [job for job in jobs if job.live and job.sampling is not None]:
            for batch, results in _together(self._launches(asking)):
                now = self._clock()
                for job, result in zip(batch, results, strict=True):
                    if job.live:
                        job.resume(result, self.engine.check, now)

    def _launches(self, jobs: Jobs) -> list[Launch]:
        """What runs the sampler requests of jobs: paths and trees go on without the host, others run by their kinds."""
        # By the type itself, as an abstract class takes long to say what is its instance.
        draws = [job for job in jobs if type(job.sampling) is DrawRequest and job.sampling.forward is not None]
        paths = draws if self._follows_paths else []
        trees = self._trees([job for job in jobs if type(job.sampling) is TopRequest])
        followed = {*paths, *(job for tree, _ in trees for job in tree)}
        others = [(batch, _launched(batch)) for batch in alike([job for job in jobs if job not in followed])]
        return [*others, *([(paths, self._draw(paths))] if paths else []), *trees]

    def _draw(self, jobs: Jobs) -> Fetching[Sequence[Any]]:
        """The next tokens of all paths, and those that follow while nobody else waits."""
        paths = Paths([job.sampling for job in jobs if type(job.sampling) is DrawRequest])
        left = 0 if self._others_wait(jobs) else min(forward.more for forward in paths.forwards)
        self._make(self.engine.following(paths, left), left, jobs, len(jobs), len(jobs))
        found = paths.found((yield paths.tensors))
        self.engine.followed(paths.forwards, [[draw.token for draw in path[:-1]] for path in found])
        return found

    def _trees(self, jobs: Jobs) -> list[Launch]:
        """Trees that grow without the host, one batch after another, as nobody else waits."""
        graphs = self.engine.runner.graphs if self._follows_paths else None
        if not jobs or graphs is None or self._others_wait(jobs):
            return []
        batches = [[jobs[place] for place in batch] for batch in graphs.tree_batches(_growing(jobs))]
        return [(batch, self._grow(batch, jobs)) for batch in batches]

    def _grow(self, jobs: Jobs, growing: Jobs) -> Fetching[list[list[TopRow]]]:
        """Levels of trees, some of all that grow, as long as nobody else waits."""
        requests = _growing(jobs)
        levels, tokens = requests[0].levels - 1, len(jobs) * requests[0].count
        found = self._make(self.engine.growing(requests), levels, growing, len(jobs), tokens)
        (rows,) = yield [found.clone()]  # the next batch may be written to the same memory
        return rows_of(rows)

    def _make(self, steps: Iterator[T], most: int, jobs: Jobs, sessions: int, tokens: int) -> T:
        """Makes the first of some steps, and up to so many others, as long as nobody but these jobs waits; what the
        latest one has brought. Others are steps without the host, of so many tokens each."""
        found, made, span = next(steps), 0, DeviceTimer(self.engine.device, self._clock)
        while made < most and not self._others_wait(jobs):
            found, made = next(steps), made + 1
            self.engine.computed += tokens
        if made:
            span.end()
            self.steps += made
            self.batches[sessions] += made
            self._followed.append((span, made, tokens))
        return found

    def _others_wait(self, jobs: Jobs) -> bool:
        """Whether others wait for the model, or nobody for one of these."""
        waiting = len(self._live) > len(jobs) or not self._arrivals.empty()
        return waiting or any(map(asyncio.Future.cancelled, [job.future for job in jobs]))


def alike(jobs: Jobs) -> Iterator[Jobs]:
    """Those whose sampler requests run together: as many of one kind as the device computes together."""
    kinds = defaultdict[Hashable, list[tuple[RunningJob[Any], Tensor]]](list)
    for job in jobs:
        request = job.sampling
        assert request is not None
        try:
            rows = request.rows
            kinds[type(request), request.kind, rows.shape[-1]].append((job, rows))
        except BaseException as error:  # a kind without a hash is the fault of whoever asks
            job.finish(error)
    for members in kinds.values():
        batch: list[RunningJob[Any]] = []
        left = most = TOGETHER if members[0][1].is_cuda else CACHED
        for job, rows in members:
            if batch and rows.numel() > left:
                yield batch
                batch, left = [], most
            batch.append(job)
            left -= rows.numel()
        yield batch


def _growing(jobs: Jobs) -> list[TopRequest]:
    return [job.sampling for job in jobs if type(job.sampling) is TopRequest]


def _launched(jobs: Jobs) -> Fetching[Sequence[Any]]:
    requests = [job.sampling for job in jobs if job.sampling is not None]
    return requests[0].launch(requests)


def _together(launches: Sequence[Launch]) -> Iterator[tuple[Jobs, Sequence[Any]]]:
    """The results of what is launched for jobs, in one copy for all of them; where something fails its jobs run one by
    one, so that only those at fault fail."""
    started: list[Sequence[Tensor] | None] = []
    for jobs, fetching in launches:
        started.append(None)
        with delivering(*jobs), suppress(*FAULTS):
            started[-1] = next(fetching)
    arrays: Fetched = []
    with delivering(*(job for jobs, _ in launches for job in jobs)):  # a device that has failed says so here
        arrays = on_host([tensor for tensors in started for tensor in tensors or ()])
    for (jobs, fetching), tensors in zip(launches, started, strict=True):
        results: Sequence[Any] | None = None
        own, arrays = arrays[: len(tensors or ())], arrays[len(tensors or ()) :]
        if tensors is not None and any(job.live for job in jobs):
            with delivering(*jobs), suppress(*FAULTS):
                results = finished(fetching, own)
        yield jobs, _one_by_one(jobs, lambda job: fetched(_launched([job]))[0]) if results is None else results


def _one_by_one(jobs: Jobs, run: Callable[[RunningJob[Any]], T]) -> list[T | None]:
    found: list[T | None] = [None] * len(jobs)
    for index, job in enumerate(jobs):
        if job.live:
            with delivering(job):
                found[index] = run(job)
    return found
