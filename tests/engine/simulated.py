"""A device and its clients by a clock of their own: what the scheduler decides, and what becomes of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.scheduler import Pause, Scheduler
from crossdraft.types.trees import TokenTree

CHUNK = 512


@dataclass
class Client:
    """A session: asks for a request, and again after each answer."""

    name: str
    gaps: Iterator[float] = field(default_factory=lambda: repeat(0.003))  # seconds from an answer to the next request
    text: Iterator[int] = field(
        default_factory=lambda: repeat(0)
    )  # tokens of each request that may come in several steps
    end: int = 6  # tokens of each request that go together
    begins: float = 0.0
    asked: float | None = field(default=None, init=False)
    began: float | None = field(default=None, init=False)
    left: int = field(default=0, init=False)  # tokens


@dataclass(frozen=True)
class Answered:
    """One request."""

    client: str
    asked: float
    began: float  # its first step
    ended: float
    sessions: int  # in its last step


@dataclass(frozen=True)
class Taken:
    """One step."""

    began: float
    seconds: float
    tokens: dict[str, int]


@dataclass
class World:
    """Everything that happened."""

    answers: list[Answered] = field(default_factory=list)
    steps: list[Taken] = field(default_factory=list)

    def of(self, name: str) -> list[Answered]:
        return [answer for answer in self.answers if answer.client == name]


def ready(session: object, asked: float, due: int, end: int = 1, **more: Any) -> ForwardRequest:
    """A request of so many tokens still, of which the last ones go together."""
    tree = TokenTree((0,) * (end - 1), tuple(range(-1, end - 2)))
    return ForwardRequest(session, (0,), tree, asked=asked, due=due, **more)


def line(base: float, each: float) -> Callable[[int], float]:
    """A device whose step takes base + each * tokens, in seconds."""
    return lambda tokens: base + each * tokens


def simulated(clients: list[Client], seconds: Callable[[int], float], until: float) -> World:
    """Lets clients and a device go on until a time."""
    scheduler, world = Scheduler(CHUNK), World()
    coming = {client.name: client.begins for client in clients}
    named = {client.name: client for client in clients}
    now = 0.0
    while now < until:
        for name in [name for name, at in coming.items() if at <= now]:
            client = named[name]
            client.asked, client.left, client.began = coming.pop(name), next(client.text) + client.end, None
            scheduler.returns.asked(name, client.asked)
        waiting = [client for client in clients if client.asked is not None]
        asking = [ready(one.name, one.asked, one.left, one.end, began=one.began) for one in waiting]
        decided = scheduler.next(asking, now)
        if isinstance(decided, Pause):
            later = [] if decided.seconds is None else [now + decided.seconds]
            following = min([*coming.values(), *later, until])
            now = max(following, now + 1e-9)
            continue
        taken = {str(one.session): one.tokens for one in decided}
        took = seconds(sum(taken.values()))
        world.steps.append(Taken(now, took, taken))
        scheduler.stepped(sum(taken.values()), took)
        for name, tokens in taken.items():
            client = named[name]
            client.began = now if client.began is None else client.began
            client.left -= tokens
            if not client.left:
                world.answers.append(Answered(name, client.asked, client.began, now + took, len(taken)))
                client.asked = None
                scheduler.returns.answered(name, now + took)
                coming[name] = now + took + next(client.gaps)
        now += took
    return world
