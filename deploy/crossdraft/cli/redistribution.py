"""`crossdraft bench rdk`: the tables and the picture of RDK's synthetic experiment."""

from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.table import Table

from crossdraft.cli.benching import write_json
from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.show import PlainConsole
from crossdraft.cli.synthetic import TAUS, Draw, Level, Study, draw_of, run


def measure(study: Study, json_file: Path | None, plot: Path | None) -> None:
    """Draws, prints the tables, and writes figures and picture where asked to.

    Raises:
        CommandFailed: a file cannot be written.
    """
    levels = tuple(run(study))
    console = PlainConsole(highlight=False)
    for _, group in groupby(levels, lambda level: (level.tokens, level.pruning)):
        found = list(group)
        console.print(_exact(found) if found[0].figures.exact else _pruned(found))
    if json_file is not None:
        write_json(json_file, {"study": asdict(study), "levels": [asdict(level) for level in levels]})
    if plot is not None:
        _draw(levels, draw_of(study, study.tokens, 0), plot)


def _draw(levels: tuple[Level, ...], draw: Draw, path: Path) -> None:
    from crossdraft.cli.redistribution_plot import picture  # matplotlib takes a second

    try:
        picture(levels, draw).savefig(path)
    except (OSError, ValueError) as error:  # ValueError: a format that it does not know
        raise CommandFailed(f"cannot write the picture: {error}") from error


def _pruned(levels: list[Level]) -> Table:
    names = ("kept", "masked", "tli", "first-order", "uniform", "|Eq. 3 − q′|₁", "θ = p·q′")
    table = Table(*names, title=_title(levels), title_justify="left")
    for level in levels:
        found = level.figures
        shares = [f"{share:.2%}" for share in (found.masked, found.tli, found.first_order, found.uniform)]
        table.add_row(f"{level.kept:,}", *shares, f"{found.change:.1e}", f"{found.theta:.1e}")
    return table


def _exact(levels: list[Level]) -> Table:
    names = ["kept", "tli", *(f"τ={tau:g}" for tau in TAUS), "uniform", "|Eq. 3 − Mᵀq′|₁", "θ = p·q′"]
    table = Table(*names, title=f"{_title(levels)}, Mᵀq′ itself", title_justify="left")
    for level in levels:
        found = level.figures
        shares = [f"{share:.2%}" for share in (found.tli, *found.exact, found.uniform)]
        table.add_row(f"{level.kept:,}", *shares, f"{found.error:.3f}", f"{found.theta:.1e}")
    return table


def _title(levels: list[Level]) -> str:
    return f"acceptance, N = {levels[0].tokens:,}, {levels[0].pruning} tokens kept"
