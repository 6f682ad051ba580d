"""In-memory services: table-driven models behind the ports that the driver uses, and sessions' assignments."""

import asyncio
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

from crossdraft.client.roster import Roster, Services
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.links import Listener, Traffic
from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Reply, Request
from crossdraft.session.ledger import Ledger
from crossdraft.speculation.choice import lock_step
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import FetchRow, NoiseKey, OpenDrafter, OpenTarget, Pass, SamplingOptions, Score
from crossdraft.types.request import GenerationRequest, Overlap
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import SLEM, Method
from tests.tables import DrafterLane, ToyDrafter, ToyTarget, greedy_tokens, pair_of

LETTERS = ("a", "b", "ab")
NEVER = 10**9
# Enumerations make a session for each of their branches, and to check these again takes a fifth of its time.
SAMPLING = SamplingOptions()
OPEN_TARGET = OpenTarget((0, 1), SAMPLING, NoiseKey(1))
REQUEST = GenerationRequest((0, 1), max_tokens=12, num_speculative_tokens=3, overlap=Overlap.OFF)
ASKED = {one.name for one in fields(GenerationRequest)}


def assignment(method: Method = SLEM, *, drafts: bool = True, **changes: object) -> Assignment:
    """A session in lock-step rounds of three over toy vocabularies; without a drafter if no token could be drafted."""
    pair = changes.get("pair") or pair_of(LETTERS, ("a", "b", "ba"))
    allowed = pair.shared_drafter_ids if method.shared_only else None
    usable = allowed is None or len(allowed)
    request = changes.pop("request", REQUEST)
    asked = {name: changes.pop(name) for name in ASKED & changes.keys()}
    made: dict[str, object] = {
        "pair": pair,
        "method": method,
        "chooser": changes.get("chooser") or RandomChooser(np.random.default_rng(1)),
        "encode": greedy_tokens(pair.target),
        "open_target": OPEN_TARGET,
        "open_drafter": OpenDrafter(NOTHING, SAMPLING, None, 64, allowed) if drafts and usable else None,
        "controller": lock_step(3),
        "request": checked(request, tuple(asked.items())),
        "context": 100,
    }
    return Assignment(**(made | changes))  # type: ignore[arg-type]


def asking(given: Assignment, **asked: object) -> Assignment:
    """The same, of a request with other values."""
    return replace(given, request=checked(given.request, tuple(asked.items())))


@cache
def checked(request: GenerationRequest, asked: tuple[tuple[str, Any], ...]) -> GenerationRequest:
    """The same with other values, which go together; checked once, as above."""
    return replace(request, **dict(asked))


def toys(method: Method = SLEM) -> tuple[ToyTarget, ToyDrafter]:
    """A target whose draws do not depend on who asks, and a drafter."""
    chooser = RandomChooser(np.random.default_rng(2))
    allowed = np.array([0, 1]) if method.shared_only else None
    target = ToyTarget(len(LETTERS), 99, chooser)
    return target, ToyDrafter(pair_of(LETTERS, ("a", "b", "ba")).drafter.letters, chooser, allowed)


class MemorySession:
    """A session with a service; what is sent is answered at once, as far as an event loop has a now."""

    def __init__(self, service: "MemoryTarget | MemoryDrafter", listener: Listener) -> None:
        self.traffic = Traffic()
        self.ledger = Ledger()
        self.requests: list[Request] = []
        self.service = service
        self.toy = toys()[0]  # of a target
        self._listener = listener
        self._over = False

    def send(self, request: Request) -> None:
        assert not self._over
        self.requests.append(request)
        self.ledger.sent(request, time.monotonic())
        self.traffic.bytes_sent += 1
        self.service.asked.set()
        for reply in self.service.answers(self, request):
            self.say(reply)

    def say(self, said: "Reply | ServiceError | None") -> None:
        """Its listener is told a reply, what ended it, or, with None, that it is open."""
        asyncio.get_running_loop().call_soon(self._tell, said)

    def _tell(self, said: "Reply | ServiceError | None") -> None:
        if self._over:
            return
        if said is None:
            self._listener.opened()
        elif isinstance(said, ServiceError):
            self._end()
            self._listener.lost(said)
        else:
            self.traffic.bytes_received += 1
            self.ledger.take(said, time.monotonic())
            self._listener.received(said)

    def close(self) -> None:
        assert not self._over
        self._end()

    def _end(self) -> None:
        self._over = True
        self.service.closed += self in self.service.opened


@dataclass
class Service:
    """What both toys have in common."""

    refuses: ServiceError | None = None  # sessions
    refusals: int = NEVER  # that many
    closed: int = 0  # of those that were opened: by either side
    opened: list[MemorySession] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    opens: bool = True  # else nothing is heard of its sessions
    silent: bool = False
    first: tuple[Reply, ...] = ()  # what it says unasked

    def _begin(self, session: MemorySession) -> MemorySession:
        self.begun.set()
        if self.refuses is not None and self.refusals > 0:
            self.refusals -= 1
            session.say(self.refuses)
            return session
        self.opened.append(session)
        for said in (None, *self.first) if self.opens else ():
            session.say(said)
        return session


@dataclass
class MemoryTarget(Service):
    """Toys behind a target's port, one for each session; their draws are the same."""

    toy: ToyTarget = field(default_factory=lambda: toys()[0])
    error: ServiceError | None = None  # that ends its first session ...
    fails_at: int = NEVER  # ... at this pass

    def begin(self, request: OpenTarget, listener: Listener) -> MemorySession:
        session = MemorySession(self, listener)
        session.toy = copy.copy(self.toy)
        session.toy._committed = ()
        return self._begin(session)

    def answers(self, session: MemorySession, request: Request) -> Iterator[Reply | ServiceError]:
        match request:
            case _ if self.silent:
                pass
            case Pass() if self.error is not None and request.number == self.fails_at:
                failure, self.error = self.error, None
                yield failure
            case Pass():
                yield session.toy.run(request)
            case FetchRow():
                yield session.toy.fetch(request)


@dataclass
class MemoryDrafter(Service):
    """A toy behind a drafter's port: one session at a time."""

    toy: ToyDrafter = field(default_factory=lambda: toys()[1])

    def begin(self, request: OpenDrafter, listener: Listener) -> MemorySession:
        self.toy.text = Letters("")
        self._lane = DrafterLane(self.toy, rows=True)
        return self._begin(MemorySession(self, listener))

    def answers(self, session: MemorySession, request: Request) -> Iterator[Reply]:
        if self.silent and not isinstance(request, Score):
            return
        self._lane.take(request)
        while self._lane.owes:
            yield self._lane.reply()


def services_of(*services: MemoryTarget | MemoryDrafter) -> Services:
    """Each at an address of its own, such as target0."""
    found = Services(Roster("target"), Roster("drafter"))
    for one in services:
        role, roster = ("target", found.targets) if isinstance(one, MemoryTarget) else ("drafter", found.drafters)
        roster.add(f"{role}{len(roster)}", one)
    return found
