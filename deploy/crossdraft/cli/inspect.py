"""`crossdraft inspect`: how well the vocabularies of two models fit; reads tokenizers and configs, no weights."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.show import PlainConsole
from crossdraft.models.names import ModelLoadError, source_of
from crossdraft.text.letters import Side
from crossdraft.text.loading import TokenizerMissing, load_tokenizer_json
from crossdraft.text.report import CompatibilityReport, Injectivity, compare
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary


def inspect(target: str, drafter: str, sample: Path | None, as_json: bool) -> None:
    """Compares two tokenizers and prints the report.

    Args:
        target: a folder, a hub id or a bundled model.
        drafter: likewise.
        sample: text of the kind that will be served; None: source code of Python's own.
        as_json: whether to print JSON.

    Raises:
        Misused: the sample cannot be read.
        CommandFailed: a tokenizer cannot be loaded, or is of no supported kind.
    """
    text = _sample(sample)
    report = compare(_tokenization(target, Side.TARGET), _tokenization(drafter, Side.DRAFTER), text)
    if as_json:
        print(json.dumps(asdict(report)))
        return
    console = PlainConsole(highlight=False)
    console.print(f"target {escape(target)}, drafter {escape(drafter)}")
    console.print(_summary(report))
    console.print(_checks(report))
    console.print(_both(report))


def _sample(path: Path | None) -> str:
    source = Path(textwrap.__file__) if path is None else path
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise Misused(f"the sample {source} cannot be read as UTF-8 text: {error}") from error


def _tokenization(name: str, side: Side) -> Tokenization:
    try:
        loaded = load_tokenizer_json(source_of(name))
        vocabulary = Vocabulary.build(
            loaded.tokenizer_json, loaded.vocabulary_size, loaded.controls, loaded.stops, side
        )
        return Tokenization(loaded.tokenizer_json, vocabulary)
    except (ModelLoadError, TokenizerMissing) as error:
        raise CommandFailed(str(error)) from error
    except ValueError as error:
        raise CommandFailed(f"the tokenizer of {name} cannot be used: {error}") from error


def _summary(report: CompatibilityReport) -> Table:
    table = Table(show_header=False)
    combinations = report.combinations
    rows = [
        ("same vocabulary", _yes(report.same_vocabulary)),
        ("tokens that both have", f"{report.shared:,}"),
        ("their share of the target's", f"{report.shared_of_target:.1%}"),
        ("their share of the drafter's", f"{report.shared_of_drafter:.1%}"),
        ("their share of the sample's tokens", f"{report.shared_of_sample:.1%}"),
        ("longest look-ahead (draft tokens for one of the target's)", str(report.look_ahead)),
        ("draft-token combinations for a target token, median", f"{combinations.median:,.0f}"),
        ("the same, mean and largest", f"10^{combinations.log10_of_mean:.1f}, 10^{combinations.log10_of_largest:.1f}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _checks(report: CompatibilityReport) -> Table:
    table = Table("same", "", "first difference")
    for check in report.checks:
        table.add_row(check.name, _yes(check.same), escape(check.detail))
    return table


def _both(report: CompatibilityReport) -> Table:
    table = Table("", "target", "drafter")
    for name, target, drafter in (
        ("different tokens", f"{report.target_strings:,}", f"{report.drafter_strings:,}"),
        (
            "that the other can write",
            f"{report.target_written_by_drafter:.1%}",
            f"{report.drafter_written_by_target:.1%}",
        ),
        ("letters of a token, mean", f"{report.target_lengths.mean:.1f}", f"{report.drafter_lengths.mean:.1f}"),
        ("letters, longest", str(report.target_lengths.longest), str(report.drafter_lengths.longest)),
        ("text comes back unchanged", _injective(report.target_injectivity), _injective(report.drafter_injectivity)),
    ):
        table.add_row(name, target, drafter)
    return table


def _injective(found: Injectivity) -> str:
    if found.holds:
        return f"yes ({found.strings} strings)"
    parts = f" because of {', '.join(found.lossy_parts)}" if found.lossy_parts else ""
    return escape(f"{found.restored} of {found.strings} strings{parts}; not {found.example!r}")


def _yes(holds: bool) -> str:
    return "[green]yes[/]" if holds else "[red]no[/]"
