"""One faulty session, or one faulty peer, harms no other: what each side of a link does about the other's faults."""

import asyncio
import re
import threading
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.config.service import SessionOptions
from crossdraft.rpc import errors, handlers, links
from crossdraft.rpc.codec import MAX_LISTS
from crossdraft.rpc.event_loop import SMALL, Beside
from crossdraft.rpc.frames import MAX_MESSAGES, MAX_SHARED, TARGET, EndSession, FrameCodec, SessionEnded
from crossdraft.rpc.handlers import MAX_EARLY, UNREAD_LIMITS
from crossdraft.rpc.links import MAX_IN_LOOP, Outbox, Patience
from crossdraft.rpc.server import Listening, Server, without_collections
from crossdraft.rpc.transport import MIB, MessageLimit
from crossdraft.types.messages import FetchRow, Opened, OpenTarget, Pass, PassDone
from crossdraft.types.rows import Row
from crossdraft.v1 import target_pb2
from tests.rpc import linked
from tests.rpc.clock import HANGS, Clock
from tests.rpc.linked import OPEN, ROW, Heard, PuppetService, PuppetSession, RawLink, all_lost, answered, one_pass
from tests.rpc.sessions import TargetClient

pytestmark = pytest.mark.usefixtures("carried")
INVALID, NOT_DUE, TOO_LONG = (
    code.value[0] for code in (StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION, StatusCode.OUT_OF_RANGE)
)
NAN = Row(np.array([1, 2]), np.array([np.nan, 0.5]), 0.5)
WIDE = Row(np.arange(MIB), np.full(MIB, 2.0**-24), 1 - 2.0**-4)
ROW_OF_99 = Row(np.arange(99), np.full(99, 2.0**-10), 1 - 99 * 2.0**-10)
BAD_REPLY = target_pb2.VerifyReplies(replies=[{"session": 1, "done": {"number": 1}}]).SerializeToString()
Numbered = tuple[int, ...]  # what is sent: numbers that may be joined


@asynccontextmanager
async def serving(service: PuppetService, limit: MessageLimit | None = None, **limits: Any) -> AsyncIterator[Server]:
    sessions, limit = SessionOptions(**limits), limit or MessageLimit()
    listening = Listening(port=linked.PORT, grace_seconds=0, sessions=sessions, limit=limit)
    async with Server(TARGET, service, listening) as server:
        yield server


@pytest.fixture
async def link(service: PuppetService) -> AsyncIterator[RawLink]:
    async with serving(service) as server, RawLink(server.address) as link:
        yield link


async def opened(link: RawLink, *numbers: int) -> None:
    await link.send(*((number, OPEN) for number in numbers))
    assert sorted(await link.received(len(numbers))) == [(number, Opened("f1")) for number in sorted(numbers)]


async def goes_on(link: RawLink, session: int, number: int = 1) -> None:
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
@pytest.mark.wire
async def test_what_a_session_must_not_say_ends_it_alone(link, service, wrong, code, complaint):
    await opened(link, 1, 2)
    await link.send((2, one_pass(1)), (1, wrong), (1, one_pass(1)), (2, one_pass(2)))
    got = await link.received(3)
    assert [number for number, _ in got] in ([2, 1, 2], [2, 2, 1], [1, 2, 2])
    (ended,) = [message for number, message in got if number == 1]
    assert (ended.code, complaint in ended.text) == (code, True), ended
    assert (service.sessions[0].closed, service.sessions[1].closed) == (1, 0)
    await goes_on(link, 2, 3)


async def test_a_request_id_that_could_spoil_a_log_line_is_refused(link, service):
    await link.send((1, replace(OPEN, request_id="a b")), (2, replace(OPEN, request_id="a-b")))
    assert {number: type(message) for number, message in await link.received(2)} == {1: SessionEnded, 2: Opened}
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
    await link.send((1, OPEN), (2, OPEN), *((1, one_pass(number)) for number in range(1, MAX_EARLY + 2)))
    number, ended = await link.receive()
    assert (number, ended.code) == (1, NOT_DUE)
    assert "before the session is open" in ended.text
    service.opens.set()
    assert await link.receive() == (2, Opened("f1"))
    assert [session.asked for session in service.sessions] == [[]]


async def test_a_session_that_is_closed_while_it_is_being_opened_is_not_opened(link, service):
    service.opens.clear()
    await link.send((1, OPEN), (1, one_pass(1)))
    await service.news.until(lambda: service.openings == 1)
    await link.send((1, EndSession()), (2, OPEN))
    await service.news.until(lambda: service.openings == 2)
    service.opens.set()
    assert await link.receive() == (2, Opened("f1"))
    await goes_on(link, 2)
    assert len(service.sessions) == 1


async def test_of_sessions_that_are_closed_before_they_are_opened_no_work_is_left():
    """Else whoever begins and closes sessions would occupy the threads beyond every limit on sessions."""
    beside, first, free, prepared = Beside("openings"), asyncio.Event(), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def prepare(token: int) -> None:
        loop.call_soon_threadsafe(first.set)
        prepared.append(token)
        free.wait()

    class Preparing(PuppetService):
        async def open(self, request: Any, replies: Any) -> PuppetSession:
            await beside.run(SMALL + 1, prepare, request.prompt[0])
            return await super().open(request, replies)

    try:
        async with serving(Preparing()) as server, RawLink(server.address) as link:
            await link.send((1, begins(1)))
            await first.wait()
            for number in range(2, 8):
                await link.send((number, begins(number)), (number, EndSession()))
                await link.send((number + 10, begins(number)))
                await link.send((number + 10, EndSession()))
            await link.send((8, begins(8)))
            await link.send((8, begins(8)))  # refused: then all before it has been read
            assert (await link.receive())[0] == 8
            await link.send((9, begins(9)))
            free.set()
            assert await link.received(2) == [(1, Opened("f1")), (9, Opened("f1"))]
            assert prepared == [1, 9]
    finally:
        free.set()


def begins(token: int) -> OpenTarget:
    return replace(OPEN, prompt=(token,))


async def test_what_comes_for_a_session_that_has_ended_or_never_was_is_ignored(link, service):
    await opened(link, 1, 2)
    await link.send((1, EndSession()), (1, one_pass(1)), (1, EndSession()), (7, one_pass(1)), (8, EndSession()))
    await link.send((2, one_pass(1)))
    assert (await link.receive())[0] == 2
    await goes_on(link, 2, 2)
    assert (service.sessions[0].closed, service.sessions[0].asked) == (1, [])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (errors.ContextTooLong("the context is full"), TOO_LONG, "the context is full"),
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
            if request.number != 2:
                answered(session, request)
            elif when == "later":
                asyncio.get_running_loop().call_soon(session.replies.fail, error)
            else:
                raise error

        service.answer = fail
        await link.send((1, one_pass(1)), (1, one_pass(2)))
        assert (await link.receive())[1].number == 1  # what was answered before the error arrives before it
    assert await link.receive() == (1, SessionEnded(code, text))
    service.refuses = None
    await goes_on(link, 2)
    assert ("a session failed" in caplog.text) == isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize(
    ("nodes", "code", "said"),
    [
        ((NAN,), StatusCode.UNKNOWN, ("",)),
        ((), StatusCode.UNKNOWN, ("",)),
        ((WIDE,), StatusCode.RESOURCE_EXHAUSTED, ("a PassDone of", "message limit of 1 MiB")),
    ],
    ids=["no distribution", "no answer", "over the limit"],
)
@pytest.mark.wire
async def test_a_reply_that_cannot_be_sent_ends_its_session_alone(service, nodes, code, said, caplog):
    """Nothing follows it, which the client would take for another reply, that is not due."""

    def answer(session: PuppetSession, request: Any) -> None:
        if session is service.sessions[0]:
            for number, each in enumerate(((ROW,), nodes, (ROW,), (ROW,)), 1):
                session.replies.send(PassDone(number, each, 0.0))
        else:
            answered(session, request)

    service.answer = answer
    async with serving(service, MessageLimit(1)) as server, RawLink(server.address) as link:
        await opened(link, 1)
        await opened(link, 2, 3)
        await link.send((2, one_pass(1)), (1, one_pass(1)), (3, one_pass(1)))
        got = await link.received(4)
        done, ended = (message for number, message in got if number == 1)
        assert {number: type(message) for number, message in got if number != 1} == {2: PassDone, 3: PassDone}
        assert (done.number, ended.code) == (1, code.value[0])
        assert all(text in ended.text for text in said)
        assert code is not StatusCode.UNKNOWN or "a session failed" in caplog.text
        await goes_on(link, 2, 2)


async def test_no_more_sessions_than_there_may_be_and_a_place_is_free_again(service):
    async with serving(service, max_sessions=2) as server, RawLink(server.address) as link:
        await opened(link, 1, 2)
        await link.send((3, OPEN))
        number, ended = await link.receive()
        assert (number, ended.code) == (3, StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert "2 are open (--max-sessions)" in ended.text
        await link.send((1, EndSession()), (4, OPEN))
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
        assert silent.result() == (1, SessionEnded(0))
        assert [session.closed for session in service.sessions] == [1, 0]
        await link.send((2, EndSession()))
        ending = asyncio.create_task(link.ended())
        assert await clock.until(ending.done) >= 100
        assert ending.result() == (StatusCode.OK, "")


# What one link does is its own.

MISSING = {"session": 1, "next_pass": {"number": 1, "listed": 2**32 - 1}}
GARBAGE = {
    "no frame": b"\xff\xff\xff",
    "lists that nobody names": target_pb2.VerifyRequests(listed={"counts": [0]}).SerializeToString(),
    "lists that are missing": target_pb2.VerifyRequests(requests=[MISSING]).SerializeToString(),
    "too many messages": target_pb2.VerifyRequests(requests=[{}] * (MAX_MESSAGES + 1)).SerializeToString(),
    "too many lists": target_pb2.VerifyRequests(listed={"counts": [0] * (MAX_LISTS + 1)}).SerializeToString(),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.wire
async def test_a_frame_that_means_nothing_ends_its_link_and_no_other(service, garbage):
    async with serving(service) as server, RawLink(server.address) as bad, RawLink(server.address) as good:
        await opened(bad, 1, 2)
        await opened(good, 1)
        await bad.send_raw(garbage)
        code, text = await bad.ended()
        assert code is StatusCode.INVALID_ARGUMENT
        assert "frame" in text or "listed" in text
        assert ([session.closed for session in service.sessions], server.activity.open) == ([1, 1, 0], 1)
        await goes_on(good, 1)


@pytest.mark.wire
async def test_a_link_ends_with_its_status_also_while_its_first_frame_is_being_written(service):
    async with serving(service) as server:
        for _ in range(20):
            async with RawLink(server.address) as link:
                await link.send((1, OPEN), (1, one_pass(1)))
                await link.send_raw(b"\xff")
                assert (await link.ended())[0] is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("side", ["service", "client"])
@pytest.mark.wire
async def test_a_frame_has_a_limit_below_that_of_a_message(service, side):
    large = bytes(MessageLimit().frame_bytes + 1)  # would be no frame
    if side == "service":
        async with serving(service) as server, RawLink(server.address) as bad:
            await opened(bad, 1)
            await bad.send_raw(large)
            code, text = await bad.ended()
            assert code is StatusCode.RESOURCE_EXHAUSTED
    else:
        async with a_client(1) as (_, _, stream, heard, _):
            await stream.send_raw(large)
            (error,) = await all_lost(heard)
            assert isinstance(error, errors.TooLarge)
            text = str(error)
    assert "a frame of 8388609 bytes is over the 8388608 that this side's message limit of 32 MiB allows" in text


@pytest.mark.wire
async def test_while_a_large_frame_is_read_other_links_go_on_and_its_own_stays_in_order(service):
    read, in_loop = threading.Event(), threading.get_ident()

    def decode(raw: bytes, size: int | None) -> Iterable[tuple[int, Any]]:
        if len(raw) > MAX_IN_LOOP:
            assert threading.get_ident() != in_loop
            assert read.wait(HANGS)
        return TARGET.requests.decode(raw, size)

    role = replace(TARGET, requests=SimpleNamespace(decode=decode))
    serving = Server(role, service, Listening(port=linked.PORT, grace_seconds=0))
    async with serving as server, RawLink(server.address) as busy, RawLink(server.address) as good:
        await opened(busy, 1)
        await opened(good, 1)
        await busy.send((1, one_pass(1, *(7,) * (MAX_IN_LOOP + 1))))
        await busy.send((1, one_pass(2)))
        for number in range(1, 20):
            await goes_on(good, 1, number)
        assert service.sessions[0].asked == []
        read.set()
        assert [done.number for _, done in await busy.received(2)] == [1, 2]


async def test_a_client_that_vanishes_leaves_nothing_behind(service):
    async with serving(service) as server, RawLink(server.address) as good:
        await opened(good, 1)
        async with RawLink(server.address) as bad:
            await opened(bad, 1, 2)
            service.opens.clear()
            await bad.send((3, OPEN), (1, one_pass(1)))
            await service.news.until(lambda: service.openings == 4)
        await service.news.until(lambda: service.closed == 2)
        service.opens.set()
        assert server.activity.open == 1
        await goes_on(good, 1)
        assert len(service.sessions) == 3


@pytest.mark.parametrize("what", ["link", "description"])
async def test_a_client_that_leaves_while_it_is_written_to_leaves_no_traceback(service, what, caplog):
    def answer(session: PuppetSession, request: Any) -> None:
        nodes = (ROW,) if session is service.sessions[0] else (ROW_OF_99,) * 400
        session.replies.send(PassDone(request.number, nodes, 0.0))

    service.answer = answer
    service.description = replace(service.description, tokenizer_json="x" * 20 * MIB)
    async with serving(service) as server, RawLink(server.address) as good:
        await opened(good, 1)
        for number in range(1, 21):
            async with RawLink(server.address, options=linked.SMALL_WINDOW) as link:
                if what == "description":
                    call = link._channel.unary_unary("/crossdraft.v1.Target/Describe", bytes, bytes)
                    describing = asyncio.ensure_future(call(b""))
                else:
                    await opened(link, 1)
                    await link.send(*((1, one_pass(at)) for at in range(1, 30)))
                    await service.news.until(lambda: service.sessions[-1].left_replies)
                for at in range(10):
                    await goes_on(good, 1, 10 * number + at)
                if what == "description":
                    describing.cancel()
            await service.news.until(lambda: service.closed == (number if what == "link" else 0))  # noqa: B023
            await goes_on(good, 1, 10_000 + number)
    # gRPC has one queue of events a process: it may be handed here what a channel of an earlier test's loop still gets.
    late = "Event loop is closed"
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not [error for error in errors if not (error.exc_info and str(error.exc_info[1]) == late)]


@pytest.mark.wire
async def test_what_an_ended_session_holds_is_freed_without_a_collection(link, service):
    with without_collections():
        for number in range(1, 4):
            await opened(link, number)
            await link.send((number, EndSession()))
            await service.news.until(lambda: service.closed == number)  # noqa: B023
        ended = [*map(weakref.ref, service.sessions)]
        service.sessions.clear()
        await opened(link, 4)  # the last one's end is over
        assert [one() for one in ended] == [None] * 3


async def flood(link: RawLink, frames: list[bytes]) -> None:
    """Frame after frame, until the link ends or stands still."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for raw in frames:
            await link.send_raw(raw)


async def test_a_session_whose_replies_are_not_read_is_ended_and_others_of_other_links_go_on(service):
    async with serving(service) as server, RawLink(server.address) as stuck, RawLink(server.address) as good:
        frame = stuck.frame(*[(1, one_pass(1, nodes=500))] * 16)
        await opened(stuck, 1)
        await opened(good, 1)
        flooding = asyncio.create_task(flood(stuck, [frame] * 1000))
        await service.news.until(lambda: service.sessions[0].closed)
        for number in range(1, 20):
            await goes_on(good, 1, number)
        assert server.activity.ended == {"protocol_broken": 1}
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


@pytest.fixture
def few_waiting(monkeypatch) -> int:
    """How many messages of a link may wait before it is not read any more."""
    monkeypatch.setattr(links, "MAX_WAITING_MESSAGES", 300)
    return 300


@pytest.mark.parametrize("what", ["replies", "refusals"])
async def test_a_client_that_never_reads_takes_bounded_memory(service, few_waiting, what):
    """However many sessions it begins: nothing more is read of it until it reads."""

    def answer(session: PuppetSession, request: Any) -> None:
        rows = (ROW,) if request.committed else (ROW_OF_99,) * 200
        session.replies.send(PassDone(request.number, rows, 0.0))

    service.answer = answer
    async with (
        serving(service, MessageLimit(1), max_sessions=100) as server,
        RawLink(server.address) as good,
        RawLink(server.address, options=linked.SMALL_WINDOW) as stuck,
    ):
        await opened(good, 1)
        begun = good.frame(*((number, OPEN) for number in range(1, 200)))
        asked = good.frame(*((number, one_pass(1)) for number in range(1, 200)))
        frames = [begun, *[asked] * 5000] if what == "replies" else [begun] * 5000
        flooding = asyncio.create_task(flood(stuck, frames))
        number = left = 0
        while left < 20:  # passes since nothing more is read
            number += 1
            await good.send((1, one_pass(number, 1)))
            assert (await good.receive())[1].number == number
            waiting = max((link.outbox for link in server._handlers._links), key=lambda outbox: outbox._count)
            left += waiting.over(1)
            assert waiting._count <= few_waiting + MAX_MESSAGES
            assert waiting._weight <= (UNREAD_LIMITS + 1) * MIB
        assert not flooding.done()
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


async def test_a_session_whose_replies_nobody_reads_is_ended(link, service):
    def answer(session: PuppetSession, request: Any) -> None:
        for _ in range(handlers.MAX_UNREAD_REPLIES + 1):
            session.replies.send(PassDone(request.number, (ROW,), 0.0))

    service.answer = answer
    await opened(link, 1)
    await link.send((1, one_pass(1)))
    number, ended = await link.receive()
    assert (number, service.closed) == (1, 1)
    assert "replies wait: the client does not read them" in ended.text


async def test_a_client_that_reads_again_gets_what_waits_for_it(service, few_waiting):
    async with serving(service, MessageLimit(1)) as server, RawLink(server.address) as link:
        await link.send(*((number, OPEN) for number in range(1, 51)))
        asking = asyncio.create_task(flood(link, [link.frame((at % 50 + 1, one_pass(at))) for at in range(600)]))
        await service.news.until(lambda: sum(len(session.asked) for session in service.sessions) > few_waiting)
        assert len(await link.received(650)) == 650
        await asking


@pytest.mark.parametrize(("per_peer", "links"), [(1, 1), (3, 3), (None, 4)])
async def test_a_peer_has_as_many_links_as_it_may_have_sessions(service, monkeypatch, per_peer, links):
    """Workers of one host are one peer, and each of them has a link for every model and drafter."""
    monkeypatch.setattr(handlers, "MAX_LINKS", 1)
    async with serving(service, max_sessions=4, max_sessions_per_peer=per_peer) as server, AsyncExitStack() as others:
        for _ in range(links - 1):
            await opened(await others.enter_async_context(RawLink(server.address)), 1)
        async with RawLink(server.address) as link:
            await opened(link, 1)
            async with RawLink(server.address) as refused:
                peer = "in-process" if linked.PORT is None else "ipv4:127.0.0.1"
                assert await refused.ended() == (
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"no room for another session: {links} connections of {peer} are open "
                    "(--max-sessions, --max-sessions-per-peer)",
                )
            await link.send((1, EndSession()))
            await link.finish()
            await link.ended()
        async with RawLink(server.address) as again:
            await opened(again, 1)


# The client's side: what a service must not do.


@asynccontextmanager
async def a_client(count: int, **patience: float) -> AsyncIterator[Any]:
    """A service that does as it is told, its client, and so many open sessions: their link, listeners and ends."""
    async with linked.raw_service() as (service, address), TargetClient(address, Patience(**patience)) as client:
        await client.describe()
        yield service, client, *await begun(service, client, count)


async def begun(service: Any, client: TargetClient, count: int) -> tuple[Any, list[Heard], list[Any]]:
    heard = [Heard() for _ in range(count)]
    sessions = [client.begin(OPEN, one) for one in heard]
    stream, messages = None, 0
    while messages < count:
        stream, came = await service.frame()
        messages += len(came)
        await stream.send(*((number, Opened("f1")) for number, _ in came))
    for one in heard:
        await one.news.until(lambda one=one: one.is_open)
    return stream, heard, sessions


def done(number: int) -> PassDone:
    return PassDone(number, (ROW,), 0.001)


@pytest.mark.parametrize(
    ("raw", "error", "text"),
    [
        (BAD_REPLY, errors.Internal, "sent a reply that cannot be decoded: done needs rows or samples"),
        (TARGET.server(None).encode([(1, Opened("f2"))]), errors.NotServed, "serves another model than it described"),
        (TARGET.server(None).encode([(1, SessionEnded(0))]), errors.Closed, "was ended"),
        (TARGET.server(None).encode([(1, SessionEnded(11, "the context"))]), errors.ContextTooLong, "the context"),
        (TARGET.server(None).encode([(1, SessionEnded(99, "?"))]), errors.Internal, r"\?"),
    ],
    ids=["bad reply", "another model", "ended", "ended with an error", "ended with no code of gRPC's"],
)
@pytest.mark.wire
async def test_what_a_service_does_wrong_in_one_session_loses_it_alone(raw, error, text):
    async with a_client(2) as (service, _, stream, (lost, kept), sessions):
        await stream.send_raw(raw)
        (got,) = await all_lost([lost])
        assert (type(got), re.search(text, str(got)) is not None) == (error, True), got
        sessions[0].send(one_pass(1))  # of no effect
        sessions[1].send(one_pass(1))
        number, message = (await frames_of(service, 2))[-1]
        assert (number, type(message)) == (2, Pass)
        await stream.send((1, done(1)), (2, done(1)), (77, done(1)), (78, SessionEnded(0)))
        await kept.news.until(lambda: kept.replies)
        assert (lost.replies, kept.errors) == ([], [])


async def frames_of(service: Any, session: int) -> list[tuple[int, Any]]:
    """All messages up to the next one of a session."""
    messages: list[tuple[int, Any]] = []
    while not messages or messages[-1][0] != session:
        messages += (await service.frame())[1]
    return messages


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (Opened("f2"), errors.NotServed, "serves another model than it described"),
        (done(1), errors.Internal, "sent PassDone where Opened was due"),
        (SessionEnded(8, "no room for another session: 2 are open"), errors.Full, "2 are open"),
        (SessionEnded(14, "the service is shutting down"), errors.Unreachable, "is shutting down"),
    ],
    ids=["another model", "a reply too early", "full", "shutting down"],
)
async def test_a_session_that_is_not_opened_is_lost_alone(reply, error, text):
    async with a_client(1) as (service, client, stream, (kept,), _):
        lost = Heard()
        client.begin(OPEN, lost)
        await service.frame()
        await stream.send((2, reply))
        (got,) = await all_lost([lost])
        assert (type(got), text in str(got), got.lost) == (error, True, True), got
        await stream.send((1, done(1)))
        await kept.news.until(lambda: kept.replies)


async def test_a_session_that_was_closed_hears_nothing_more():
    async with a_client(2) as (service, _, stream, (closed, kept), sessions):
        sessions[0].close()
        assert (await service.frame())[1] == [(1, EndSession())]
        sessions[0].close()
        sessions[0].send(one_pass(1))
        await stream.send((1, done(1)), (1, SessionEnded(13, "?")), (2, done(1)))
        await kept.news.until(lambda: kept.replies)
        assert (closed.replies, closed.errors) == ([], [])


@pytest.mark.wire
async def test_a_request_that_cannot_be_sent_loses_its_session_alone():
    async with a_client(3) as (service, _, stream, (first, kept, second), sessions):
        sessions[0].send(replace(one_pass(1), wanted=()))
        sessions[1].send(one_pass(1))
        sessions[2].send(replace(one_pass(1), number=2**40))
        assert [type(error) for error in await all_lost([first, second])] == [errors.BadMessage, errors.BadMessage]
        assert "must want something" in str(first.errors[0])
        sent = [message for message in await frames_of(service, 2) if message[0] == 2]
        assert [(number, type(message)) for number, message in sent] == [(2, Pass)]
        await stream.send((2, done(1)))
        await kept.news.until(lambda: kept.replies)


FOREIGN_ROWS = TARGET.server(None).encode([(1, PassDone(1, (Row.certain(100),), 0.0))])
SPOILED = {
    "no frame": b"\xff\xff",
    "foreign ids in a column": FOREIGN_ROWS,
    "rows that nobody names": target_pb2.VerifyReplies(rows={"ids": {"counts": [0]}}).SerializeToString(),
    "too many messages": target_pb2.VerifyReplies(replies=[{}] * (MAX_MESSAGES + 1)).SerializeToString(),
}


@pytest.mark.parametrize("raw", SPOILED.values(), ids=SPOILED)
@pytest.mark.wire
async def test_a_frame_of_a_service_that_means_nothing_loses_its_link_whose_sessions_begin_again(raw):
    async with a_client(3) as (service, client, stream, heard, _):
        again: list[Heard] = []

        class Reopening(Heard):
            def lost(self, error: errors.ServiceError) -> None:
                super().lost(error)
                again.append(Heard())
                client.begin(OPEN, again[-1])

        reopening = Reopening()
        client.begin(OPEN, reopening)
        await stream.send_raw(raw)
        faults = await all_lost([*heard, reopening])
        assert {type(error) for error in faults} == {errors.Internal}
        assert "sent a frame that cannot be decoded" in str(faults[0])
        assert all(error.lost for error in faults)
        (one,) = again
        while (came := await service.frame())[0] is stream:
            pass
        await came[0].send(*((number, Opened("f1")) for number, _ in came[1]))
        await one.news.until(lambda: one.is_open)


@pytest.mark.parametrize(
    ("code", "error"), [(StatusCode.OK, errors.Closed), (StatusCode.UNAVAILABLE, errors.Unreachable)]
)
async def test_a_link_that_the_service_ends_loses_its_sessions(code, error):
    async with a_client(2) as (service, client, stream, heard, sessions):
        stream.end(code, "why")
        faults = await all_lost(heard)
        assert [type(one) for one in faults] == [error] * 2
        sessions[0].send(one_pass(1))  # of no effect
        sessions[1].close()
        await begun(service, client, 2)


async def test_a_session_without_its_reply_is_lost_alone_and_each_in_its_own_time(clock: Clock):
    async with a_client(3, reply_seconds=20) as (_, client, _, (idle, first, second), sessions):
        again = Heard()
        first.lost = lambda error: (first.errors.append(error), client.begin(OPEN, again))  # type: ignore[method-assign,func-returns-value]
        sessions[1].send(one_pass(1))
        clock.move(10)
        sessions[2].send(one_pass(1))
        clock.move(9)
        await asyncio.sleep(0)
        assert not first.errors
        assert await clock.until(lambda: bool(first.errors)) <= 2
        assert 8 <= await clock.until(lambda: bool(second.errors)) <= 11
        assert 9 <= await clock.until(lambda: bool(again.errors)) <= 11
        assert {type(error) for one in (first, second, again) for error in one.errors} == {errors.TimedOut}
        assert "no reply within 20 s" in str(first.errors[0])
        assert not idle.errors


async def test_replies_in_time_keep_a_session_for_ever(clock: Clock):
    async with a_client(1, reply_seconds=20) as (service, _, stream, (heard,), (session,)):
        for number in range(1, 10):
            session.send(one_pass(number))
            await service.frame()
            clock.move(15)
            await stream.send((1, done(number)))
            await heard.news.until(lambda: len(heard.replies) == number)  # noqa: B023
            clock.move(1000)
            await asyncio.sleep(0)
        assert not heard.errors


async def test_a_service_that_says_that_it_works_is_waited_for_and_lost_when_it_is_silent(clock: Clock):
    async with a_client(1, reply_seconds=20) as (_, _, stream, (heard,), (session,)):
        session.send(one_pass(1))
        for _ in range(9):
            since = session.ledger.since
            clock.move(15)
            await stream.send((1, Opened("f1")))
            await clock.still(lambda: session.ledger.since != since)  # noqa: B023
        assert (heard.replies, heard.errors) == ([], [])
        assert 19 <= await clock.until(lambda: bool(heard.errors)) <= 21
        assert type(heard.errors[0]) is errors.TimedOut


async def test_what_a_service_says_of_its_work_takes_the_place_of_what_waits(link, service):
    """However long nobody reads it: a client that does not read is not ended for that."""
    outbox: list[Any] = []

    def answer(session: PuppetSession, request: Any) -> None:
        for _ in range(3 * handlers.MAX_UNREAD_REPLIES):
            session.replies.working()
        outbox.append(session.replies._link.outbox._count)
        answered(session, request)

    service.answer = answer
    await opened(link, 1)
    await link.send((1, one_pass(1)))
    assert await link.receive() == (1, Opened("f1"))
    assert (await link.receive())[1].number == 1
    assert outbox == [1]


async def test_a_service_that_drains_lets_sessions_go_on_and_begins_none(service):
    server = Server(TARGET, service, Listening(port=linked.PORT, grace_seconds=300))
    await server.start()
    async with RawLink(server.address) as link, RawLink(server.address) as idle:
        await opened(link, 1)
        await idle.send()
        await opened(idle, 1)
        await idle.send((1, EndSession()))
        draining = asyncio.create_task(server.drain())
        assert await idle.ended() == (StatusCode.OK, "")
        await link.send((2, OPEN), (1, one_pass(1)))
        got = dict(await link.received(2))
        assert (got[1].number, got[2].code) == (1, StatusCode.UNAVAILABLE.value[0])
        assert "shutting down" in got[2].text
        await goes_on(link, 1, 2)
        await link.send((1, EndSession()))
        assert await link.ended() == (StatusCode.OK, "")
        await draining
    assert (service.closed, service.ended) == (2, True)


# Messages of one session stay in order.


def encode_numbered(messages: Any) -> bytes:
    if any(13 in message for _, message in messages):
        raise ValueError("13 cannot be sent")
    return bytes(sum(sum(message) for _, message in messages))


def an_outbox(refused: Any = lambda *_: None, encode: Any = encode_numbered, weight: Any = sum) -> Outbox[Numbered]:
    codec: FrameCodec[Numbered, Any] = FrameCodec(encode, lambda raw: (), weight)
    return Outbox(codec, SimpleNamespace(bytes=100, frame_bytes=100), refused)  # type: ignore[arg-type]


def joined(before: Numbered, after: Numbered) -> Numbered | None:
    return before + after if len(before) + len(after) <= 3 else None


operations = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), st.integers(1, 12) | st.integers(1, 120), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.just(("write",)),
    st.just(("sent",)),
)


@settings(max_examples=60)
@given(st.lists(operations, max_size=60), st.integers(0, 1))
async def test_messages_of_a_session_stay_in_order_however_frames_are_made(done_in_turn, light):
    put: dict[int, list[int]] = {number: [] for number in range(4)}
    gone: dict[int, list[int]] = {number: [] for number in range(4)}  # left, dropped or refused
    frames: list[int] = []
    room = asyncio.Semaphore(0)

    def left(session: int, message: Numbered, *_: float) -> None:
        gone[session] += message
        frames[-1:] = [frames[-1] + sum(message)] if frames and frames[-1] >= 0 else [sum(message)]

    def refused(session: int, fault: Exception) -> None:
        which = latest[0]
        latest.clear()
        assert which[0][0] == session
        ((_, message),) = which
        assert sum(message) > 100 if isinstance(fault, errors.TooLarge) else 13 in message
        gone[session] += message
        gone[session] += put[session][len(gone[session]) :]  # what waits behind it is dropped

    latest: list[Any] = []

    def encode(messages: Any) -> bytes:
        latest[:] = [messages]
        assert len(messages) <= MAX_MESSAGES
        return encode_numbered(messages)

    async def send(raw: bytes) -> None:
        assert 0 < len(raw) <= 100
        assert frames.pop() == len(raw)
        await room.acquire()

    outbox = an_outbox(refused, encode, lambda message: light * sum(message))
    writing = asyncio.create_task(outbox.write(send, left))
    for kind, *given_ in done_in_turn:
        match kind, given_:
            case "put", [session, number, joining]:
                put[session].append(number)
                outbox.put(session, (number,), 0.001 if joining else 0.0, joined if joining else None)
            case "drop", [session]:
                gone[session] += [number for message in outbox.drop(session) for number in message]
            case "write", []:
                await asyncio.sleep(0)
            case _:
                room.release()
    for _ in range(100):
        room.release()
    outbox.finish()
    await writing
    assert gone == put


async def test_a_message_that_may_wait_leaves_with_the_first_of_those_that_wait(clock: Clock):
    left: list[tuple[Numbered, float]] = []
    outbox = an_outbox()
    began = clock.now

    async def send(raw: bytes) -> None:
        """Takes no time."""

    writing = asyncio.create_task(outbox.write(send, lambda _, message, *__: left.append((message, clock.now - began))))
    for message, within in (((1,), 400.0), ((2,), 20.0), ((3,), 30.0)):
        outbox.put(1, message, within)
    await clock.until(lambda: len(left) == 3)
    outbox.put(1, (4,), 400.0)
    await clock.until(lambda: len(left) == 4)
    assert [message for message, _ in left] == [(1,), (2,), (3,), (4,)]
    (first,) = {after for _, after in left[:3]}
    assert 20 <= first < 30 <= 400 <= left[3][1] - first
    writing.cancel()


@pytest.mark.parametrize("seconds", [1e-4, 1.4e-3])
async def test_messages_may_wait_for_less_than_a_tick_of_the_clock(seconds: float) -> None:
    outbox = an_outbox()
    sent = asyncio.Queue[bytes]()
    writing = asyncio.create_task(outbox.write(sent.put, lambda *_: None))
    outbox.put(1, (1,), 400.0)
    outbox.put(2, (2,), seconds)
    outbox.put(3, (3,), seconds / 2)
    outbox.put(4, (4,), seconds)
    assert await sent.get() == encode_numbered([(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,))])
    writing.cancel()


async def test_messages_share_no_frame_that_is_too_large_for_several():
    frames: list[int] = []
    encode = lambda messages: bytes(sum(size for _, size in messages))  # noqa: E731
    outbox: Outbox[int] = Outbox(FrameCodec(encode, lambda raw: (), lambda _: 1), MessageLimit(), lambda *_: None)
    parts: list[int] = []

    async def send(raw: bytes) -> None:
        frames.append(len(raw))
        assert sum(parts) == len(raw) <= MAX_SHARED or parts == [len(raw)]
        parts.clear()

    sizes = (MAX_SHARED // 2, MAX_SHARED // 2, MAX_SHARED // 2, 3 * MAX_SHARED, 1)
    for session, size in enumerate(sizes):
        outbox.put(session, size)
    outbox.finish()
    await outbox.write(send, lambda _, size, *__: parts.append(size))
    assert sum(frames) == sum(sizes)
    assert len(frames) < len(sizes)


async def test_a_session_that_always_has_more_lets_others_through():
    outbox = an_outbox()
    order: list[int] = []

    async def send(raw: bytes) -> None:
        for _ in range(10):
            outbox.put(1, (10,))
        if len(order) > 1000:
            outbox.drop(1)
            outbox.finish()

    for _ in range(10):
        outbox.put(1, (10,))
    outbox.put(2, (10,))
    await outbox.write(send, lambda session, *_: order.append(session))
    assert order.index(2) < 20


# A round of many sessions costs a frame each way, not one for each of them.


@pytest.mark.wire
async def test_what_a_frame_asks_of_all_sessions_is_answered_with_one_frame(link):
    numbers = range(1, 33)
    await opened(link, *numbers)
    await link.send(*((number, one_pass(1)) for number in numbers))
    raw = await link.call.read()
    found = TARGET.client(None).decode(raw)
    assert [(number, type(reply)) for number, reply in found] == [(number, PassDone) for number in numbers]


async def test_what_all_sessions_make_of_a_frame_leaves_as_one_frame(monkeypatch):
    monkeypatch.setattr(links, "TURN_SECONDS", float("inf"))
    async with a_client(32) as (service, _, stream, heard, sessions):
        for one, session in zip(heard, sessions, strict=True):  # what each sends depends on its reply
            told = lambda reply, session=session: session.send(one_pass(1 + reply.number))  # noqa: E731
            monkeypatch.setattr(one, "received", told)
        await stream.send(*((number, done(1)) for number in range(1, 33)))
        _, asked = await service.frame()
        assert [(number, request.number) for number, request in asked] == [(number, 2) for number in range(1, 33)]
