"""`crossdraft bench memory`: many sessions of all lengths through one engine, and what the process holds meanwhile."""

from dataclasses import asdict
from pathlib import Path

from crossdraft.cli.benching import write_json
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.models.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.models.soaking import Sample, Soaked, Soaking, soak_of

SAMPLES = 100  # in all
SHOWN = 10  # rows of the table
HEADINGS = ("sessions ended", "seconds", "resident, MiB", "live sessions", "places held", "of all places")


def measure(target: str, mib: int, soaking: Soaking, json_path: Path | None) -> None:
    """Runs all sessions; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a number does not fit the model.
        CommandFailed: the model cannot be loaded or run.
    """
    if json_path is not None:
        check_output(json_path)
    try:
        found = soak_of(target, mib, soaking, max(1, soaking.sessions // SAMPLES))
    except NumberOutOfRangeError as error:
        raise Misused(str(error)) from error
    except (ModelLoadError, ValueError) as error:
        raise CommandFailed(str(error)) from error
    print(report(found, mib), end="")
    if json_path is not None:
        write_json(json_path, {"target": target, "mib": mib, "soaking": asdict(soaking)} | asdict(found))


def report(found: Soaked, mib: int) -> str:
    """A table, and what it comes to."""
    step = max(1, len(found.samples) // SHOWN)
    rows = [_row(sample, found.places) for sample in found.samples[step - 1 :: step]]
    most = max(sample.held for sample in found.samples)
    table = markdown(HEADINGS, rows)
    return (
        f"{table}\nBudget {mib} MiB, {found.places:,} places. The process had {found.loaded:.0f} MiB "
        f"before the first session, and grew by {found.grown:.1f} MiB from a tenth of the sessions to the end. At most "
        f"{most:,} places were held, and {found.left:,} after the last session.\n"
    )


def _row(sample: Sample, places: int) -> tuple[str, ...]:
    held = (f"{sample.live}", f"{sample.held:,}", f"{sample.held / places:.0%}")
    return (f"{sample.ended:,}", f"{sample.seconds:.0f}", f"{sample.resident:.0f}", *held)
