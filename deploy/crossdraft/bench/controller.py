"""`crossdraft bench controller`: controlled generations beside the best fixed choice, in simulations of many pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import ClassVar

import numpy as np

from crossdraft.bench.harness import Advance, Benchmark, Columns, Table
from crossdraft.speculation.choice import PLAIN, Choice, Controller, Workload, lock_step
from crossdraft.speculation.controller import Adaptive, Limits
from crossdraft.speculation.cost_model import forecast
from crossdraft.speculation.simulator import simulate

PASS = 0.02  # seconds of a plain pass
JITTER = 0.1
MATCHES = 0.7  # of the acceptance: what agrees with a token that the target drew by itself
SHORT = 512  # tokens
SHORT_RUNS = 7
FINALISTS = 4  # fixed choices that are simulated, the best by forecast
LOW = 0.97  # a share of a speed below which a cell is counted


@dataclass(frozen=True)
class Cell:
    """One pair. Costs in plain passes, speeds in tokens a plain pass."""

    acceptance: float  # of a draft token
    token: float  # that the drafter takes for a token
    trip: float  # to the drafter and back
    node: float  # that the target takes for a node of a pass's tree
    best: float  # the fastest fixed choice
    choice: str  # ... which that is
    controlled: float  # in the long run, what the controller learns included
    short: float  # 512 tokens, from no knowledge; median


@dataclass(frozen=True)
class Simulated(Benchmark[Cell]):
    """Every combination of these values; all but acceptance in plain passes."""

    acceptance: tuple[float, ...]
    token: tuple[float, ...]
    trip: tuple[float, ...]
    node: tuple[float, ...]
    tokens: int  # of a long run
    branches: bool  # whether continuations are prepared, of which half match

    unit: ClassVar[str] = "pairs"
    title: ClassVar[str] = "Speeds in tokens a plain pass"
    columns: ClassVar[Columns] = {
        "acceptance": lambda cell: f"{cell.acceptance:g}",
        "token": lambda cell: f"{cell.token:g}",
        "round trip": lambda cell: f"{cell.trip:g}",
        "node": lambda cell: f"{cell.node:g}",
        "best fixed": lambda cell: f"{cell.best:.2f}",
        "controlled / best": lambda cell: f"{cell.controlled / cell.best:.3f}",
        "512 tokens / plain": lambda cell: f"{cell.short:.3f}",
        "best fixed choice": lambda cell: cell.choice,
    }

    @property
    def total(self) -> int:
        return len(self.acceptance) * len(self.token) * len(self.trip) * len(self.node)

    def measure(self, advance: Advance) -> Iterator[Cell]:
        for acceptance, token, trip, node in product(self.acceptance, self.token, self.trip, self.node):
            yield self._cell(acceptance, token, trip, node)
            advance()

    def _cell(self, acceptance: float, token: float, trip: float, node: float) -> Cell:
        workload = Workload(
            (acceptance,),
            MATCHES * acceptance,
            token * PASS,
            PASS,
            node * PASS,
            slope=0.17,
            drafter_trip=trip * PASS,
            branch_hit=0.5,
        )
        choices = sorted(fixed_choices(workload, self.branches), key=lambda one: -forecast(workload, one).speed)
        # Chosen with other random numbers than its speed is reported for.
        best = max([PLAIN, *choices[:FINALISTS]], key=lambda one: _speed(workload, one, self.tokens, 1))
        limits = Limits(branch_depth=None if self.branches else 0)
        controlled = _speed(workload, Adaptive(limits=limits), self.tokens, 3)
        short = median(_speed(workload, Adaptive(limits=limits), SHORT, 10 + run) for run in range(SHORT_RUNS))
        fixed = _speed(workload, best, self.tokens, 2)
        return Cell(acceptance, token, trip, node, fixed, _name(best), controlled, short)

    def report(self, results: Sequence[Cell]) -> Iterator[Table | str]:
        yield from super().report(results)
        for name, shares in (
            ("controlled / best fixed", [cell.controlled / cell.best for cell in results]),
            ("512 tokens / plain", [cell.short for cell in results]),
        ):
            low = sum(share < LOW for share in shares)
            yield (
                f"{name}: least {min(shares):.3f}, median {median(shares):.3f}, "
                f"below {LOW:g} in {low} of {len(results)} cells"
            )


def fixed_choices(workload: Workload, branches: bool) -> Sequence[Choice]:
    """Plain, lock-step, and overlapped ones with many windows, waits, patiences and branches."""
    rounds = [lock_step(k).choice for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)]
    patiences = (0.5 * PASS, workload.drafter_trip + 3 * workload.token + 0.2 * PASS, 1.0)
    chains = [Choice(window, patience=0.0) for window in (1, 2, 4, 6, 8, 12, 16, 24, 32)]
    chains += [
        Choice(window, wait, patience=patience)
        for window in (2, 4, 8, 16, 32)
        for wait in (0, 1, 2, 4, 8)
        if wait <= window
        for patience in patiences
    ]
    if not branches:
        return [*rounds, *chains]
    prepared = [
        Choice(one.max_draft_tokens, one.min_draft_tokens, True, one.patience, depth, width)
        for one in chains
        for depth, width in ((2, 1), (4, 1), (8, 1), (4, 2))
    ]
    return [*rounds, *chains, *prepared]


def _speed(workload: Workload, how: Choice | Controller, tokens: int, seed: int) -> float:
    return PASS * simulate(workload, how, tokens, np.random.default_rng(seed), JITTER).speed


def _name(choice: Choice) -> str:
    if not choice.drafts:
        return "plain"
    if not choice.overlap:
        return f"lock-step {choice.max_draft_tokens}"
    branches = f", branches {choice.branch_depth} x {choice.branch_width}" if choice.branch_depth else ""
    return (
        f"{choice.max_draft_tokens}/{choice.min_draft_tokens} draft tokens for {choice.patience / PASS:.1f}{branches}"
    )
