"""A link that is cut without a closed socket, and a process that is frozen, are noticed by both sides."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

import pytest

from crossdraft.rpc.errors import ServiceError, Unreachable
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.server import Server
from tests.rpc.linked import AT_ONCE, DESCRIPTION, OPEN, SLOW, Link, PuppetService, one_pass
from tests.rpc.sessions import ServiceSession, TargetClient
from tests.rpc.unhurried import unhurry

BOUND = 30  # seconds; about 3 are usual, gRPC's own are over 45
SERVE = """
import asyncio
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.server import Listening, Server, serve
from tests.rpc.linked import AT_ONCE, DESCRIPTION, OPEN, SLOW, PuppetService, one_pass
async def main():
    await serve(Server(TARGET, PuppetService(), Listening()))
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def unhurried() -> None:
    """gRPC's limits are as they are."""


async def described(client: TargetClient) -> None:
    """Returns when the service answers again."""
    while True:
        try:
            assert await client.describe() == DESCRIPTION
            return
        except ServiceError:
            pass


async def opened(client: TargetClient) -> ServiceSession:
    """A session; a machine that stands still in this moment loses the link, as it should."""
    async with asyncio.timeout(300):
        while True:
            with suppress(ServiceError):
                return await client.open(OPEN)


@pytest.mark.parametrize("under_way", [pytest.param(True, marks=pytest.mark.full), False])
async def test_a_link_that_forwards_nothing_is_noticed_on_both_sides_and_used_again(under_way):
    serving = Server(TARGET, service := PuppetService(), AT_ONCE)
    async with serving as server, Link(server.address) as link, TargetClient(link.address) as client:
        session = await opened(client)
        if under_way:
            await session.send(one_pass(1, SLOW))
        link.cut()
        with pytest.raises(Unreachable) as raised:
            await asyncio.wait_for(session.receive(), BOUND)
        assert raised.value.lost
        await service.wait_closed(service.openings)
        link.mend()
        await asyncio.wait_for(described(client), BOUND)


async def test_a_frozen_process_is_noticed_and_a_killed_one_at_once(monkeypatch):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, stdout=asyncio.subprocess.PIPE)
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 300))
        async with TargetClient(ready["address"]) as client:
            frozen = await opened(client)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(Unreachable):
                await asyncio.wait_for(frozen.receive(), BOUND)
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.wait_for(described(client), BOUND)
        unhurry(monkeypatch)  # pings would tell after a minute
        async with TargetClient(ready["address"]) as client:
            killed = await opened(client)
            process.kill()
            with pytest.raises(Unreachable):
                await asyncio.wait_for(killed.receive(), BOUND)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
