"""The backend of this process: what is served, from where, how many at once, what opens late, and readiness."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from crossdraft.client import GenerationRequest, Kind, Pipeline, Reason, Token
from crossdraft.rpc.errors import Overloaded, Replaced, ServiceError
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.generation import SERVICE, Committed
from crossdraft.rpc.links import Patience
from crossdraft.rpc.server import Listening, Server
from crossdraft.serving import backend as backends
from crossdraft.serving.grpc import GenerationServer
from tests.rpc.clock import until
from tests.rpc.linked import PuppetService
from tests.serving.fakes import figures
from tests.serving.http.conftest import Front, fault, front
from tests.serving.ports import free_port
from tests.text.kinds import kind

NOWHERE = "127.0.0.1:9"  # the port for what is thrown away: nobody listens
MODEL = backends.LocalModel("demo", (NOWHERE,), (backends.NamedDrafter("a", (NOWHERE,)),))
QUICK = backends.LocalOptions(max_outputs=1, patience=Patience(describe_seconds=0.2))


def order(model: str = "demo", drafter: str | None = None) -> backends.OutputRequest:
    return backends.OutputRequest("id", model, GenerationRequest("Say"), drafter)


async def first(outputs: backends.LocalBackend, of: backends.OutputRequest) -> object:
    async with aclosing(outputs.stream(of)) as stream:
        return await anext(stream)


async def test_a_model_without_a_target_is_not_served_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with backends.LocalBackend(MODEL, QUICK) as outputs:
        assert await outputs.models() == ()
        assert "demo cannot be served yet: target at 127.0.0.1:9" in caplog.text
        for drafter in (None, "a", ""):
            with pytest.raises(ServiceError, match=r"target at 127\.0\.0\.1:9"):
                await first(outputs, order(drafter=drafter))
        assert outputs.running == 0


async def test_names_that_are_not_there() -> None:
    async with backends.LocalBackend(MODEL, QUICK) as outputs:
        with pytest.raises(backends.UnknownModelError, match="there is no model 'other'; there is demo"):
            await first(outputs, order("other"))
        with pytest.raises(backends.UnknownModelError, match="'demo' has no drafter 'b'; there is a"):
            await first(outputs, order(drafter="b"))


async def test_one_more_than_there_is_room_for() -> None:
    outputs = backends.LocalBackend(MODEL, backends.LocalOptions(1, Patience(describe_seconds=60)))
    waiting = asyncio.create_task(first(outputs, order()))  # for its target
    await until(lambda: outputs.running)
    with pytest.raises(Overloaded, match="1 outputs are being generated, which is the limit") as caught:
        await first(outputs, order())
    assert caught.value.after >= 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert outputs.running == 0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: backends.NamedDrafter("", (NOWHERE,)), "a drafter needs a name"),
        (lambda: backends.NamedDrafter("auto", (NOWHERE,)), "'auto' stands for the fastest"),
        (lambda: backends.NamedDrafter("none", (NOWHERE,)), "'none' for none"),
        (lambda: backends.LocalModel("", (NOWHERE,)), "no name may be empty"),
        (lambda: backends.LocalModel("demo", (NOWHERE,), aliases=("small", "")), "no name may be empty"),
        (lambda: backends.LocalModel("demo", ()), "at least one target"),
        (lambda: backends.LocalModel("demo", (NOWHERE,), MODEL.drafters * 2), "have the same name: a, a"),
    ],
)
def test_what_cannot_be_served(make: object, complaint: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=complaint):
        make()


async def test_a_model_is_served_once_its_target_is_there_though_nobody_asks_for_it() -> None:
    port = free_port()
    async with backends.LocalBackend(backends.LocalModel("demo", (f"127.0.0.1:{port}",))) as outputs, target(port):
        await until(lambda: outputs._default.usable)
        assert [model.name for model in await outputs.models()] == ["demo"]


async def test_addresses_that_change_before_a_target_is_there_are_followed() -> None:
    async with backends.LocalBackend(backends.LocalModel("demo", (NOWHERE,))) as outputs, target() as there:
        await outputs.follow(backends.LocalModel("demo", (there.address,)))
        assert (await outputs.written("demo", "x")).ids
        assert [model.there for model in await outputs.models()] == [True]


def changing(tokens: int) -> AsyncMock:
    """A pipeline whose model is replaced after so many tokens of its first output, unless that has its two before."""
    pipeline = AsyncMock(Pipeline, usable=False, models=SimpleNamespace(target=SimpleNamespace(fingerprint="old")))

    def said(count: int) -> Iterator[tuple[Token, ...]]:
        yield from [(Token(7, "x", b"x", Kind.BONUS, None),)] * min(count, 2)
        if count < 2:
            pipeline.models.target.fingerprint = "new"
            raise Replaced("it was replaced by another model")
        yield ()

    outputs = [AsyncMock(prompt_tokens=(), reason=Reason.LENGTH, statistics=figures(2)) for _ in range(2)]
    for output, count in zip(outputs, (tokens, 2), strict=True):
        output.__aenter__.return_value = output
        output.together.side_effect = said(count)
    pipeline.run.side_effect = outputs
    return pipeline


async def made(pipeline: AsyncMock, request: backends.OutputRequest) -> list[str]:
    """Which model made each token."""
    outputs = backends.LocalBackend(MODEL, QUICK)
    outputs._pipelines["a"] = pipeline
    async with aclosing(outputs.stream(request)) as items:
        return [item.target async for item in items if isinstance(item, Committed)]


async def test_an_output_that_has_not_begun_is_made_by_the_model_that_is_served_now() -> None:
    assert (await made(changing(3), order()), await made(changing(0), order())) == (["old", "old"], ["new", "new"])
    with pytest.raises(Replaced):
        await made(changing(1), order())


async def test_an_output_is_resumed_by_the_model_that_began_it_only() -> None:
    assert await made(changing(3), replace(order(), target="old")) == ["old", "old"]
    with pytest.raises(Replaced):
        await made(changing(0), replace(order(), target="old"))
    with pytest.raises(Replaced, match="'demo' was replaced by another model while this output was being made"):
        await made(changing(3), replace(order(), target="older"))


STATUS = health_pb2.HealthCheckResponse


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdraft.client.discovery.WATCHED_EVERY", 0.01)
    monkeypatch.setattr("crossdraft.serving.grpc.REPORT_INTERVAL", 0.01)


def puppet(role: Any, port: int, model: str = "gpt2", **changes: Any) -> Server:
    service = PuppetService(description=kind(model).described(**changes))
    return Server(role, service, Listening(port=port, grace_seconds=0))


def target(port: int | None = None) -> Server:
    """On another port each time, unless it is to come back at one."""
    return puppet(TARGET, port or free_port())


@asynccontextmanager
async def fronts(outputs: Any) -> AsyncIterator[tuple[Front, health_pb2_grpc.HealthStub, Any]]:
    """Both, of which gRPC's has a stub of its health and a call that watches the service; for a minute."""
    async with (
        asyncio.timeout(60),
        front(outputs) as served,
        GenerationServer(outputs, Listening(grace_seconds=0)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        yield served, stub, watch
        watch.cancel()


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
    model = backends.LocalModel("demo", (first.address, second.address))
    async with backends.LocalBackend(model) as outputs, fronts(outputs) as (served, stub, watch):
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
        async with target(int(second.address.rpartition(":")[2])):
            assert (await watch.read()).status == STATUS.SERVING
            await becomes(served, 200)


async def test_what_a_drafter_cannot_do_is_shown_though_the_model_is_served() -> None:
    port = free_port()
    drafters = (backends.NamedDrafter("small", (f"127.0.0.1:{port}",)), backends.NamedDrafter("none yet", ()))

    async def shown(*lines: str) -> None:
        due = [f"demo: {one}" for one in lines]
        while (found := (await served.http.get("/ready")).json().get("detail", [])) != due:
            assert await becomes(served, 200)
        (card,) = (await served.http.get("/v1/models")).json()["data"]
        assert card["detail"] == [line.removeprefix("demo: ") for line in found]

    absent = "drafter none yet: none there"
    async with target() as there:
        model = backends.LocalModel("demo", (there.address,), drafters)
        async with backends.LocalBackend(model) as outputs, front(outputs) as served, asyncio.timeout(60):
            await shown("drafter small: not there yet (unreachable); tried again", absent)
            async with puppet(DRAFTER, port):
                await shown(absent)
            await shown("drafter small: lost; tried again", absent)
            async with puppet(DRAFTER, port, fingerprint="f2", tokenizer_json="{}"):
                while "small: not used: the tokenizer of the drafter" not in await becomes(served, 200):
                    pass


async def test_targets_that_differ_from_the_start_have_answered() -> None:
    """The second one has another vocabulary, and could be used as well if it were the first to answer."""
    async with target() as first, puppet(TARGET, free_port(), "llama2") as second:
        model = backends.LocalModel("demo", (first.address, second.address))
        async with backends.LocalBackend(model) as outputs, front(outputs) as served:
            assert "no model can be served yet. demo: targets: 1 of 2 not used: serves" in await becomes(served, 503)
            assert second.address not in await becomes(served, 503)


async def test_a_request_waits_for_a_target_that_has_just_come_whether_it_names_the_model_or_not() -> None:
    port = free_port()
    async with (
        backends.LocalBackend(backends.LocalModel("demo", (f"127.0.0.1:{port}",), aliases=("other",))) as outputs,
        fronts(outputs) as (served, _, watch),
    ):
        assert (await watch.read()).status == STATUS.NOT_SERVING
        assert (await served.post("/tokenize", prompt="x")).status_code == 503
        why = "demo: targets: not there yet (unreachable); tried again"
        assert f"no model can be served yet. {why}" in await becomes(served, 503)
        assert (await served.http.get("/v1/models")).json() == {"object": "list", "data": [], "detail": [why]}
        for name, status, text in (("demo", 503, why), ("other", 503, why), ("none", 404, "there is no model 'none'")):
            asked = await served.http.get(f"/v1/models/{name}")
            assert (asked.status_code, text in fault(asked)["message"]) == (status, True)
        async with target(port):
            assert (await served.post("/tokenize", prompt="x")).json()["count"] == 1
            assert (await watch.read()).status == STATUS.SERVING
