"""What a link does to real connections; delays without any traffic; what the processes say to each other."""

import asyncio

import pytest

from crossdraft.bench.emulation import NotAllowed, relays
from crossdraft.bench.emulation.network import (
    Lane,
    Place,
    Shape,
    Through,
    read_order,
    read_places,
    write_order,
    write_places,
)
from tests.bench.emulation.conftest import HANGS, Echo

SOON = 0.3  # seconds in which what is not cut arrives, unless the machine is busy


async def test_an_echo_takes_both_delays(echo: Echo) -> None:
    await echo.link.delay(40)
    await echo.within(0.080, 0.110)  # one of them twice would take longer
    await echo.link.delay(0)
    await echo.within(0, 0.030)


async def test_a_delay_does_not_narrow_the_link(echo: Echo) -> None:
    await echo.link.delay(20)
    data = bytes(range(256)) * 4096
    loop = asyncio.get_running_loop()
    seconds = HANGS
    async with asyncio.timeout(HANGS):
        while seconds >= 0.5:  # TCP widens its windows first; 16 pieces of 64 KiB, one after the other, take 0.64 s
            began = loop.time()
            echo.send(data)
            assert await echo.receive(len(data)) == data
            seconds = loop.time() - began


async def test_a_cut_link_passes_nothing_until_it_heals(echo: Echo) -> None:
    await echo.seconds()
    await echo.link.cut()
    echo.send(b"lost?")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(echo.receive(1), SOON)
    assert echo.link.shape.cut
    assert not echo.writer.is_closing()
    await echo.link.heal()
    assert await asyncio.wait_for(echo.receive(5), HANGS) == b"lost?"


async def test_a_delay_that_cannot_be_is_refused_and_changes_nothing(echo: Echo) -> None:
    with pytest.raises(ValueError, match="a delay must be"):
        await echo.link.delay(-1)
    assert echo.link.shape.delay_ms == 0
    await echo.seconds()


async def test_each_host_has_a_link_of_its_own() -> None:
    async with relays(["near", "far"]) as links:
        await links["far"].delay(7)
        assert (links["near"].shape.delay_ms, links["far"].shape.delay_ms) == (0, 7)


async def test_a_service_that_is_not_there_closes_the_connection() -> None:
    async with relays(["far"]) as links:
        host, _, port = (await links["far"].address_through("127.0.0.1:1")).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_hosts_behind_relays_cannot_be_parted() -> None:
    async with relays(["near", "far"]) as links:
        with pytest.raises(NotAllowed, match="nothing passes between near and far"):
            await links["near"].part(links["far"])


def test_what_enters_later_never_leaves_earlier() -> None:
    lane = Lane()
    assert lane.due(1.0, 20) == pytest.approx(1.02)
    assert lane.due(1.001, 0) == pytest.approx(1.02)  # the delay was taken away
    assert lane.due(1.5, 0) == 1.5


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_impossible_delays_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 60,000"):
        Shape("far", wrong)


@pytest.mark.parametrize("order", [Shape("far", 1.5, True), Through("far", "127.0.0.1:7")])
def test_an_order_is_read_as_it_was_written(order: Shape | Through) -> None:
    line = write_order(order)
    assert line.endswith(b"\n")
    assert read_order(line) == order


def test_so_are_places() -> None:
    places = {"far": Place(("nsenter", "--net=/x"), "198.18.0.2"), "near": Place((), "127.0.0.1")}
    assert read_places(write_places(places)) == places
