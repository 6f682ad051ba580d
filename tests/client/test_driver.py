"""The driver: it carries out a session's commands, and feeds back what happens."""

import asyncio
import time

import pytest

from crossdraft.client.driver import Driver
from crossdraft.client.roster import Services
from crossdraft.rpc.errors import BadRequest, Internal, ServiceError, Unreachable
from crossdraft.session import events
from crossdraft.session.events import Close, Command, Event, Expired, Finished, Lost, Open, Ready, Replied, Send, Timer
from crossdraft.text.letters import NOTHING
from crossdraft.types.messages import Draft, Pass, PassDone
from crossdraft.types.statistics import Counts
from crossdraft.types.trees import TokenTree
from tests.ports import MemoryDrafter, MemoryTarget, assignment, services_of

GIVEN = assignment()
PASS = Pass(1, (), TokenTree((), ()))
DRAFT = Draft(1, 0, NOTHING, 3)
DONE = Finished(events.Reason.LENGTH, Counts())
ScriptedStep = tuple[object, list[Command]]  # an event, as far as it is compared, and what follows
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])  # whose timers differ
STALL, TARGET = (Timer.STALL, 1, 0.0), (Timer.TARGET, 1, 0.0)


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
            raise events.IllegalEventError("not asked for")
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
    return await Driver(session, services).run(lambda _: None)


def target_open(lane: int = 1, after: float = 0.0) -> Open:
    return Open(lane, GIVEN.open_target, after)


def drafter_open(lane: int = 2) -> Open:
    return Open(lane, GIVEN.open_drafter)


async def test_events_carry_the_time_of_their_arrival() -> None:
    session = Scripted([target_open()], (Ready(1), [Send(1, PASS)]), (Replied, [DONE]))
    before = time.monotonic()
    assert await run(session, services_of(MemoryTarget())) is DONE
    times = [now for _, now in session.seen]
    assert [type(event) for event in session.events] == [Ready, Replied]
    assert before <= times[0] <= times[1] <= time.monotonic()


async def test_a_lane_that_is_not_read_does_not_delay_another() -> None:
    """The first target answers nothing at all, and many passes are sent to it."""
    stuck, other = MemoryTarget(silent=True), MemoryTarget()
    both = [target_open(1), target_open(2)]
    session = Scripted(both, (Ready(1), [Send(1, PASS)] * 100), (Ready(2), [Send(2, PASS)]), (Replied, [DONE]))
    await run(session, services_of(stuck, other))
    assert session.events[-1].lane == 2  # type: ignore[union-attr]
    assert (stuck.closed, other.closed) == (1, 1)


@pytest.mark.parametrize(("error", "elsewhere"), [(Unreachable("gone"), True), (BadRequest("no"), False)])
async def test_a_failure_says_whether_another_service_may_do_it(error: ServiceError, elsewhere: bool) -> None:
    session = Scripted([target_open()], (Lost, [DONE]))
    await run(session, services_of(MemoryTarget(refuses=error)))
    assert session.events == [Lost(1, error, elsewhere)]


async def test_the_next_lane_opens_at_an_address_that_did_not_fail() -> None:
    bad, good = MemoryTarget(refuses=Unreachable("down")), MemoryTarget()
    session = Scripted([target_open(1)], (Lost, [target_open(2)]), (Ready(2), [DONE]))
    await run(session, services_of(bad, good))
    assert len(good.opened) == 1


async def test_lanes_of_one_generation_open_at_different_addresses() -> None:
    targets = [MemoryTarget() for _ in range(3)]
    session = Scripted([target_open(lane) for lane in (1, 2, 3)], ((Ready, 3), [DONE]))
    await run(session, services_of(*targets))
    assert [len(target.opened) for target in targets] == [1, 1, 1]


async def test_a_service_that_was_blamed_is_not_used_again_by_this_generation() -> None:
    """There is one drafter: after it was blamed none is left, and what it did last is why."""
    drafter = MemoryDrafter()
    session = Scripted([drafter_open(1)], (Ready(1), [Close(1, "it lies"), drafter_open(2)]), (Lost, [DONE]))
    services = services_of(MemoryTarget(), drafter)
    await run(session, services)
    (lost,) = [event for event in session.events if isinstance(event, Lost)]
    assert (lost.lane, lost.elsewhere) == (2, False)
    again = Scripted([drafter_open(1)], (Ready(1), [DONE]))
    await run(again, services)
    assert len(drafter.opened) == 2


async def test_without_any_address_a_lane_is_lost_but_one_may_come() -> None:
    session = Scripted([drafter_open(1)], (Lost, [DONE]))
    await run(session, services_of(MemoryTarget()))
    (lost,) = session.events
    assert (lost.elsewhere, str(lost.error)) == (True, "there is no drafter")


async def test_an_answer_that_nobody_asked_for_costs_the_service_its_lane_and_its_place() -> None:
    target = MemoryTarget(first=(PassDone(77, (), 0.0),))
    session = Scripted([target_open(1)], ((Lost, 1), [target_open(2)]), ((Lost, 2), [DONE]), illegal=PassDone)
    await run(session, services_of(target))
    losses = [event for event in session.events if isinstance(event, Lost)]
    assert [(lost.elsewhere, type(lost.error)) for lost in losses] == [(True, Internal), (False, Internal)]
    assert str(losses[-1].error) == "the target broke the protocol: not asked for"
    assert target.closed == 1


@pytest.mark.parametrize(
    ("timers", "expired"),
    [
        ([STALL, (Timer.STALL, 2, 0.0), (Timer.DRAFTER, 1, 3600.0), (Timer.TARGET, 2, 0.001)], 2),
        # Due between two ticks of the loop's clock, or in this one.
        *(([STALL, TARGET, (Timer.TARGET, 2, seconds)], 1) for seconds in (0.0, 1e-4, 1e-3, 1.4e-3, 2.6e-3)),
    ],
)
async def test_a_newer_timer_of_a_kind_replaces_the_older_one_and_expires(timers, expired):
    session = Scripted([events.SetTimer(*one) for one in timers], (Expired(Timer.TARGET, 2), [DONE]))
    await run(session, services_of(MemoryTarget()))
    assert session.events == [Expired(Timer.STALL, expired), Expired(Timer.TARGET, 2)]


async def test_a_closed_lane_says_nothing_more() -> None:
    drafter = MemoryDrafter()
    begin: list[Command] = [drafter_open(1), drafter_open(2)]
    session = Scripted(begin, (Ready(1), [Close(1), Send(1, DRAFT)]), (Ready(2), [Send(2, DRAFT)]), (Replied, [DONE]))
    await run(session, services_of(MemoryTarget(), drafter))
    assert [event.lane for event in session.events] == [1, 2, 2]  # type: ignore[union-attr]
    assert drafter.closed == 2


@pytest.mark.parametrize("state", ["opening", "waiting to open", "open"])
async def test_cancelling_closes_everything_at_once(state: str) -> None:
    target = MemoryTarget(opens=state != "opening", silent=True)
    session = Scripted([target_open(1, 3600.0 if state == "waiting to open" else 0.0)], (Ready, [Send(1, PASS)]))
    task = asyncio.create_task(run(session, services_of(target)))
    if state == "waiting to open":
        await asyncio.sleep(0)
    else:
        await (target.asked if state == "open" else target.begun).wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (target.closed, asyncio.all_tasks()) == (len(target.opened), {asyncio.current_task()})
