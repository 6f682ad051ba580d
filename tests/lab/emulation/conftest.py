"""A host at a distance, of each kind that this machine allows, with an echo service on it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from crossdraft.lab.emulation import EmulatedHost, NoEmulationError, hosts, relays

HANGS = 120.0  # seconds after which something never comes, however busy the machine is
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


@dataclass(frozen=True)
class Echo:
    """A connection to the echo service through the link."""

    link: EmulatedHost
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, count: int) -> bytes:
        return await self.reader.readexactly(count)

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
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.send(b"x")
        await self.receive(1)
        return loop.time() - began


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[hosts, relays], ids=["hosts", "relays"])
async def echo(request: pytest.FixtureRequest) -> AsyncIterator[Echo]:
    made: Callable[..., AbstractAsyncContextManager[dict[str, EmulatedHost]]] = request.param
    network = made(["far"])
    try:
        links = await network.__aenter__()
    except NoEmulationError as error:
        pytest.skip(str(error))
    link = links["far"]
    command = (*link.place.prefix, sys.executable, "-c", ECHO, link.place.listen)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        host, _, through = (await link.address_through(f"{link.place.listen}:{port}")).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(through))
        yield Echo(link, reader, writer)
        writer.close()
        await writer.wait_closed()
    finally:
        process.kill()
        await process.wait()
        await network.__aexit__(None, None, None)
