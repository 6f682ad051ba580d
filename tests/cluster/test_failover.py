"""Outputs that go on when the orchestrator that makes them is lost."""

import asyncio
import copy
import time
from collections.abc import Callable
from contextlib import aclosing

import pytest

from crossdraft.client import GenerationRequest, Reason, RequestError, SamplingOptions
from crossdraft.cluster import failover
from crossdraft.cluster.failover import Alive, Began, ClusterBackend, DetectionLimits, Lost, Refusal, seed_of
from crossdraft.rpc.errors import TimedOut, Unreachable
from crossdraft.serving.backend import (
    Ended,
    OutputRequest,
    OverloadedError,
    PromptTokens,
    ServedModel,
    UnknownDrafterError,
    UnknownModelError,
)
from crossdraft.types.output import PromptToken
from crossdraft.types.request import PromptTooLongError
from tests.cluster.scripted import BEGAN, REQUEST, SMALL, Act, Scripted, tokens
from tests.serving.fakes import figures

ENDED = Ended(Reason.LENGTH, figures(3))
SOON = DetectionLimits(silent=0.5)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "PAUSE", 0.01)


async def taken(
    orchestrators: Scripted,
    order: OutputRequest = REQUEST,
    limits: DetectionLimits = SOON,
    clock: Callable[[], float] = lambda: 0.0,
) -> list[object]:
    outputs = ClusterBackend({"small": orchestrators}, clock=clock, limits=limits)
    return [piece async for piece in outputs.stream(order)]


async def test_pieces_pass_as_they_are_but_for_signs_of_life() -> None:
    one = Scripted([Alive(), tokens(1), Alive(), tokens(2), ENDED])
    assert await taken(one) == [tokens(1), tokens(2), ENDED]
    assert [(order.id, order.generation.seed) for order in one.requests] == [("one", 1)]


@pytest.mark.parametrize("end", [Lost("it died"), None], ids=["died", "silent"])
async def test_another_orchestrator_goes_on_after_what_was_delivered(end: Act) -> None:
    one = Scripted([tokens(1, 2), tokens(3), end], [end], [tokens(4, 5), Ended(Reason.LENGTH, figures(2))])
    *made, ended = await taken(one)
    assert made == [tokens(1, 2), tokens(3), tokens(4, 5)]
    assert isinstance(ended, Ended)
    counted = ended.statistics
    assert (counted.tokens, counted.accepted, counted.corrected, counted.bonus) == (5, 0, 0, 5)
    assert [order.generation.committed for order in one.requests] == [(), (1, 2, 3), (1, 2, 3)]
    assert {(order.id, order.generation.seed) for order in one.requests} == {("one", 1)}
    assert one.closed == 3


async def test_the_prompt_is_delivered_once() -> None:
    read = [PromptToken(token, "x", b"x", None) for token in range(5)]

    def piece(begin: int, end: int) -> PromptTokens:
        return PromptTokens(begin, tuple(read[begin:end]))

    one = Scripted(
        [piece(0, 3), Lost("it died")],
        [piece(0, 2), piece(2, 4), piece(4, 5), tokens(1), Lost("it died")],
        [tokens(2), ENDED],
    )
    order = OutputRequest("one", "small", GenerationRequest("go", seed=1, prompt_logprobs=0))
    assert (await taken(one, order))[:-1] == [piece(0, 3), piece(3, 4), piece(4, 5), tokens(1), tokens(2)]
    assert [order.generation.prompt_logprobs for order in one.requests] == [0, 0, None]


async def test_after_a_loss_one_that_does_not_even_begin_is_given_up_soon() -> None:
    one = Scripted([BEGAN, tokens(1), Lost("it died")], [None], [None], [BEGAN, tokens(2), ENDED])
    async with asyncio.timeout(300):  # less than a silence
        found = await taken(one, limits=DetectionLimits(silent=600.0, first=0.02, most=600.0, step=0.01))
    assert found[:2] == [tokens(1), tokens(2)]
    assert [order.generation.committed for order in one.requests] == [(), (1,), (1,), (1,)]


async def test_one_that_has_begun_has_all_the_time_of_a_silence() -> None:
    one = Scripted([BEGAN, tokens(1), Lost("it died")], [BEGAN, None], [BEGAN, tokens(2), ENDED])
    began = asyncio.get_running_loop().time()
    await taken(one, limits=DetectionLimits(silent=0.5, first=0.01, step=0.01))
    assert asyncio.get_running_loop().time() - began >= 0.5


async def test_one_that_was_given_up_late_is_replaced_none_the_less() -> None:
    one = Scripted([BEGAN, tokens(1), None], [BEGAN, tokens(2), ENDED])
    found = await taken(one, limits=DetectionLimits(silent=0.1, step=0.01, search=0.02), clock=time.monotonic)
    assert found[:2] == [tokens(1), tokens(2)]


async def test_what_a_client_had_before_stays_committed() -> None:
    one = Scripted([tokens(3), Lost("it died")], [tokens(4), ENDED])
    order = OutputRequest("one", "small", GenerationRequest("go", seed=1, committed=(1, 2)))
    assert (await taken(one, order))[:2] == [tokens(3), tokens(4)]
    assert one.requests[1].generation.committed == (1, 2, 3)


async def test_without_a_seed_the_requests_id_gives_one_so_that_the_rest_is_the_same_text() -> None:
    one = Scripted([tokens(1), Lost("it died")], [tokens(2), ENDED])
    await taken(one, OutputRequest("one", "small", GenerationRequest("go")))
    first, second = (order.generation for order in one.requests)
    assert first.method == second.method == "seeded"
    assert first.seed == second.seed == seed_of("one")


async def test_who_asks_again_with_the_same_id_has_the_same_seed_and_others_have_another() -> None:
    seeds = []
    for id in ("one", "one", "two"):
        other = Scripted([ENDED])
        await taken(other, OutputRequest(id, "small", GenerationRequest("go")))
        seeds.append(other.requests[0].generation.seed)
    assert seeds[0] == seeds[1] != seeds[2]


async def test_with_another_model_behind_the_name_an_output_does_not_go_on() -> None:
    same = Scripted([BEGAN, tokens(1), Lost("it died")], [BEGAN, tokens(2), ENDED])
    assert (await taken(same))[:2] == [tokens(1), tokens(2)]
    other = Scripted([BEGAN, tokens(1), Lost("it died")], [Began("b", "there 1"), tokens(2), ENDED])
    with pytest.raises(Unreachable, match="'small' was replaced by another model"):
        await taken(other)
    unseen = Scripted([BEGAN, Lost("it died")], [Began("b", "there 1"), tokens(1), ENDED])
    assert (await taken(unseen))[:1] == [tokens(1)]


async def test_who_counts_losses_is_told_of_them_and_of_how_long_the_client_waited() -> None:
    told: list[object] = []

    class Told:
        def lost(self, model: str) -> None:
            told.append(model)

        def resumed(self, model: str, seconds: float) -> None:
            told.append((model, seconds))

    times = iter(range(100))
    begun, later = [BEGAN, tokens(1), Lost("it died")], [BEGAN, tokens(2), tokens(3), ENDED]
    one = Scripted(begun, [Lost("it is not there yet")], later)
    outputs = ClusterBackend({"small": one}, Told(), clock=lambda: next(times))
    assert len([piece async for piece in outputs.stream(REQUEST)]) == 4
    # It is 0 at the beginning, 2 with the first token, 3 and 4 at the losses, 6 with the next token.
    assert told == ["small", ("small", 4)]


async def test_greedy_outputs_need_no_seed_and_go_on() -> None:
    one = Scripted([tokens(1), Lost("it died")], [tokens(2), ENDED])
    greedy = GenerationRequest("go", method="tli", options=SamplingOptions(temperature=0))
    assert (await taken(one, OutputRequest("one", "small", greedy)))[:2] == [tokens(1), tokens(2)]
    assert (one.requests[0].generation.method, one.requests[0].generation.seed) == ("tli", None)


async def test_what_would_lose_the_distribution_by_going_on_ends() -> None:
    one = Scripted([tokens(1), Lost("it died")], [tokens(2), ENDED])
    with pytest.raises(Unreachable, match="method 'coupled' cannot go on elsewhere"):
        await taken(one, OutputRequest("one", "small", GenerationRequest("go", method="coupled")))
    assert len(one.requests) == 1


async def test_without_any_orchestrator_for_too_long_an_output_fails() -> None:
    one = Scripted([tokens(1), Lost("it died")])
    times = iter(range(1000))
    with pytest.raises(Unreachable, match="no orchestrator of 'small' can go on: nobody is there"):
        await taken(one, clock=lambda: float(next(times)))
    # It is 3 when the first one is lost, and a second later at each other one.
    assert len(one.requests) == 1 + DetectionLimits().search + 1


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no prompt"),
        RequestError("no such method", "method"),
        PromptTooLongError("too long"),
        UnknownModelError("no model"),
        UnknownDrafterError("no drafter"),
        OverloadedError("full", 3.0),
        Unreachable("no target"),
        TimedOut("late"),
    ],
)
async def test_expected_errors_are_raised_as_they_were(error: Exception) -> None:
    one = Scripted([copy.deepcopy(Refusal(error))])  # by the same protocol by which Ray sends it
    with pytest.raises(type(error), match=str(error)) as raised:
        await taken(one)
    assert type(raised.value) is type(error)
    assert vars(raised.value) == vars(error)
    assert len(one.requests) == 1


async def test_an_orchestrator_that_finds_no_target_in_the_middle_of_an_output_is_as_good_as_lost() -> None:
    one = Scripted([tokens(1), Refusal(Unreachable("no target"))], [tokens(2), ENDED])
    assert (await taken(one))[:2] == [tokens(1), tokens(2)]
    other = Scripted([tokens(1), Refusal(RequestError("too long"))])
    with pytest.raises(RequestError, match="too long"):
        await taken(other)


async def test_leaving_early_releases_the_orchestrator() -> None:
    one = Scripted([tokens(1), None])
    async with aclosing(ClusterBackend({"small": one}).stream(REQUEST)) as pieces:
        assert await anext(pieces) == tokens(1)
    assert one.closed == 1


async def test_a_model_that_nobody_serves_is_said() -> None:
    with pytest.raises(UnknownModelError, match="there is no model 'large'; there is small"):
        await anext(ClusterBackend({"small": Scripted()}).stream(OutputRequest("one", "large", REQUEST.generation)))


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "lost"])
async def test_models_whose_orchestrators_are_gone_are_not_served(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    class Gone(Scripted):
        async def models(self) -> tuple[ServedModel, ...]:
            if not silent:
                raise Lost("it died")
            await asyncio.Event().wait()
            return ()

    if silent:
        monkeypatch.setattr(failover, "MODELS_SECONDS", 0.01)
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
    one = Busy([BEGAN, tokens(1)])
    outputs = ClusterBackend({"small": one}, limits=DetectionLimits(silent=60.0))
    assert await outputs.models() == (SMALL,)
    one.busy = True
    assert await outputs.models() == ()
    async with aclosing(outputs.stream(REQUEST)) as pieces:
        await anext(pieces)
        assert await outputs.models() == (SMALL,)
