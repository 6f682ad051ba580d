"""`crossdraft bench head`: how much of a drafting step is LM head and softmax, with whole and with cut heads."""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from crossdraft.cli.benching import print_table, write_json
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.models.loading import ModelLoadError
from crossdraft.models.pruning import CannotPruneError
from crossdraft.models.steptime import Drawing, FromRows, Keyed, StepTime, model_of, step_times

MILLISECONDS = 1000.0
ROW_WIDTH = 64  # ids of a proposal's row, as the pipeline asks for
COLUMNS = ("drafter", "drawn from", "keep", "layers", "head", "softmax", "draw", "step", "head + softmax", "faster")


@dataclass(frozen=True)
class Measured:
    """A drafting step with a head of one size. Times are medians, of one thread's processor time."""

    drafter: str
    drawn_from: str
    keep: int  # ids of the head
    layers_ms: float
    head_ms: float
    softmax_ms: float  # and order, and rounding
    draw_ms: float
    head_and_softmax: float  # share of the step
    faster: float  # the step with the whole head, over this one


def measure(drafters: Sequence[str], shares: Sequence[float], turns: int, json_path: Path | None) -> None:
    """Measures every drafter; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a share is out of its range.
        CommandFailed: a model cannot be loaded, or its head cannot be cut.
    """
    check_shares(shares)
    measured = [one for name in drafters for one in _measured(name, shares, turns)]
    print_table("Processor milliseconds of a drafting step, one thread", COLUMNS, [shown(one) for one in measured])
    if json_path is not None:
        write_json(json_path, {"turns": turns, "steps": [asdict(one) for one in measured]})


def check_shares(shares: Sequence[float]) -> None:
    """Raises Misused if one is no share of a vocabulary."""
    for share in shares:
        if not 0 < share <= 1:
            raise Misused(f"--share must be above 0 and at most 1, got {share}")


def sizes_of(size: int, shares: Sequence[float]) -> list[int]:
    """How many ids the shares of a vocabulary are, the whole of it first."""
    return sorted({size, *(max(1, round(size * share)) for share in shares)}, reverse=True)


def _measured(name: str, shares: Sequence[float], turns: int) -> list[Measured]:
    try:
        model = model_of(name)
        size: int = len(model.get_output_embeddings().weight)
        keep = sizes_of(size, shares)
        ways: dict[str, Drawing] = {f"the {ROW_WIDTH} best": FromRows(ROW_WIDTH), "all, keyed": Keyed(size)}
        return [
            _of(name, way, ids, time, times[0])
            for way, drawing in ways.items()
            for times in [step_times(model, keep, drawing, turns)]
            for ids, time in zip(keep, times, strict=True)
        ]
    except (ModelLoadError, CannotPruneError) as error:
        raise CommandFailed(str(error)) from error


def _of(name: str, way: str, keep: int, time: StepTime, whole: StepTime) -> Measured:
    layers, head, softmax, draw = (MILLISECONDS * part for part in astuple(time))
    return Measured(name, way, keep, layers, head, softmax, draw, time.head_and_law, whole.total / time.total)


def shown(one: Measured) -> tuple[str, ...]:
    """A row of the table."""
    parts = (one.layers_ms, one.head_ms, one.softmax_ms, one.draw_ms)
    times = (f"{part:.2f}" for part in (*parts, sum(parts)))
    return (one.drafter, one.drawn_from, f"{one.keep:,}", *times, f"{one.head_and_softmax:.0%}", f"{one.faster:.2f}×")
