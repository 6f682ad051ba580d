"""How many sessions a server has at once, of whom, and how long one may be silent."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from crossdraft.rpc.errors import Full

COARSE = 0.1  # of the silence that is allowed: how exactly it is kept


@dataclass(frozen=True)
class SessionLimits:
    """What clients may take of a server.

    Raises:
        ValueError: a value is out of its range.
    """

    sessions: int = 1024  # open at once
    per_peer: int | None = None  # of them with one peer; None: no limit of its own
    idle_seconds: float = 600.0  # a session in which nothing was said by either side for so long is ended

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ValueError(f"sessions must be at least 1, got {self.sessions}")
        if self.per_peer is not None and not 1 <= self.per_peer <= self.sessions:
            raise ValueError(
                f"sessions of one peer must be between 1 and those of all, {self.sessions}, got {self.per_peer}"
            )
        if not 0 < self.idle_seconds < float("inf"):
            raise ValueError(f"idle_seconds must be above 0, got {self.idle_seconds}")


class Admission:
    """The sessions of one server, counted by peer."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()

    @contextmanager
    def admitted(self, peer: str) -> Iterator[None]:
        """The block is one session of a peer.

        Raises:
            Full: there are as many as there may be.
        """
        limits = self._limits
        if self._open.total() >= limits.sessions:
            raise Full(f"{limits.sessions} are open (--max-sessions)")
        if limits.per_peer is not None and self._open[peer] >= limits.per_peer:
            raise Full(f"{limits.per_peer} of {peer} are open (--max-sessions-per-peer)")
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # forgets those that have none


def peer_of(context: "grpc.aio.ServicerContext[bytes, bytes]") -> str:
    """Whose a call is: the certificate's first name where there is one, else the address without its port."""
    identities = context.peer_identities()
    if identities:
        return next(iter(identities)).decode(errors="replace")
    return context.peer().rpartition(":")[0]


@asynccontextmanager
async def ended_when_silent(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """Cancels the block, and ends, once what it yields was not called for so long."""
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(seconds) as limit:

            def heard() -> None:
                due, now = limit.when(), clock()
                # Moved seldom: it is called for every message.
                if due is not None and not limit.expired() and now + seconds - due > COARSE * seconds:
                    limit.reschedule(now + seconds)

            yield heard
    except TimeoutError:
        if not limit.expired():
            raise
