"""The enumerating chooser: replays a run over every branch and sums the weights."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import ArrayLike

Outcome = TypeVar("Outcome", bound=Hashable)


def few_or_full(values: Iterable[Any], few: Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test: those for which `few` holds, and the others for `make test-full` only."""
    return [value if few(value) else full(*(value if isinstance(value, tuple) else (value,))) for value in values]


def full(*values: Any) -> Any:
    """One set of parameters for `make test-full` only."""
    return pytest.param(*values, marks=pytest.mark.full)


class EnumeratingChooser:
    """Follows a script of branches; past its end it takes the first branch of every choice."""

    def __init__(self, script: list[int]) -> None:
        self.taken: list[int] = []
        self.branches: list[int] = []  # how many there were at each choice
        self.weight = 1.0
        self._script = script

    def bernoulli(self, probability: float) -> bool:
        probability = min(1.0, max(0.0, probability))
        return self.categorical([1.0 - probability, probability]) == 1

    def categorical(self, weights: ArrayLike) -> int:
        values = np.asarray(weights, dtype=np.float64).tolist()
        possible = [index for index, value in enumerate(values) if value > 0]
        assert possible, "a choice without a possible outcome"
        place = self._script[len(self.taken)] if len(self.taken) < len(self._script) else 0
        self.taken.append(place)
        self.branches.append(len(possible))
        self.weight *= values[possible[place]] / sum(values)
        return possible[place]

    def candidates(self, weights: ArrayLike, count: int) -> tuple[int, ...]:
        """All that are possible: `kept` then has the distribution of any number of blocks at once."""
        return tuple(np.flatnonzero(np.asarray(weights) > 0).tolist())

    def kept(self, candidates: Sequence[int], weights: ArrayLike, keep: ArrayLike) -> int | None:
        thinned = np.asarray(weights, dtype=np.float64)[list(candidates)] * np.asarray(keep, dtype=np.float64)
        return candidates[self.categorical(thinned)] if np.any(thinned > 0) else None


class Refusing(EnumeratingChooser):
    def bernoulli(self, probability: float) -> bool:
        return False


def distribution_of(run: Callable[[EnumeratingChooser], Outcome]) -> dict[Outcome, float]:
    """The exact distribution of `run`'s outcome over all its random choices."""
    distribution: dict[Outcome, float] = {}
    script: list[int] = []
    while True:
        chooser = EnumeratingChooser(script)
        outcome = run(chooser)
        distribution[outcome] = distribution.get(outcome, 0.0) + chooser.weight
        script = chooser.taken
        while script and script[-1] + 1 == chooser.branches[len(script) - 1]:
            script.pop()
        if not script:
            return distribution
        script[-1] += 1


def distance(one: dict[Outcome, float], other: dict[Outcome, float]) -> float:
    """The largest difference of two distributions at any outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())


def total_variation(one: dict[Outcome, float], other: dict[Outcome, float]) -> float:
    """Half the sum of the differences of two distributions."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2
