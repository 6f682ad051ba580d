"""Clients: sessions, waits for replies that are due, and services that are lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from crossdraft.config.service import SessionOptions
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.errors import Closed, NotServed, TimedOut, TooLarge, Unreachable
from crossdraft.rpc.handlers import DRAFTER, TARGET
from crossdraft.rpc.server import Listening, Server
from crossdraft.rpc.transport import MessageLimit
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import (
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    RunTo,
    SamplingOptions,
    Score,
    Scored,
)
from crossdraft.types.trees import ROOT, TokenTree
from tests.rpc import linked
from tests.rpc.linked import DESCRIPTION, PuppetService
from tests.rpc.sessions import DrafterClient, TargetClient
from tests.serving.ports import free_port

OPEN = OpenTarget((1,), SamplingOptions(), None)
REQUESTS = (OpenTarget, OpenDrafter, Pass, FetchRow, RunTo, Draft, Advance, Score)
AT_ONCE = Listening(grace_seconds=0, sessions=SessionOptions(idle_seconds=86_400.0))
pytestmark = pytest.mark.usefixtures("carried")


@pytest.fixture
async def service() -> PuppetService:
    return PuppetService()


@pytest.fixture
async def address(service: PuppetService) -> AsyncIterator[str]:
    async with Server(TARGET, service, replace(AT_ONCE, port=linked.PORT)) as server:
        yield server.address


@pytest.fixture
async def client(address: str) -> AsyncIterator[TargetClient]:
    async with TargetClient(address) as client:
        yield client


def one_pass(number: int, *committed: int) -> Pass:
    return Pass(number, committed, TokenTree((5,), (ROOT,)))


async def test_a_target_is_described_opened_asked_and_closed(client, service):
    assert await client.describe() == DESCRIPTION
    async with client.session(OPEN) as session:
        done = await session.run(one_pass(1))
        assert (done.number, len(done.nodes)) == (1, 2)
        fetched = await session.fetch(FetchRow(1, 1))
        assert (fetched.number, fetched.node, fetched.row.ids.tolist()) == (1, 1, [1, 2])
    await service.wait_closed(1)
    assert service.openings == 1


@pytest.mark.wire
async def test_traffic_counts_serialized_bytes(client):
    async with client.session(OPEN) as session:
        before = session.traffic.bytes_sent, session.traffic.bytes_received
        await session.run(one_pass(1))
        small = session.traffic.bytes_sent - before[0]
        await session.run(Pass(2, tuple(range(20, 60)), TokenTree()))
        large = session.traffic.bytes_sent - before[0] - small
    alone = 2 + 2 + 2  # envelope; session; envelope of the pass
    assert small == alone + 2 + 2 + 3  # number; tree's envelope; one token; a chain's parents go without saying
    assert large == alone + 2 + 2 + 2 + 40  # number; empty tree; packed field's head; forty ids of one byte
    assert session.traffic.bytes_received > before[1]
    assert session.traffic.codec_seconds > 0


@pytest.mark.wire
async def test_nobody_listening_costs_a_bounded_wait_and_the_text_says_where():
    async with TargetClient("127.0.0.1:1", Patience(describe_seconds=60)) as client:
        with pytest.raises(Unreachable, match=r"target at 127.0.0.1:1: .*check that the service runs there"):
            await client.describe()


@pytest.mark.wire
async def test_a_drafter_is_no_target(address):
    async with DrafterClient(address) as client:
        with pytest.raises(NotServed, match=rf"^what listens at {address} is no drafter \(is it the target\?"):
            await client.describe()


@pytest.mark.wire
async def test_a_message_over_the_clients_limit_is_too_large(address):
    async with TargetClient(address, limit=MessageLimit(1)) as client:
        with pytest.raises(TooLarge, match=r"an? OpenTarget of 1\d{6} bytes is over .* message limit of 1 MiB"):
            await client.open(replace(OPEN, prompt=(99,) * ((1 << 20) + 1)))
        assert await client.describe() == DESCRIPTION


@pytest.mark.wire
async def test_a_message_over_the_services_limit_is_too_large_and_it_lives_on(service):
    listening = Listening(grace_seconds=0, limit=MessageLimit(1))
    async with Server(TARGET, service, listening) as server, TargetClient(server.address) as client:
        with pytest.raises(TooLarge, match="raise the message limit"):
            await client.open(replace(OPEN, prompt=(99,) * (2 << 20)))
        assert await client.describe() == DESCRIPTION


async def test_a_service_that_came_back_with_another_model_is_noticed(client, service):
    await client.describe()
    service.description = replace(DESCRIPTION, fingerprint="f2")
    with pytest.raises(NotServed, match="serves another model than it described") as raised:
        await client.open(OPEN)
    assert raised.value.lost
    assert (await client.describe()).fingerprint == "f2"
    async with client.session(OPEN) as session:
        assert (await session.run(one_pass(1))).number == 1


@pytest.mark.wire
async def test_a_service_that_is_gone_breaks_the_session_and_is_found_again(service):
    port = free_port()
    first = Server(TARGET, service, replace(AT_ONCE, port=port))
    await first.start()
    async with TargetClient(f"127.0.0.1:{port}") as client:
        session = await client.open(OPEN)
        await first.drain()
        with pytest.raises((Unreachable, Closed)) as raised:
            await session.run(one_pass(1))
        assert raised.value.lost
        async with asyncio.timeout(60), Server(TARGET, service, replace(AT_ONCE, port=port)):
            while True:
                try:
                    assert await client.describe() == DESCRIPTION
                    break
                except (Unreachable, TimedOut):
                    pass


def test_patience_must_be_positive():
    with pytest.raises(ValueError, match="must be above 0"):
        Patience(reply_seconds=0)


OPENED, BEGUN = Opened("f1"), OpenDrafter(NOTHING, SamplingOptions(), None, 0)
PASS, DONE, RUN = Pass(1, (), TokenTree()), PassDone(1, (), 0.0), Pass(1, (), TokenTree(), draws=True, run=8)
OLD, NEWER = (Draft(epoch, 0, NOTHING, 4, chunk=1) for epoch in (1, 2))
LATE, FRESH = (Drafted(epoch, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),)) for epoch in (1, 2))
SCORE, SCORED = Score(1, 0, (Letters("a"),), 1), Scored(1, np.ones(1), 0.0)
NEW, DUE, PAID = "the wait begins", "a reply is due", "nothing is due"


async def test_replies_that_are_dropped_before_they_leave_never_arrive():
    service = PuppetService(answer=None)
    async with (
        Server(DRAFTER, service, replace(AT_ONCE, port=linked.PORT)) as server,
        DrafterClient(server.address) as client,
        client.session(BEGUN) as session,
    ):
        replies = service.sessions[0].replies
        for told in (LATE, LATE):
            replies.send(told)
        replies.drop()
        replies.send(FRESH)
        assert (await session.receive()).epoch == 2
