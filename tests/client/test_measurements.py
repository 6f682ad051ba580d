"""What the driver measures, and what it tells a recorder."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crossdraft.client.driver import Driver, LaneWatch
from crossdraft.rpc.links import Traffic
from crossdraft.session.events import Close, Command, Ready, Replied, Send
from crossdraft.session.ledger import Ledger
from crossdraft.types.messages import Advance, Drafted, FetchRow, PassDone, RowFetched, Scored
from crossdraft.types.rows import Row
from crossdraft.types.statistics import BOUNDS
from tests.client.test_driver import DONE, DRAFT, PASS, Scripted, drafter_open, target_open
from tests.ports import MemoryDrafter, MemoryTarget, services_of
from tests.trace.recordings import Keeper


async def test_a_recorder_is_told_of_every_event_and_what_it_led_to() -> None:
    kept, begin = Keeper(), [target_open()]
    session = Scripted([*begin], (Ready, [Send(1, PASS)]), (Replied, [DONE]))
    await Driver(session, services_of(MemoryTarget()), [kept]).run(lambda _: None)
    assert [list(step.commands) for step in kept.steps] == [begin, [Send(1, PASS)], [DONE]]
    assert [step.event for step in kept.steps] == [None, *session.events]


async def test_what_was_measured() -> None:
    begin, passes = [target_open(1), drafter_open(2)], [Send(1, PASS), Send(1, SECOND)]
    drafting = ((Ready, 2), [Send(2, DRAFT)]), ((Replied, 2), passes)
    session = Scripted(begin, *drafting, ((Replied, 1), []), ((Replied, 1), [DONE]))
    driver = Driver(session, services_of(MemoryTarget(), MemoryDrafter()))
    await driver.run(lambda _: None)
    times = driver.times()
    assert times.events == 1 + len(session.seen) == 6
    assert times.seconds >= times.verification_seconds > 0
    assert (times.bytes_sent, times.bytes_received, times.target_bytes, times.drafter_bytes) == (3, 3, 4, 2)
    assert 0 < times.idle_seconds < times.target_lane_seconds <= times.seconds
    assert times.wire_seconds > 0


def measured(role: str, *happened: tuple[object, float], opened: float = 0.0) -> LaneWatch:
    """The stop-watch of a lane after requests and replies with their times."""
    session: Any = SimpleNamespace(traffic=Traffic(codec_seconds=0.25), ledger=Ledger())
    watch = LaneWatch(role)
    watch.opened(session, opened)
    for what, now in happened:
        if isinstance(what, PassDone | Drafted | RowFetched | Scored):
            session.ledger.take(what, now)
            watch.answered(what, now)
        else:
            session.ledger.sent(what, now)
    return watch


SECOND, LATER, OVERTAKEN = replace(PASS, number=2), replace(DRAFT, epoch=3), replace(DRAFT, epoch=2)
SAID, THEN, ROW = Drafted(1, (), 0.25), Drafted(3, (), 0.25), RowFetched(1, 0, Row.certain(1))


@pytest.mark.parametrize(
    ("happened", "seconds", "count"),
    [
        # What the model did not take of the wait for a first reply.
        ([(DRAFT, 1.0), (SAID, 2.0), (SAID, 5.0), (Advance(1, 5), 6.0), (SAID, 9.0)], 0.75, 1),
        # Passes in flight have one each.
        ([(PASS, 1.0), (SECOND, 2.0), (PassDone(1, (), 0.5), 3.0), (PassDone(2, (), 0.25), 4.0)], 1.5 + 1.75, 2),
        # A draft that another has overtaken has none.
        ([(DRAFT, 1.0), (SAID, 2.0), (OVERTAKEN, 3.0), (LATER, 4.0), (SAID, 4.5), (THEN, 6.0), (THEN, 9.0)], 2.5, 2),
        # Nor have replies that nobody asked for.
        ([(ROW, 1.0), (Scored(1, np.zeros(0), 0.0), 2.0)], 0.0, 0),
        ([(FetchRow(1, 0), 1.0), (ROW, 1.5)], 0.5, 1),
    ],
)
def test_round_trips(happened: list[tuple[object, float]], seconds: float, count: int) -> None:
    found = measured("drafter", *happened).figures(99.0).trips
    assert (found.seconds, sum(found.counts)) == (seconds, count)


def test_trips_are_counted_by_their_bounds() -> None:
    happened: list[tuple[object, float]] = []
    for number, seconds in enumerate((BOUNDS[0], BOUNDS[0] * 1.5, BOUNDS[-1] * 2)):
        happened += [(replace(PASS, number=number), 0.0), (PassDone(number, (), 0.0), seconds)]
    counts = measured("target", *happened).figures(99.0).trips.counts
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (1, 1, 1, 3)


def test_a_lane_says_where_its_time_went() -> None:
    assert LaneWatch("target").figures(5.0).open_seconds == 0
    done = PassDone(PASS.number, (), 0.5, queued=0.125)
    watch = measured("target", (PASS, 11.0), (done, 13.0), (replace(PASS, number=2), 15.0), opened=10.0)
    figures = watch.figures(16.0)
    assert (figures.trips.seconds, figures.trips.queued_seconds) == (1.5, 0.125)
    assert (figures.open_seconds, figures.idle_seconds) == (6.0, 3.0)
    assert (figures.model_seconds, figures.codec_seconds) == (0.5, 0.25)
    watch.closed(17.0)
    assert (watch.figures(99.0).open_seconds, watch.figures(99.0).idle_seconds) == (7.0, 3.0)


async def test_lanes_say_where_they_were_and_how_they_were_lost() -> None:
    begin: list[Command] = [target_open(1), drafter_open(2)]
    session = Scripted(begin, ((Ready, 2), [Close(2, "it lied"), Send(1, PASS)]), ((Replied, 1), [DONE]))
    driver = Driver(session, services_of(MemoryTarget(), MemoryDrafter()))
    await driver.run(lambda _: None)
    lanes = {lane.role: lane for lane in driver.times().lanes}
    assert (lanes["target"].address, lanes["target"].lost) == ("target0", "")
    assert (lanes["drafter"].address, lanes["drafter"].lost) == ("drafter0", "blamed")
    assert (lanes["target"].bytes_sent, lanes["target"].bytes_received) == (1, 1)
    assert sum(lanes["target"].trips.counts) == 1
