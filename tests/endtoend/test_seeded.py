"""Seeded output at temperature 1 through gRPC: whatever drafts, or nothing does, the text is a function of the seed."""

from collections.abc import Sequence
from typing import Any

import pytest
import pytest_asyncio

from crossdraft.client import Generation, GenerationRequest
from crossdraft.types.messages import NoiseKey, SamplingOptions
from tests import prompts
from tests.conftest import FULL
from tests.endtoend.reference import Case, Noise, Reference
from tests.endtoend.stack import AHEAD, DRAFTERS, NGRAM, ROUNDS, Stack, statistics

PROMPTS, NEW_TOKENS = 5, 16
SEED = 7
TEXTS = prompts.PROMPTS[:: len(prompts.PROMPTS) // PROMPTS][:PROMPTS]
SERVED = (*(DRAFTERS if FULL else DRAFTERS[:2]), NGRAM)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(stack: Stack) -> list[Generation]:
    """What the target writes alone."""
    return await stack.run(None, requests(SEED))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def noise(stack: Stack) -> Noise:
    return Noise((await stack.pipeline(None)).models.tokenization.vocabulary, NoiseKey(SEED))


def requests(seed: int, **settings: Any) -> list[GenerationRequest]:
    return [GenerationRequest(text, method="seeded", seed=seed, max_tokens=NEW_TOKENS, **settings) for text in TEXTS]


def check(reference: Reference, noise: Noise, generations: Sequence[Generation]) -> list[bool]:
    """Compares with greedy decoding of the same noise; where there was no tie, an output is exactly that."""
    return reference.same([Case(text, NEW_TOKENS, noise=noise) for text in TEXTS], generations)


async def test_the_target_alone_draws_with_the_seeds_noise(plain: list[Generation], reference: Reference, noise: Noise):
    assert any(check(reference, noise, plain))
    assert len({generation.text for generation in plain}) == PROMPTS


async def test_penalties_and_bans_are_those_of_the_distribution_that_is_drawn_from(stack, plain, reference, noise):
    often = tuple(plain[0].ids[:4])
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.6}
    bans = {"logit_bias": ((often[0], 2.0),), "bad_word_ids": ((often[1],), often[2:4]), "min_tokens": 8}
    options = SamplingOptions(**penalties, **bans)
    cases = [Case(text, NEW_TOKENS, options, often[:1], noise) for text in TEXTS]
    for drafter, settings in ((None, {}), (DRAFTERS[1], AHEAD), (DRAFTERS[0], ROUNDS | {"paths": 1})):
        found = await stack.run(drafter, requests(SEED, options=options, stop_token_ids=often[:1], **settings))
        assert reference.same(cases, found).count(False) <= 1


SETTINGS = (
    *(ROUNDS | {"num_speculative_tokens": k} for k in (3, 1, 8)),
    {"overlap": "on", "num_speculative_tokens": 1},
)


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(
    ("drafter", "settings"),
    [("drafter-a", ROUNDS), ("drafter-b", AHEAD), (NGRAM, ROUNDS)]
    + [pytest.param(one, ROUNDS, marks=pytest.mark.full) for one in ("drafter-b", "drafter-c")]
    + [pytest.param(one, AHEAD, marks=pytest.mark.full) for one in ("drafter-a", "drafter-c", NGRAM)]
    + [pytest.param("drafter-b", one, marks=pytest.mark.full) for one in SETTINGS],
)
async def test_no_drafter_changes_the_text(stack, plain, reference, noise, drafter, settings):
    generations = await stack.run(drafter, requests(SEED, **settings))
    untied = zip(check(reference, noise, plain), check(reference, noise, generations), strict=True)
    assert sum(statistics(generation).draft_tokens for generation in generations)
    for alone, drafted, both in zip(plain, generations, untied, strict=True):
        assert drafted.text == alone.text or not all(both)
