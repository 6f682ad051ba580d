"""Both directions of a session are independent; whoever ends it, nothing stays behind."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from crossdraft.rpc.errors import BadRequest, ContextTooLong, Internal
from crossdraft.rpc.handlers import DRAFTER, TARGET
from crossdraft.rpc.server import Listening, Server
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import (
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    SamplingOptions,
    Score,
    Scored,
)
from crossdraft.types.rows import DraftToken
from crossdraft.types.trees import ROOT, TokenTree
from tests.rpc.linked import PuppetService, PuppetSession
from tests.rpc.services import SLOW, ToyTargetService
from tests.rpc.sessions import DrafterClient, DrafterSession, TargetClient

OPEN = OpenDrafter(NOTHING, SamplingOptions(), None, 0)
OPEN_TARGET = OpenTarget((1,), SamplingOptions(), None)
AT_ONCE = Listening(grace_seconds=0)


@pytest.fixture
async def service() -> PuppetService:
    return PuppetService(answer=None)


@pytest.fixture
async def server(service: PuppetService) -> AsyncIterator[Server]:
    async with Server(DRAFTER, service, AT_ONCE) as server:
        yield server


@pytest.fixture
async def session(server: Server) -> AsyncIterator[DrafterSession]:
    async with asyncio.timeout(120), DrafterClient(server.address) as client, client.session(OPEN) as session:
        yield session


@pytest.fixture
async def served(session: DrafterSession, service: PuppetService) -> PuppetSession:
    """The service's side of it."""
    (served,) = service.sessions
    return served


def draft(epoch: int) -> Draft:
    return Draft(epoch, 0, NOTHING, count=4, chunk=1)


def drafted(epoch: int, first: int = 0) -> Drafted:
    return Drafted(epoch, (DraftToken(7),), 0.001, first=first)


async def test_a_newer_draft_arrives_while_the_older_one_has_no_reply(session, served, service):
    for epoch in (1, 2):
        await session.send(draft(epoch))
    await service.news.until(lambda: len(served.asked) == 2)
    assert [request.epoch for request in served.asked] == [1, 2]
    served.replies.send(drafted(2))
    assert (await session.receive()).epoch == 2


async def test_a_draft_has_many_replies_and_an_advance_none(session, served, service):
    await session.send(draft(1))
    for first in range(4):
        served.replies.send(drafted(1, first))
    await session.send(Advance(1, 6))
    assert [(await session.receive()).first for _ in range(4)] == [0, 1, 2, 3]
    branch = Branch(1, 3, Letters("x"), (5, 6))
    served.replies.send(Drafted(1, (), 0.001, first=4, branches=(branch,)))
    assert (await session.receive()).branches == (branch,)
    await service.news.until(lambda: len(served.asked) == 2)
    assert served.asked == [draft(1), Advance(1, 6)]


async def test_whole_drafts_and_scores_are_waited_for_past_what_is_left_of_an_older_epoch(session, served):
    for reply in (drafted(1), drafted(1, 1), drafted(2)):
        served.replies.send(reply)
    assert (await session.draft(Draft(2, 0, NOTHING, 1))).epoch == 2
    served.replies.send(Scored(2, np.array([0.5]), 0.0))
    assert (await session.score(Score(2, 0, (Letters("a"),), 1))).probabilities.tolist() == [0.5]


async def test_a_draft_of_an_epoch_that_nobody_began_is_a_fault_of_the_drafter(session, served):
    served.replies.send(drafted(3))
    with pytest.raises(Internal, match="answered epoch 3 where 2 was due"):
        await session.draft(draft(2))


async def test_replies_that_are_dropped_before_they_leave_never_arrive(session, served):
    for first in range(3):
        served.replies.send(drafted(1, first))
    served.replies.drop()
    served.replies.send(drafted(2))
    assert (await session.receive()).epoch == 2


async def test_many_tasks_send_at_once(session, served, service):
    await asyncio.gather(*(session.send(Advance(1, count)) for count in range(1, 41)))
    await service.news.until(lambda: len(served.asked) == 40)
    assert [request.count for request in served.asked] == list(range(1, 41))


async def test_a_client_that_closes_leaves_nothing_behind(session, served, service):
    await session.send(draft(1))
    await service.news.until(lambda: served.asked)
    await session.close()
    await service.news.until(lambda: served.closed)


async def test_a_client_that_vanishes_between_two_replies_leaves_nothing_behind(server, service):
    async with DrafterClient(server.address) as client:
        session = await client.open(OPEN)
        service.sessions[0].replies.send(drafted(1))
        await session.receive()
    await service.news.until(lambda: service.closed == 1)  # the channel was closed, the session was not


@pytest.mark.parametrize(
    ("error", "meaning", "text"),
    [
        (ContextTooLong("the context is full"), ContextTooLong, "the context is full"),
        (ZeroDivisionError("a fault of the service"), Internal, "a fault of the service"),
    ],
)
async def test_an_error_of_the_session_ends_it_with_its_status(session, served, error, meaning, text):
    await session.send(draft(1))
    served.replies.fail(error)
    with pytest.raises(meaning, match=text):
        await session.receive()
    assert served.closed == 1


async def test_a_bad_request_ends_a_session_that_is_busy(session, served):
    await session.send(draft(1))
    await session.send(Draft(2, 0, NOTHING, count=65))
    with pytest.raises(BadRequest, match="count must be between 1 and 64, got 65"):
        await session.receive()
    assert served.closed == 1


async def test_a_bad_request_ends_a_session_that_answers_one_by_one_too():
    service = ToyTargetService()
    async with Server(TARGET, service, AT_ONCE) as server, TargetClient(server.address) as client:
        session = await client.open(OPEN_TARGET)
        await session.send(Pass(1, (SLOW,), TokenTree()))
        await session.send(Pass(2, (100,), TokenTree()))
        with pytest.raises(BadRequest, match="committed has the id 100"):
            await session.receive()
        await service.wait_closed(1)


async def test_passes_and_fetches_are_answered_in_order_while_others_wait():
    service = ToyTargetService()
    tree = TokenTree((5, 6), (ROOT, ROOT))
    async with (
        asyncio.timeout(60),
        Server(TARGET, service, AT_ONCE) as server,
        TargetClient(server.address) as client,
        client.session(OPEN_TARGET) as session,
    ):
        await session.send(Pass(1, (SLOW,), tree, wanted=(0, 2)))
        await session.send(FetchRow(1, 2))
        await session.send(Pass(2, (), tree))
        service.go_on.set()
        replies = [await session.receive() for _ in range(3)]
    assert [type(reply).__name__ for reply in replies] == ["PassDone", "RowFetched", "PassDone"]
    assert [len(reply.nodes) for reply in replies if isinstance(reply, PassDone)] == [2, 3]
