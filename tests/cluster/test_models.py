"""Which models a front says are served."""

import asyncio
from contextlib import aclosing

import pytest

from crossdraft.cluster import failover
from crossdraft.cluster.failover import ClusterBackend, DetectionLimits, Lost
from crossdraft.serving.backend import ServedModel
from tests.cluster.scripted import BEGAN, REQUEST, SMALL, Scripted, token


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "lost"])
async def test_models_whose_orchestrators_are_gone_are_not_served(silent: bool) -> None:
    class Gone(Scripted):
        async def models(self) -> tuple[ServedModel, ...]:
            if not silent:
                raise Lost("it died")
            await asyncio.Event().wait()
            return ()

    assert await ClusterBackend({"gone": Gone(), "small": Scripted()}).models() == (SMALL,)


async def test_a_model_whose_orchestrators_have_no_time_to_answer_is_served_while_they_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy(Scripted):
        busy = False

        async def models(self) -> tuple[ServedModel, ...]:
            if self.busy:
                await asyncio.Event().wait()
            return await super().models()

    monkeypatch.setattr(failover, "MODELS_SECONDS", 0.01)
    one = Busy([BEGAN, token(1)])
    outputs = ClusterBackend({"small": one}, limits=DetectionLimits(silent=60.0))
    assert await outputs.models() == (SMALL,)
    one.busy = True
    assert await outputs.models() == ()
    async with aclosing(outputs.stream(REQUEST)) as pieces:
        await anext(pieces)
        assert await outputs.models() == (SMALL,)
