"""Outputs over gRPC from the bundled models: what the pipeline itself makes, nothing left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from crossdraft.client import GenerationRequest, Overlap, Pipeline, RequestError, SamplingOptions, connect
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.errors import NameUnknown, Overloaded, Unreachable
from crossdraft.rpc.server import Listening
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.serving.client import Client
from crossdraft.serving.grpc import serve_generation
from crossdraft.target.service import ServeTarget, TargetServer, target_server
from crossdraft.types.request import Chat, Message

pytestmark = pytest.mark.asyncio(loop_scope="module")
AT_ONCE = Listening(grace_seconds=0)
BUDGET = 256  # MiB
MOST = 4  # outputs at once
GREEDY = GenerationRequest(
    "def main(", max_tokens=24, options=SamplingOptions(0.0), ignore_eos=True, overlap=Overlap.OFF
)
SEEDED = replace(GREEDY, options=SamplingOptions(), seed=7)


@dataclass(frozen=True)
class Running:
    """A front, and a pipeline to the same services."""

    client: Client
    direct: Pipeline
    outputs: LocalBackend
    target: TargetServer


def options(name: str) -> ModelOptions:
    return ModelOptions(f"bundled:{name}", budget=BUDGET, threads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(await target_server(ServeTarget(options("target"), AT_ONCE)))
        drafter = await stack.enter_async_context(await drafter_server(ServeDrafter(options("drafter-b"), AT_ONCE)))
        model = LocalModel("bundled", (target.address,), (NamedDrafter("b", (drafter.address,)),))
        outputs = await stack.enter_async_context(LocalBackend((model,), LocalOptions(MOST)))
        server = await stack.enter_async_context(serve_generation(outputs, AT_ONCE))
        direct = await stack.enter_async_context(connect(target.address, drafter.address, needs_drafter=True))
        client = await stack.enter_async_context(Client(server.address))
        yield Running(client, direct, outputs, target)


@pytest.mark.parametrize("request_", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_the_same_output_as_of_the_pipeline(running: Running, request_: GenerationRequest) -> None:
    async with running.direct.run(request_) as direct:
        made = [token async for token in direct]
    for drafter in (None, "b", ""):
        async with running.client.run(request_, "bundled", drafter) as generation:
            got = [token async for token in generation]
        assert (generation.text, generation.ids, generation.reason) == (direct.text, direct.ids, direct.reason)
        assert [(token.text, token.raw) for token in got] == [(token.text, token.raw) for token in made]
        assert generation.statistics is not None
        assert generation.statistics.tokens == 24
        assert (generation.statistics.draft_tokens > 0) == (drafter != "")
        assert len(generation.milliseconds) == 24


async def test_an_output_goes_on_after_what_was_delivered(running: Running) -> None:
    async with running.client.run(SEEDED) as whole:
        async for _ in whole:
            pass
    async with running.client.run(replace(SEEDED, committed=tuple(whole.ids[:10]))) as rest:
        async for _ in rest:
            pass
    assert rest.ids == whole.ids[10:]
    assert whole.text.endswith(rest.text)


async def test_other_kinds_of_prompts(running: Running) -> None:
    chat = Chat((Message("user", "Say something."),))
    for prompt in ((70, 71, 72), chat):
        asked = replace(GREEDY, prompt=prompt, max_tokens=6)
        async with running.direct.run(asked) as direct, running.client.run(asked) as generation:
            assert [token.id async for token in direct] == [token.id async for token in generation]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt": "word " * 5000}, "context"),
        ({"method": "standard"}, "needs a drafter with the target's vocabulary"),
        ({"options": SamplingOptions(logit_bias=((10**6, 1.0),))}, "logit_bias names id 1000000"),
        ({"prompt": (10**6,)}, "1000000"),
    ],
)
async def test_what_the_pair_cannot_serve(running: Running, change: dict[str, object], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        await anext(running.client.run(replace(GREEDY, **change)))
    assert running.outputs.running == 0


async def test_unknown_names(running: Running) -> None:
    with pytest.raises(NameUnknown, match="there is no model 'x'; there is bundled"):
        await anext(running.client.run(GREEDY, "x"))
    with pytest.raises(NameUnknown, match="'bundled' has no drafter 'x'; there is b"):
        await anext(running.client.run(GREEDY, "bundled", "x"))


async def test_no_room(running: Running) -> None:
    long = replace(GREEDY, max_tokens=900)
    async with AsyncExitStack() as stack:
        for _ in range(MOST):
            generation = await stack.enter_async_context(running.client.run(long))
            await anext(generation)
        with pytest.raises(Overloaded, match=f"{MOST} outputs are being made") as raised:
            await anext(running.client.run(GREEDY))
        assert raised.value.after >= 1
    await nothing_left(running)


async def nothing_left(running: Running) -> None:
    async with asyncio.timeout(60):
        while running.outputs.running or running.target.activity.open:  # noqa: ASYNC110
            await asyncio.sleep(0)  # one turn of the loop, which all of it runs in


async def test_leaving_gives_the_places_in_the_models_back(running: Running) -> None:
    for _ in range(3 * MOST):
        async with running.client.run(replace(GREEDY, max_tokens=900)) as generation:
            await anext(generation)
        await nothing_left(running)


async def test_without_a_target() -> None:
    model = LocalModel("gone", ("127.0.0.1:1",))
    async with (
        LocalBackend((model,)) as outputs,
        serve_generation(outputs, AT_ONCE) as server,
        Client(server.address) as client,
    ):
        assert await client.models() == ()
        with pytest.raises(Unreachable):
            await anext(client.run(GREEDY, "gone"))
