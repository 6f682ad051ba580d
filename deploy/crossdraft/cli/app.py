"""The commands and their options.

Everything that a command needs is imported when it runs: torch, transformers and grpc take seconds, which `--help`
and a mistyped option should not.
"""

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli import bench, clustering, generating, loadtesting, recordings, security, serving
from crossdraft.cli.failures import CommandFailed, Interrupted

# Plain errors and help: an error is then one line whatever the width of the terminal, and rich is not imported.
app = typer.Typer(
    name="crossdraft",
    help="Speculative decoding across vocabularies and machines, exactly.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
app.add_typer(serving.app)
app.add_typer(bench.app)
recordings.register(app)
clustering.register(app)


class Affinities(StrEnum):
    """How `affinity` makes its matrix."""

    ALIGNED = "aligned"
    PREFIX = "prefix"
    CO_OCCURRENCE = "co-occurrence"
    FIRST_ORDER = "first-order"


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process with 0, 1 (it failed), 2 (wrong usage) or 128 + a signal's number."""
    _quiet_libraries()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        app(arguments, prog_name="crossdraft")
    except Interrupted as error:
        sys.exit(128 + error.number)
    except CommandFailed as error:
        print("crossdraft:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(error.exit_code)


def _quiet_libraries() -> None:
    """What these libraries read from the environment when they are imported; a user's own setting stays."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is an error with a text already
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers heeds it too


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print("crossdraft", version("crossdraft"))
        except PackageNotFoundError:
            print("crossdraft (run from its source folders, not installed)")
        raise typer.Exit


@app.callback()
def _options(
    shown: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What all commands have in common."""


app.command()(generating.generate)
app.command()(generating.demo)
app.command()(security.certs)
app.command()(loadtesting.loadtest)


@app.command()
def affinity(
    corpus: Annotated[Path, typer.Argument(help="A file, or a folder of files: text, or .jsonl lines with a text.")],
    target: Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME; only its tokenizer is read.")],
    drafter: Annotated[str, typer.Option(help="Likewise.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    kind: Annotated[Affinities, typer.Option(help="How the matrix is made; docs/rdk.md compares them.")] = (
        Affinities.ALIGNED
    ),
    neighbours: Annotated[
        int | None, typer.Option(min=1, help="Target tokens of a draft token; by default 64.")
    ] = None,
    keep: Annotated[
        float | None, typer.Option(help="Share of its mass that stays with each token first; by default 0.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=2, help="Of co-occurrence: target tokens in a window; by default 8.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of co-occurrence: τ of its softmax; by default 0.0001.")
    ] = None,
) -> None:
    """Estimate which target tokens a draft token stands for, for `serve drafter --affinity` and the method rdk."""
    from crossdraft.cli import affinity as command

    command.make(target, drafter, corpus, output, kind, command.Options(neighbours, keep, window, temperature))


@app.command()
def frequencies(
    corpus: Annotated[Path, typer.Argument(help="A file, or a folder of files: text, or .jsonl lines with a text.")],
    model: Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME; only its tokenizer is read.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
) -> None:
    """Count how often a corpus uses each token, for `serve drafter --vocab-keep`."""
    from crossdraft.cli import frequencies as command

    command.count(model, corpus, output)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="A folder, a hub id, or bundled:NAME.")],
    drafter: Annotated[str, typer.Argument(help="Likewise.")],
    sample: Annotated[Path | None, typer.Option(help="Text of the kind that will be served.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture of the draft-token combinations there.")
    ] = None,
) -> None:
    """Show how well two vocabularies fit: what they share, what each can write of the other."""
    from crossdraft.cli import inspect as command

    command.inspect(target, drafter, sample, as_json, plot)


@app.command()
def select(
    target: Annotated[str, typer.Option(help="A folder, a hub id, bundled:NAME, or HOST:PORT.")] = "bundled:target",
    drafter: Annotated[list[str], typer.Option(help="Likewise; repeatable.")] = bench.DRAFTERS[:2],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines, each with a text of the kind that will be served.")
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Only the first prompts.")] = 4,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; by default those that suit the temperature.")
    ] = None,
    ks: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            "-k",
            help="Proposals in a round to choose from; repeatable. By default 1 to 6, "
            "and 4 to 32 with a drafter that copies.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest output.")] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture of speed against K there.")] = None,
) -> None:
    """Measure drafters for a target, and say which one to use, with which method and how many proposals."""
    from crossdraft.cli import select as command
    from crossdraft.cli.benching import prompts_of
    from crossdraft.cli.texts import PROMPTS

    texts = PROMPTS[:limit] if prompts is None else prompts_of(prompts, limit)
    methods, numbers = tuple(method or ()), tuple(ks or ())
    choosing = command.Choosing(target, tuple(drafter), texts, methods, numbers, temperature, max_tokens)
    command.select(choosing, as_json, plot)
