"""Limits on sessions: how many, of whom, how long silent; and a client that stops reading."""

import asyncio
from itertools import count

import grpc
import pytest

from crossdraft.rpc import target_codec
from crossdraft.rpc.clients import TargetClient
from crossdraft.rpc.errors import Closed, Full
from crossdraft.rpc.handlers import TARGET, Admission, SessionLimits, ended_when_silent
from crossdraft.rpc.security import client_credentials
from crossdraft.rpc.server import Listening, Server
from crossdraft.types.messages import OpenTarget, Pass, SamplingOptions
from crossdraft.types.trees import TokenTree
from tests.rpc.certificates import LOOPBACK, Cluster
from tests.rpc.clock import Clock
from tests.rpc.services import ToyTargetService

OPEN = OpenTarget((1,), SamplingOptions(), None)
RAW_OPEN = target_codec.encode_request(OPEN).SerializeToString()
VERIFY = "/crossdraft.v1.Target/Verify"
NODES = 1000  # of a pass whose reply has a hundred kilobytes


def serving(service: ToyTargetService, **limits: float) -> Server:
    return Server(TARGET, service, Listening(grace_seconds=0, sessions=SessionLimits(**limits)))


async def test_no_more_sessions_than_there_may_be_and_a_place_is_free_again():
    service = ToyTargetService()
    async with serving(service, sessions=2) as server, TargetClient(server.address) as client:
        first, second = await client.open(OPEN), await client.open(OPEN)
        with pytest.raises(
            Full, match=r"no room for another session: 2 are open \(--max-sessions\) \(use another"
        ) as full:
            await client.open(OPEN)
        assert full.value.lost
        assert (await second.run(Pass(1, (), TokenTree()))).number == 1
        await first.close()
        await service.wait_closed(1)
        async with client.session(OPEN) as again:
            assert (await again.run(Pass(1, (), TokenTree()))).number == 1


async def test_a_stream_that_says_nothing_has_a_place_too():
    async with serving(ToyTargetService(), sessions=1) as server, TargetClient(server.address) as client:
        await client.describe()
        silent = client.channel.stream_stream(VERIFY)(None)
        await silent.wait_for_connection()
        with pytest.raises(Full):
            await client.open(OPEN)
        silent.cancel()


async def test_peers_are_told_apart_by_certificate(tmp_path):
    cluster = Cluster(tmp_path / "ca")
    tls, limits = cluster.files("target"), SessionLimits(sessions=2, per_peer=1)
    listening = Listening(grace_seconds=0, tls=tls, sessions=limits)
    clients = [client_credentials(cluster.files(name, (name, *LOOPBACK))) for name in ("front1", "front2")]
    async with (
        Server(TARGET, ToyTargetService(), listening) as server,
        TargetClient(server.address, tls=clients[0]) as one,
        TargetClient(server.address, tls=clients[1]) as other,
        one.session(OPEN),
    ):
        with pytest.raises(Full, match=r"1 of front1 are open \(--max-sessions-per-peer\)"):
            await one.open(OPEN)
        async with other.session(OPEN) as session:
            assert (await session.run(Pass(1, (), TokenTree()))).number == 1


async def test_a_silent_session_is_ended_in_order_and_one_that_speaks_is_not(clock: Clock):
    service = ToyTargetService()
    async with serving(service, idle_seconds=100) as server, TargetClient(server.address) as client:
        silent, speaking = await client.open(OPEN), await client.open(OPEN)
        ended = asyncio.create_task(silent.receive())
        number, began = 0, clock.now
        while not ended.done():
            number += 1
            clock.move(5)
            assert clock.now - began < 1e6, "the silent session goes on"
            await speaking.run(Pass(number, (), TokenTree()))
        assert clock.now - began >= 100
        with pytest.raises(Closed):
            await ended
        await speaking.run(Pass(number + 1, (), TokenTree()))
        assert service.closed == 1
        ended = asyncio.create_task(speaking.receive())
        await clock.run(ended)
        with pytest.raises(Closed):
            await ended


async def test_a_client_that_stops_reading_loses_its_session(clock: Clock):
    service = ToyTargetService()
    tree = TokenTree((1,) * NODES, (-1,) * NODES)
    async with serving(service, idle_seconds=100) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream(VERIFY)(None)

        async def write() -> None:
            await call.write(RAW_OPEN)
            for number in count(1):
                await call.write(target_codec.encode_request(Pass(number, (), tree)).SerializeToString())

        writing, before = asyncio.create_task(write()), 0
        while not before or server.activity.total().replies > before:  # until no reply finds room any more
            before = server.activity.total().replies
            for _ in range(1000):
                await asyncio.sleep(0)
        assert service.closed == 0
        await clock.until(lambda: service.closed == 1)
        call.cancel()
        await asyncio.gather(writing, return_exceptions=True)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"sessions": 0}, "sessions must be at least 1, got 0"),
        ({"sessions": 5, "per_peer": 6}, "between 1 and those of all, 5, got 6"),
        ({"per_peer": 0}, "got 0"),
        ({"idle_seconds": 0}, "idle_seconds must be above 0, got 0"),
        ({"idle_seconds": float("nan")}, "idle_seconds must be above 0"),
    ],
)
def test_limits_are_checked_at_once(bad, complaint):
    with pytest.raises(ValueError, match=complaint):
        SessionLimits(**bad)


def test_peers_without_sessions_are_forgotten():
    admission = Admission(SessionLimits())
    for number in range(100):
        with admission.admitted(f"ipv4:10.0.0.{number}"):
            assert admission._open.total() == 1
    assert not admission._open


async def test_a_timeout_of_the_session_itself_is_not_taken_for_silence():
    with pytest.raises(TimeoutError, match="its own"):
        async with ended_when_silent(60):
            raise TimeoutError("its own")
