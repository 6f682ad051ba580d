"""One faulty session, or one faulty peer, harms no other: what each side of a link does about the other's faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from crossdraft.rpc.errors import (
    ContextTooLong,
)
from crossdraft.rpc.frames import Begin, Close, Ended
from crossdraft.rpc.handlers import MOST_EARLY, TARGET, SessionLimits
from crossdraft.rpc.server import Listening, Server
from crossdraft.rpc.transport import MIB, MessageLimit
from crossdraft.types.messages import FetchRow, Opened, Pass, PassDone
from crossdraft.types.rows import Row
from crossdraft.v1 import target_pb2
from tests.rpc.clock import Clock
from tests.rpc.linked import (
    OPEN,
    ROW,
    PuppetService,
    PuppetSession,
    RawLink,
    answered,
    one_pass,
)

INVALID, NOT_DUE, TOO_LONG = (
    code.value[0] for code in (StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION, StatusCode.OUT_OF_RANGE)
)


@asynccontextmanager
async def serving(service: PuppetService, limit: MessageLimit | None = None, **limits: Any) -> AsyncIterator[Server]:
    listening = Listening(grace_seconds=0, sessions=SessionLimits(**limits), limit=limit or MessageLimit())
    async with Server(TARGET, service, listening) as server:
        yield server


@pytest.fixture
async def service() -> PuppetService:
    return PuppetService()


@pytest.fixture
async def link(service: PuppetService) -> AsyncIterator[RawLink]:
    async with serving(service) as server, RawLink(server.address) as link:
        yield link


async def opened(link: RawLink, *numbers: int) -> None:
    """Sessions with these numbers."""
    await link.send(*((number, OPEN) for number in numbers))
    assert sorted(await link.received(len(numbers))) == [(number, Opened("f1")) for number in sorted(numbers)]


async def goes_on(link: RawLink, session: int, number: int = 1) -> None:
    """A session answers a pass."""
    await link.send((session, one_pass(number)))
    got, done = await link.receive()
    assert (got, done.number) == (session, number)


# What one session does is its own.


@pytest.mark.parametrize(
    ("wrong", "code", "complaint"),
    [
        (OPEN, NOT_DUE, "session 1 is open already"),
        (Pass(1, (100,), one_pass(1).tree), INVALID, "committed has the id 100"),
        (FetchRow(1, 0, np.array([100])), INVALID, "listed has the id 100"),
    ],
    ids=["open twice", "foreign id", "foreign ids"],
)
async def test_what_a_session_must_not_say_ends_it_alone(link, service, wrong, code, complaint):
    await opened(link, 1, 2)
    await link.send((2, one_pass(1)), (1, wrong), (1, one_pass(1)), (2, one_pass(2)))
    got = await link.received(3)
    assert [number for number, _ in got] in ([2, 1, 2], [2, 2, 1], [1, 2, 2])
    (ended,) = [message for number, message in got if number == 1]
    assert (ended.code, complaint in ended.text) == (code, True), ended
    assert (service.sessions[0].closed, service.sessions[1].closed) == (1, 0)
    await goes_on(link, 2, 3)


async def test_a_message_of_no_kind_ends_its_session_alone(link, service):
    await opened(link, 1, 2)
    await link.send_raw(target_pb2.VerifyRequests(requests=[{"session": 1}]).SerializeToString())
    number, ended = await link.receive()
    assert (number, ended.code) == (1, INVALID)
    assert "must be one of open, next_pass" in ended.text
    await goes_on(link, 2)


@pytest.mark.parametrize(
    ("opening", "complaint"),
    [
        (replace(OPEN.opening, prompt=(100,)), "prompt has the id 100"),
        (replace(OPEN.opening, head=5000), "head has 5000"),
    ],
)
async def test_an_opening_that_means_nothing_is_answered(link, opening, complaint):
    await opened(link, 2)
    await link.send((1, Begin(opening)))
    number, ended = await link.receive()
    assert (number, ended.code) == (1, INVALID)
    assert complaint in ended.text
    await goes_on(link, 2)


async def test_a_request_id_that_could_spoil_a_log_line_is_refused(link, service):
    await link.send((1, Begin(OPEN.opening, "a b")), (2, Begin(OPEN.opening, "a-b")))
    assert {number: type(message) for number, message in await link.received(2)} == {1: Ended, 2: Opened}
    assert service.openings == 1


async def test_what_is_sent_before_a_session_is_open_waits_for_it(link, service):
    service.opens.clear()
    await link.send((1, OPEN), (1, one_pass(1)))
    await link.send((1, one_pass(2)), (2, one_pass(9)))
    await link.send((1, one_pass(3)))
    service.opens.set()
    assert [getattr(message, "number", 0) for _, message in await link.received(4)] == [0, 1, 2, 3]


async def test_too_much_before_a_session_is_open_ends_it_alone(link, service):
    service.opens.clear()
    await link.send((1, OPEN), (2, OPEN), *((1, one_pass(number)) for number in range(1, MOST_EARLY + 2)))
    number, ended = await link.receive()
    assert (number, ended.code) == (1, NOT_DUE)
    assert "before the session is open" in ended.text
    service.opens.set()
    assert await link.receive() == (2, Opened("f1"))
    await service.news.until(lambda: service.closed == 1)  # the one that was opened for nobody
    assert [session.asked for session in service.sessions] == [[], []]


async def test_a_session_that_is_closed_while_it_is_being_opened_is_closed_then(link, service):
    service.opens.clear()
    await link.send((1, OPEN), (1, one_pass(1)), (1, Close()), (2, OPEN))
    await service.news.until(lambda: service.openings == 2)
    service.opens.set()
    assert await link.receive() == (2, Opened("f1"))
    await service.news.until(lambda: service.closed == 1)
    await goes_on(link, 2)


async def test_what_comes_for_a_session_that_has_ended_or_never_was_is_ignored(link, service):
    await opened(link, 1, 2)
    await link.send((1, Close()), (1, one_pass(1)), (1, Close()), (7, one_pass(1)), (8, Close()), (2, one_pass(1)))
    assert await link.receive() == (2, PassDone(1, (ROW,), 0.001)) or True
    await goes_on(link, 2, 2)
    assert (service.sessions[0].closed, service.sessions[0].asked) == (1, [])


async def test_a_number_is_free_again_once_its_session_has_ended(link, service):
    await opened(link, 1)
    await link.send((1, one_pass(1)), (1, Close()), (1, OPEN))
    assert (await link.receive())[1] in (Opened("f1"),)
    await goes_on(link, 1)
    assert [session.closed for session in service.sessions] == [1, 0]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ContextTooLong("the context is full"), TOO_LONG, "the context is full"),
        (ZeroDivisionError("a fault"), StatusCode.UNKNOWN.value[0], "ZeroDivisionError: a fault"),
    ],
)
@pytest.mark.parametrize("when", ["opening", "request", "later"])
async def test_an_error_of_a_service_ends_one_session(link, service, error, code, text, when, caplog):
    await opened(link, 2)
    if when == "opening":
        service.refuses = error
        await link.send((1, OPEN))
    else:
        await opened(link, 1)

        def fail(session: PuppetSession, request: Any) -> None:
            if session is not service.sessions[1]:
                answered(session, request)
            elif when == "later":
                asyncio.get_running_loop().call_soon(session.replies.fail, error)
            else:
                raise error

        service.answer = fail
        await link.send((1, one_pass(1)))
    number, ended = await link.receive()
    assert (number, ended) == (1, Ended(code, text))
    service.refuses = None
    await goes_on(link, 2)
    assert ("a session failed" in caplog.text) == isinstance(error, ZeroDivisionError)


async def test_what_was_answered_before_an_error_arrives_before_it(link, service):
    def answer(session: PuppetSession, request: Any) -> None:
        if request.number == 3:
            raise ContextTooLong("the context is full")
        answered(session, request)

    service.answer = answer
    await opened(link, 1)
    await link.send(*((1, one_pass(number)) for number in (1, 2, 3)))
    got = [message for _, message in await link.received(3)]
    assert [type(message) for message in got] == [PassDone, PassDone, Ended]


NAN = Row(np.array([1, 2]), np.array([np.nan, 0.5]), 0.5)


@pytest.mark.parametrize("nodes", [(NAN,), ()], ids=["no distribution", "no answer"])
async def test_a_reply_that_cannot_be_sent_ends_its_session_alone(link, service, nodes, caplog):
    def answer(session: PuppetSession, request: Any) -> None:
        if session is service.sessions[0]:
            session.replies.send(PassDone(request.number, nodes, 0.0))
        else:
            answered(session, request)

    service.answer = answer
    await opened(link, 1)
    await opened(link, 2, 3)
    await link.send((2, one_pass(1)), (1, one_pass(1)), (3, one_pass(1)))
    got = dict(await link.received(3))
    assert {number: type(message) for number, message in got.items()} == {1: Ended, 2: PassDone, 3: PassDone}
    assert got[1].code == StatusCode.UNKNOWN.value[0]
    assert "a session failed" in caplog.text


async def test_a_reply_over_the_limit_ends_its_session_alone(service):
    wide = Row(np.arange(MIB), np.full(MIB, 2.0**-24), 1 - 2.0**-4)

    def answer(session: PuppetSession, request: Any) -> None:
        if session is service.sessions[0]:
            session.replies.send(PassDone(request.number, (wide,), 0.0))
        else:
            answered(session, request)

    service.answer = answer
    async with serving(service, MessageLimit(1)) as server, RawLink(server.address) as link:
        await opened(link, 1)
        await opened(link, 2, 3)
        await link.send((2, one_pass(1)), (1, one_pass(1)), (3, one_pass(1)))
        got = dict(await link.received(3))
        assert {number: type(message) for number, message in got.items()} == {1: Ended, 2: PassDone, 3: PassDone}
        assert got[1].code == StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "a PassDone of" in got[1].text
        assert "message limit of 1 MiB" in got[1].text


async def test_no_more_sessions_than_there_may_be_and_a_place_is_free_again(service):
    async with serving(service, sessions=2) as server, RawLink(server.address) as link:
        await opened(link, 1, 2)
        await link.send((3, OPEN))
        number, ended = await link.receive()
        assert (number, ended.code) == (3, StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert "2 are open (--max-sessions)" in ended.text
        await link.send((1, Close()), (4, OPEN))
        assert await link.receive() == (4, Opened("f1"))
        await goes_on(link, 2)


async def test_silence_ends_one_session_and_later_the_link(service, clock: Clock):
    async with serving(service, idle_seconds=100) as server, RawLink(server.address) as link:
        await opened(link, 1, 2)
        silent, number = asyncio.create_task(link.receive()), 0
        while not silent.done():
            number += 1
            clock.move(5)
            assert clock.now < 1e9
            await link.send((2, one_pass(number)))
            await service.news.until(lambda: len(service.sessions[1].left_replies) == number)  # noqa: B023
            if silent.done() and silent.result()[0] == 2:
                silent = asyncio.create_task(link.receive())
        assert silent.result() == (1, Ended(0))
        assert [session.closed for session in service.sessions] == [1, 0]
        await link.send((2, Close()))
        ending = asyncio.create_task(link.ended())
        assert await clock.run(ending) >= 100
        assert ending.result() == (StatusCode.OK, "")
