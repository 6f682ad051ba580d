"""What a server knows and says of its sessions, and how a request's id comes to it."""

import asyncio
import logging

import grpc
import pytest

from crossdraft.rpc import log_context
from crossdraft.rpc.clients import TargetClient
from crossdraft.rpc.errors import BadMessage, ContextTooLong, ServiceError, name_of
from crossdraft.rpc.handlers import TARGET, Activity, Tally
from crossdraft.rpc.log_context import LONGEST, REQUEST_ID, RequestIdError, request_id
from crossdraft.rpc.server import Listening, Server
from crossdraft.rpc.target_codec import encode_request
from crossdraft.types.messages import OpenTarget, Pass, PassDone, SamplingOptions
from crossdraft.types.trees import TokenTree
from tests.rpc.services import FAULTY, FULL, ToyTargetService, exchange

OPENING = OpenTarget((1, 2), SamplingOptions(), None)
TARGET_OPENING = encode_request(OPENING).SerializeToString()
AT_ONCE = Listening(grace_seconds=0)


@pytest.mark.parametrize("given", ["a", "req-1", "chatcmpl-9:x._-", "0" * LONGEST])
def test_ids_of_clients_are_kept(given: str) -> None:
    assert request_id(given) == given


@pytest.mark.parametrize(
    "given", ["", "0" * (LONGEST + 1), "-a", "../a", "a/b", "a b", "a\nb", 'a"b', "é", "a\x00", "\u0661"]
)
def test_ids_that_could_spoil_a_line_are_refused(given: str) -> None:
    with pytest.raises(RequestIdError, match=r"x-request-id.*1 to 128 characters"):
        request_id(given)


def test_an_id_is_made_where_none_is_given() -> None:
    made = {request_id() for _ in range(50)}
    assert len(made) == 50
    assert all(request_id(one) == one for one in made)


async def test_tasks_inherit_what_they_are_about() -> None:
    async def seen() -> log_context.Subject:
        return log_context.current()

    with log_context.about(request="one"), log_context.about(peer="there"):
        task = asyncio.create_task(seen())
    assert await task == log_context.Subject("one", "", "there")
    assert log_context.current() == log_context.Subject()


async def test_sessions_are_counted_and_their_lines_have_the_id(caplog: pytest.LogCaptureFixture) -> None:
    subjects: list[log_context.Subject] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            subjects.append(log_context.current())

    noting = Noting()
    logging.getLogger("crossdraft").addHandler(noting)
    service = ToyTargetService()
    with caplog.at_level(logging.INFO, "crossdraft"):
        async with Server(TARGET, service, AT_ONCE) as server, TargetClient(server.address) as client:
            with log_context.about(request="req-7"):
                session = await client.open(OPENING)
            await session.run(Pass(1, (1,), TokenTree()))
            assert server.activity.open == 1
            await session.close()
            await service.wait_closed(1)
    logging.getLogger("crossdraft").removeHandler(noting)
    activity = server.activity
    assert (activity.open, activity.opened, dict(activity.ended)) == (0, 1, {"closed": 1})
    total = activity.total()
    assert (total.requests, total.replies, total.passes, total.nodes) == (2, 2, 1, 1)
    assert total.bytes_received == session.traffic.bytes_sent
    assert total.bytes_sent == session.traffic.bytes_received
    records = [record for record in caplog.records if record.name.startswith("crossdraft.")]  # asyncio's come late
    assert [record.levelname for record in records] == ["INFO", "INFO"]
    assert records[0].message == "session opened"
    assert "ended (closed)" in records[1].message
    assert "passes 1" in records[1].message
    assert {(one.request, one.session) for one in subjects} == {("req-7", "target-1")}
    assert all(one.peer.startswith("ipv4:127.0.0.1:") for one in subjects)


@pytest.mark.parametrize(("token", "outcome"), [(FULL, "context_too_long"), (FAULTY, "internal")])
async def test_how_a_session_failed_is_counted(token: int, outcome: str) -> None:
    async with Server(TARGET, ToyTargetService(), AT_ONCE) as server, TargetClient(server.address) as client:
        async with client.session(OPENING) as session:
            with pytest.raises(ServiceError):
                await session.run(Pass(1, (token,), TokenTree()))
        assert dict(server.activity.ended) == {outcome: 1}


async def test_an_id_that_cannot_be_used_is_refused() -> None:
    async with Server(TARGET, ToyTargetService(), AT_ONCE) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream("/crossdraft.v1.Target/Verify")(
                iter([TARGET_OPENING]), metadata=((REQUEST_ID, "a b"),), timeout=60
            )
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "x-request-id" in await call.details()
        _, code, _ = await exchange(server.address, "/crossdraft.v1.Target/Verify", [TARGET_OPENING])
        assert code is grpc.StatusCode.OK
        assert server.activity.opened == 1


def test_totals_do_not_fall_when_a_session_ends() -> None:
    activity = Activity("target")
    with activity.session("", "") as tally:
        tally.sent(PassDone(1, (), 0.5), b"12")
        during = activity.total()
    assert activity.total() == during == Tally(replies=1, bytes_sent=2, passes=1, model_seconds=0.5)
    assert activity.ended.total() == 1


def test_names_of_errors_are_as_many_as_their_classes() -> None:
    class More(BadMessage):
        pass

    assert name_of(ContextTooLong("text")) == "context_too_long"
    assert name_of(More("any text")) == "bad_message"
    assert name_of(ZeroDivisionError("any text")) == "internal"
