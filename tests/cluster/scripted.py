"""Orchestrators that say what a test tells them to, and simulated time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import wraps
from typing import NoReturn

from crossdraft.client import GenerationRequest, Kind, Token
from crossdraft.cluster.failover import Began, Lost, Replies, Reply
from crossdraft.rpc.generation import Committed
from crossdraft.serving.backend import OutputRequest
from crossdraft.types.output import ServedModel

SMALL = ServedModel("small", 0, 100, (), ("slem",), False)
REQUEST = OutputRequest("one", "small", GenerationRequest("go", seed=1))
BEGAN = Began("here 1")
Act = Reply | Exception | None  # None: nothing for ever


async def nothing() -> NoReturn:
    """For ever."""
    while True:
        await asyncio.Event().wait()


def tokens(*numbers: int) -> Committed:
    """Those of one pass."""
    made = tuple(Token(one, str(one), str(one).encode(), Kind.BONUS, None) for one in numbers)
    return Committed(made, target="a")


class Scripted:
    """Orchestrators of which each call meets the next script."""

    def __init__(self, *scripts: Sequence[Act]) -> None:
        self.scripts = list(scripts)
        self.requests: list[OutputRequest] = []
        self.closed = 0
        self.avoided: list[str] = []

    def avoid(self, orchestrator: str) -> None:
        self.avoided.append(orchestrator)

    async def models(self) -> tuple[ServedModel, ...]:
        return (SMALL,)

    async def stream(self, request: OutputRequest) -> AsyncGenerator[Replies, None]:
        self.requests.append(request)
        try:
            for act in self.scripts.pop(0) if self.scripts else [Lost("nobody is there")]:
                if isinstance(act, Exception):
                    raise act
                if act is None:
                    await nothing()
                else:
                    yield (act,)
        finally:
            self.closed += 1


class Hurried(asyncio.SelectorEventLoop):
    """Nobody waits: its time is that of what is due next."""

    now = 0.0  # seconds

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def now() -> float:
    """Seconds, of the event loop."""
    return asyncio.get_running_loop().time()


def simulated(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """The test in simulated time. What it waits for must come from timers, not from other threads or sockets."""

    @wraps(test)
    def run(*given: object, **named: object) -> None:
        with asyncio.Runner(loop_factory=Hurried) as runner:
            runner.run(test(*given, **named))

    return run
