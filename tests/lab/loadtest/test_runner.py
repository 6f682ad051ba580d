"""Clients at once, on a clock that nobody waits for."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from crossdraft.lab.loadtest.clients import TIMED_OUT, Body, Pieces, RequestFailedError, send
from crossdraft.lab.outputs import Output
from crossdraft.lab.workload import gathered
from tests.lab.loadtest.values import FIGURES

REQUESTS = [{"prompt": one} for one in "abcdef"]


class Jumping(selectors.DefaultSelector):
    """Does not wait: the time that it should have waited is over at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = Jumping()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def virtually(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


@dataclass
class Timed:
    """Makes two tokens, each after `each` seconds."""

    each: float = 1.0
    under_way: int = 0
    most: int = 0
    seen: list[str] = field(default_factory=list)
    failing: dict[str, Exception] = field(default_factory=dict)
    ended: int = 0

    async def stream(self, asked: Body) -> Pieces:
        prompt = str(asked["prompt"])
        self.seen.append(prompt)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(2):
                await asyncio.sleep(self.each)
                if prompt in self.failing:
                    raise self.failing[prompt]
                yield 0.25
            yield replace(FIGURES, tokens=2)
        finally:
            self.under_way -= 1
            self.ended += 1


def now() -> float:
    return asyncio.get_running_loop().time()


def run(way: Timed, at_once: int, timeout: float = 100.0) -> list[Output]:
    found: list[Output] = virtually(
        lambda: gathered(lambda one: send(way.stream, one, timeout, now), REQUESTS, at_once)
    )
    assert sorted(way.seen) == list("abcdef")
    assert way.ended == 6
    return found


def test_clients_ask_again_when_they_have_their_answer() -> None:
    way = Timed()
    found = run(way, 2)
    assert way.most == 2
    assert [one.asked for one in found] == [0, 0, 2, 2, 4, 4]
    assert [one.moments for one in found][2] == (3, 4)
    assert [one.per_token for one in found] == [1.0] * 6


def test_what_fails_is_written_down_and_the_others_go_on() -> None:
    way = Timed(failing={"b": RequestFailedError("HTTP 429", "no room")})
    found = run(way, 1)
    assert [(one.error, one.fault) for one in found] == [("", ""), ("HTTP 429", "no room"), *[("", "")] * 4]
    assert (found[1].moments, found[1].ended, found[1].ok) == ((), 3.0, False)


def test_a_request_without_an_end_is_given_up() -> None:
    found = run(Timed(each=8.0), 6, timeout=10.0)
    assert {(one.error, one.moments, one.ended) for one in found} == {(TIMED_OUT, (8.0,), 10.0)}


def test_a_fault_of_the_client_itself_ends_the_test() -> None:
    way = Timed(failing={"c": ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        run(way, 2)
    assert way.under_way == 0
