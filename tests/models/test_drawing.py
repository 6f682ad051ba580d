"""Draws: their law, and the samples of a pass."""

import numpy as np
import pytest
import torch
from scipy import stats

from crossdraft.models.drawing import Draws, KeyedDraws, RandomDraws, samples
from crossdraft.models.sampling import law
from crossdraft.text.letters import from_bytes
from crossdraft.verification.exchange import NoiseKey, SamplingOptions
from crossdraft.verification.noise import KeyedNoise

NOISE = KeyedNoise([from_bytes(bytes([token])) for token in range(20)], [0] * 20)
LOGITS = torch.randn(4, 20, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("draws", [KeyedDraws(NOISE, NoiseKey(8)), RandomDraws(np.random.default_rng(8))])
def test_draws_follow_the_law(draws: Draws) -> None:
    ids, weights = np.array([7, 3, 19, 0]), np.array([0.5, 0.3, 0.2, 0.0])
    drawn = [draws.draw(ids, weights, offset) for offset in range(8_000)]
    assert 0 not in drawn
    counts = [drawn.count(token) for token in (7, 3, 19)]
    assert stats.chisquare(counts, weights[:3] * 8_000).pvalue > 1e-4


def test_samples_are_drawn_from_the_law_and_priced_by_the_model() -> None:
    laws = law(LOGITS, SamplingOptions(temperature=0.5, top_k=3))
    draws = KeyedDraws(NOISE, NoiseKey(8, 1))
    found = samples(LOGITS, laws, draws, [0, 1, 1, 5])
    assert found == samples(LOGITS, laws, draws, [0, 1, 1, 5])
    for sample, logits, row, offset in zip(found, LOGITS, laws, [0, 1, 1, 5], strict=True):
        assert sample.token == NOISE.draw(np.arange(20), row.numpy(), NoiseKey(8, 1), offset)
        assert row[sample.token] > 0
        assert sample.log_probability == pytest.approx(float(logits.log_softmax(-1)[sample.token]), abs=1e-6)


def test_the_most_probable_ids_come_along() -> None:
    laws = law(LOGITS, SamplingOptions(temperature=0.5, top_k=3))
    for sample, logits in zip(samples(LOGITS, laws, KeyedDraws(NOISE, NoiseKey(8)), [0] * 4, 5), LOGITS, strict=True):
        values, ids = logits.log_softmax(-1).sort(descending=True)
        assert [token for token, _ in sample.likely] == ids[:5].tolist()
        assert [value for _, value in sample.likely] == pytest.approx(values[:5].tolist(), abs=1e-6)
    (first, *_) = samples(LOGITS, laws, KeyedDraws(NOISE, NoiseKey(8)), [0] * 4, 999)
    assert sorted(token for token, _ in first.likely) == list(range(20))


def test_greedy_samples_are_the_best_tokens() -> None:
    laws = law(LOGITS, SamplingOptions(temperature=0))
    found = samples(LOGITS, laws, RandomDraws(np.random.default_rng(1)), [0, 1, 2, 3])
    assert [sample.token for sample in found] == LOGITS.argmax(-1).tolist()
