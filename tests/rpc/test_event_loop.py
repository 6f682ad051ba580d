"""Work beside the event loop, and how late the loop is."""

import asyncio
import threading

from crossdraft.rpc.event_loop import LARGE, MEDIUM, SMALL, Beside, LoopLag
from crossdraft.rpc.metrics import Registry, exposition


async def test_what_is_small_is_done_in_the_loop_and_the_rest_in_a_thread() -> None:
    beside = Beside("tests")
    assert await beside.run(SMALL, threading.get_ident) == threading.get_ident()
    for size in (SMALL + 1, LARGE):
        assert await beside.run(size, threading.get_ident) != threading.get_ident()


async def test_the_loop_goes_on_while_work_is_done_beside_it() -> None:
    beside, ended = Beside("tests"), threading.Event()
    work = asyncio.create_task(beside.run(LARGE, ended.wait))
    await asyncio.to_thread(lambda: None)  # the loop runs
    assert not work.done()
    ended.set()
    assert await work


async def test_a_small_request_does_not_wait_for_large_ones() -> None:
    beside, ended = Beside("tests"), threading.Event()
    large = [asyncio.create_task(beside.run(LARGE, ended.wait)) for _ in range(8)]
    assert await beside.run(MEDIUM, threading.get_ident)
    assert not any(one.done() for one in large)
    ended.set()
    assert all(await asyncio.gather(*large))


async def test_a_loop_that_is_held_up_is_late() -> None:
    registry = Registry()
    lag = LoopLag(registry, "front")
    lag.start()
    lag.start()
    while b'event_loop_lag_seconds_count{role="front"} 0.0' in exposition(registry)[0]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    lag.stop()
    lag.stop()
    assert b"crossdraft_event_loop_lag_seconds_sum" in exposition(registry)[0]
