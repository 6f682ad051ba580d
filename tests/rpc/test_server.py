"""Servers and clients: ports, health, the end; how many sessions, of whom, what is counted; what is beside the loop."""

import asyncio
import gc
import io
import json
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from crossdraft.config.service import SessionOptions
from crossdraft.rpc import errors, logs
from crossdraft.rpc.event_loop import LARGE, MEDIUM, SMALL, Beside, LoopLag
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.handlers import Activity, Tally
from crossdraft.rpc.links import Patience
from crossdraft.rpc.logs import MAX_LENGTH, RequestIdError, request_id
from crossdraft.rpc.metrics import exposition
from crossdraft.rpc.security import RenewedCredentials
from crossdraft.rpc.server import Endpoint, Listening, Server, freeze_heap, serve
from crossdraft.rpc.transport import MessageLimit
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import Branch, Drafted, OpenDrafter, PassDone, SamplingOptions
from crossdraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.rpc import linked
from tests.rpc.certificates import LOOPBACK, Cluster
from tests.rpc.clock import until
from tests.rpc.linked import AT_ONCE, DESCRIPTION, OPEN, SLOW, PuppetService, one_pass
from tests.rpc.sessions import DrafterClient, TargetClient

UNLIMITED = Listening(grace_seconds=0, sessions=SessionOptions(idle_seconds=86_400.0))
BEGUN = OpenDrafter(NOTHING, SamplingOptions(), None, 0)
LATE, FRESH = (Drafted(epoch, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),)) for epoch in (1, 2))


async def serving(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status


async def test_the_generated_stub_talks_to_the_server():
    service = Server(TARGET, PuppetService(), AT_ONCE)
    async with service as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        assert (await stub.Describe(common_pb2.DescribeRequest(), timeout=60)).fingerprint == "f1"
        call = stub.Verify(timeout=60)
        asked = [{"session": 1, "open": {"prompt": [1]}}, {"session": 1, "next_pass": {"number": 1}}]
        await call.write(target_pb2.VerifyRequests(requests=asked))
        replies: list[str] = []
        while len(replies) < 2:
            replies += [reply.WhichOneof("message") for reply in (await call.read()).replies]
        assert replies == ["opened", "done"]


async def test_health_and_reflection_are_on():
    async with Server(DRAFTER, PuppetService(), AT_ONCE) as server:
        for name in ("", "crossdraft.v1.Drafter"):
            assert await serving(server.address, name) == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=60):
                names = {service.name for service in answer.list_services_response.service}
        assert {"crossdraft.v1.Drafter", "grpc.health.v1.Health"} <= names


async def test_a_port_that_is_taken_is_an_error_that_says_so():
    async with Server(TARGET, PuppetService(), AT_ONCE) as server:
        port = int(server.address.split(":")[1])
        with pytest.raises(errors.CannotListen, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            await Server(TARGET, PuppetService(), Listening(port=port)).start()


async def test_sessions_that_outlive_the_grace_period_are_ended():
    service = PuppetService()
    server = Server(TARGET, service, Listening(grace_seconds=0.1))
    async with TargetClient(await server.start()) as client, client.session(OPEN) as session:
        await session.send(one_pass(1, SLOW))
        await asyncio.wait_for(server.drain(), 60)
        await service.wait_closed(1)


async def test_a_server_has_ended_once_its_calls_have():
    begun, ended = asyncio.Event(), False

    async def slow_to_end(request: bytes, context: object) -> bytes:
        nonlocal ended
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
            ended = True

    handlers = {"Call": grpc.unary_unary_rpc_method_handler(slow_to_end)}
    endpoint = Endpoint(AT_ONCE, {"a.Service": grpc.method_handlers_generic_handler("a.Service", handlers)})
    async with grpc.aio.insecure_channel(await endpoint.start()) as channel:
        call = channel.unary_unary("/a.Service/Call")(b"", timeout=60)
        first = [asyncio.ensure_future(one) for one in (begun.wait(), call.code())]
        await asyncio.wait(first, return_when="FIRST_COMPLETED")
        await endpoint.drain()
        assert ended
        assert await call.code() != grpc.StatusCode.OK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_serving_prints_one_line_and_ends_on_a_signal(number):
    class Output(io.StringIO):
        def flush(self) -> None:
            os.kill(os.getpid(), number)

    output = Output()
    server = Server(TARGET, PuppetService(), AT_ONCE)
    await asyncio.wait_for(serve(server, output), 60)
    about = {"model": DESCRIPTION.model, "fingerprint": DESCRIPTION.fingerprint}
    assert json.loads(output.getvalue()) == {"ready": True, "role": "target", "address": server.address} | about
    assert output.getvalue().count("\n") == 1


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_is_not_looked_at_again() -> None:
    kept: list[list[int]] = [[] for _ in range(1000)]
    freeze_heap()
    assert gc.get_freeze_count() >= 1000
    assert not {id(one) for one in gc.get_objects()} & {id(one) for one in kept}


@pytest.mark.parametrize("wrong", [{"port": 70_000}, {"metrics_port": -1}, {"grace_seconds": float("inf")}])
def test_numbers_that_cannot_be_are_refused_before_anything_starts(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"ports must|grace_seconds must"):
        Listening(**wrong)  # type: ignore[arg-type]


async def test_peers_are_told_apart_by_certificate(tmp_path):
    cluster = Cluster(tmp_path / "ca")
    tls, limits = cluster.files("target"), SessionOptions(max_sessions=2, max_sessions_per_peer=1)
    listening = Listening(grace_seconds=0, tls=tls, sessions=limits)
    clients = [RenewedCredentials(cluster.files(name, (name, *LOOPBACK))) for name in ("front1", "front2")]
    async with (
        Server(TARGET, PuppetService(), listening) as server,
        TargetClient(server.address, tls=clients[0]) as one,
        TargetClient(server.address, tls=clients[1]) as other,
        one.session(OPEN),
    ):
        with pytest.raises(errors.Full, match=r"1 of front1 are open \(--max-sessions-per-peer\)"):
            await one.open(OPEN)
        async with other.session(OPEN) as session:
            assert (await session.run(one_pass(1))).number == 1


def test_peers_without_sessions_are_forgotten():
    activity = Activity("target", SessionOptions(max_sessions=1))
    for number in range(3):
        activity.end(activity.begin("", f"ipv4:10.0.0.{number}", ""), "closed")
    assert not activity._peers


def test_ids_of_clients_are_kept_and_where_none_is_given_one_is_made() -> None:
    made = {request_id() for _ in range(50)}
    assert len(made) == 50
    assert all(request_id(one) == one for one in ("a", "req-1", "chatcmpl-9:x._-", "0" * MAX_LENGTH, *made))


@pytest.mark.parametrize(
    "given", ["", "0" * (MAX_LENGTH + 1), "-a", "../a", "a/b", "a b", "a\nb", 'a"b', "é", "a\x00", "\u0661"]
)
def test_ids_that_could_spoil_a_line_are_refused(given: str) -> None:
    with pytest.raises(RequestIdError, match=r"x-request-id.*1 to 128 characters"):
        request_id(given)


async def test_sessions_are_counted_and_their_lines_have_the_id(caplog: pytest.LogCaptureFixture) -> None:
    subjects: list[logs.LogContext] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            subjects.append(logs.current())

    noting = Noting()
    logging.getLogger("crossdraft").addHandler(noting)
    service = PuppetService()
    with caplog.at_level(logging.INFO, "crossdraft"):
        async with Server(TARGET, service, AT_ONCE) as server, TargetClient(server.address) as client:
            with logs.about(request="req-7"):
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
    class More(errors.BadMessage):
        pass

    assert errors.name_of(errors.ContextTooLong("text")) == "context_too_long"
    assert errors.name_of(More("any text")) == "bad_message"
    assert errors.name_of(ZeroDivisionError("any text")) == "internal"


@pytest.fixture
async def address(service: PuppetService, carried: None) -> AsyncIterator[str]:
    async with Server(TARGET, service, replace(UNLIMITED, port=linked.PORT)) as server:
        yield server.address


@pytest.fixture
async def client(address: str) -> AsyncIterator[TargetClient]:
    async with TargetClient(address) as client:
        yield client


async def test_nobody_listening_costs_a_bounded_wait_and_the_text_says_where():
    async with TargetClient("127.0.0.1:1", Patience(describe_seconds=60)) as client:
        with pytest.raises(errors.Unreachable, match=r"target at 127.0.0.1:1: .*check that the service runs there"):
            await client.describe()


@pytest.mark.wire
async def test_a_drafter_is_no_target(address):
    async with DrafterClient(address) as client:
        with pytest.raises(errors.NotServed, match=rf"^what listens at {address} is no drafter \(is it the target\?"):
            await client.describe()


@pytest.mark.wire
async def test_a_message_over_the_clients_limit_is_too_large(address):
    async with TargetClient(address, limit=MessageLimit(1)) as client:
        with pytest.raises(errors.TooLarge, match=r"an? OpenTarget of 1\d{6} bytes is over .* message limit of 1 MiB"):
            await client.open(replace(OPEN, prompt=(99,) * ((1 << 20) + 1)))
        assert await client.describe() == DESCRIPTION


async def test_a_message_over_the_services_limit_is_too_large_and_it_lives_on(service):
    listening = Listening(grace_seconds=0, limit=MessageLimit(1))
    async with Server(TARGET, service, listening) as server, TargetClient(server.address) as client:
        with pytest.raises(errors.TooLarge, match="raise the message limit"):
            await client.open(replace(OPEN, prompt=(99,) * (2 << 20)))
        assert await client.describe() == DESCRIPTION


async def test_a_service_that_came_back_with_another_model_is_noticed(client, service):
    await client.describe()
    service.description = replace(DESCRIPTION, fingerprint="f2")
    with pytest.raises(errors.NotServed, match="serves another model than it described") as raised:
        await client.open(OPEN)
    assert raised.value.lost
    assert (await client.describe()).fingerprint == "f2"
    async with client.session(OPEN) as session:
        assert (await session.run(one_pass(1, nodes=1))).number == 1


@pytest.mark.usefixtures("carried")
async def test_replies_that_are_dropped_before_they_leave_never_arrive():
    service = PuppetService(answer=None)
    async with (
        Server(DRAFTER, service, replace(UNLIMITED, port=linked.PORT)) as server,
        DrafterClient(server.address) as client,
        client.session(BEGUN) as session,
    ):
        replies = service.sessions[0].replies
        for told in (LATE, LATE):
            replies.send(told)
        replies.drop()
        replies.send(FRESH)
        assert (await session.receive()).epoch == 2


async def test_what_is_small_is_done_in_the_loop_and_the_rest_in_a_thread() -> None:
    beside = Beside("tests")
    assert await beside.run(SMALL, threading.get_ident) == threading.get_ident()
    for size in (SMALL + 1, LARGE):
        assert await beside.run(size, threading.get_ident) != threading.get_ident()


async def test_a_small_request_does_not_wait_for_large_ones() -> None:
    beside, ended = Beside("tests"), threading.Event()
    large = [asyncio.create_task(beside.run(LARGE, ended.wait)) for _ in range(8)]
    assert await beside.run(MEDIUM, threading.get_ident)
    assert not any(one.done() for one in large)
    ended.set()
    assert all(await asyncio.gather(*large))


async def test_a_loop_that_is_held_up_is_late() -> None:
    registry = CollectorRegistry()
    lag = LoopLag(registry, "front")
    lag.start()
    lag.start()
    await until(lambda: b'event_loop_lag_seconds_count{role="front"} 0.0' not in exposition(registry)[0])
    lag.stop()
    lag.stop()
    assert b"crossdraft_event_loop_lag_seconds_sum" in exposition(registry)[0]
