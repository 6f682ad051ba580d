"""What a link does to real connections; delays without any traffic; what the processes say to each other."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic

import pytest
import pytest_asyncio

from crossdraft.lab.emulation.network import DelayLine, EmulatedHost, NoEmulationError, Shape, hosts, relays
from tests.rpc.clock import HANGS

with_the_hosts = pytest.mark.asyncio(loop_scope="module")  # which are there for the whole file
ECHO = """
import asyncio, sys

async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(echo, sys.argv[1], 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
SOON = 0.3  # seconds in which what is not cut arrives, unless the machine is busy


@dataclass(frozen=True)
class Echo:
    """A connection to the echo service through the link."""

    link: EmulatedHost
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def within(self, least: float, most: float) -> None:
        """A letter's way there and back takes `least` seconds always, and less than `most` unless the machine is busy:
        returns once one did."""
        async with asyncio.timeout(HANGS):
            while True:
                seconds = await self.seconds()
                assert seconds >= least
                if seconds < most:
                    return

    async def seconds(self) -> float:
        """Of one letter's way there and back."""
        began = monotonic()
        self.writer.write(b"x")
        await self.reader.readexactly(1)
        return monotonic() - began


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[hosts, relays], ids=["hosts", "relays"])
async def echo(request: pytest.FixtureRequest) -> AsyncIterator[Echo]:
    async with AsyncExitStack() as stack:
        try:
            link = (await stack.enter_async_context(request.param(["far"])))["far"]
        except NoEmulationError as error:
            pytest.skip(str(error))
        command = (*link.place.prefix, sys.executable, "-c", ECHO, link.place.listen)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        stack.push_async_callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        host, _, through = (await link.address_through(f"{link.place.listen}:{port}")).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(through))
        yield Echo(link, reader, writer)
        writer.close()
        await writer.wait_closed()


@with_the_hosts
async def test_an_echo_takes_both_delays(echo: Echo) -> None:
    await echo.link.delay(40)
    await echo.within(0.080, 0.110)  # one of them twice would take longer
    with pytest.raises(ValueError, match="a delay must be"):
        await echo.link.delay(-1)
    assert echo.link.shape.delay_ms == 40
    await echo.link.delay(0)
    await echo.within(0, 0.030)


@with_the_hosts
async def test_a_delay_does_not_narrow_the_link(echo: Echo) -> None:
    await echo.link.delay(20)
    data = bytes(range(256)) * 16384
    seconds = HANGS
    async with asyncio.timeout(HANGS):
        while seconds >= 2:  # TCP widens its windows first; 64 pieces of 64 KiB, one after the other, take 2.56 s
            began = monotonic()
            echo.writer.write(data)
            assert await echo.reader.readexactly(len(data)) == data
            seconds = monotonic() - began
    await echo.link.delay(0)


@with_the_hosts
async def test_a_cut_link_passes_nothing(echo: Echo) -> None:
    await echo.seconds()
    if not echo.link.place.prefix:
        with pytest.raises(NoEmulationError, match="only links between namespaces"):
            await echo.link.cut()
        return
    await echo.link.cut()
    echo.writer.write(b"lost?")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(echo.reader.readexactly(1), SOON)
    assert echo.link.shape.cut
    assert not echo.writer.is_closing()


async def test_each_relayed_host_has_a_link_of_its_own_and_a_service_that_is_not_there_closes_the_connection() -> None:
    async with relays(["near", "far"]) as links:
        await links["far"].delay(7)
        assert (links["near"].shape.delay_ms, links["far"].shape.delay_ms) == (0, 7)
        host, _, port = (await links["far"].address_through("127.0.0.1:1")).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


def test_what_enters_later_never_leaves_earlier() -> None:
    lane = DelayLine()
    assert lane.due(1.0, 20) == pytest.approx(1.02)
    assert lane.due(1.001, 0) == pytest.approx(1.02)  # the delay was taken away
    assert lane.due(1.5, 0) == 1.5


def test_impossible_delays_are_refused() -> None:
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="between 0 and 60,000"):
            Shape("far", wrong)
