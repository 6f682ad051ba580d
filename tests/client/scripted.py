"""A session that plays a part: it expects events, and answers each with commands that are written down."""

import asyncio

from crossdraft.client.driver import Driver
from crossdraft.client.roster import Roster, Services
from crossdraft.session.events import Command, Event, Finished, IllegalEventError, Open, Reason, Replied
from crossdraft.text.letters import NOTHING
from crossdraft.types.messages import Draft, OpenDrafter, OpenTarget, Pass
from crossdraft.types.statistics import Counts
from crossdraft.types.trees import TokenTree
from tests.ports import MemoryTarget, assignment

GIVEN = assignment()
OPEN_TARGET, OPEN_DRAFTER = GIVEN.open_target, GIVEN.open_drafter
PASS = Pass(1, (), TokenTree((), ()))
DRAFT = Draft(1, 0, NOTHING, 3)
DONE = Finished(Reason.LENGTH, Counts())
ScriptedStep = tuple[object, list[Command]]  # an event, as far as it is compared, and what follows


class Scripted:
    """Expects events in order, and answers each with the commands that are written beside it."""

    def __init__(self, begin: list[Command], *steps: ScriptedStep, illegal: type | None = None) -> None:
        self.counts = Counts()
        self.seen: list[tuple[Event, float]] = []
        self.abandoned = False
        self._begin = begin
        self._steps = list(steps)
        self._illegal = illegal  # replies of this type

    def start(self, now: float) -> list[Command]:
        return self._begin

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, Replied) and isinstance(event.reply, self._illegal or ()):
            raise IllegalEventError("not asked for")
        self.seen.append((event, now))
        for place, (expected, commands) in enumerate(self._steps):
            if expected in (event, type(event), (type(event), getattr(event, "lane", None))):
                del self._steps[place]
                return commands
        return []

    def abandon(self) -> None:
        self.abandoned = True

    @property
    def events(self) -> list[Event]:
        return [event for event, _ in self.seen]


async def run(session: Scripted, services: Services) -> Finished:
    async with asyncio.timeout(300):
        return await Driver(session, services).run(lambda _: None)


def target_open(lane: int = 1, after: float = 0.0) -> Open:
    assert isinstance(OPEN_TARGET, OpenTarget)
    return Open(lane, OPEN_TARGET, after)


def drafter_open(lane: int = 2) -> Open:
    assert isinstance(OPEN_DRAFTER, OpenDrafter)
    return Open(lane, OPEN_DRAFTER)


def several(**targets: MemoryTarget) -> Services:
    """Services with targets at several addresses."""
    services = Services(Roster("target"), Roster("drafter"))
    for address, target in targets.items():
        services.targets.add(address, target)
    return services
