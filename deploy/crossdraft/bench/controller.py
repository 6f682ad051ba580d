"""`crossdraft bench controller`: controlled generations beside the best fixed way, in simulations of many pairs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from crossdraft.bench.harness import print_table, write_json
from crossdraft.speculation.choice import PLAIN, Choice, Controller, Workload, lock_step
from crossdraft.speculation.controller import Adaptive, Limits
from crossdraft.speculation.cost_model import forecast
from crossdraft.speculation.simulator import simulate

PASS = 0.02  # seconds of a plain pass
JITTER = 0.1
MATCHES = 0.7  # of the acceptance: what agrees with a token that the target drew by itself
SHORT = 512  # tokens
SHORT_RUNS = 7
FINALISTS = 4  # fixed ways that are simulated, the best by forecast
COLUMNS = ("acceptance", "token", "round trip", "node", "best fixed", "controlled / best", "512 tokens / plain", "way")


@dataclass(frozen=True)
class Costs:
    """The values that are combined; all but acceptance in plain passes."""

    acceptance: tuple[float, ...]
    token: tuple[float, ...]
    trip: tuple[float, ...]
    node: tuple[float, ...]


@dataclass(frozen=True)
class Cell:
    """One pair. Speeds in tokens a plain pass."""

    acceptance: float
    token: float
    trip: float
    node: float
    best: float  # the fastest fixed way
    way: str  # ... which that is
    governed: float  # in the long run, what it learns included
    short: float  # 512 tokens, from no knowledge; median


def measure(costs: Costs, tokens: int, branches: bool, json_path: Path | None) -> None:
    """Simulates every combination; a table on stdout, and JSON if a path is given."""
    values = product(costs.acceptance, costs.token, costs.trip, costs.node)
    cells = [_cell(*value, tokens=tokens, branches=branches) for value in values]
    print_table("Speeds in tokens a plain pass", COLUMNS, [_shown(cell) for cell in cells])
    for name, shares in (
        ("controlled / best fixed", [cell.governed / cell.best for cell in cells]),
        ("512 tokens / plain", [cell.short for cell in cells]),
    ):
        low = sum(share < 0.97 for share in shares)
        print(
            f"{name}: least {min(shares):.3f}, median {median(shares):.3f}, below 0.97 in {low} of {len(cells)} cells"
        )
    if json_path is not None:
        write_json(json_path, {"tokens": tokens, "branches": branches, "cells": [asdict(cell) for cell in cells]})


def fixed_ways(workload: Workload, branches: bool) -> Sequence[Choice]:
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
        Choice(one.window, one.wait, True, one.patience, depth, width)
        for one in chains
        for depth, width in ((2, 1), (4, 1), (8, 1), (4, 2))
    ]
    return [*rounds, *chains, *prepared]


def _cell(acceptance: float, token: float, trip: float, node: float, tokens: int, branches: bool) -> Cell:
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
    ways = sorted(fixed_ways(workload, branches), key=lambda way: -forecast(workload, way).speed)
    finalists = [PLAIN, *ways[:FINALISTS]]
    way = max(finalists, key=lambda one: _speed(workload, one, tokens, 1))  # with other chances than what is reported
    limits = Limits(branch_depth=None if branches else 0)
    governed = _speed(workload, Adaptive(limits=limits), tokens, 3)
    short = median(_speed(workload, Adaptive(limits=limits), SHORT, 10 + run) for run in range(SHORT_RUNS))
    return Cell(acceptance, token, trip, node, _speed(workload, way, tokens, 2), _name(way), governed, short)


def _speed(workload: Workload, how: Choice | Controller, tokens: int, seed: int) -> float:
    return PASS * simulate(workload, how, tokens, np.random.default_rng(seed), JITTER).speed


def _name(choice: Choice) -> str:
    if not choice.drafts:
        return "plain"
    if not choice.overlap:
        return f"lock-step {choice.window}"
    branches = f", branches {choice.branch_depth} x {choice.branch_width}" if choice.branch_depth else ""
    return f"window {choice.window}, wait {choice.wait} for {choice.patience / PASS:.1f}{branches}"


def _shown(cell: Cell) -> tuple[str, ...]:
    costs = (cell.acceptance, cell.token, cell.trip, cell.node)
    return (
        *(f"{cost:g}" for cost in costs),
        f"{cell.best:.2f}",
        f"{cell.governed / cell.best:.3f}",
        f"{cell.short:.3f}",
        cell.way,
    )
