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

from crossdraft.bench import commands
from crossdraft.cli import loadtest_commands, serve_commands
from crossdraft.cli import options as security
from crossdraft.cli.options import TlsCa, TlsCert, TlsKey, tls_of
from crossdraft.console.running import METHODS, CommandFailed, Interrupted, Misused

# Plain errors and help: an error is then one line whatever the width of the terminal, and rich is not imported.
app = typer.Typer(
    name="crossdraft",
    help="Speculative decoding across vocabularies and machines, exactly.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
app.add_typer(serve_commands.app)
app.add_typer(commands.app)


# The commands for recorded sessions, and their options.

Recorded = Annotated[Path, typer.Argument(metavar="FILE", help="Written by `crossdraft generate --record FILE`.")]


def replay(file: Recorded) -> None:
    """Run verification again from a recording, and compare its verdicts."""
    from crossdraft.cli import trace as command

    command.replay(file)


def timeline(
    file: Recorded,
    output: Annotated[Path, typer.Option("--output", "-o", help="A page (.html), or a picture (.png, .svg, .pdf).")],
    first: Annotated[int, typer.Option(min=1, help="The round that is seen first.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are seen at once; a page has them all.")] = 15,
) -> None:
    """Draw a recording: who worked when, what was on its way, what came of it."""
    from crossdraft.cli import trace as command

    command.timeline(file, output, first, rounds)


def register(app: typer.Typer) -> None:
    """Adds them to the command line."""
    app.command()(replay)
    app.command()(timeline)


register(app)


# `crossdraft deploy`, `status`, `undeploy`: the commands of a cluster, and their options.

Address = Annotated[
    str,
    typer.Option(help="Of the Ray cluster: auto on one of its nodes, or HOST:PORT as `ray start --address` has it."),
]


def deploy(
    configuration: Annotated[Path, typer.Argument(help="A YAML file, such as deploy/crossdraft.yaml.")],
    address: Address = "auto",
    check: Annotated[bool, typer.Option("--check", help="Only read the file and say what is wrong with it.")] = False,
    wait_seconds: Annotated[float, typer.Option(min=0, help="For nodes that are still being started.")] = 120.0,
) -> None:
    """Serve what a configuration says on a running Ray cluster.

    What runs already and is the same goes on; what differs is replaced, and open streams go on.
    """
    from crossdraft.cli import cluster as command

    command.deploy(configuration, address, check, wait_seconds)


def status(
    address: Address = "auto", as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """Show which processes answer on a cluster, where, and whether Serve's replicas are healthy."""
    from crossdraft.cli import cluster as command

    command.status(address, as_json)


def undeploy(address: Address = "auto") -> None:
    """End all that `deploy` started; the Ray cluster itself goes on."""
    from crossdraft.cli import cluster as command

    command.undeploy(address)


def clustering_register(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (deploy, status, undeploy):
        app.command()(command)


clustering_register(app)


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


# `crossdraft generate` and `crossdraft demo`: their options. What they need is imported when they run.


class Overlaps(StrEnum):
    """Whether the drafter drafts on while the target verifies."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


Prompt = Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input.")]
MaxTokens = Annotated[int, typer.Option(help="Longest output.")]


def generate(
    prompt: Prompt = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...", help="One or several of the same model; by default a bundled one is started."
        ),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="One or several, or none to decode plainly.")
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}; by default the best.")] = None,
    k: Annotated[int, typer.Option("-k", help="Draft tokens in a lock-step round.")] = 5,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable.")] = None,
    top_k: Annotated[int, typer.Option(help="0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Above 0, at most 1.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Between 0 and 1.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="As in transformers.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="As in vLLM.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="ID:BIAS", help="Repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the output; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of sequence.")] = False,
    drafter_temperature: Annotated[float | None, typer.Option(help="By default the target's.")] = None,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Let a method change the distribution.")
    ] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Recompute the drafter's draws from their rows.")] = False,
    overlap: Annotated[
        Overlaps,
        typer.Option(help="Draft on while the target verifies; off is the lock-step round of -k draft tokens."),
    ] = Overlaps.AUTO,
    window: Annotated[int | None, typer.Option(help="Most draft tokens ahead of what is verified.")] = None,
    wait: Annotated[int | None, typer.Option(help="Draft tokens that a pass waits for.")] = None,
    branches: Annotated[
        int | None, typer.Option(help="Draft tokens of each prepared continuation; 0 prepares none.")
    ] = None,
    branch_width: Annotated[int | None, typer.Option(help="Prepared continuations for each draft token.")] = None,
    paths: Annotated[int, typer.Option(help="Most guessed paths in a pass; 1 is a chain.")] = 2,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="With two targets, begin passes before the one under way is back.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what the controller decided, and why.")] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a flight record, for replay and timeline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each token, then the whole.")] = False,
    untrusted_drafter: Annotated[
        bool,
        typer.Option(
            "--untrusted-drafter", help="Use only methods whose output nothing that a drafter says can change."
        ),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Let `serve grpc` make it; --drafter is then the name of one of its drafters."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of the server; by default its only one.")] = None,
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="CROSSDRAFT_API_KEY", help="Of the server.", show_envvar=True)
    ] = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Continue a prompt. Without addresses, the bundled models are run for as long as it takes."""
    from crossdraft.cli import generate as command
    from crossdraft.cli import generate as remote
    from crossdraft.client import GenerationRequest, Overlap, SamplingOptions
    from crossdraft.console.running import checked_options

    with checked_options():
        biases = command.logit_biases(logit_bias or ())
        request = GenerationRequest(
            command.read_prompt(prompt),
            method=method,
            k=k,
            max_tokens=max_tokens,
            options=SamplingOptions(
                temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, logit_bias=biases
            ),
            drafter_temperature=drafter_temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            stop=tuple(command.checked_text(text) for text in stop or ()),
            allow_inexact=allow_inexact,
            audit=audit,
            overlap=Overlap(overlap.value),
            window=window,
            wait=wait,
            branches=branches,
            branch_width=branch_width,
            paths=paths,
            speculation=speculation,
            explain=explain,
            record=record,
        )
    if server is not None:
        if target is not None or untrusted_drafter:
            raise Misused("--target and --untrusted-drafter are the server's own: leave them out, or --server")
        if tls_cert is not None or tls_key is not None:
            raise Misused("a server wants no certificate: give --tls-ca alone, for the CA of its own, and --api-key")
        asked = remote.Asked(server, model or "", drafter, api_key, tls_ca)
        remote.remote_generate(request, asked, as_json)
        return
    if model is not None:
        raise Misused("--model is a name that a server knows: give --server, or --target for a model's address")
    services = command.Given(target, drafter, tls_of(tls_ca, tls_cert, tls_key), not untrusted_drafter)
    command.generate(request, services, as_json)


def demo(
    prompt: Prompt = None,
    k: Annotated[int, typer.Option("-k", help="Draft tokens in a round.")] = 5,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Both generations have it, so their texts must be equal.")] = 7,
) -> None:
    """Generate with the bundled models, with the drafter and without, side by side."""
    from crossdraft.cli import demo as command
    from crossdraft.cli.generate import read_prompt
    from crossdraft.client import GenerationRequest, Overlap, SamplingOptions
    from crossdraft.console.running import checked_options

    with checked_options():
        options = SamplingOptions(temperature)
        request = GenerationRequest(
            read_prompt(prompt), k=k, max_tokens=max_tokens, options=options, seed=seed, overlap=Overlap.OFF
        )
    command.demo(request)


app.command()(generate)
app.command()(demo)
app.command()(security.certs)
app.command()(loadtest_commands.loadtest)


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
    from crossdraft.cli import corpus as command

    command.make(target, drafter, corpus, output, kind, command.Options(neighbours, keep, window, temperature))


@app.command()
def frequencies(
    corpus: Annotated[Path, typer.Argument(help="A file, or a folder of files: text, or .jsonl lines with a text.")],
    model: Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME; only its tokenizer is read.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
) -> None:
    """Count how often a corpus uses each token, for `serve drafter --vocab-keep`."""
    from crossdraft.cli import corpus as command

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
    drafter: Annotated[list[str], typer.Option(help="Likewise; repeatable.")] = commands.DRAFTERS[:2],
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
            help="Draft tokens in a round to choose from; repeatable. By default 1 to 6, "
            "and 4 to 32 with a drafter that copies.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest output.")] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture of speed against K there.")] = None,
) -> None:
    """Measure drafters for a target, and say which one to use, with which method and how many draft tokens."""
    from crossdraft.bench.workload import prompts_of
    from crossdraft.cli import select as command
    from crossdraft.console.running import PROMPTS

    texts = PROMPTS[:limit] if prompts is None else prompts_of(prompts, limit)
    methods, numbers = tuple(method or ()), tuple(ks or ())
    choosing = command.Choosing(target, tuple(drafter), texts, methods, numbers, temperature, max_tokens)
    command.select(choosing, as_json, plot)
