"""`crossdraft inspect`: how well two vocabularies fit. It reads tokenizers and configs, no weights."""

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import log2, log10
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from crossdraft.cli.corpus import NamedTokenizer
from crossdraft.cli.running import PlainConsole, UsageError
from crossdraft.text.letters import Side
from crossdraft.text.report import CompatibilityReport, Injectivity, compare

SHOWN = 8  # texts that are an unknown token
LARGE = 10**6  # larger numbers are shown as powers of ten


def inspect(target: str, drafter: str, sample: Path | None, longest: int | None, plot: bool, as_json: bool) -> None:
    """Compares two tokenizers and prints the report."""
    text = _sample(sample)
    ours, theirs = NamedTokenizer.load(target, Side.TARGET), NamedTokenizer.load(drafter, Side.DRAFTER)
    report = compare(ours.tokenization, theirs.tokenization, text, longest or 0)
    if as_json:
        print(json.dumps(asdict(report)))
        return
    console = PlainConsole(highlight=False)
    console.print(f"target {escape(target)}, drafter {escape(drafter)}")
    console.print(_summary(report))
    checks = ((check.name, _yes_or_no(check.same), escape(check.detail)) for check in report.checks)
    console.print(_table(("same", "", "first difference"), checks))
    console.print(_lengths(report))
    if plot:
        console.print(_chart(report))
    console.print(verdict(report), soft_wrap=True)


def verdict(report: CompatibilityReport) -> str:
    """What the report comes to."""
    measured = "`crossdraft select` measures what the drafter gains."
    if report.same_vocabulary:
        return f"One vocabulary: all methods can be used, `standard` is the default of sampling. {measured}"
    unwritten = 1 - report.target_written_by_drafter
    never = f"; it never drafts the {unwritten:.1%} of the target's tokens that it cannot write" * (unwritten > 0)
    return (
        f"Different vocabularies: the drafter can be used, by default with `slem` and `seeded`{never}. Methods for "
        f"shared tokens (`tli`) can draft {report.sample.target_tokens:.1%} of the sample's tokens. {measured}"
    )


def _sample(path: Path | None) -> str:
    source = Path(textwrap.__file__) if path is None else path
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"the sample {source} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise UsageError(f"the sample {source} is empty: give some pages of text like that which will be served")
    return text


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*headings, show_header=bool(headings))
    for row in rows:
        table.add_row(*row)
    return table


def _summary(report: CompatibilityReport) -> Table:
    combinations, forwards = report.combinations, report.forwards
    rows = [
        ("same vocabulary", _yes_or_no(report.same_vocabulary)),
        ("tokens that both have", f"{report.shared:,}"),
        ("their share of the target's", f"{report.shared_of_target:.1%}"),
        ("their share of the drafter's", f"{report.shared_of_drafter:.1%}"),
        ("their share of the target's tokens in the sample", f"{report.sample.target_tokens:.1%}"),
        ("their share of the drafter's tokens in the sample", f"{report.sample.drafter_tokens:.1%}"),
        (
            "different tokens in the sample, target and drafter",
            f"{report.sample.target_kinds:,}, {report.sample.drafter_kinds:,}",
        ),
        ("those of them that both use, share of the target's", f"{report.sample.shared_of_target:.1%}"),
        ("longest look-ahead (draft tokens for one target token)", str(report.look_ahead)),
        ("draft-token combinations for a target token, quartiles", _numbers(combinations.quartiles)),
        ("the same, mean ± standard deviation", _powers(combinations.log10_of_mean, combinations.log10_of_deviation)),
        ("the same, largest", _powers(combinations.log10_of_largest)),
        ("target tokens that these are of", f"{combinations.tokens:,}"),
        ("forwards for one probability of `slrs`, quartiles", _numbers(forwards.quartiles)),
        ("the same, mean; largest", f"{_powers(forwards.log10_of_mean)}; {_powers(forwards.log10_of_largest)}"),
    ]
    return _table((), rows)


def _lengths(report: CompatibilityReport) -> Table:
    def both(name: str, shown: Callable[[Any], str]) -> tuple[str, str]:
        return shown(getattr(report, f"target_{name}")), shown(getattr(report, f"drafter_{name}"))

    written = f"{report.target_written_by_drafter:.1%}", f"{report.drafter_written_by_target:.1%}"
    rows = (
        ("different tokens", *both("strings", "{:,}".format)),
        ("texts that the other can write", *written),
        ("letters of a token, mean ± deviation", *both("lengths", "{0.mean:.1f} ± {0.deviation:.1f}".format)),
        ("letters, quartiles", *both("lengths", lambda lengths: _numbers(lengths.quartiles))),
        ("letters, longest", *both("lengths", "{0.longest}".format)),
        ("text encoded as unknown", *both("unknown", _unknown)),
        ("decode(encode(s)) = s", *both("decoding", _decoded)),
        ("text comes back unchanged", *both("injectivity", _injective)),
    )
    return _table(("", "target", "drafter"), rows)


def _chart(report: CompatibilityReport) -> Table:
    """Figure 2 of arXiv 2502.05202, with the forwards beside it: a line for each length of target tokens."""
    headings = ("letters", "tokens", "combinations, mean", "forwards, mean")
    rows = (
        (str(length), f"{tokens:,}", f"{counts:,.1f}", f"{forwards:,.1f}", "▪" * round(log2(counts)))
        for length, tokens, counts, forwards in report.by_length
    )
    return _table((*headings, "combinations, a mark for each doubling"), rows)


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" if number < LARGE else f"10^{log10(number):.1f}" for number in numbers)


def _powers(*exponents: float) -> str:
    return " ± ".join(f"{10**one:,.0f}" if one < log10(LARGE) else f"10^{one:.1f}" for one in exponents)


def _decoded(found: Injectivity) -> str:
    return f"yes ({found.strings} strings)" if found.holds else f"{found.restored} of {found.strings} strings"


def _injective(found: Injectivity) -> str:
    parts = f" because of {', '.join(found.lossy_parts)}" if found.lossy_parts else ""
    return _decoded(found) + ("" if found.holds else escape(f"{parts}; not {found.example!r}"))


def _unknown(parts: Sequence[str]) -> str:
    return escape(f"{', '.join(map(repr, parts[:SHOWN]))}{' and more' * (len(parts) > SHOWN)}") or "none in the sample"


def _yes_or_no(holds: bool) -> str:
    return "[green]yes[/]" if holds else "[red]no[/]"
