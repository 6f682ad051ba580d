"""Whether anything can be served now: /ready, and the health service of the gRPC front; the process is alive anyway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.generation import SERVICE
from crossdraft.rpc.server import Listening, Server
from crossdraft.serving.backend import LocalBackend, LocalModel, NamedDrafter
from crossdraft.serving.grpc import GenerationServer
from tests.rpc.linked import PuppetService
from tests.serving.fakes import TOY, FakeBackend
from tests.serving.http.conftest import Front, front
from tests.serving.ports import free_port
from tests.text.kinds import kind

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdraft.client.discovery.WATCHED_EVERY", 0.01)
    monkeypatch.setattr("crossdraft.serving.grpc.REPORT_INTERVAL", 0.01)


def target(port: int | None = None) -> Server:
    """On another port each time, unless it is to come back at one."""
    service = PuppetService(description=kind("gpt2").described())
    return Server(TARGET, service, Listening(port=port or free_port(), grace_seconds=0))


def other_model() -> PuppetService:
    """A target of another vocabulary, which could be used as well if it were the first to answer."""
    return PuppetService(description=kind("llama2").described())


def port_of(server: Server) -> int:
    return int(server.address.rpartition(":")[2])


@asynccontextmanager
async def health(address: str) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def becomes(served: Front, status: int) -> str:
    """The text of /ready once it has this status."""
    async with asyncio.timeout(60):
        while (response := await served.http.get("/ready")).status_code != status:
            assert (await served.http.get("/health")).json() == {"status": "ok"}
    return response.text


async def test_targets_that_go_and_come_back() -> None:
    first, second = target(), target()
    await first.start()
    await second.start()
    addresses = (first.address, second.address)
    async with (
        LocalBackend(LocalModel("demo", addresses)) as outputs,
        front(outputs) as served,
        GenerationServer(outputs, Listening(grace_seconds=0)) as server,
        health(server.address) as stub,
        asyncio.timeout(60),
    ):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == STATUS.SERVING
        assert await becomes(served, 200) == '{"status":"ready","models":["demo"]}'
        await first.drain()
        assert await becomes(served, 200)  # the other one is there
        await second.drain()
        assert "no target of demo can be reached any more" in await becomes(served, 503)
        assert (await watch.read()).status == STATUS.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == STATUS.SERVING  # the process
        (listed,) = (await served.openai.models.list()).data
        assert listed.id == "demo"  # it is served, though nothing can be made now
        async with target(port_of(second)):
            assert (await watch.read()).status == STATUS.SERVING
            await becomes(served, 200)
        watch.cancel()


async def test_what_a_drafter_cannot_do_is_shown_though_the_model_is_served() -> None:
    port = free_port()
    drafters = (NamedDrafter("small", (f"127.0.0.1:{port}",)), NamedDrafter("none yet", ()))
    described = kind("gpt2").described()

    async def shown(*lines: str) -> None:
        while (found := (await served.http.get("/ready")).json().get("detail", [])) != [
            f"demo: {one}" for one in lines
        ]:
            assert await becomes(served, 200)
        (card,) = (await served.http.get("/v1/models")).json()["data"]
        assert card["detail"] == [line.removeprefix("demo: ") for line in found]

    absent = "drafter none yet: none there"
    async with target() as there:
        model = LocalModel("demo", (there.address,), drafters)
        async with LocalBackend(model) as outputs, front(outputs) as served, asyncio.timeout(60):
            await shown("drafter small: not there yet (unreachable); tried again", absent)
            async with Server(DRAFTER, PuppetService(description=described), Listening(port=port, grace_seconds=0)):
                await shown(absent)
            await shown("drafter small: lost; tried again", absent)
            other = replace(described, fingerprint="f2", tokenizer_json="{}")
            async with Server(DRAFTER, PuppetService(description=other), Listening(port=port, grace_seconds=0)):
                while "small: not used: the tokenizer of the drafter" not in await becomes(served, 200):
                    pass


async def test_targets_that_differ_from_the_start_have_answered() -> None:
    second = Server(TARGET, other_model(), Listening(port=free_port(), grace_seconds=0))
    async with target() as first, second:
        model = LocalModel("demo", (first.address, second.address))
        async with LocalBackend(model) as outputs, front(outputs) as served:
            assert "no target could be used since the start" in await becomes(served, 503)


async def test_a_request_waits_for_a_target_that_has_just_come_whether_it_names_the_model_or_not() -> None:
    port = free_port()
    async with (
        LocalBackend(LocalModel("demo", (f"127.0.0.1:{port}",), aliases=("other",))) as outputs,
        front(outputs) as served,
        asyncio.timeout(60),
    ):
        assert (await served.post("/tokenize", prompt="x")).status_code == 503
        async with target(port):
            assert (await served.post("/tokenize", prompt="x")).json()["count"] == 1


async def test_a_front_that_begins_before_its_targets_is_not_ready() -> None:
    outputs = FakeBackend(served=())
    async with (
        front(outputs) as served,
        GenerationServer(outputs, Listening(grace_seconds=0)) as server,
        health(server.address) as stub,
        asyncio.timeout(60),
    ):
        assert "no model can be served yet" in await becomes(served, 503)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == STATUS.NOT_SERVING
        outputs.served = (TOY, replace(TOY, name="gone", there=False))
        assert (await watch.read()).status == STATUS.SERVING
        assert await becomes(served, 200) == '{"status":"ready","models":["toy"]}'
        watch.cancel()
