"""What the driver measures, and what it tells a recorder."""

from dataclasses import replace

from crossdraft.pipeline.driver import Driver
from crossdraft.pipeline.events import Command, Event, Ready, Replied, Send
from crossdraft.pipeline.ports import Services
from crossdraft.pipeline.recording import Step
from crossdraft.pipeline.stopwatches import LaneWatch
from crossdraft.rpc.stream import Traffic
from crossdraft.verification.exchange import Advance, Drafted, PassDone
from tests.pipeline.memory import MemoryDrafter, MemoryTarget
from tests.pipeline.scripted import DONE, DRAFT, PASS, Scripted, drafter_open, target_open


async def test_a_recorder_is_told_of_every_event_and_what_it_led_to() -> None:
    class Kept:
        def __init__(self) -> None:
            self.steps: list[tuple[Event | None, list[Command]]] = []
            self.closed = 0

        def record(self, step: Step) -> None:
            self.steps.append((step.event, list(step.commands)))
            assert step.sent >= 0

        def close(self) -> None:
            self.closed += 1

    kept, begin = Kept(), [target_open()]
    session = Scripted([*begin], (Ready, [Send(1, PASS)]), (Replied, [DONE]))
    await Driver(session, Services.of(MemoryTarget()), kept).run(lambda _: None)
    assert [commands for _, commands in kept.steps] == [begin, [Send(1, PASS)], [DONE]]
    assert [event for event, _ in kept.steps] == [None, *session.events]
    assert kept.closed == 1


async def test_what_was_measured() -> None:
    target, drafter = MemoryTarget(), MemoryDrafter()
    begin: list[Command] = [target_open(1), drafter_open(2)]
    session = Scripted(
        begin,
        ((Ready, 2), [Send(2, DRAFT)]),
        ((Replied, 2), [Send(1, PASS), Send(1, replace(PASS, number=2))]),
        ((Replied, 1), []),
        ((Replied, 1), [DONE]),
    )
    driver = Driver(session, Services.of(target, drafter))
    await driver.run(lambda _: None)
    times = driver.times()
    assert times.events == 1 + len(session.seen) == 6
    assert times.seconds >= times.verification_seconds > 0
    assert (times.bytes_sent, times.bytes_received) == (3, 3)
    assert (times.target_bytes, times.drafter_bytes) == (4, 2)
    assert 0 < times.idle_seconds < times.target_lane_seconds <= times.seconds
    assert times.wire_seconds > 0


def test_a_targets_idle_time_is_that_without_a_pass_in_flight() -> None:
    watch = LaneWatch("target")
    assert watch.idle(5.0) == (0.0, 0.0)
    watch.opened(Traffic(), 10.0)
    watch.asked(PASS, 11.0)
    assert watch.idle(12.0) == (1.0, 2.0)
    watch.answered(PassDone(1, (), 0.5), 14.0)
    watch.asked(PASS, 15.0)
    watch.asked(PASS, 16.0)
    watch.answered(PassDone(2, (), 0.5), 17.0)
    watch.answered(PassDone(3, (), 0.5), 18.0)
    watch.closed(20.0)
    assert watch.idle(99.0) == (4.0, 10.0)


def test_the_wire_is_what_the_model_did_not_take_of_the_wait_for_a_first_answer() -> None:
    watch = LaneWatch("drafter")
    watch.opened(Traffic(), 0.0)
    watch.asked(DRAFT, 1.0)
    watch.answered(Drafted(1, (), 0.25), 2.0)
    watch.answered(Drafted(1, (), 0.25), 5.0)
    watch.asked(Advance(1, 5), 6.0)
    watch.answered(Drafted(1, (), 0.25), 9.0)
    assert watch.wire_seconds == 0.75
