"""`crossdraft bench controller`: the controller beside the best fixed choice, simulated for many pairs and loads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import ClassVar

from crossdraft.bench.harness import Advance, Benchmark, Columns, Table
from crossdraft.bench.simulator import Simulation, World, fixed_choices, fixed_speed
from crossdraft.speculation.choice import PLAIN, Controller
from crossdraft.speculation.controller import Limits, TargetController

KIND = ("coupled", 1.0, None)  # of all simulated requests
TOKENS = 256  # of an output


@dataclass(frozen=True)
class Cell:
    """One load of one pair; speeds in tokens a second of all outputs."""

    outputs: int  # at once
    acceptance: float
    pass_ms: float
    trip_ms: float  # round trip to the drafter
    plain: float
    best: float  # the fastest fixed choice
    choice: str  # ... which that is
    controlled: float  # what the controller learns included

    @property
    def beside_best(self) -> float:
        """The controller's speed, as a share of the best fixed one."""
        return self.controlled / self.best

    @property
    def beside_plain(self) -> float:
        """The controller's speed, relative to plain decoding."""
        return self.controlled / self.plain


@dataclass(frozen=True)
class SimulatedControl(Benchmark[Cell]):
    """Every combination of these values. A pass takes 0.02 ms more for each token; a draft step 1 + 0.01 n ms."""

    outputs: tuple[int, ...]
    acceptance: tuple[float, ...]
    passes_ms: tuple[float, ...]
    trips_ms: tuple[float, ...]
    passes: int  # plain ones that a run takes

    unit: ClassVar[str] = "cells"
    title: ClassVar[str] = "Tokens a second of all outputs, simulated"
    columns: ClassVar[Columns] = {
        "outputs": lambda cell: f"{cell.outputs}",
        "acceptance": lambda cell: f"{cell.acceptance:g}",
        "pass, ms": lambda cell: f"{cell.pass_ms:g}",
        "round trip, ms": lambda cell: f"{cell.trip_ms:g}",
        "plain": lambda cell: f"{cell.plain:.0f}",
        "best fixed": lambda cell: f"{cell.best:.0f}",
        "auto": lambda cell: f"{cell.controlled:.0f}",
        "auto / best": lambda cell: f"{cell.beside_best:.2f}",
        "auto / plain": lambda cell: f"{cell.beside_plain:.2f}",
        "best fixed choice": lambda cell: cell.choice,
    }

    @property
    def total(self) -> int:
        return len(self.outputs) * len(self.acceptance) * len(self.passes_ms) * len(self.trips_ms)

    def measure(self, advance: Advance) -> Iterator[Cell]:
        for outputs, acceptance, pass_ms, trip_ms in product(
            self.outputs, self.acceptance, self.passes_ms, self.trips_ms
        ):
            yield measured(outputs, acceptance, pass_ms, trip_ms, self.passes)
            advance()

    def report(self, results: Sequence[Cell]) -> Iterator[Table | str]:
        yield from super().report(results)
        for name, shares in (
            ("auto / best fixed", [cell.beside_best for cell in results]),
            ("auto / plain", [cell.beside_plain for cell in results]),
        ):
            yield f"{name}: least {min(shares):.2f}, median {median(shares):.2f}"


def measured(outputs: int, acceptance: float, pass_ms: float, trip_ms: float, passes: int) -> Cell:
    """One cell of the grid, over the time of so many plain passes."""
    world = World(acceptance, pass_base=pass_ms / 1e3, drafter_trip=trip_ms / 1e3)
    seconds = passes * world.pass_base
    speeds = {choice: fixed_speed(world, choice, TOKENS, outputs, seconds) for choice in fixed_choices()}
    best = max(speeds, key=lambda choice: speeds[choice])
    controlled = Simulation(world, controllers(), TOKENS, outputs, seed=1).speed(seconds)
    return Cell(
        outputs, acceptance, pass_ms, trip_ms, speeds[PLAIN], speeds[best], best.settings, controlled=controlled
    )


def controllers(limits: Limits | None = None) -> Callable[[], Controller]:
    """Makes controllers of outputs that share a new one."""
    shared, given = TargetController(), limits or Limits()
    return lambda: shared.output(KIND, given)
