"""The backend of this process: what is served, from where, how many at once, and pipelines that open late."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import pytest

from crossdraft.client import GenerationRequest, Kind, Pipeline, Reason, Token
from crossdraft.rpc.errors import Replaced, ServiceError, Unreachable
from crossdraft.rpc.generation import Committed
from crossdraft.rpc.links import Patience
from crossdraft.serving import backend
from crossdraft.serving.backend import (
    Addresses,
    LocalBackend,
    LocalModel,
    LocalOptions,
    NamedDrafter,
    OutputRequest,
    OverloadedError,
    SharedPipeline,
    UnknownModelError,
)
from tests.serving.fakes import figures

NOWHERE = "127.0.0.1:9"  # the port for what is thrown away: nobody listens
MODEL = LocalModel("demo", (NOWHERE,), (NamedDrafter("a", (NOWHERE,)),))
QUICK = LocalOptions(max_outputs=1, patience=Patience(describe_seconds=0.2))


def order(model: str = "demo", drafter: str | None = None) -> OutputRequest:
    return OutputRequest("id", model, GenerationRequest("Say"), drafter)


async def first(outputs: LocalBackend, of: OutputRequest) -> object:
    async with aclosing(outputs.stream(of)) as stream:
        return await anext(stream)


async def test_a_model_without_a_target_is_not_served_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with LocalBackend(MODEL, QUICK) as outputs:
        assert await outputs.models() == ()
        assert "demo cannot be served yet: target at 127.0.0.1:9" in caplog.text
        for drafter in (None, "a", ""):
            with pytest.raises(ServiceError, match=r"target at 127\.0\.0\.1:9"):
                await first(outputs, order(drafter=drafter))
        assert outputs.running == 0


async def test_names_that_are_not_there() -> None:
    async with LocalBackend(MODEL, QUICK) as outputs:
        with pytest.raises(UnknownModelError, match="there is no model 'other'; there is demo"):
            await first(outputs, order("other"))
        with pytest.raises(UnknownModelError, match="'demo' has no drafter 'b'; there is a"):
            await first(outputs, order(drafter="b"))


async def test_one_more_than_there_is_room_for() -> None:
    outputs = LocalBackend(MODEL, LocalOptions(1, Patience(describe_seconds=60)))
    waiting = asyncio.create_task(first(outputs, order()))  # for its target
    while not outputs.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="1 outputs are being generated, which is the limit") as caught:
        await first(outputs, order())
    assert caught.value.after >= 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert outputs.running == 0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: NamedDrafter("", (NOWHERE,)), "a drafter needs a name"),
        (lambda: NamedDrafter("auto", (NOWHERE,)), "not 'auto', which stands for the fastest"),
        (lambda: LocalModel("", (NOWHERE,)), "a model needs a name"),
        (lambda: LocalModel("demo", ()), "at least one target"),
        (lambda: LocalModel("demo", (NOWHERE,), MODEL.drafters * 2), "have the same name: a, a"),
    ],
)
def test_what_cannot_be_served(make: object, complaint: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=complaint):
        make()


class LatePipeline(Pipeline):
    """Its services are there once `there` is set."""

    def __init__(self, there: asyncio.Event) -> None:
        super().__init__("127.0.0.1:1")
        self.there = there
        self.followed: list[tuple[object, object]] = []

    async def follow(self, target: object, drafter: object = None) -> None:
        self.followed.append((target, drafter))

    async def __aenter__(self) -> Self:
        if not self.there.is_set():
            raise Unreachable("no target")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_it_is_opened_in_the_background_once_its_target_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TRIED_EVERY", 0)
    there = asyncio.Event()
    shared = SharedPipeline(lambda *_: LatePipeline(there), ("127.0.0.1:1",), ())
    with pytest.raises(Unreachable):
        await shared.open()
    shared.begin()
    for _ in range(9):
        await asyncio.sleep(0)
    assert shared.pipeline is None
    there.set()
    async with asyncio.timeout(60):
        while shared.pipeline is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert await shared.open() is shared.pipeline
    await shared.close()


class SlowPipeline(LatePipeline):
    """It takes until `there` is set to open."""

    async def __aenter__(self) -> Self:
        await self.there.wait()
        return self


async def test_addresses_that_change_while_it_is_opened_are_followed() -> None:
    there, made = asyncio.Event(), asyncio.Event()
    used: list[tuple[Addresses, Addresses]] = []

    def make(targets: Addresses, drafters: Addresses) -> SlowPipeline:
        used.append((targets, drafters))
        made.set()
        return SlowPipeline(there)

    shared = SharedPipeline(make, ("a:1",), ())
    await shared.follow(("b:1",), ("c:1",))
    opening = asyncio.create_task(shared.open())
    await made.wait()
    await shared.follow(("d:1",), ())
    there.set()
    pipeline = await opening
    await shared.follow(("e:1",), ("f:1",))
    assert used == [(("b:1",), ("c:1",))]
    assert pipeline.followed == [(("d:1",), ()), (("e:1",), ("f:1",))]


class ChangingOutput:
    """Two tokens, or so many until the model is replaced."""

    prompt_tokens = ()
    reason, statistics = Reason.LENGTH, figures(2)

    def __init__(self, pipeline: "ChangingPipeline", left: int) -> None:
        self._pipeline, self._left = pipeline, left
        self._tokens = 2

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self) -> None:
        pass

    async def together(self) -> tuple[Token, ...]:
        if not self._left:
            self._pipeline.fingerprint = "new"
            raise Replaced("it was replaced by another model")
        self._left, self._tokens = self._left - 1, self._tokens - 1
        return (Token(7, "x", b"x", Kind.BONUS, None),) if self._tokens >= 0 else ()


class ChangingPipeline(LatePipeline):
    """Its model is replaced after so many tokens of its first output."""

    def __init__(self, tokens: int) -> None:
        super().__init__(asyncio.Event())
        self.there.set()
        self.fingerprint = "old"
        self._left = [tokens, 99]

    @property
    def models(self) -> Any:
        return SimpleNamespace(target=SimpleNamespace(fingerprint=self.fingerprint))

    async def prepared(self, request: GenerationRequest) -> None:
        pass

    def note_idle(self) -> None:
        pass

    def run(self, *_: object) -> Any:
        return ChangingOutput(self, self._left.pop(0))


async def made(pipeline: ChangingPipeline, request: OutputRequest) -> list[str]:
    """Which model made each token."""
    outputs = LocalBackend(MODEL, QUICK)
    outputs._pipelines["a"] = SharedPipeline(lambda *_: pipeline, (NOWHERE,), ())
    async with aclosing(outputs.stream(request)) as items:
        return [item.target async for item in items if isinstance(item, Committed)]


async def test_an_output_that_has_not_begun_is_made_by_the_model_that_is_served_now() -> None:
    assert await made(ChangingPipeline(3), order()) == ["old", "old"]
    assert await made(ChangingPipeline(0), order()) == ["new", "new"]
    with pytest.raises(Replaced):
        await made(ChangingPipeline(1), order())


async def test_an_output_is_resumed_by_the_model_that_began_it_only() -> None:
    assert await made(ChangingPipeline(3), replace(order(), target="old")) == ["old", "old"]
    with pytest.raises(Replaced):
        await made(ChangingPipeline(0), replace(order(), target="old"))
    with pytest.raises(Replaced, match="'demo' was replaced by another model while this output was being made"):
        await made(ChangingPipeline(3), replace(order(), target="older"))
