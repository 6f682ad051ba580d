"""Draws: their distribution, and the samples of a pass."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from crossdraft.engine.distributions import Columns, History, Nodes, distribution
from crossdraft.engine.sampler import Clocks, DrawRequest, Draws, KeyedDraws, RandomDraws, SampleRequest
from crossdraft.text.letters import from_bytes
from crossdraft.types.messages import NoiseKey, Sample, SamplingOptions
from crossdraft.verification.noise import KeyedNoise

SIZE = 20
NOISE = KeyedNoise([from_bytes(bytes([token])) for token in range(SIZE)], [0] * SIZE)
CLOCKS = Clocks(NOISE, torch.device("cpu"))
LOGITS = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(5))
KEY = NoiseKey(8, 1)
OFFSETS = [0, 1, 1, 5]
GREEDY = SamplingOptions(temperature=0)


def draws() -> list[Draws]:
    return [KeyedDraws(NOISE, NoiseKey(8)), RandomDraws(np.random.default_rng(8))]


def sampled(options: SamplingOptions, likely: int = 0, logits: torch.Tensor = LOGITS) -> tuple[Sample, ...]:
    reading = SampleRequest(Nodes(logits, options, History((1,), (2,), [(3,)] * 4)), CLOCKS, KEY, OFFSETS, likely)
    (found,) = reading.run([reading])
    return found


@pytest.mark.parametrize("draws", draws())
def test_draws_follow_the_distribution(draws: Draws) -> None:
    ids, weights = np.array([7, 3, 19, 0]), np.array([0.5, 0.3, 0.2, 0.0])
    drawn = [draws.draw(ids, weights, offset) for offset in range(8_000)]
    assert 0 not in drawn
    counts = [drawn.count(token) for token in (7, 3, 19)]
    assert stats.chisquare(counts, weights[:3] * 8_000).pvalue > 1e-4


@pytest.mark.parametrize("options", [SamplingOptions(0.5, top_k=3), SamplingOptions(0.9, presence_penalty=1.5)])
def test_samples_are_drawn_from_the_distribution_and_priced_by_the_model(options: SamplingOptions) -> None:
    found = sampled(options)
    assert found == sampled(options)
    distributions = distribution(LOGITS, options, History((1,), (2,), [(3,)] * 4))
    for sample, logits, row, offset in zip(found, LOGITS, distributions, OFFSETS, strict=True):
        assert sample.token == NOISE.draw(np.arange(SIZE), row.numpy(), KEY, offset)
        assert row[sample.token] > 0
        assert sample.log_probability == pytest.approx(float(logits.log_softmax(-1)[sample.token]), abs=1e-6)


def test_the_most_probable_ids_come_along() -> None:
    for sample, logits in zip(sampled(SamplingOptions(0.5, top_k=3), 5), LOGITS, strict=True):
        values, ids = logits.log_softmax(-1).sort(descending=True)
        assert [token for token, _ in sample.likely] == ids[:5].tolist()
        assert [value for _, value in sample.likely] == pytest.approx(values[:5].tolist(), abs=1e-6)
    first, *_ = sampled(SamplingOptions(0.5, top_k=3), 999)
    assert sorted(token for token, _ in first.likely) == list(range(SIZE))


def test_greedy_samples_are_the_best_tokens() -> None:
    assert [sample.token for sample in sampled(GREEDY)] == LOGITS.argmax(-1).tolist()
    biased = SamplingOptions(temperature=0, logit_bias=((13, 50.0),))
    assert [sample.token for sample in sampled(biased)] == [13] * 4


def test_logits_that_are_no_numbers_are_not_drawn_from() -> None:
    logits = LOGITS.clone()
    logits[2] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        sampled(SamplingOptions(), logits=logits)
    ranking = DrawRequest(logits, SamplingOptions(), CLOCKS, [0.5] * 4)
    with pytest.raises(ValueError, match="not finite"):
        ranking.run([ranking])


def ranked(
    options: SamplingOptions, draws: Draws, beside: int = 0, allowed: Columns | None = None
) -> tuple[list[int], ...]:
    chances = [draws.chance(offset) for offset in OFFSETS]
    reading = DrawRequest(LOGITS, options, CLOCKS, chances, beside, allowed)
    (found,) = reading.run([reading])
    return found


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("allowed", [None, np.array([2, 3, 5, 11, 13, 17])])
@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(0.7, top_k=6, min_p=0.01)])
def test_draws_from_whole_distributions_are_those_of_distributions_that_were_fetched(
    kind: int, allowed: np.ndarray | None, options: SamplingOptions
) -> None:
    columns = None if allowed is None else Columns.of(allowed, LOGITS.device)
    ids = np.arange(SIZE) if allowed is None else allowed
    here, there = draws()[kind], draws()[kind]
    for _ in range(50):
        found = ranked(options, here, 3, columns)
        distributions = distribution(LOGITS[:, ids], options).numpy()
        due = [
            there.ranked(ids, row, offset, 0 if place else 3)
            for place, (row, offset) in enumerate(zip(distributions, OFFSETS, strict=True))
        ]
        assert list(found) == due


def test_random_draws_from_whole_distributions_follow_the_distribution() -> None:
    options = SamplingOptions(1.5, top_k=5)
    drawn = Counter()
    random = draws()[1]
    for _ in range(2_000):
        drawn.update(found[0] for found in ranked(options, random))
    weights = distribution(LOGITS, options).sum(0).numpy() * 2_000
    assert {token for token in range(SIZE) if weights[token]} == set(drawn)
    possible = np.flatnonzero(weights)
    assert stats.chisquare([drawn[token] for token in possible], weights[possible]).pvalue > 1e-4


def test_where_few_can_be_drawn_the_best_others_stand_beside() -> None:
    order = LOGITS[0].argsort(descending=True).tolist()
    for number in range(2):
        (first, *others) = ranked(GREEDY, draws()[number], 3)
        assert first == order[:4]
        assert [len(row) for row in others] == [1, 1, 1]
        (first, *_) = ranked(SamplingOptions(top_k=2), draws()[number], 3)
        assert set(first[:2]) == set(order[:2])
        assert first[2:] == order[2:4]
