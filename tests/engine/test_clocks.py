"""Keyed noise beside the logits against the noise that an orchestrator has."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.engine.sampler import Clocks
from crossdraft.text.letters import Letters
from crossdraft.types.messages import NoiseKey
from crossdraft.verification.noise import KeyedNoise, moment, uniform_words

SIZE = 300
NOISE = KeyedNoise([Letters(str(token // 2)) for token in range(SIZE)], [token % 2 for token in range(SIZE)])
CPU = torch.device("cpu")
WORDS = st.integers(0, 2**64 - 1)
MOMENTS = st.tuples(st.builds(NoiseKey, WORDS, st.integers(0, 2**32)), st.integers(0, 2**40))


def mixed(word: int) -> int:
    """splitmix64 as it is published, in unsigned numbers without bounds."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
    return word ^ (word >> 31)


@given(st.lists(WORDS, min_size=1, max_size=20), MOMENTS)
def test_words_are_splitmix64_in_numpy_and_in_torch(words: list[int], at: tuple[NoiseKey, int]) -> None:
    first, second = moment(*at)
    due = [mixed(mixed((word + first) % 2**64) ^ (second % 2**64)) >> 11 for word in words]
    hashes = np.array(words, dtype=np.uint64).view(np.int64)
    assert uniform_words(hashes, first, second).tolist() == due
    assert uniform_words(torch.from_numpy(hashes), first, second).tolist() == due


@given(st.lists(MOMENTS, min_size=1, max_size=5))
def test_arrivals_are_those_of_the_noise(moments: list[tuple[NoiseKey, int]]) -> None:
    distributions = torch.ones(len(moments), SIZE, dtype=torch.float64)
    found = Clocks(NOISE, CPU).arrivals(distributions, moments)
    for row, (key, offset) in zip(found, moments, strict=True):
        np.testing.assert_allclose(row.numpy(), NOISE.exponentials(key, offset), rtol=4e-16)


def test_what_is_impossible_never_arrives_and_columns_have_the_noise_of_their_ids() -> None:
    distributions = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64)
    at = [(NoiseKey(3), 4)]
    due = NOISE.exponentials(NoiseKey(3), 4, np.array([7, 9, 200])) / np.array([np.nan, 0.5, 0.5])
    pruned = Clocks(NOISE, CPU, np.array([7, 9, 200, 201])).arrivals(distributions, at)
    picked = Clocks(NOISE, CPU).arrivals(distributions, at, torch.tensor([7, 9, 200]))
    for found in (pruned, picked):
        assert found[0, 0] == torch.inf
        np.testing.assert_allclose(found[0, 1:].numpy(), due[1:], rtol=1e-15)
