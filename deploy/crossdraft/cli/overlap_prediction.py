"""What the simulator expects of each way, from what was measured in the run itself."""

from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import fmean as mean
from typing import Any

import numpy as np

from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.governing import PLAIN, Choice, Governor, Observation
from crossdraft.pipeline.learning import Learner
from crossdraft.pipeline.simulator import simulate

TOKENS = 4_000  # of a simulation
SEED = 0


class Watched:
    """A governor whose observations are learnt from besides, which changes nothing that it does."""

    def __init__(self, governor: Governor, learner: Learner) -> None:
        self._governor, self._learner = governor, learner

    @property
    def waits_for_drafter(self) -> bool:
        """As the governor has it."""
        return self._governor.waits_for_drafter

    def observe(self, seen: Observation, now: float) -> None:
        """As the governor does, and learnt from."""
        self._learner.observe(seen, now)
        self._governor.observe(seen, now)

    def choose(self, now: float) -> Choice:
        """As the governor does."""
        choice = self._governor.choose(now)
        self._learner.begin(choice, now)
        return choice


def mean_of(all_estimates: Sequence[Estimates]) -> Estimates:
    """What was believed on average. An estimate forgets what is long ago; the mean of many does not.

    Raises:
        ValueError: there are none.
    """
    if not all_estimates:
        raise ValueError("a mean needs at least one of the estimates")
    latest = all_estimates[-1]
    numbers = [field.name for field in fields(latest) if isinstance(getattr(latest, field.name), float)]
    means: dict[str, Any] = {name: mean(getattr(one, name) for one in all_estimates) for name in numbers}
    by_place = zip(*(one.acceptance for one in all_estimates), strict=True)
    return replace(latest, acceptance=tuple(map(mean, by_place)), **means)


def predicted_ratio(estimates: Estimates, way: Choice | Governor, samples: bool) -> float:
    """The simulated speed of a way, as a multiple of plain decoding's.

    Args:
        estimates: of the services, both seen at work.
        way: the choice for all epochs, or who decides it.
        samples: the target draws by itself (`slem`, `seeded`).
    """
    workload = estimates.workload(samples)
    run, plain = (simulate(workload, how, TOKENS, np.random.default_rng(SEED)) for how in (way, PLAIN))
    return run.speed / plain.speed
