"""Clients: sessions, waits for replies that are due, and services that are lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from crossdraft.rpc.clients import Patience
from crossdraft.rpc.errors import Closed, Internal, NotServed, TimedOut, TooLarge, Unreachable
from crossdraft.rpc.handlers import DRAFTER, TARGET, SessionLimits
from crossdraft.rpc.links import DrafterOwes, TargetOwes
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
from crossdraft.types.rows import DraftToken
from crossdraft.types.trees import ROOT, TokenTree
from tests.rpc.linked import DESCRIPTION, FOREIGN, SLOW, PuppetService, PuppetSession, aside
from tests.rpc.sessions import DrafterClient, DrafterSession, TargetClient
from tests.serving.ports import free_port

OPEN = OpenTarget((1,), SamplingOptions(), None)
AT_ONCE = Listening(grace_seconds=0, sessions=SessionLimits(idle_seconds=1e9))


@pytest.fixture
async def service() -> PuppetService:
    return PuppetService()


@pytest.fixture
async def address(service: PuppetService) -> AsyncIterator[str]:
    async with Server(TARGET, service, AT_ONCE) as server:
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


async def test_a_drafter_answers_with_its_epoch_and_letters_that_are_no_characters():
    async with Server(DRAFTER, PuppetService(aside), AT_ONCE) as server, DrafterClient(server.address) as client:
        assert await client.describe() == DESCRIPTION
        opening = OpenDrafter(Letters("a\xe4"), SamplingOptions(), None, 8)
        async with client.session(opening) as session:
            drafted = await session.draft(Draft(3, 0, Letters("\xb8"), 4))
    assert (drafted.epoch, drafted.reason) == (3, "cannot draft 4 after '\xb8'")


async def test_requests_are_sent_without_waiting_and_answered_in_order(client):
    async with client.session(OPEN) as session:
        for number in range(1, 6):
            await session.send(one_pass(number))
        assert [(await session.receive()).number for _ in range(5)] == [1, 2, 3, 4, 5]


async def test_replies_are_an_iterator_that_ends_when_the_session_is_closed(client):
    session = await client.open(OPEN)
    seen = []

    async def read() -> None:
        async for reply in session:
            seen.append(reply.number)
            if len(seen) == 2:
                await session.close()

    reader = asyncio.create_task(read())
    await session.send(one_pass(1))
    await session.send(one_pass(2))
    await asyncio.wait_for(reader, 60)
    assert seen == [1, 2]
    with pytest.raises(Closed):
        await session.send(one_pass(3))


async def test_another_task_closes_a_session_that_is_being_read(client):
    session = await client.open(OPEN)
    reader = asyncio.create_task(session.receive())
    await asyncio.sleep(0)  # lets it begin to read
    await session.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(reader, 60)


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


async def test_cancelling_the_caller_closes_the_services_session(client, service):
    async def ask() -> None:
        async with client.session(OPEN) as session:
            await session.run(one_pass(1, SLOW))

    asking = asyncio.create_task(ask())
    await service.wait_asked()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await service.wait_closed(1)


async def test_a_service_that_hangs_costs_a_bounded_wait(address, service, clock):
    async with TargetClient(address, Patience(reply_seconds=20)) as client, client.session(OPEN) as session:
        asking = asyncio.create_task(session.run(one_pass(1, SLOW)))
        await service.wait_asked()
        assert await clock.run(asking) >= 20
        with pytest.raises(TimedOut, match=f"target at {address}: no reply within 20 s"):
            await asking
    await service.wait_closed(1)


async def test_a_request_that_is_sent_while_an_idle_session_is_read_is_bounded_too(address, clock):
    async with TargetClient(address, Patience(reply_seconds=20)) as client, client.session(OPEN) as session:
        reader = asyncio.create_task(session.receive())
        await asyncio.sleep(0)  # lets it begin to read, with nothing due
        clock.move(1000)
        await session.send(one_pass(1, SLOW))
        assert not reader.done()
        await clock.run(reader)
        with pytest.raises(TimedOut):
            await reader


async def test_nobody_listening_costs_a_bounded_wait_and_the_text_says_where():
    async with TargetClient("127.0.0.1:1", Patience(describe_seconds=60)) as client:
        with pytest.raises(Unreachable, match=r"target at 127.0.0.1:1: .*check that the service runs there"):
            await client.describe()


async def test_a_drafter_is_no_target(address):
    async with DrafterClient(address) as client:
        with pytest.raises(NotServed, match=rf"^what listens at {address} is no drafter \(is it the target\?"):
            await client.describe()


async def test_a_reply_that_means_nothing_is_the_services_fault(client, service):
    async with client.session(OPEN) as session:
        with pytest.raises(Internal, match=r"sent a frame that cannot be decoded: rows.ids has the id 100"):
            await session.run(one_pass(1, FOREIGN))
        await service.wait_closed(1)


async def test_a_message_over_the_clients_limit_is_too_large(address):
    async with TargetClient(address, limit=MessageLimit(1)) as client:
        with pytest.raises(TooLarge, match=r"an? OpenTarget of 2\d{6} bytes is over .* message limit of 1 MiB"):
            await client.open(replace(OPEN, prompt=(99,) * (2 << 20)))
        assert await client.describe() == DESCRIPTION


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


@pytest.fixture
async def drafting_service() -> PuppetService:
    return PuppetService(answer=None)


@pytest.fixture
async def session(drafting_service: PuppetService) -> AsyncIterator[DrafterSession]:
    async with (
        Server(DRAFTER, drafting_service, AT_ONCE) as server,
        DrafterClient(server.address) as client,
        client.session(OpenDrafter(NOTHING, SamplingOptions(), None, 0)) as session,
    ):
        yield session


@pytest.fixture
async def served(session: DrafterSession, drafting_service: PuppetService) -> PuppetSession:
    """The service's side of it."""
    return drafting_service.sessions[0]


def told(epoch: int, first: int = 0) -> Drafted:
    return Drafted(epoch, (DraftToken(7),), 0.001, first=first)


async def test_a_newer_draft_arrives_while_the_older_one_has_no_reply(session, served, drafting_service):
    for epoch in (1, 2):
        await session.send(draft(epoch))
    await drafting_service.news.until(lambda: len(served.asked) == 2)
    assert [request.epoch for request in served.asked] == [1, 2]
    served.replies.send(told(2))
    assert (await session.receive()).epoch == 2


async def test_a_draft_has_many_replies_and_an_advance_none(session, served, drafting_service):
    await session.send(draft(1))
    for first in range(4):
        served.replies.send(told(1, first))
    await session.send(Advance(1, 6))
    assert [(await session.receive()).first for _ in range(4)] == [0, 1, 2, 3]
    branch = Branch(1, 3, Letters("x"), (5, 6))
    served.replies.send(Drafted(1, (), 0.001, first=4, branches=(branch,)))
    assert (await session.receive()).branches == (branch,)
    await drafting_service.news.until(lambda: len(served.asked) == 2)
    assert served.asked == [draft(1), Advance(1, 6)]


async def test_whole_drafts_and_scores_are_waited_for_past_what_is_left_of_an_older_epoch(session, served):
    for reply in (told(1), told(1, 1), told(2)):
        served.replies.send(reply)
    assert (await session.draft(Draft(2, 0, NOTHING, 1))).epoch == 2
    served.replies.send(Scored(2, np.array([0.5]), 0.0))
    assert (await session.score(Score(2, 0, (Letters("a"),), 1))).probabilities.tolist() == [0.5]


async def test_a_draft_of_an_epoch_that_nobody_began_is_a_fault_of_the_drafter(session, served):
    served.replies.send(told(3))
    with pytest.raises(Internal, match="answered epoch 3 where 2 was due"):
        await session.draft(draft(2))


async def test_replies_that_are_dropped_before_they_leave_never_arrive(session, served):
    for first in range(3):
        served.replies.send(told(1, first))
    served.replies.drop()
    served.replies.send(told(2))
    assert (await session.receive()).epoch == 2


def test_patience_must_be_positive():
    with pytest.raises(ValueError, match="must be above 0"):
        Patience(reply_seconds=0)


OPENED = Opened("f1")


def draft(epoch: int) -> Draft:
    return Draft(epoch, 0, NOTHING, 4, chunk=1)


def score(epoch: int) -> Score:
    return Score(epoch, 0, (Letters("a"),), 1)


def scored(epoch: int) -> Scored:
    return Scored(epoch, np.ones(1), 0.0)


def drafted(epoch: int) -> Drafted:
    return Drafted(epoch, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),))


def drafting() -> DrafterOwes:
    """Of a session that is open."""
    owes = DrafterOwes()
    assert owes.sent(OpenDrafter(NOTHING, SamplingOptions(), None, 0))
    assert owes.due
    owes.received(OPENED)
    assert not owes.due
    return owes


def test_a_drafter_owes_nothing_for_a_draft_that_was_ended():
    owes = drafting()
    assert owes.sent(Draft(1, 0, NOTHING, 4))
    assert not owes.sent(Advance(1, 0))
    assert not owes.due


def test_a_target_owes_each_request_a_reply_and_the_oldest_begins_the_wait():
    owes = TargetOwes()
    requests = (OpenTarget((1,), SamplingOptions(), None), Pass(1, (), TokenTree()), FetchRow(1, 0))
    assert [owes.sent(request) for request in requests] == [True, False, False]
    due = []
    for reply in (OPENED, PassDone(1, (), 0.0), PassDone(1, (), 0.0)):
        due.append(owes.due)
        owes.received(reply)
    assert due == [True] * 3
    assert not owes.due
    assert owes.sent(requests[1])


def test_a_run_is_owed_more_until_its_last_reply_and_its_end_nothing():
    owes = TargetOwes()
    assert owes.sent(Pass(1, (), TokenTree(), draws=True, run=8))
    for _ in range(2):
        owes.received(PassDone(1, (), 0.0, more=True))
        assert owes.due
    assert not owes.sent(RunTo(1, 0))
    owes.received(PassDone(1, (), 0.0))
    assert not owes.due


def test_a_reply_too_many_does_not_pay_for_what_is_asked_later():
    owes = TargetOwes()
    owes.received(PassDone(1, (), 0.0))
    owes.sent(Pass(1, (), TokenTree()))
    assert owes.due


def test_a_draft_is_owed_one_reply_and_more_may_come():
    owes = drafting()
    assert owes.sent(draft(1))
    assert owes.due
    for _ in range(3):
        owes.received(drafted(1))
        assert not owes.due


def test_nothing_is_owed_for_an_advance():
    owes = drafting()
    assert not owes.sent(Advance(1, 8))
    assert not owes.due
    owes.sent(draft(2))
    assert not owes.sent(Advance(2, 8))
    owes.received(drafted(2))
    assert not owes.due


def test_a_newer_draft_begins_the_wait_anew_and_older_replies_do_not_end_it():
    owes = drafting()
    assert owes.sent(draft(1))
    assert owes.sent(draft(2))
    owes.received(drafted(1))
    assert owes.due
    owes.received(drafted(2))
    assert not owes.due


def test_each_score_is_owed_a_reply_until_a_newer_draft():
    owes = drafting()
    owes.sent(draft(1))
    owes.received(drafted(1))
    assert [owes.sent(score(1)) for _ in range(2)] == [True, False]
    owes.received(scored(1))
    assert owes.due
    owes.sent(draft(2))
    owes.received(scored(1))
    owes.received(drafted(2))
    assert not owes.due
