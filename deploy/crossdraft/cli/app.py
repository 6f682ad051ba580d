"""The command line: which commands there are, and what typer knows of them.

What a command does is in the module that it names, which is imported when it runs: torch, transformers, grpc and numpy
take seconds, which `--help` and a mistyped option should not.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli.commands import command
from crossdraft.cli.running import CommandFailed, Interrupted, checked_options, open_standard_files, unwritten
from crossdraft.config import commands
from crossdraft.config.api import ServedGrpc, ServedHttp
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.config.fields import COMMAS, option
from crossdraft.config.service import ServedDrafter, ServedNgram, ServedTarget
from crossdraft.engine.names import LABORATORY, laboratory

TOKENIZER = "A folder, a hub id, bundled:NAME, or a file: a tokenizer.json of any name, or NAME.tiktoken."
DRAFTERS = ["bundled:drafter-a", "bundled:drafter-b"]

# Plain errors and help: an error is then one line, whatever the width of the terminal.
app = typer.Typer(
    name="crossdraft",
    help="Speculative decoding for a target and a drafter with different vocabularies, on one machine or several.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
serve = typer.Typer(
    name="serve",
    help="Serve a target, a drafter, or an API that uses them. "
    "A line of JSON on standard output says when the server is ready.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Prompt = Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input. By default some Python.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
Corpus = Annotated[Path, typer.Argument(help="A file or a folder: plain text, or .jsonl with a `text` on each line.")]
Tokenizer = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME; only the tokenizer is read.")]
Cluster = Annotated[
    str, typer.Option(help="Address of the Ray cluster: auto on one of its nodes, or HOST:PORT as for `ray start`.")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process with 0, 1 (it failed), 2 (wrong usage) or 128 + a signal's number."""
    open_standard_files()
    # What these libraries read when they are imported; a user's own setting stays.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is an error with a text already
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers heeds it too
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        try:
            app(arguments, prog_name="crossdraft")
        finally:
            print(end="", flush=True)  # what cannot be written is an error here, and not when Python ends
    except OSError as error:
        sys.exit(unwritten(error))
    except Interrupted as error:
        sys.exit(128 + error.number)
    except CommandFailed as error:
        print("crossdraft:", "\n".join(" ".join(str(line).split()) for line in error.args), file=sys.stderr)
        sys.exit(error.exit_code)


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


@command(app, runs="crossdraft.cli.demo:demo")
def demo(
    prompt: Prompt = None,
    k: int = option(6, "Draft tokens in a lock-step round.", "--num-speculative-tokens", "-k", min=1, max=64),
    max_tokens: int = option(30, "Max tokens to generate.", min=1),
    temperature: list[float] = option([0.0, 0.8], f"Sampling temperature, 0 is greedy; {COMMAS}.", min=0),
    seed: int = option(14, "Random seed of both generations, so that their texts must be equal."),
) -> None:
    """Generate with and without a drafter, and compare. It starts the bundled models, and ends them afterwards.

    The target is padded with layers that add nothing: it is as slow as a larger model, and writes the same texts.
    """


@command(app)
def generate(
    *,
    prompt: Prompt = None,
    where: commands.WhereToGenerate,
    options: commands.RequestOptions,
    as_json: bool = option(False, "Print one JSON object for each token, then one for the whole.", "--json"),
    verbose: bool = option(
        False, "Say what the figures mean, and, without --server, the fate of draft tokens.", "--verbose", "-v"
    ),
) -> None:
    """Continue a prompt. Without addresses it starts the bundled models, and ends them afterwards."""
    from crossdraft.cli import generate as module

    running = where.target is not None or where.server is not None
    module.generate(module.request_of(prompt, options, running), where, as_json, verbose=verbose)


@command(app, runs="crossdraft.cli.inspect:inspect")
def inspect(
    target: Annotated[str, typer.Argument(help=TOKENIZER)],
    drafter: Annotated[str, typer.Argument(help=TOKENIZER)],
    sample: Path | None = option(None, "Text like that to be served; by default Python source code.", metavar="FILE"),
    longest: int | None = option(None, "Count combinations for tokens of at most N letters only.", min=1, metavar="N"),
    plot: bool = option(False, "Also show combinations and forwards by the length of target tokens."),
    as_json: AsJson = False,
) -> None:
    """Compare two vocabularies. It counts the tokens that both have, and those that the other can write."""


@command(app, runs="crossdraft.cli.check:check")
def check(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A folder, a hub id, bundled:NAME, or random:ARCHITECTURE for a small random model, such as "
            "random:gemma3_text; random:all: every architecture that transformers has.",
        ),
    ],
    drafter: str | None = option(None, "Compare greedy outputs with this drafter, too.", metavar="MODEL"),
    engine: EngineOptions,
    as_json: AsJson = False,
    markdown: Path | None = option(None, "Write the table to this file.", metavar="FILE"),
) -> None:
    """Check whether a model is served exactly, and what it needs of memory.

    Logits are compared with the model's own: for drafts, trees, rollback, shared prefixes, and a text of up to 1,024
    tokens, which is longer than three windows where these are short.
    """


@command(app, runs="crossdraft.cli.select:select")
def select(
    target: str = option("bundled:target", "A folder, a hub id, bundled:NAME, or HOST:PORT."),
    drafter: list[str] = option(DRAFTERS, f"A folder, a hub id, bundled:NAME, or HOST:PORT; {COMMAS}."),
    prompts: Path | None = option(
        None, "Prompts like those to be served: JSON lines with a `text`, and perhaps a `category`.", metavar="FILE"
    ),
    limit: int = option(4, "Max prompts to use.", min=2),
    method: list[str] | None = option(None, f"Methods to measure, {COMMAS}; by default what suits the temperature."),
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0),
    max_tokens: int = option(48, "Max tokens to generate.", min=1),
    as_json: AsJson = False,
    engine: EngineOptions = STARTED,
) -> None:
    """Measure drafters for a target. It says which one to use, and with which method, or that none helps."""


@command(app, runs="crossdraft.cli.corpus:make_affinity")
def affinity(
    corpus: Corpus, target: Tokenizer, drafter: Tokenizer, output: Output, options: commands.AffinityOptions
) -> None:
    """Make an affinity matrix, for `serve drafter --affinity`.

    It says which target tokens each draft token may stand for; the method rdk uses it.
    """


@command(app, runs="crossdraft.cli.corpus:count_tokens")
def frequencies(corpus: Corpus, model: Tokenizer, output: Output) -> None:
    """Count tokens in a corpus, for `serve drafter --vocab-keep`."""


@command(app, runs="crossdraft.cli.audit:audit")
def audit(
    endpoint: commands.AuditedEndpoint, reference: commands.AuditReference, options: commands.AuditOptions
) -> None:
    """Check that a server's outputs have its model's distribution. Any server of OpenAI's API can be audited.

    Greedy texts are compared with a reference, if one is given, and sampled tokens with their log-probabilities. It
    ends with 0 if nothing was found, 1 if a fault was found, and 2 if the server cannot be audited.
    """


@command(app, runs="crossdraft.cli.certs:certs")
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Keep it private: the CA's key is in it.")],
    options: commands.CertsOptions,
) -> None:
    """Make certificates for mutual TLS. The first call makes a private CA, each call a certificate for each --host."""


@command(app, runs="crossdraft.cli.cluster:deploy")
def deploy(
    configuration: Annotated[Path, typer.Argument(help="A YAML file, such as deploy/serve.yaml.")],
    address: Cluster = "auto",
    check: bool = option(False, "Only check the file, and deploy nothing.", "--check"),
    wait_seconds: float = option(120.0, "Seconds to wait for nodes that Ray is not setting up yet.", min=0),
    timeout: float = option(1800.0, "Seconds until everything must serve. Else the command fails and says why.", min=1),
) -> None:
    """Serve models on a running Ray cluster, by Ray Serve.

    As `serve deploy`, with more checks: says at once what nodes lack, starts other models before it ends those before,
    and brings back what ran if something does not start. Services whose configuration is unchanged keep running; others
    are replaced, without ending open streams.
    """


@command(app, runs="crossdraft.cli.cluster:status")
def status(address: Cluster = "auto", as_json: AsJson = False) -> None:
    """Show what runs on a Ray cluster. Lists processes with their addresses, and the state of Ray Serve's replicas."""


@command(app, runs="crossdraft.cli.cluster:undeploy")
def undeploy(address: Cluster = "auto") -> None:
    """Stop all that `crossdraft deploy` or `serve deploy` started. The Ray cluster keeps running."""


@command(serve, "target", runs="crossdraft.cli.serve:serve_target")
def serve_target(options: ServedTarget) -> None:
    """Serve the target. It is the large model, which verifies the draft tokens."""


@command(serve, "drafter", runs="crossdraft.cli.serve:serve_drafter")
def serve_drafter(options: ServedDrafter) -> None:
    """Serve a drafter. It is a small model, which proposes draft tokens."""


@command(serve, "ngram", runs="crossdraft.cli.serve:serve_ngram")
def serve_ngram(options: ServedNgram) -> None:
    """Serve a drafter without a model (prompt lookup). It proposes what followed earlier occurrences of the last bytes.

    It looks in the prompt, in the output, and in earlier outputs for the same client. A draft token is one byte.
    """


@command(serve, "http", runs="crossdraft.cli.serve:serve_http")
def serve_http(api: ServedHttp) -> None:
    """Serve OpenAI's HTTP API. --ssl-... sets TLS with its clients, --tls-... TLS with targets and drafters."""


@command(serve, "grpc", runs="crossdraft.cli.serve:serve_grpc")
def serve_grpc(api: ServedGrpc) -> None:
    """Serve the gRPC API (crossdraft.v1.Generation). --ssl-... and --tls-... are as for `serve http`."""


app.add_typer(serve)


def _add_laboratory() -> None:
    """The commands that measure. They are of a checkout: the wheel has no laboratory."""
    if find_spec(LABORATORY) is not None:
        laboratory("commands", "").add_to(app)
        return
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name in ("bench", "loadtest"):
        app.command(name, hidden=True, context_settings=anything)(_not_here)


def _not_here(context: typer.Context) -> None:
    """Raises UsageError."""
    with checked_options():
        laboratory("commands", f"`crossdraft {context.info_name}`")


_add_laboratory()
