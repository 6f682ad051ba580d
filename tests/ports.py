"""In-memory services: table-driven models behind the ports that the driver uses, and sessions' assignments."""

import asyncio
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.streams import Traffic
from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Reply, Request
from crossdraft.speculation.choice import lock_step
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    NoiseKey,
    OpenDrafter,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    SamplingOptions,
    Score,
)
from crossdraft.types.rows import NO_IDS
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import SLEM, Method
from tests.tables import ToyDrafter, ToyTarget, open_drafter
from tests.vocabularies import greedy_tokens, pair_of

LETTERS = ("a", "b", "ab")
NEVER = 10**9


def assignment(method: Method = SLEM, *, drafts: bool = True, **changes: object) -> Assignment:
    """A session in lock-step rounds of three over toy vocabularies; without a drafter if no token could be drafted."""
    pair = changes.get("pair") or pair_of(LETTERS, ("a", "b", "ba"))
    assert isinstance(pair, Pair)
    allowed = pair.shared_drafter_ids if method.shared_only else None
    fields: dict[str, object] = {
        "pair": pair,
        "method": method,
        "chooser": changes.get("chooser") or RandomChooser(np.random.default_rng(1)),
        "encode": greedy_tokens(pair.target),
        "open_target": OpenTarget((0, 1), SamplingOptions(), NoiseKey(1)),
        "open_drafter": open_drafter(NOTHING, allowed) if drafts and (allowed is None or len(allowed)) else None,
        "controller": lock_step(3),
        "max_tokens": 12,
        "context": 100,
    }
    return Assignment(**(fields | changes))  # type: ignore[arg-type]


def toys(method: Method = SLEM) -> tuple[ToyTarget, ToyDrafter]:
    """A target whose draws do not depend on who asks, and a drafter."""
    chooser = RandomChooser(np.random.default_rng(2))
    allowed = np.array([0, 1]) if method.shared_only else None
    target = ToyTarget(len(LETTERS), 99, chooser)
    return target, ToyDrafter(pair_of(LETTERS, ("a", "b", "ba")).drafter.letters, chooser, allowed)


class MemoryStream:
    """An open session; what is sent is answered at once."""

    def __init__(self, service: "MemoryTarget | MemoryDrafter") -> None:
        self.traffic = Traffic()
        self.requests: list[Request] = []
        self.service = service
        self.toy = toys()[0]  # of a target
        self.replies: asyncio.Queue[Reply | Opened | ServiceError] = asyncio.Queue()

    async def send(self, request: Request) -> None:
        await self.service.writable.wait()
        self.requests.append(request)
        self.traffic.bytes_sent += 1
        self.service.asked.set()
        for reply in self.service.answers(self, request):
            self.replies.put_nowait(reply)

    async def receive(self) -> Reply | Opened:
        reply = await self.replies.get()
        if isinstance(reply, ServiceError):
            raise reply
        self.traffic.bytes_received += 1
        return reply

    async def close(self) -> None:
        self.service.closed += 1


@dataclass
class Service:
    """What both toys have in common."""

    refuses: ServiceError | None = None  # sessions
    refusals: int = NEVER  # that many
    closed: int = 0
    opened: list[MemoryStream] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    writable: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: it does not read

    def __post_init__(self) -> None:
        self.writable.set()

    def refuse(self) -> None:
        if self.refuses is not None and self.refusals > 0:
            self.refusals -= 1
            raise self.refuses


@dataclass
class MemoryTarget(Service):
    """Toys behind a target's port, one for each session; their draws are the same."""

    toy: ToyTarget = field(default_factory=lambda: toys()[0])
    error: ServiceError | None = None  # that ends its first session ...
    fails_at: int = NEVER  # ... at this pass
    first: tuple[Reply | Opened, ...] = ()  # what it says unasked

    async def open(self, request: OpenTarget) -> MemoryStream:
        self.refuse()
        stream = MemoryStream(self)
        self.opened.append(stream)
        stream.toy = copy.copy(self.toy)
        stream.toy._committed = ()
        for reply in self.first:
            stream.replies.put_nowait(reply)
        return stream

    def answers(self, stream: MemoryStream, request: Request) -> Iterator[Reply | ServiceError]:
        match request:
            case Pass() if self.error is not None and request.number == self.fails_at:
                failure, self.error = self.error, None
                yield failure
            case Pass():
                yield self._passed(stream.toy, request)
            case FetchRow():
                yield stream.toy.fetch(request)

    def _passed(self, toy: ToyTarget, sent: Pass) -> PassDone:
        """Of the toy, which answers everything, what was wanted."""
        listed = [NO_IDS] * (1 + len(sent.tree))
        for place, node in enumerate(sent.answered):
            listed[node] = sent.listed[place] if sent.listed else NO_IDS
        done = toy.run(replace(sent, listed=tuple(listed), wanted=None))
        return PassDone(done.number, tuple(done.nodes[node] for node in sent.answered), done.seconds)


@dataclass
class MemoryDrafter(Service):
    """A toy behind a drafter's port: one session at a time. It prepares no continuations."""

    toy: ToyDrafter = field(default_factory=lambda: toys()[1])
    silent: bool = False
    scoreless: bool = False  # never answers Score
    first: tuple[Reply | Opened, ...] = ()  # what it says unasked

    async def open(self, request: OpenDrafter) -> MemoryStream:
        self.refuse()
        stream = MemoryStream(self)
        self.opened.append(stream)
        self.toy.text = Letters("")
        for reply in self.first:
            stream.replies.put_nowait(reply)
        return stream

    def answers(self, stream: MemoryStream, request: Request) -> Iterator[Reply]:
        match request:
            case Draft() if not self.silent:
                self._draft, self._sent, self._drafted = request, 0, self.toy.draft(replace(request, count=0))
                yield from self._streamed(request.count)
            case Advance(epoch, count) if not self.silent and epoch == self._draft.epoch:
                yield from self._streamed(count)
            case Score() if not self.scoreless:
                yield self.toy.score(request)

    def _streamed(self, count: int) -> Iterable[Drafted]:
        while self._sent < count:
            full = self._draft.first - self._sent if self._sent < self._draft.first else self._draft.chunk
            size = min(full, count - self._sent)
            draft_tokens = tuple(self.toy.propose() for _ in range(size))
            yield replace(self._drafted, draft_tokens=draft_tokens, first=self._sent)
            self._sent += size
