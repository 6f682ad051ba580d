"""The pipeline as events in time, without models: how fast a way of running it would be.

Drafter, wire, target and walk do what `pipeline.session` and the services do, with coins for acceptance and given
times for forwards. A governor can be tried on it: it is asked for its choice at each epoch and sees the observations
that a session would give it. `forecast` computes the same speeds without chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossdraft.pipeline.governing import Choice, Fixed, Governor
from crossdraft.pipeline.simulated_session import SimulatedSession
from crossdraft.pipeline.workload import Workload


@dataclass(frozen=True)
class Run:
    """What a simulated generation took."""

    tokens: float  # emitted
    seconds: float
    passes: int
    epochs: int
    target_seconds: float  # with a pass in flight, its round trip included; of all targets together
    drafter_seconds: float  # in its forwards, those for nothing included
    tried: int  # refusals that met branches
    hits: int  # ... and were continued by one

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def idle(self) -> float:
        """Share of the time in which no pass was in flight (with one target)."""
        return max(0.0, 1 - self.target_seconds / self.seconds)

    @property
    def passes_per_token(self) -> float:
        return self.passes / self.tokens

    @property
    def drafter_busy(self) -> float:
        """Share of the time in which the drafter ran a forward."""
        return self.drafter_seconds / self.seconds


def simulate(
    workload: Workload,
    choice: Choice | Governor,
    tokens: int,
    rng: np.random.Generator,
    jitter: float = 0.0,
    changes: Sequence[tuple[float, Workload]] = (),
) -> Run:
    """Runs one generation.

    Args:
        choice: how every epoch is run, or who decides it.
        tokens: target tokens to emit.
        rng: of acceptance and of jitter.
        jitter: standard deviation of a forward's time, as a share of it (log-normal).
        changes: (seconds since the beginning, what holds from then on), ascending.
    """
    governor = Fixed(choice) if isinstance(choice, Choice) else choice
    session = SimulatedSession(workload, governor, tokens, rng, jitter)
    session.run(changes)
    return Run(
        session.tokens,
        session.agenda.now,
        session.targets.passes,
        session.epoch,
        session.targets.seconds,
        session.drafter.seconds,
        session.tried,
        session.hits,
    )
