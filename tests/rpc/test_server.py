"""Servers: ports, health, reflection, messages out of order, the end, and a frozen heap."""

import asyncio
import gc
import io
import json
import os
import signal
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.server import Listening, Server, freeze_heap, serve
from crossdraft.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.rpc.linked import AT_ONCE, DESCRIPTION, OPEN, SLOW, PuppetService, one_pass
from tests.rpc.sessions import TargetClient


async def serving(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status


async def test_the_generated_stub_talks_to_the_server():
    async with Server(TARGET, PuppetService(), AT_ONCE) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
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
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            await Server(TARGET, PuppetService(), Listening(port=port)).start()


async def test_sessions_that_outlive_the_grace_period_are_ended():
    service = PuppetService()
    server = Server(TARGET, service, Listening(grace_seconds=0.1))
    async with TargetClient(await server.start()) as client, client.session(OPEN) as session:
        await session.send(one_pass(1, SLOW))
        await asyncio.wait_for(server.drain(), 60)
        await service.wait_closed(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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
