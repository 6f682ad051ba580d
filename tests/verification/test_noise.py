"""Keyed noise: its distribution, what it depends on, and that it is the same everywhere."""

from hashlib import blake2b

import numpy as np
import pytest
import torch
from scipy import stats

from crossdraft.text.letters import ControlRole, Side, from_bytes
from crossdraft.types.messages import NoiseKey
from crossdraft.verification.noise import KeyedNoise, exponentials_of

STRINGS = [from_bytes(text.encode()) for text in ("a", "b", "ab", " the", "é", "", "aa", "x" * 40)]
NOISE = KeyedNoise(STRINGS, [0] * len(STRINGS))
KEY = NoiseKey(2024)
DISTRIBUTION = np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.05, 0.02, 0.0])
IDS = np.arange(8)
RARE = 1e-4  # least p value
KNOWN = [3.3031964833774676, 0.4495164279957488, 0.6566401215079303, 0.7230380536734106]
DRAWN = [3, 0, 2, 2, 4, 3, 4, 0, 0, 4, 6, 2]
BITS = "120386c4e7c43526"


@pytest.mark.parametrize("of", ["offsets", "seeds", "choices"])
def test_draws_follow_the_probabilities(of: str) -> None:
    places = range(5_000)
    keys = {"seeds": map(NoiseKey, places), "choices": (NoiseKey(7, choice) for choice in places)}
    drawn = [NOISE.draw(IDS, DISTRIBUTION, key, 3) for key in keys.get(of, ())]
    counts = np.bincount(drawn or [NOISE.draw(IDS, DISTRIBUTION, KEY, offset) for offset in places], minlength=8)
    assert counts[7] == 0
    assert stats.chisquare(counts[:7], DISTRIBUTION[:7] * len(places)).pvalue > RARE


def test_draws_at_neighbouring_offsets_are_independent() -> None:
    drawn = [NOISE.draw(IDS[:3], DISTRIBUTION[:3], KEY, offset) for offset in range(5_001)]
    table = np.zeros((3, 3))
    np.add.at(table, (drawn[:-1], drawn[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > RARE


def test_noise_is_exponential_and_uncorrelated_between_tokens() -> None:
    noise = np.stack([NOISE.exponentials(KEY, offset) for offset in range(2_000)])
    assert stats.kstest(noise.ravel(), "expon").pvalue > RARE
    correlations = np.corrcoef(noise.T)[np.triu_indices(8, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(2_000)


def test_the_same_letters_have_the_same_noise_in_every_vocabulary() -> None:
    other = KeyedNoise([STRINGS[3], from_bytes(b"q"), STRINGS[0], ControlRole.END_OF_SEQUENCE.letter], [0, 0, 0, 0])
    here, there = NOISE.exponentials(KEY, 9), other.exponentials(KEY, 9)
    assert (there[0], there[2]) == (here[3], here[0])
    assert len({*here, *there}) == 10


def test_ranks_keys_and_offsets_all_change_the_noise() -> None:
    twice = KeyedNoise([STRINGS[0], STRINGS[0]], [0, 1]).exponentials(KEY, 9)
    others = (NoiseKey(2025), NoiseKey(2024, 1))
    values = [*twice, *(NOISE.exponentials(key, 9)[0] for key in others), NOISE.exponentials(KEY, 10)[0]]
    assert len(set(values)) == len(values)


def test_a_draw_does_not_depend_on_scale_or_order_nor_noise_on_the_other_ids() -> None:
    some, shuffled = np.array([6, 1, 3]), np.array([5, 2, 7, 0, 1, 6, 3, 4])
    np.testing.assert_array_equal(NOISE.exponentials(KEY, 5, some), NOISE.exponentials(KEY, 5)[some])
    for offset in range(100):
        expected = NOISE.draw(IDS, DISTRIBUTION, KEY, offset)
        assert NOISE.draw(shuffled, 8.0 * DISTRIBUTION[shuffled], KEY, offset) == expected


def test_large_seeds_control_letters_and_large_ranks() -> None:
    noise = KeyedNoise([Side.TARGET.control(3), Side.DRAFTER.control(3)], [0, 70_000])
    values = noise.exponentials(NoiseKey((1 << 64) - 1, 1), 1 << 40)
    assert np.isfinite(values).all()
    assert (values > 0).all()


def test_known_values() -> None:
    """Another machine, or another version, must draw the same text for the same seed."""
    np.testing.assert_allclose(NOISE.exponentials(NoiseKey(1, 2), 3)[:4], KNOWN, rtol=1e-14)
    assert [NOISE.draw(IDS, DISTRIBUTION, KEY, offset) for offset in range(12)] == DRAWN


def test_the_logarithm_is_the_same_bits_everywhere_and_correct_to_one_unit() -> None:
    words = np.random.default_rng(1).integers(0, 1 << 53, 100_000)
    words[:4] = 0, 1, (1 << 53) - 1, (1 << 53) - 2
    found = exponentials_of(words, words.astype(np.float64))
    np.testing.assert_array_max_ulp(found, -np.log((words + 0.5) * 2.0**-53), 2)
    digest = blake2b(found[:1000].tobytes(), digest_size=8).hexdigest()
    assert digest == BITS
    tensor = torch.from_numpy(words)
    assert exponentials_of(tensor, tensor.double()).numpy().tobytes() == found.tobytes()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="2 strings of letters but 1 ranks"):
        KeyedNoise(STRINGS[:2], [0])
    with pytest.raises(ValueError, match="no id has a probability above 0"):
        NOISE.draw(IDS, np.zeros(8), KEY, 0)
