"""`crossdraft bench inflate`: a costlier model with the same function."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crossdraft.cli.benching import print_table
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.models.growing import CannotInflateError
from crossdraft.models.inflating import inflate
from crossdraft.models.loading import ModelLoadError
from crossdraft.models.names import NumberOutOfRangeError, Size
from crossdraft.models.packing import pack
from crossdraft.models.passtime import pass_times

MILLISECONDS = 1000.0
TOKENS = (1, 2, 5, 9, 17)  # of a pass: one that was committed, and 0, 1, 4, 8, 16 nodes
TURNS = 15
COLUMNS = ("model", "parameters", *(f"{count} token{'s'[: count - 1]}" for count in TOKENS))


def make(name: str, size: Size, folder: Path) -> None:
    """Writes the larger model, and says how much it may differ and what its passes cost.

    Raises:
        Misused: the folder holds something, or the shape is smaller than the model.
        CommandFailed: the model cannot be loaded, inflated or written.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise Misused(f"{folder} holds something already: give a folder that is empty or new")
    with _failures():
        inflated = inflate(name, size)
        inflated.save(name, folder)
        rows = []
        for shown, model in (("original", inflated.original), ("larger", inflated.model)):
            parameters = sum(parameter.numel() for parameter in model.parameters())
            pack(model)  # as a service runs it
            times = pass_times(model, [count - 1 for count in TOKENS], TURNS)
            rows.append((shown, f"{parameters / 1e6:.1f}M", *(f"{MILLISECONDS * time:.1f}" for time in times)))
    print(f"Largest difference between logits on random prompts: {inflated.difference:.1e}")
    print_table("Processor milliseconds of a pass, one thread", COLUMNS, rows)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except NumberOutOfRangeError as error:
        raise Misused(str(error)) from error
    except (ModelLoadError, CannotInflateError) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"the larger model cannot be written: {error}") from error
