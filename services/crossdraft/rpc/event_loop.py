"""The event loop of a process: signals that end it, a thread beside it for what grows with a request, its delays."""

import asyncio
import ctypes
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from prometheus_client import CollectorRegistry, Histogram

SMALL = 1024  # bytes of a request that are handled in the loop: a thread costs more
MEDIUM = 2**16  # bytes of a request that does not wait for larger ones
LARGE = 2**20  # bytes of a request whose memory is given back to the system at once
INTERVAL = 0.05  # seconds between two looks at the clock
LAGS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # bounds of the histogram, seconds
P = ParamSpec("P")
T = TypeVar("T")


def heard() -> list[signal.Signals]:
    """Signals that end a process, but for those that nobody had this one hear, as nohup does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


async def until_signalled(work: Coroutine[Any, Any, None], always: Sequence[signal.Signals] = ()) -> int:
    """Runs it; each signal cancels it, so that a second one ends what the first one began. Returns the number of the
    first one; 0: it ended by itself. `always`: signals that are heard although this process had them ignored."""
    task, received, loop = asyncio.create_task(work), list[int](), asyncio.get_running_loop()

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (numbers := {*heard(), *always}):
        loop.add_signal_handler(number, cancel, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    return 0


class Beside:
    """Runs what grows with a request in a thread, so that the event loop goes on with other requests.

    By default one thread for large requests and one for others, which need not wait for those: Python's own work takes
    turns with the loop, and each further thread would take one, too.
    Work should release the interpreter lock, or be Python code, which passes it on every few ms; one long call into
    C that keeps the lock (`json.loads`) stops the loop from any thread.
    """

    def __init__(self, name: str, threads: int = 1, small: int = SMALL) -> None:
        self._pools = [ThreadPoolExecutor(threads, thread_name_prefix=f"{name} {of}") for of in ("medium", "large")]
        self._small = small  # bytes

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises; `size`, in bytes, says how much there is to do, and little is done here."""
        if size <= self._small:
            return work(*args, **kwargs)
        pool = self._pools[size > MEDIUM]
        return await asyncio.get_running_loop().run_in_executor(pool, _trimmed, size, lambda: work(*args, **kwargs))


def _trimmed(size: int, work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        if size >= LARGE and sys.platform == "linux":
            # Else glibc keeps what a tokenizer has used for each of a million tokens. musl has no such function.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)


class LoopLag:
    """Measures how much later than asked for the running event loop calls back."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self._lag = Histogram(
            "crossdraft_event_loop_lag_seconds",
            "Seconds that the event loop was late, measured 20 times a second.",
            ("role",),
            buckets=LAGS,
            registry=registry,
        ).labels(role)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._again()

    def stop(self) -> None:
        """Ends it; may be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._late, time.perf_counter() + INTERVAL)

    def _late(self, due: float) -> None:
        self._lag.observe(max(0.0, time.perf_counter() - due))
        self._again()
