"""Which service a session is opened with."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from crossdraft.client.roster import FORGIVEN_SECONDS, Roster
from crossdraft.session.events import Command, Finished, Lost, Open, Ready
from crossdraft.session.session import Session
from tests.clock import GONE
from tests.ports import assignment

ALL = ("a", "b", "c")


def roster() -> Roster[str]:
    made: Roster[str] = Roster("target")
    for address in ALL:
        made.add(address, address.upper())
    return made


def test_sessions_are_spread_and_given_back() -> None:
    services = roster()
    taken = [services.take((), (), 0.0) for _ in range(6)]
    assert taken == [*ALL, *ALL]
    services.give_back("b")
    assert services.take((), (), 0.0) == "b"
    assert services["b"] == "B"


def test_the_one_that_failed_least_recently() -> None:
    services = roster()
    for address, now in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        services.failed(address, now)
    assert [services.take((), (), 4.0) for _ in range(3)] == ["b", "b", "b"]
    assert services.take((), ("b",), 4.0) == "c"


def test_failures_count_from_the_beginning_of_the_clock_and_are_forgiven() -> None:
    services = roster()
    services.failed("a", 0.0)
    assert services.take((), (), FORGIVEN_SECONDS - 1) == "b"
    assert services.take((), (), FORGIVEN_SECONDS) == "a"


def test_one_in_use_is_taken_only_if_no_other_is_left() -> None:
    services = roster()
    services.failed("c", 1.0)
    assert services.take(("a", "b"), (), 2.0) == "c"
    assert services.take(("a", "b"), ("c",), 2.0) == "a"


def test_none_is_left() -> None:
    assert roster().take((), ALL, 0.0) is None
    assert Roster[str]("drafter").take((), (), 0.0) is None


def test_an_address_is_there_once() -> None:
    services = roster()
    services.add("a", "other")
    assert (len(services), services["a"]) == (3, "A")


def test_one_that_leaves_keeps_its_sessions_and_gets_no_more() -> None:
    services = roster()
    assert services.take((), (), 0.0) == "a"
    services.remove("a")
    assert len(services) == 2
    assert {services.take((), (), 0.0) for _ in range(4)} == {"b", "c"}
    assert "a" in services
    services.failed("a", 1.0)
    services.give_back("a")
    assert "a" not in services
    services.failed("a", 2.0)


def test_one_without_sessions_leaves_at_once_and_may_come_back() -> None:
    services = roster()
    services.remove("a")
    assert "a" not in services
    services.remove("a")
    services.take((), ("c",), 0.0)
    services.remove("b")
    services.add("b", "another")
    assert services["b"] == "another"
    assert len(services) == 2


def test_one_that_is_known_to_be_there_is_taken_before_others() -> None:
    there = {"A": None, "B": False, "C": True}
    services: Roster[str] = Roster("target", there.get)
    for address, now in zip(ALL, (2.0, 1.0, 3.0), strict=True):
        services.add(address, address.upper())
        services.failed(address, now)
    assert [services.take((), (), 4.0), services.take(("c",), (), 4.0)] == ["c", "a"]
    assert services.take(("a", "c"), (), 4.0) == "c"
    assert services.take((), ("c",), 4.0) == "a"
    assert services.take((), (), 2.0 + FORGIVEN_SECONDS) == "a"


@dataclass
class Lives:
    """When targets are there, on a clock of their own; to find out that one is not takes half a second."""

    back: Sequence[float]  # of each, in seconds
    now: float = 0.0

    def tried(self, services: Roster[float], opening: Open) -> Ready | Lost:
        self.now += opening.after
        address = services.take((), (), self.now)
        assert address is not None
        if services[address] <= self.now:
            return Ready(opening.lane)
        self.now += 0.5
        services.failed(address, self.now)
        services.give_back(address)
        return Lost(opening.lane, GONE)


@pytest.mark.parametrize("back", [20.0, 27.0, 28.0, 28.5, 29.0])
def test_of_two_killed_targets_one_that_is_back_before_the_wait_ends_is_used(back: float) -> None:
    lives = Lives((100.0, back))
    services: Roster[float] = Roster("target", lambda since: since <= lives.now)
    for since in lives.back:
        services.add(f"back at {since}", since)
    session = Session(assignment(drafts=False, target_seconds=30.0))
    out: list[Command] = session.start(0.0)
    event: Ready | Lost | None = None
    while not isinstance(event, Ready):
        event = lives.tried(services, next(one for one in out if isinstance(one, Open)))
        out = session.handle(event, lives.now)
        assert not any(isinstance(one, Finished) for one in out), f"after {lives.now} s"
    assert lives.now <= back + 1.5
