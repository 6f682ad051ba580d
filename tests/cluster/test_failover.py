"""Outputs that go on when the orchestrator that makes them is lost, in simulated time."""

import asyncio
import copy
from contextlib import aclosing
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from crossdraft.client import GenerationRequest, Reason, RequestError, SamplingOptions
from crossdraft.cluster import failover
from crossdraft.rpc.errors import Full, Overloaded, Replaced, TimedOut, Unreachable
from crossdraft.rpc.generation import Committed, OutputEnded, PromptTokens
from crossdraft.serving.backend import OutputRequest, UnknownDrafterError, UnknownModelError
from crossdraft.types.output import PromptToken
from crossdraft.types.request import PromptTooLongError
from tests.cluster.scripted import BEGAN, REQUEST, SMALL, Act, Scripted, tokens
from tests.rpc.clock import now, simulated
from tests.serving.fakes import figures

ENDED = OutputEnded(Reason.LENGTH, figures(3))
DIED = failover.Lost("it died")


def backend(
    orchestrators: Scripted, metrics: failover.LossMetrics | None = None, **more: float
) -> failover.ClusterBackend:
    return failover.ClusterBackend({"small": orchestrators}, metrics, now, **more)


async def taken(orchestrators: Scripted, generation: GenerationRequest = REQUEST.generation) -> list[object]:
    request = OutputRequest("one", "small", generation)
    return [item async for item in backend(orchestrators).stream(request)]


@simulated
async def test_pieces_pass_as_they_are_but_for_who_made_them() -> None:
    one = Scripted([BEGAN, tokens(1), tokens(2), ENDED])
    assert await taken(one) == [tokens(1), tokens(2), ENDED]
    assert [(order.id, order.generation.seed) for order in one.requests] == [("one", 1)]


@simulated
async def test_another_orchestrator_goes_on_after_what_was_delivered() -> None:
    one = Scripted([tokens(1, 2), tokens(3), DIED], [DIED], [tokens(4, 5), OutputEnded(Reason.LENGTH, figures(2))])
    *made, ended = await taken(one, GenerationRequest("go", seed=1, committed=(9,)))
    assert made == [tokens(1, 2), tokens(3), tokens(4, 5)]
    counted = ended.statistics
    assert (counted.tokens, counted.accepted, counted.corrected, counted.bonus) == (5, 0, 0, 5)
    assert [order.generation.committed for order in one.requests] == [(9,), (9, 1, 2, 3), (9, 1, 2, 3)]
    assert {(order.id, order.generation.seed) for order in one.requests} == {("one", 1)}
    assert one.closed == 3


@simulated
async def test_the_prompt_is_delivered_once() -> None:
    read = [PromptToken(token, "x", b"x", None) for token in range(5)]

    def piece(begin: int, end: int) -> PromptTokens:
        return PromptTokens(tuple(read[begin:end]), begin)

    one = Scripted([piece(0, 3), DIED], [piece(0, 2), piece(2, 4), piece(4, 5), tokens(1), DIED], [tokens(2), ENDED])
    found = await taken(one, GenerationRequest("go", seed=1, prompt_logprobs=0))
    assert found[:-1] == [piece(0, 3), piece(3, 4), piece(4, 5), tokens(1), tokens(2)]
    assert [order.generation.prompt_logprobs for order in one.requests] == [0, 0, None]


@pytest.mark.parametrize("losses", [[[BEGAN, tokens(1), DIED]], [[BEGAN, tokens(1), DIED], [DIED]]])
@simulated
async def test_another_orchestrator_is_asked_soon_after_a_loss(losses: list[list[Act]]) -> None:
    times = []
    async for item in backend(Scripted(*losses, [BEGAN, tokens(2), ENDED])).stream(REQUEST):
        times += [now()] if isinstance(item, Committed) else []
    assert times[1] - times[0] == len(losses) * failover.PAUSE


@simulated
async def test_a_seed_that_is_not_named_comes_from_the_requests_id() -> None:
    """So whoever goes on, or asks again with this id, has the same text."""
    seeds = []
    for id in ("one", "one", "two"):
        one = Scripted([tokens(1), DIED], [tokens(2), ENDED])
        assert [item async for item in backend(one).stream(OutputRequest(id, "small", GenerationRequest("go")))]
        first, second = (order.generation for order in one.requests)
        assert (first.method, first.seed) == (second.method, second.seed) == ("seeded", failover.seed_of(id))
        seeds.append(first.seed)
    assert seeds[0] == seeds[1] != seeds[2]


@simulated
async def test_an_output_goes_on_with_the_model_that_it_began_with_or_ends() -> None:
    """Who serves another one refuses it; in an update some may serve the one before."""
    refused = failover.Refusal(Replaced("'small' was replaced by another model"))
    one = Scripted([BEGAN, DIED], [BEGAN, tokens(1), DIED], [BEGAN, refused], [BEGAN, tokens(2), ENDED])
    assert (await taken(one))[:2] == [tokens(1), tokens(2)]
    assert [order.target for order in one.requests] == ["", "", "a", "a"]
    with pytest.raises(Unreachable, match="no orchestrator of 'small' can go on: 'small' was replaced by another"):
        await taken(Scripted([BEGAN, tokens(1), DIED], *([refused] for _ in range(1000))))


@simulated
async def test_losses_are_counted_and_how_long_the_client_waited() -> None:
    registry = CollectorRegistry()
    one = Scripted([BEGAN, tokens(1), DIED], [DIED], [BEGAN, tokens(2), tokens(3), ENDED])
    assert len([item async for item in backend(one, failover.LossMetrics(registry)).stream(REQUEST)]) == 4
    names = ("orchestrators_lost_total", "output_resume_seconds_count", "output_resume_seconds_sum")
    found = [registry.get_sample_value(f"crossdraft_{name}", {"model_name": "small"}) for name in names]
    assert found == [1, 1, 0.5]  # two pauses


@simulated
async def test_an_orchestrator_that_was_lost_is_avoided_and_one_that_is_busy_is_not() -> None:
    other = replace(BEGAN, orchestrator="there 2")
    one = Scripted([BEGAN, tokens(1), DIED], [DIED], [other, failover.Refusal(Overloaded("full"))], [BEGAN, ENDED])
    await taken(one)
    assert one.avoided == [BEGAN.orchestrator]


@simulated
async def test_greedy_outputs_need_no_seed_and_go_on_and_others_end_that_would_lose_their_distribution() -> None:
    one = Scripted([tokens(1), DIED], [tokens(2), ENDED])
    greedy = GenerationRequest("go", method="tli", options=SamplingOptions(temperature=0))
    assert (await taken(one, greedy))[:2] == [tokens(1), tokens(2)]
    assert (one.requests[0].generation.method, one.requests[0].generation.seed) == ("tli", None)
    other = Scripted([tokens(1), DIED], [tokens(2), ENDED])
    with pytest.raises(Unreachable, match="method 'coupled' cannot go on elsewhere"):
        await taken(other, GenerationRequest("go", method="coupled"))
    assert len(other.requests) == 1


@simulated
async def test_without_any_orchestrator_for_too_long_an_output_fails() -> None:
    began = now()
    with pytest.raises(Unreachable, match="no orchestrator of 'small' can go on: nobody is there"):
        await taken(Scripted([tokens(1), DIED]))
    assert failover.SEARCH_SECONDS < now() - began <= failover.SEARCH_SECONDS + 1


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no such method", "method"),
        PromptTooLongError("too long"),
        UnknownModelError("no model"),
        UnknownDrafterError("no drafter"),
        Overloaded("full", 3.0),
        Unreachable("no target"),
        TimedOut("late"),
    ],
)
@simulated
async def test_expected_errors_are_raised_as_they_were(error: Exception) -> None:
    one = Scripted([copy.deepcopy(failover.Refusal(error))])  # by the same protocol by which Ray sends it
    with pytest.raises(type(error), match=str(error)) as raised:
        await taken(one)
    assert type(raised.value) is type(error)
    assert vars(raised.value) == vars(error)
    assert len(one.requests) == 1


@simulated
async def test_an_orchestrator_that_finds_no_target_in_the_middle_of_an_output_is_as_good_as_lost() -> None:
    one = Scripted([tokens(1), failover.Refusal(Unreachable("no target"))], [tokens(2), ENDED])
    assert (await taken(one))[:2] == [tokens(1), tokens(2)]
    other = Scripted([tokens(1), failover.Refusal(RequestError("too long"))])
    with pytest.raises(RequestError, match="too long"):
        await taken(other)


@pytest.mark.parametrize("full", [Overloaded("full", 3.0), Full("no room for another session")])
@pytest.mark.parametrize("said", [failover.Refusal, lambda error: error], ids=["by an orchestrator", "by Serve"])
@simulated
async def test_an_output_under_way_waits_while_the_next_orchestrator_is_full(full, said):
    """As in one process: for `--target-wait-seconds`, however long that is."""
    if isinstance(full, Full):
        said = failover.Refusal  # only an orchestrator has targets
    registry = CollectorRegistry()
    one = Scripted([BEGAN, tokens(1), DIED], *[[said(full)]] * 1500, [BEGAN, tokens(2), ENDED])
    outputs = backend(one, failover.LossMetrics(registry), search_seconds=600.0)
    made = [item async for item in outputs.stream(REQUEST)]
    assert made[:2] == [tokens(1), tokens(2)]
    assert registry.get_sample_value("crossdraft_orchestrators_lost_total", {"model_name": "small"}) == 1
    began = now()
    with pytest.raises(type(full), match=str(full)):
        await taken(Scripted([tokens(1), DIED], *[[said(full)]] * 1000))
    assert failover.SEARCH_SECONDS < now() - began <= failover.SEARCH_SECONDS + 1


@simulated
async def test_an_output_that_was_admitted_before_its_orchestrator_was_lost_waits_likewise() -> None:
    one = Scripted([BEGAN, DIED], [failover.Refusal(Overloaded("full"))], [BEGAN, tokens(1), ENDED])
    assert (await taken(one))[:1] == [tokens(1)]


@simulated
async def test_leaving_early_releases_the_orchestrator() -> None:
    one = Scripted([tokens(1), None])
    async with aclosing(backend(one).stream(REQUEST)) as items:
        assert await anext(items) == tokens(1)
    assert one.closed == 1


@simulated
async def test_which_models_are_served() -> None:
    one = Scripted([BEGAN, tokens(1), None])
    outputs = backend(one)
    with pytest.raises(UnknownModelError, match="there is no model 'large'; there is small"):
        await anext(outputs.stream(OutputRequest("one", "large", REQUEST.generation)))
    assert await outputs.models() == (SMALL,)
    for one.answer in (Overloaded("full"), DIED, None):  # who is full is there
        assert await outputs.models() == ((SMALL,) if isinstance(one.answer, Overloaded) else ())
    async with aclosing(outputs.stream(REQUEST)) as items:
        await anext(items)
        assert await outputs.models() == (SMALL,)  # they have no time to answer, and are heard
        await asyncio.sleep(failover.MODELS_SECONDS)
        assert await outputs.models() == ()
