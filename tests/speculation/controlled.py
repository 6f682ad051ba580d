"""Controlled generations in simulations, for tests."""

import numpy as np

from crossdraft.speculation.choice import Choice, Controller, Judged, Observation, Workload
from crossdraft.speculation.controller import Adaptive, Limits
from crossdraft.speculation.simulator import Run, simulate

PASS = 0.02
GOOD = Workload((0.8,), 0.6, PASS / 20, PASS, 0.02 * PASS, slope=0.17, drafter_trip=PASS / 2, branch_hit=0.5)
CHAINS = Limits(branch_depth=0)
NEVER_SLOWER = 0.97


def workload(acceptance: float, token: float, trip: float, node: float) -> Workload:
    """Costs in passes."""
    return Workload((acceptance,), 0.7 * acceptance, token * PASS, PASS, node * PASS, drafter_trip=trip * PASS)


def run(given: Workload, how: Choice | Controller, tokens: int, seed: int = 0, **more: object) -> Run:
    return simulate(given, how, tokens, np.random.default_rng(seed), 0.1, **more)  # type: ignore[arg-type]


class Counting:
    """An adaptive controller; counts the tokens of the first seconds, and notes when it gives which kind of reason."""

    waits_for_drafter = False

    def __init__(self, until: float = 0.0) -> None:
        self.controller = Adaptive(limits=CHAINS)
        self.tokens = 0
        self.reasons: list[tuple[float, str]] = []
        self._until = until

    def observe(self, seen: Observation, now: float) -> None:
        self.controller.observe(seen, now)
        if isinstance(seen, Judged) and now <= self._until:
            self.tokens += seen.tokens

    def choose(self, now: float) -> Choice:
        choice = self.controller.choose(now)
        self.reasons.append((now, choice.reason))
        return choice

    def times(self, words: str) -> list[float]:
        return [now for now, reason in self.reasons if words in reason]


def relative(given: Workload, tokens: int, seeds: range, limits: Limits = CHAINS) -> float:
    """Speed of controlled runs, relative to plain decoding; median."""
    return float(np.median([PASS * run(given, Adaptive(limits=limits), tokens, seed).speed for seed in seeds]))
