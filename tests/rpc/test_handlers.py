"""Sessions of a server: how many, of whom, how long silent; requests read ahead; what is counted and logged."""

import logging

import pytest

from crossdraft.config.service import SessionOptions
from crossdraft.rpc import log_context
from crossdraft.rpc.errors import BadMessage, ContextTooLong, Full, name_of
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.handlers import Activity, Tally
from crossdraft.rpc.log_context import MAX_LENGTH, RequestIdError, request_id
from crossdraft.rpc.security import client_credentials
from crossdraft.rpc.server import Listening, Server
from crossdraft.types.messages import PassDone
from tests.rpc.certificates import LOOPBACK, Cluster
from tests.rpc.linked import AT_ONCE, OPEN, PuppetService, one_pass
from tests.rpc.sessions import TargetClient


async def test_peers_are_told_apart_by_certificate(tmp_path):
    cluster = Cluster(tmp_path / "ca")
    tls, limits = cluster.files("target"), SessionOptions(max_sessions=2, max_sessions_per_peer=1)
    listening = Listening(grace_seconds=0, tls=tls, sessions=limits)
    clients = [client_credentials(cluster.files(name, (name, *LOOPBACK))) for name in ("front1", "front2")]
    async with (
        Server(TARGET, PuppetService(), listening) as server,
        TargetClient(server.address, tls=clients[0]) as one,
        TargetClient(server.address, tls=clients[1]) as other,
        one.session(OPEN),
    ):
        with pytest.raises(Full, match=r"1 of front1 are open \(--max-sessions-per-peer\)"):
            await one.open(OPEN)
        async with other.session(OPEN) as session:
            assert (await session.run(one_pass(1))).number == 1


def test_peers_without_sessions_are_forgotten():
    activity = Activity("target", SessionOptions(max_sessions=1))
    for number in range(3):
        activity.end(activity.begin("", f"ipv4:10.0.0.{number}", ""), "closed")
    assert not activity._peers


@pytest.mark.parametrize("given", ["a", "req-1", "chatcmpl-9:x._-", "0" * MAX_LENGTH])
def test_ids_of_clients_are_kept(given: str) -> None:
    assert request_id(given) == given


@pytest.mark.parametrize(
    "given", ["", "0" * (MAX_LENGTH + 1), "-a", "../a", "a/b", "a b", "a\nb", 'a"b', "é", "a\x00", "\u0661"]
)
def test_ids_that_could_spoil_a_line_are_refused(given: str) -> None:
    with pytest.raises(RequestIdError, match=r"x-request-id.*1 to 128 characters"):
        request_id(given)


def test_an_id_is_made_where_none_is_given() -> None:
    made = {request_id() for _ in range(50)}
    assert len(made) == 50
    assert all(request_id(one) == one for one in made)


async def test_sessions_are_counted_and_their_lines_have_the_id(caplog: pytest.LogCaptureFixture) -> None:
    subjects: list[log_context.LogContext] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            subjects.append(log_context.current())

    noting = Noting()
    logging.getLogger("crossdraft").addHandler(noting)
    service = PuppetService()
    with caplog.at_level(logging.INFO, "crossdraft"):
        async with Server(TARGET, service, AT_ONCE) as server, TargetClient(server.address) as client:
            with log_context.about(request="req-7"):
                session = await client.open(OPEN)
            await session.run(one_pass(1, 1))
            assert server.activity.open == 1
            await session.close()
            await service.wait_closed(1)
    logging.getLogger("crossdraft").removeHandler(noting)
    activity = server.activity
    assert (activity.open, activity.opened, dict(activity.ended)) == (0, 1, {"closed": 1})
    total = activity.total()
    assert (total.requests, total.replies, total.passes, total.pass_nodes) == (2, 2, 1, 1)
    close = 6  # bytes of the frame that closes it, which the client does not count
    assert 0 <= total.bytes_received - session.traffic.bytes_sent <= close
    assert total.bytes_sent == session.traffic.bytes_received
    records = [record for record in caplog.records if record.name.startswith("crossdraft.")]  # asyncio's come late
    assert [record.levelname for record in records] == ["INFO", "INFO"]
    assert records[0].message == "session opened"
    assert "ended (closed)" in records[1].message
    assert "passes 1" in records[1].message
    assert {(one.request, one.session) for one in subjects} == {("req-7", "target-1")}
    assert all(one.peer.startswith("ipv4:127.0.0.1:") for one in subjects)


def test_totals_do_not_fall_when_a_session_ends() -> None:
    activity = Activity("target", SessionOptions())
    entry = activity.begin("", "", "")
    entry.tally.sent(PassDone(1, (), 0.5), 2)
    during = activity.total()
    activity.end(entry, "closed")
    assert activity.total() == during == Tally(replies=1, bytes_sent=2, passes=1, model_seconds=0.5)
    assert activity.ended.total() == 1


def test_names_of_errors_are_as_many_as_their_classes() -> None:
    class More(BadMessage):
        pass

    assert name_of(ContextTooLong("text")) == "context_too_long"
    assert name_of(More("any text")) == "bad_message"
    assert name_of(ZeroDivisionError("any text")) == "internal"
