"""What a server's sessions do: counted while they are open, and said in the log when they begin and end."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

from crossdraft.rpc import subject
from crossdraft.rpc.errors import name_of
from crossdraft.verification.exchange import Drafted, PassDone, Scored

log = logging.getLogger(__name__)

CLOSED = "closed"  # how a session ends in order: a client closes it by cancelling the call


@dataclass
class Tally:
    """What was exchanged, and what for."""

    requests: int = 0
    replies: int = 0
    bytes_received: int = 0  # serialized, before HTTP/2 frames
    bytes_sent: int = 0
    passes: int = 0
    nodes: int = 0  # of passes: those that were answered, roots among them
    proposals: int = 0
    branches: int = 0  # prepared continuations
    scores: int = 0  # prefixes
    model_seconds: float = 0.0  # that replies say; of passes in one batch, each says all of it

    def received(self, raw: bytes) -> None:
        """A request came."""
        self.requests += 1
        self.bytes_received += len(raw)

    def sent(self, reply: object, raw: bytes) -> None:
        """A reply leaves."""
        self.replies += 1
        self.bytes_sent += len(raw)
        match reply:
            case PassDone():
                self.passes += reply.forwards
                self.nodes += len(reply.nodes)
                self.model_seconds += reply.seconds
            case Drafted():
                self.proposals += len(reply.proposals)
                self.branches += len(reply.branches)
                self.model_seconds += reply.seconds
            case Scored():
                self.scores += len(reply.probabilities)
                self.model_seconds += reply.seconds

    def add(self, other: "Tally") -> None:
        """Counts the other's as well."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def __str__(self) -> str:
        counted = {name: value for name, value in asdict(self).items() if value}
        return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in counted.items())


class Activity:
    """The sessions of one server since it began.

    Args:
        role: of the server; sessions are named by it.
    """

    def __init__(self, role: str) -> None:
        self.opened = 0
        self.ended: Counter[str] = Counter()  # by how: CLOSED, or the name of an error
        self.seconds = 0.0  # that ended sessions were open
        self._role = role
        self._open: list[Tally] = []
        self._past = Tally()  # of ended sessions
        self._moving = threading.Lock()  # a session that ends is in one of the two

    @property
    def open(self) -> int:
        """Sessions that are open now."""
        return len(self._open)

    def total(self) -> Tally:
        """What all sessions have done so far. May be called from any thread."""
        total = Tally()
        with self._moving:
            for tally in (self._past, *self._open):
                total.add(tally)
        return total

    @contextmanager
    def session(self, request: str, peer: str) -> Iterator[Tally]:
        """The block is one session, for a client's request; what happens in it is to be counted in the tally."""
        self.opened += 1
        tally, began = Tally(), time.monotonic()
        self._open.append(tally)
        outcome = CLOSED
        with subject.about(request=request, session=f"{self._role}-{self.opened}", peer=peer):
            log.info("session opened")
            try:
                yield tally
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                outcome = name_of(first_of(error))
                raise
            finally:
                seconds = time.monotonic() - began
                self._end(tally, outcome, seconds)
                figures = {"outcome": outcome, "seconds": round(seconds, 6), **asdict(tally)}
                log.info("session ended (%s) after %.3f s: %s", outcome, seconds, tally, extra={"figures": figures})

    def _end(self, tally: Tally, outcome: str, seconds: float) -> None:
        with self._moving:
            self._open = [other for other in self._open if other is not tally]
            self._past.add(tally)
        self.ended[outcome] += 1
        self.seconds += seconds


def first_of(fault: BaseException) -> BaseException:
    """What went wrong first, where several tasks worked on it."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault
