"""When a front takes an orchestrator for lost.

One that is lost says nothing to anybody; one that has much to do says it late. So what all outputs hear counts: an
orchestrator that one of them hears is there, and while outputs begin late, one that has not begun yet is none that is
lost. Time in which this process did not come to listen is nobody's silence, and what lay here meanwhile is no sign of
life: one that is lost may have left many pieces to a slow reader. To give up an orchestrator costs no text,
but work that is done again, which a cluster that has too much of it must not be given.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from statistics import median

from crossdraft.serving.cluster.pieces import Began, Piece

Together = tuple[Piece, ...]  # pieces of one output that came at once

LATEST = 16  # beginnings that are remembered
FRESH = 10.0  # seconds for which they are
LATE = 4.0  # times as late as others did lately (their median) may an output begin
FORGOTTEN = 60.0  # seconds after which an orchestrator that nobody hears is forgotten


class Lost(Exception):  # noqa: N818 - it says what happened
    """An orchestrator died, or cannot be reached."""


@dataclass(frozen=True)
class Attention:
    """Seconds after which an orchestrator is taken for lost, where nothing says that it just has much to do."""

    silent: float = 3.0  # without a piece
    # ... without a first one, where another was just lost; it doubles, up to `silent` where outputs begin. Serve knows
    # only later which replicas are gone, and may send an order to one of them again.
    first: float = 0.75
    most: float = 30.0  # whatever else is heard
    looks: float = 0.25  # between two looks


class Hearing:
    """What a front hears of one model's orchestrators.

    Args:
        attention: how long it waits.
        clock: seconds.
    """

    def __init__(self, attention: Attention, clock: Callable[[], float] = time.monotonic) -> None:
        self._attention = attention
        self._clock = clock
        self._heard: dict[str, float] = {}  # by orchestrator, when any output heard it last
        self._begun: deque[tuple[float, float]] = deque(maxlen=LATEST)  # when an output did, and how long after asking

    @property
    def lively(self) -> bool:
        """Whether an output has just heard an orchestrator."""
        now = self._clock()
        return any(now - heard < self._attention.silent for heard in self._heard.values())

    async def listen(self, stream: AsyncGenerator[Together, None], lost: int = 0) -> AsyncGenerator[Together, None]:
        """What an orchestrator sends for one output.

        Args:
            stream: what comes of it; it is closed.
            lost: orchestrators that this output has lost since it heard one.

        Raises:
            Lost: nothing has come for too long, or what `stream` raised.
        """
        asked, who = self._clock(), ""
        left = back = asked  # when the reader had the latest pieces, and when it asked for more
        async with aclosing(stream):
            while together := await self._next(stream, who, lost):
                now = self._clock()
                match together[0]:
                    case Began(orchestrator=who):
                        self._begins(who, now, now - asked)
                if now - back >= back - left:  # else they may have lain here
                    self._heard[who] = now
                yield together
                left, back = now, self._clock()

    async def _next(self, stream: AsyncGenerator[Together, None], who: str, lost: int) -> Together | None:
        """What comes next, None at the end; raises Lost."""
        due = asyncio.ensure_future(anext(stream, None))
        silence, looks = 0.0, self._attention.looks
        try:
            while not due.done():
                before = self._clock()
                await asyncio.wait([due], timeout=looks)
                silence += min(self._clock() - before, 2 * looks)
                if not due.done() and self._lost(who, silence, lost):
                    raise Lost(f"{who or 'it'} has been silent for {silence:.2g} s")
            return due.result()
        finally:
            due.cancel()
            await asyncio.gather(due, return_exceptions=True)

    def _begins(self, who: str, now: float, seconds: float) -> None:
        self._begun.append((now, seconds))
        self._heard = {one: heard for one, heard in self._heard.items() if now - heard < FORGOTTEN}

    def _lost(self, who: str, silence: float, lost: int) -> bool:
        """Whether an orchestrator is taken for lost that has not told an output anything for so long.

        Args:
            who: it; empty: nobody has begun, so it is not known who was asked.
            silence: seconds.
            lost: as of `listen`.
        """
        attention = self._attention
        if silence >= attention.most:
            return True
        now = self._clock()
        if who:
            return min(silence, now - self._heard.get(who, -inf)) >= attention.silent
        doubled = attention.silent if not lost else attention.first * 2 ** (lost - 1)
        latest = [seconds for at, seconds in self._begun if now - at < FRESH]
        if not latest:  # it may be that all begin late, and that those who asked did not wait for long enough to know
            return silence >= min(LATE * attention.silent, doubled)
        return silence >= max(min(attention.silent, doubled), LATE * median(latest))
