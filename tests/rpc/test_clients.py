"""Clients: sessions, waits for replies that are due, and services that are lost."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from crossdraft.config.service import SessionOptions
from crossdraft.rpc.errors import NotServed, TooLarge, Unreachable
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.links import Patience
from crossdraft.rpc.server import Listening, Server
from crossdraft.rpc.transport import MessageLimit
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import Branch, Drafted, OpenDrafter, SamplingOptions
from tests.rpc import linked
from tests.rpc.linked import DESCRIPTION, OPEN, PuppetService, one_pass
from tests.rpc.sessions import DrafterClient, TargetClient

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
        assert (await session.run(one_pass(1, nodes=1))).number == 1


BEGUN = OpenDrafter(NOTHING, SamplingOptions(), None, 0)
LATE, FRESH = (Drafted(epoch, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),)) for epoch in (1, 2))


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
