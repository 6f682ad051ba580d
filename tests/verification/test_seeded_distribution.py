"""`seeded`: the output is a function of the seed alone, and over seeds it has the target's distribution.

The noise cannot be enumerated, so the distribution is judged by chi-square over the seeds: p > 1e-4 for every pair of
vocabularies, cells expected below 5 pooled.
"""

import copy
from collections import Counter
from functools import cache

import numpy as np
import pytest

from crossdraft.audit.statistics import fit_of
from crossdraft.session.session import Session
from crossdraft.speculation.choice import lock_step
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import NoiseKey, Sample
from crossdraft.types.rows import DraftToken
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import SEEDED
from crossdraft.verification.noise import KeyedNoise
from tests.clock import Stage, run_session
from tests.conftest import FULL
from tests.ports import assignment
from tests.tables import ToyDrafter, ToyTarget, autoregressive_distribution
from tests.verification.enumerating import few_or_full
from tests.verification.scheduling import Overlapped
from tests.verification.toys import NESTED, TOYS, Toy, as_ids
from tests.vocabularies import pair_of

LENGTH = 3
SEEDS = 2000 if FULL else 500
SMALLEST_P = 1e-4
NO_CHOICE = RandomChooser.__new__(RandomChooser)  # `seeded` makes no choice of its own


class SeededTarget(ToyTarget):
    """Answers nodes with keyed draws, as the service does."""

    def __init__(self, vocabulary: Vocabulary, key: NoiseKey, noise: KeyedNoise) -> None:
        super().__init__(vocabulary.size, 99, NO_CHOICE)
        self._vocabulary, self._key, self._noise = vocabulary, key, noise

    def _sample(self, path: tuple[int, ...]) -> Sample:
        offset = len(self._vocabulary.letters_of(path))
        return Sample(self._noise.draw(as_ids(*range(self.size)), self.distribution(path), self._key, offset), 0.0)


class SeededDrafter(ToyDrafter):
    """Draws with the target's noise, as the service does."""

    def __init__(self, vocabulary: Vocabulary, key: NoiseKey, noise: KeyedNoise) -> None:
        super().__init__(vocabulary.letters, NO_CHOICE)
        self._key, self._noise = key, noise

    def propose(self) -> DraftToken:
        row = self.distribution(self.text)
        token = self._noise.draw(row.ids, row.probabilities, self._key, len(self.text))
        self.text = type(self.text)(self.text + self.letters[token])
        return DraftToken(token)


class Runs:
    """Sessions over one pair of toys; the noise of a vocabulary is made once."""

    def __init__(self, toy: Toy) -> None:
        self.pair = pair_of(toy.target, toy.drafter, toy.stops)
        self.noises = KeyedNoise.of(self.pair.target), KeyedNoise.of(self.pair.drafter)

    def output(self, seed: int, draft_tokens: int) -> tuple[int, ...]:
        """The output for a seed; without draft tokens there is no drafter."""
        given = assignment(
            SEEDED,
            drafts=draft_tokens > 0,
            pair=self.pair,
            chooser=NO_CHOICE,
            controller=lock_step(draft_tokens or 1),
            max_tokens=LENGTH,
        )
        return tuple(one.token for one in run_session(Session(given), *self.services(seed)).emitted)

    def services(self, seed: int) -> tuple[SeededTarget, SeededDrafter]:
        """Both sides, which draw with the noise of a seed."""
        key, (target, drafter) = NoiseKey(seed), self.noises
        return SeededTarget(self.pair.target, key, target), SeededDrafter(self.pair.drafter, key, drafter)

    def play(self, given: Overlapped, seed: int) -> Stage:
        """An overlapped session of the same toys, played to its end."""
        stage = given.stage(NO_CHOICE)
        target, drafter = self.services(seed)
        stage.replace_toys(target, lambda: copy.copy(drafter))
        given.schedule.play(stage)
        return stage


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_the_output_is_a_function_of_the_seed(toy: Toy) -> None:
    runs = Runs(toy)
    for seed in range(10):
        assert len({runs.output(seed, draft_tokens) for draft_tokens in (0, 1, 2, 3)}) == 1


@cache
def outputs(toy: Toy) -> Counter[tuple[int, ...]]:
    """Those of all seeds."""
    runs = Runs(toy)
    return Counter(runs.output(seed, 2) for seed in range(SEEDS))


@pytest.mark.parametrize("toy", few_or_full(TOYS, lambda toy: toy is NESTED), ids=lambda toy: toy.name)
def test_over_seeds_the_distribution_is_the_targets(toy: Toy) -> None:
    wanted = autoregressive_distribution(ToyTarget(len(toy.target), 99), toy.stops, LENGTH)
    assert outputs(toy).keys() <= wanted.keys()
    assert p_value(outputs(toy), wanted) > SMALLEST_P


def test_noise_of_another_distribution_is_seen() -> None:
    """The test has teeth: the same outputs judged against the distribution of another target."""
    other = autoregressive_distribution(ToyTarget(len(NESTED.target), 99, salt="another"), NESTED.stops, LENGTH)
    assert p_value(outputs(NESTED), other) < SMALLEST_P


def p_value(seen: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """Chi-square against a distribution."""
    fit = fit_of({place: seen[output] for place, output in enumerate(wanted)}, np.array([*wanted.values()]))
    assert fit is not None
    return fit.p
