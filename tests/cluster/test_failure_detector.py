"""When an orchestrator is taken for lost, in simulated time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from math import inf

import pytest

from crossdraft.cluster.failover import RECENT_SECONDS, Alive, Began, DetectionLimits, FailureDetector, Lost, Replies
from tests.cluster.scripted import now, simulated

LIMITS = DetectionLimits()
ALIVE = (Alive(),)
BEGAN = (Began("a"),)
AT_ONCE, LATE = 0.0, LIMITS.silent  # seconds until an output begins
WAITED = 4 * LIMITS.silent  # for one that has not begun, where others begin late


class Orchestrator:
    """Begins so many seconds after it was asked, and then says something every `pulse` seconds."""

    def __init__(self, name: str = "a", begins: float = AT_ONCE, pulse: float = inf) -> None:
        self.began = Began(name)
        self.begins, self.pulse = begins, pulse
        self.closed = False

    async def stream(self) -> AsyncGenerator[Replies, None]:
        try:
            await pause(self.begins)
            yield (self.began,)
            while True:
                await pause(self.pulse)
                yield ALIVE
        finally:
            self.closed = True


async def pause(seconds: float) -> None:
    await (asyncio.sleep(seconds) if seconds < inf else asyncio.Event().wait())


def detecting(limits: DetectionLimits = LIMITS) -> FailureDetector:
    return FailureDetector(limits, now)


async def silence(detector: FailureDetector, one: Orchestrator, losses: int = 0) -> float:
    """Seconds after which it is taken for lost."""
    began = now()
    with pytest.raises(Lost, match="silent"):
        async for _ in detector.watch(one.stream(), losses):
            pass
    assert one.closed
    return now() - began


async def late(detector: FailureDetector, *seconds: float) -> None:
    """Outputs that begin so late, one after the other."""
    for one in seconds:
        async with aclosing(detector.watch(Orchestrator(begins=one).stream(), losses=9)) as heard:
            await anext(heard)


@simulated
async def test_what_is_said_is_heard_to_its_end() -> None:
    async def said() -> AsyncGenerator[Replies, None]:
        for replies in (BEGAN, ALIVE, (Alive(), Alive())):
            yield replies

    assert [replies async for replies in detecting().watch(said())] == [BEGAN, ALIVE, (Alive(), Alive())]


@simulated
async def test_silence_is_a_loss() -> None:
    assert await silence(detecting(), Orchestrator()) == LIMITS.silent


@pytest.mark.parametrize(
    ("other", "most", "seconds"),
    [("a", LIMITS.most, LIMITS.most), ("b", LIMITS.most, LIMITS.silent), ("b", inf, LIMITS.silent)],
)
@simulated
async def test_one_that_another_output_hears_is_there_up_to_a_limit(other: str, most: float, seconds: float) -> None:
    detector = detecting(replace(LIMITS, most=most))

    async def listen() -> None:
        async for _ in detector.watch(Orchestrator(other, pulse=LIMITS.step / 2).stream()):
            pass

    listening = asyncio.create_task(listen())
    assert await silence(detector, Orchestrator("a")) == seconds
    listening.cancel()
    await asyncio.wait([listening])


@simulated
async def test_what_lay_here_while_its_reader_was_away_is_no_sign_of_life() -> None:
    detector = detecting()

    async def read_slowly() -> None:
        async for _ in detector.watch(Orchestrator("a", pulse=0).stream()):  # it was lost when it had said much
            await asyncio.sleep(LIMITS.silent / 2)

    reading = asyncio.create_task(read_slowly())
    assert await silence(detector, Orchestrator("a")) < 2 * LIMITS.silent
    reading.cancel()
    await asyncio.wait([reading])


@pytest.mark.parametrize(
    ("recent", "losses", "seconds"),
    [
        # After a loss it is given up sooner, ...
        ((), 0, LIMITS.silent),
        ((), 1, LIMITS.first),
        ((), 2, 2 * LIMITS.first),
        # ... and after several it has more time than a silence only where none has begun, ...
        ((), 9, WAITED),
        ((AT_ONCE,), 1, LIMITS.first),
        ((AT_ONCE,), 9, LIMITS.silent),
        # ... or where outputs have lately begun late, of which one alone does not count.
        ((LATE,), 0, RECENT_SECONDS),
        ((LATE,), 1, RECENT_SECONDS),
        ((LATE,), 9, WAITED),
        ((LATE, AT_ONCE, AT_ONCE), 0, LIMITS.silent),
        ((AT_ONCE, LATE, LATE), 0, RECENT_SECONDS),
    ],
)
@simulated
async def test_one_that_does_not_begin_is_given_up(recent: tuple[float, ...], losses: int, seconds: float) -> None:
    detector = detecting()
    await late(detector, *recent)
    assert await silence(detector, Orchestrator(begins=inf), losses) == seconds


@simulated
async def test_time_in_which_nobody_listened_does_not_count() -> None:
    async with aclosing(detecting().watch(Orchestrator(pulse=LIMITS.silent / 2).stream())) as heard:
        await anext(heard)
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: vars(loop).update(now=now() + 100.0))  # this process stands still
        assert await anext(heard) == ALIVE


@pytest.mark.parametrize("cancelled", [False, True])
@simulated
async def test_leaving_early_closes_the_stream(cancelled: bool) -> None:
    one = Orchestrator(begins=inf if cancelled else AT_ONCE)

    async def listen() -> None:
        async with aclosing(detecting().watch(one.stream())) as heard:
            await anext(heard)

    listening = asyncio.create_task(listen())
    if cancelled:
        await asyncio.sleep(LIMITS.step)
        listening.cancel()
    await asyncio.wait([listening])
    assert (one.closed, listening.cancelled()) == (True, cancelled)
