"""When an orchestrator is taken for lost."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from math import inf

import pytest

from crossdraft.client import Reason
from crossdraft.cluster.failover import (
    RECENT_SECONDS,
    Alive,
    Began,
    ClusterBackend,
    DetectionLimits,
    FailureDetector,
    Lost,
    Replies,
)
from crossdraft.serving.backend import Committed, Ended
from tests.cluster.scripted import BEGAN, REQUEST, Scripted, tokens
from tests.serving.fakes import figures

STEP = 0.001  # seconds of the clock of these tests between two looks at it
LIMITS = DetectionLimits(silent=10 * STEP, first=4 * STEP, most=200 * STEP, step=STEP)
ALIVE = (Alive(),)


class Clock:
    """It goes on whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looked_at = asyncio.Event()

    def __call__(self) -> float:
        self.now += STEP
        self.looked_at.set()
        return self.now


class Orchestrator:
    """It begins at once, or when it may, and says what it is told to."""

    def __init__(self, name: str, begins: bool = True) -> None:
        self.began = Began("", name)
        self.may_begin = asyncio.Event()
        if begins:
            self.may_begin.set()
        self.says: asyncio.Queue[Replies] = asyncio.Queue()  # nothing: it is over
        self.closed = False

    async def stream(self) -> AsyncGenerator[Replies, None]:
        try:
            await self.may_begin.wait()
            yield (self.began,)
            while said := await self.says.get():
                yield said
        finally:
            self.closed = True


class Chatty(Orchestrator):
    """It says something all the time."""

    async def stream(self) -> AsyncGenerator[Replies, None]:
        yield (self.began,)
        while True:
            await asyncio.sleep(0)
            yield ALIVE


def hearing() -> FailureDetector:
    return FailureDetector(LIMITS, Clock())


async def silence(hearing: FailureDetector, one: Orchestrator, lost: int = 0) -> float:
    """Seconds after which it is taken for lost, from its beginning, if it has one."""
    async with aclosing(hearing.watch(one.stream(), lost)) as heard:
        if one.may_begin.is_set():
            assert await anext(heard) == (one.began,)
        clock = hearing._clock
        began = clock()
        with pytest.raises(Lost, match="silent"):
            await anext(heard)
        return clock() - began


async def heard_meanwhile(hearing: FailureDetector, other: Orchestrator, one: Orchestrator) -> float:
    """The same, while another output hears an orchestrator."""

    async def listen() -> None:
        async for _ in hearing.watch(other.stream()):
            pass

    listening = asyncio.create_task(listen())
    try:
        return await silence(hearing, one)
    finally:
        listening.cancel()
        await asyncio.wait([listening])


async def test_what_is_said_is_heard_to_its_end() -> None:
    one = Orchestrator("a")
    for together in (ALIVE, (Alive(), Alive()), ()):
        one.says.put_nowait(together)
    assert [together async for together in hearing().watch(one.stream())] == [(one.began,), ALIVE, (Alive(), Alive())]
    assert one.closed


async def test_silence_is_a_loss() -> None:
    one = Orchestrator("a")
    assert LIMITS.silent <= await silence(hearing(), one) < 10 * LIMITS.silent
    assert one.closed


async def test_one_that_another_output_hears_is_there_up_to_a_limit() -> None:
    assert await heard_meanwhile(hearing(), Chatty("a"), Orchestrator("a")) >= LIMITS.most


async def test_what_is_heard_of_others_says_nothing() -> None:
    # Looks at the clock are also those of who hears the other one, so its time is no measure here.
    without_limit = FailureDetector(replace(LIMITS, most=inf), Clock())
    async with asyncio.timeout(60):
        await heard_meanwhile(without_limit, Chatty("b"), Orchestrator("a"))


async def test_what_lay_here_while_its_reader_was_away_is_no_sign_of_life() -> None:
    clock = Clock()
    hearing = FailureDetector(replace(LIMITS, silent=100 * STEP, most=1000 * STEP), clock)

    class Left(Orchestrator):
        """It was lost when it had said much."""

        async def stream(self) -> AsyncGenerator[Replies, None]:
            yield (self.began,)
            while True:
                yield ALIVE

    async def read_slowly() -> None:
        async for _ in hearing.watch(Left("a").stream()):
            for _ in range(20):  # less than a silence
                clock()
            await asyncio.sleep(0)

    reading = asyncio.create_task(read_slowly())
    async with aclosing(hearing.watch(Orchestrator("a").stream())) as heard:
        await anext(heard)
        with pytest.raises(Lost, match=r"silent for 0\.1"):  # and not 1, the most
            await anext(heard)
    reading.cancel()
    await asyncio.wait([reading])


async def test_after_a_loss_one_that_does_not_begin_is_given_up_sooner() -> None:
    sooner = await silence(hearing(), Orchestrator("a", begins=False), 1)
    then = await silence(hearing(), Orchestrator("a", begins=False), 2)
    first = await silence(hearing(), Orchestrator("a", begins=False))
    assert LIMITS.first <= sooner < then < first


async def test_after_losses_one_that_does_not_begin_has_more_time_than_a_silence_only_where_none_has_begun() -> None:
    clock = Clock()
    hearing = FailureDetector(LIMITS, clock)
    first, last = [await silence(hearing, Orchestrator("a", begins=False), lost) for lost in (0, 9)]
    assert 3 * first < last < 5 * first
    await late(hearing, clock, 0)
    first, last = [await silence(hearing, Orchestrator("a", begins=False), lost) for lost in (0, 9)]
    assert last == pytest.approx(first, abs=2 * STEP)


async def late(hearing: FailureDetector, clock: Clock, seconds: float) -> None:
    """An output that begins so late."""
    one = Orchestrator("a", begins=False)
    async with aclosing(hearing.watch(one.stream())) as heard:
        beginning = asyncio.ensure_future(anext(heard))
        await asyncio.sleep(0)
        clock.now += seconds
        one.may_begin.set()
        await beginning


async def test_while_outputs_begin_late_one_that_has_not_begun_is_waited_for() -> None:
    clock = Clock()
    hearing = FailureDetector(LIMITS, clock)
    usual = await silence(hearing, Orchestrator("a", begins=False))
    await late(hearing, clock, LIMITS.silent)
    for lost in (0, 1, 5):
        assert await silence(hearing, Orchestrator("a", begins=False), lost) >= 3 * usual
    for _ in range(2):  # it alone was late
        await late(hearing, clock, 0)
    assert await silence(hearing, Orchestrator("a", begins=False)) == pytest.approx(usual, rel=0.2)
    for _ in range(3):
        await late(hearing, clock, LIMITS.silent)
    assert await silence(hearing, Orchestrator("a", begins=False)) >= 3 * usual
    clock.now += RECENT_SECONDS
    assert await silence(hearing, Orchestrator("a", begins=False)) == pytest.approx(usual, rel=0.2)


async def test_time_in_which_nobody_listened_does_not_count() -> None:
    clock = Clock()
    hearing = FailureDetector(LIMITS, clock)
    one = Orchestrator("a")
    async with aclosing(hearing.watch(one.stream())) as heard:
        await anext(heard)
        due = asyncio.ensure_future(anext(heard))
        await asyncio.sleep(0)
        clock.now += 100.0
        clock.looked_at.clear()
        await clock.looked_at.wait()
        one.says.put_nowait(ALIVE)
        assert await due == ALIVE


async def test_leaving_early_closes_the_stream() -> None:
    one = Orchestrator("a")
    async with aclosing(hearing().watch(one.stream())) as heard:
        await anext(heard)
    assert one.closed


async def test_who_is_cancelled_while_listening_leaves_nothing_open() -> None:
    one = Orchestrator("a", begins=False)

    async def listen() -> None:
        async with aclosing(FailureDetector(DetectionLimits()).watch(one.stream())) as heard:
            await anext(heard)

    listening = asyncio.create_task(listen())
    for _ in range(5):
        await asyncio.sleep(0)
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert one.closed


class Hurried(asyncio.SelectorEventLoop):
    """Nobody waits: its time is that of what is due next."""

    now = 0.0  # seconds

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


@pytest.mark.parametrize(("again", "seconds"), [(0, 3.75), (1, 4.75)])
def test_as_configured_a_lost_orchestrator_costs_a_stream_less_than_five_seconds(again: int, seconds: float) -> None:
    """Also where the lost one is chosen once more."""
    ended = Ended(Reason.LENGTH, figures(2))
    orchestrators = Scripted([BEGAN, tokens(1), None], *[[None]] * again, [BEGAN, tokens(2), ended])

    async def heard() -> list[float]:
        clock = asyncio.get_running_loop().time
        backend = ClusterBackend({"small": orchestrators}, clock=clock, limits=DetectionLimits())
        for detector in backend._detectors.values():
            detector._clock = clock
        return [clock() async for item in backend.stream(REQUEST) if isinstance(item, Committed)]

    with asyncio.Runner(loop_factory=Hurried) as runner:
        before, after = runner.run(heard())
    assert 3.0 <= after - before <= seconds
