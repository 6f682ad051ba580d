"""Outputs made in this process: what is served, from where, and how many at once."""

import asyncio
from contextlib import aclosing

import pytest

from crossdraft.client import GenerationRequest
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.errors import ServiceError
from crossdraft.serving.backend import (
    LocalBackend,
    LocalModel,
    LocalOptions,
    NamedDrafter,
    OutputRequest,
    OverloadedError,
    UnknownModelError,
)

NOWHERE = "127.0.0.1:9"  # the port for what is thrown away: nobody listens
MODEL = LocalModel("demo", (NOWHERE,), (NamedDrafter("a", (NOWHERE,)),))
QUICK = LocalOptions(max_outputs=1, patience=Patience(describe_seconds=0.2))


def order(model: str = "demo", drafter: str | None = None) -> OutputRequest:
    return OutputRequest("id", model, GenerationRequest("Say"), drafter)


async def first(outputs: LocalBackend, of: OutputRequest) -> object:
    async with aclosing(outputs.stream(of)) as stream:
        return await anext(stream)


async def test_a_model_without_a_target_is_not_served_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with LocalBackend((MODEL,), QUICK) as outputs:
        assert await outputs.models() == ()
        assert "demo cannot be served yet: target at 127.0.0.1:9" in caplog.text
        for drafter in (None, "a", ""):
            with pytest.raises(ServiceError, match=r"target at 127\.0\.0\.1:9"):
                await first(outputs, order(drafter=drafter))
        assert outputs.running == 0


async def test_names_that_are_not_there() -> None:
    async with LocalBackend((MODEL,), QUICK) as outputs:
        with pytest.raises(UnknownModelError, match="there is no model 'other'; there is demo"):
            await first(outputs, order("other"))
        with pytest.raises(UnknownModelError, match="'demo' has no drafter 'b'; there is a"):
            await first(outputs, order(drafter="b"))


async def test_one_more_than_there_is_room_for() -> None:
    outputs = LocalBackend((MODEL,), LocalOptions(1, Patience(describe_seconds=60)))
    waiting = asyncio.create_task(first(outputs, order()))  # for its target
    while not outputs.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="1 outputs are being made, the most at once") as caught:
        await first(outputs, order())
    assert caught.value.after >= 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert outputs.running == 0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: NamedDrafter("", (NOWHERE,)), "a drafter needs a name"),
        (lambda: LocalModel("", (NOWHERE,)), "a model needs a name"),
        (lambda: LocalModel("demo", ()), "at least one target"),
        (lambda: LocalModel("demo", (NOWHERE,), MODEL.drafters * 2), "have the same name: a, a"),
        (lambda: LocalOptions(0), "max_outputs must be at least 1"),
        (lambda: LocalBackend(()), "at least one model"),
        (lambda: LocalBackend((MODEL, MODEL)), "a name of its own"),
    ],
)
def test_what_cannot_be_served(make: object, complaint: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=complaint):
        make()
