"""`crossdraft bench`: the commands that measure, and their options.

A command is a plan: a frozen dataclass whose fields are its options, and whose docstring is its help. What measures is
imported when it runs: `--help` shall not wait for torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer import Option
from typer.core import TyperGroup

from crossdraft.console import options
from crossdraft.console.processes import DEFAULT_DRAFTER, STARTED, EngineOptions
from crossdraft.console.running import METHODS

TARGET, DRAFTER = "bundled:target", f"bundled:{DEFAULT_DRAFTER}"
DRAFTERS = ["bundled:drafter-a", "bundled:drafter-b", "bundled:drafter-c"]

EXACTNESS, SPEED = "Acceptance and exactness", "Speed"
ROBUSTNESS, PARTS = "Robustness", "Parts: what each costs by itself"
SECTIONS = (EXACTNESS, SPEED, ROBUSTNESS, PARTS)


class SectionedGroup(TyperGroup):
    """Lists the commands in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One list for each section."""
        for section in SECTIONS:
            commands = [one for one in self.commands.items() if getattr(one[1], "rich_help_panel", None) == section]
            with formatter.section(section):
                formatter.write_dl([(name, command.get_short_help_str(400)) for name, command in commands])


app = typer.Typer(
    name="bench",
    help="Run benchmarks on this machine. Tables go to stdout (Markdown where that is a file), all figures to --json.",
    cls=SectionedGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
)


@dataclass(frozen=True)
class Files:
    """Where results are written."""

    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write all figures to this file, as JSON.")
    ] = None
    markdown_file: Annotated[
        Path | None, Option("--markdown", metavar="FILE", help="Write the table to this file.")
    ] = None


Planned = TypeVar("Planned")


def command(name: str, section: str, benchmark: str) -> Callable[[type[Planned]], type[Planned]]:
    """Makes a plan a command.

    Args:
        name: of the command.
        section: of SECTIONS.
        benchmark: MODULE.CLASS in this package, made of the plan that the options say.
    """

    def register(plan: type[Planned]) -> type[Planned]:
        def run(given: Planned, files: Files) -> None:
            module, _, measuring = benchmark.partition(".")
            found = getattr(import_module(f"crossdraft.bench.{module}"), measuring)(given)
            found.run(files.json_file, files.markdown_file)

        run.__annotations__["given"] = plan
        run.__doc__ = plan.__doc__
        options.command(app, name, section)(run)
        return plan

    return register


Limit = Annotated[int | None, Option(min=1, help="Use only the first N prompts.")]
Target = Annotated[str, Option(help="A folder, a hub id, or bundled:NAME.")]
OneDrafter = Annotated[str, Option("--drafter", help="A folder, a hub id, or bundled:NAME.")]
Drafters = Annotated[
    tuple[str, ...],
    Option(
        "--drafter", help="A folder, a hub id, or bundled:NAME; repeatable. `standard` takes the target's own model."
    ),
]
Method = Annotated[str | None, Option(help="By default the best for the temperature.")]
Methods = Annotated[tuple[str, ...], Option("--method", help="Repeatable.")]
Temperatures = Annotated[tuple[float, ...], Option("--temperature", help="Repeatable.")]
NumberOfDraftTokens = Annotated[
    int, Option("--num-speculative-tokens", "--k", "-k", min=1, max=64, help="Draft tokens in a round.")
]
NumbersOfDraftTokens = Annotated[
    tuple[int, ...], Option("--num-speculative-tokens", "--k", "-k", help="Draft tokens in a round; repeatable.")
]
MaxTokens = Annotated[int, Option(help="Max tokens to generate.")]
Concurrency = Annotated[int, Option(min=1, help="Generations at once.")]
Concurrencies = Annotated[str, Option("--concurrency", metavar="N,N", help="Outputs at once; each in turn.")]
PaceTarget = Annotated[
    str | None, Option(metavar="A,B", help="A pass of the target over n tokens takes at least A + B n ms.")
]
PaceDrafter = Annotated[
    str | None, Option(metavar="A,B", help="A step of the drafter over n tokens takes at least A + B n ms.")
]
LogitNoises = Annotated[
    tuple[float, ...], Option("--logit-noise", metavar="SIGMA", help="Noise on the drafter's logits; repeatable.")
]
Delays = Annotated[
    str, Option(metavar="MS,MS", help="One-way delays to the drafter on an emulated network; each in turn.")
]
Affinities = Annotated[
    tuple[str, ...],
    Option("--affinity", metavar="NAME=FILE", help="A drafter's file of `crossdraft affinity`; repeatable."),
]
Shares = Annotated[tuple[float, ...], Option("--share", help="Share of the vocabulary to keep; repeatable.")]
StreamTokens = Annotated[int, Option(min=8, help="Tokens of each output.")]
Seed = Annotated[int, Option(min=0, help="Random seed.")]
Dtype = Annotated[str, Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, Option(help="Torch device of all models.")]
EnforceEager = Annotated[bool, Option("--enforce-eager", help="Do not use CUDA graphs.")]
CacheMib = Annotated[int, Option(min=1, help="Size of the KV cache in MiB.")]


@dataclass(frozen=True)
class PromptsPlan:
    """What is generated from prompts."""

    # Of a checkout: the prompts belong to the tests, and are not part of the package.
    prompts: Annotated[Path, Option(help="JSON lines, each with a text.")] = Path("tests/prompts.jsonl")
    limit: Limit = None
    target: Target = TARGET


@dataclass(frozen=True)
class PairPlan(PromptsPlan):
    """A target and a drafter, perhaps slower than they are."""

    limit: Limit = 8
    drafter: OneDrafter = DRAFTER
    pace_target: PaceTarget = None
    pace_drafter: PaceDrafter = None
    engine: EngineOptions = STARTED


@dataclass(frozen=True)
class SettingsPlan(PromptsPlan):
    """Every combination of drafters, methods, temperatures and numbers of draft tokens, in lock-step rounds."""

    drafter: Drafters = tuple(DRAFTERS)
    methods: Methods = METHODS
    temperatures: Temperatures = (0.0, 0.6, 1.0)
    k: NumbersOfDraftTokens = (5,)
    max_tokens: MaxTokens = 128
    affinity: Affinities = ()
    logit_noise: Annotated[float, Option(min=0.0, help="Noise on the drafters' logits: they agree less.")] = 0.0
    engine: EngineOptions = STARTED


# Acceptance and exactness.


@command("acceptance", EXACTNESS, "acceptance.AcceptanceBenchmark")
@dataclass(frozen=True)
class AcceptancePlan(SettingsPlan):
    """Tokens per pass of each method with each drafter; those that a pair cannot do are skipped."""

    concurrency: Concurrency = 16


@command("distribution", EXACTNESS, "acceptance.Exactness")
@dataclass(frozen=True)
class ExactnessPlan:
    """Whether sampled tokens have the target's distribution: chi-square tests over many continuations."""

    prompt: Annotated[str, Option(help="Text to continue.")] = "for i in range("
    count: Annotated[int, Option(min=1, help="Continuations of each setting.")] = 20_000
    target: Target = TARGET
    drafter: Drafters = tuple(DRAFTERS[1:2])
    methods: Methods = METHODS
    k: NumberOfDraftTokens = 3
    concurrency: Concurrency = 32
    transformers: Annotated[int, Option(min=0, help="As many by transformers' assisted generation, to compare.")] = 0
    affinity: Affinities = ()


@command("pruning", EXACTNESS, "acceptance.PruningBenchmark")
@dataclass(frozen=True)
class PruningPlan(AcceptancePlan):
    """Tokens per pass with drafters that keep only the most frequent tokens of their LM head."""

    drafter: Drafters = tuple(DRAFTERS[:2])
    methods: Methods = ("slem",)
    temperatures: Temperatures = (0.0,)
    share: Shares = (0.5, 0.25, 0.125, 0.0625)
    corpus: Annotated[Path | None, Option(help="Text whose tokens are counted; by default Python's own sources.")] = (
        None
    )


@command("rdk", EXACTNESS, "rdk.Study")
@dataclass(frozen=True)
class RdkPlan:
    """RDK's synthetic experiment: acceptance of a pruned drafter, with its mass redistributed and without."""

    tokens: Annotated[int, Option(min=1000, help="Vocabulary of the first-order form.")] = 200_000
    exact_tokens: Annotated[int, Option(min=1000, help="Where the matrix itself is applied.")] = 2_000
    draws: Annotated[int, Option(min=1, help="Random draws of target and drafter.")] = 20
    noise: Annotated[float, Option(min=0, help="Standard deviation of the noise on the drafter's logits.")] = 1.0
    seed: Seed = 0
    plot: Annotated[Path | None, Option(metavar="FILE", help="Write a plot to this file.")] = None


# Speed.


@command("overlap", SPEED, "overlap.OverlapBenchmark")
@dataclass(frozen=True)
class OverlapPlan(PairPlan):
    """Speed of lock-step, overlapped and controlled decoding, beside plain decoding, in one run."""

    logit_noise: LogitNoises = (0.0,)
    delay_ms: Delays = "0"
    temperatures: Temperatures = (0.0, 1.0)
    method: Method = None
    row_width: Annotated[int, Option(help="Ids of a draft token's row; the drafter draws among them.")] = 64
    max_tokens: MaxTokens = 128
    repeat: Annotated[int, Option(min=1, help="Repetitions of each prompt with each configuration.")] = 1
    k: Annotated[
        tuple[int, ...],
        Option("--num-speculative-tokens", "--k", "-k", min=1, help="Draft tokens in a lock-step round; repeatable."),
    ] = (1, 2, 3, 5, 8)
    window: Annotated[
        tuple[str, ...],
        Option(
            "--draft-tokens",
            "--window",
            metavar="MAX,MIN",
            help="Max and min draft tokens of overlapped drafts; repeatable.",
        ),
    ] = ("8,1", "8,4", "16,1", "16,4", "32,1", "32,8")
    branches: Annotated[
        tuple[str, ...], Option(metavar="DEPTH,WIDTH", help="Shape of prepared continuations; repeatable.")
    ] = ("2,1", "4,1", "4,2")
    assisted: Annotated[
        tuple[int, ...],
        Option(
            metavar="THREADS", help="Also run transformers' assisted generation with this many threads; repeatable."
        ),
    ] = ()


@command("controller", SPEED, "controller.ControllerBenchmark")
@dataclass(frozen=True)
class ControllerPlan:
    """The controller beside fixed choices and no drafter, on paced services: near the best, and never slower?

    Scenarios: grid (cells of outputs, acceptance, pass, round trip and method), bad (drafters that are useless, slow or
    dead), and with the middle value of each list: short (40 short requests on a new connection), turning (the drafter
    becomes useless, then good again), load (one output, many, one). pair: a real target and drafter as fast as they
    are, at temperatures 0 and 0.8, with those numbers of outputs that are at most 4.
    """

    scenario: Annotated[tuple[str, ...], Option(help="grid, bad, short, turning, load or pair; repeatable.")] = (
        "grid",
    )
    target: Annotated[str, Option(help="Of pair: a folder, a hub id, or bundled:NAME.")] = f"inflated:8x1024:{TARGET}"
    drafter: Annotated[str, Option(help="Of pair, likewise.")] = DRAFTERS[1]
    prompts: Annotated[Path, Option(help="Of pair: JSON lines, each with a text.")] = PromptsPlan.prompts
    outputs: Annotated[str, Option(metavar="N,N", help="Outputs at once.")] = "1,4,16,64"
    acceptance: Annotated[str, Option(metavar="SHARE,SHARE", help="Draft tokens that are accepted.")] = "0.5,0.8,0.95"
    pass_ms: Annotated[str, Option(metavar="MS,MS", help="Pass of the target; a node takes 1/400 of it.")] = "8,25,60"
    trip_ms: Annotated[str, Option(metavar="MS,MS", help="Round trip to the drafter.")] = "0,5,20"
    methods: Annotated[str, Option("--method", metavar="NAME,NAME", help="slem is greedy, others sample.")] = (
        "seeded,coupled,slem"
    )
    all_cells: Annotated[
        bool, Option("--all", help="All cells; by default some 50 in which any three values of different lists meet.")
    ] = False
    cells: Annotated[int | None, Option(min=1, help="Only the first N cells; any two values meet in the first 15.")] = (
        None
    )
    drafter_pace: Annotated[str, Option(metavar="A,B", help="A draft step of n tokens takes A + B n ms.")] = "1,0.01"
    turns: Annotated[int, Option(min=1, help="How often each choice runs.")] = 3
    seconds: Annotated[
        float, Option(min=0.0, help="Of a turn without a drafter; the others are as long in tokens.")
    ] = 2.0


@command("throughput", SPEED, "throughput.Throughput")
@dataclass(frozen=True)
class ThroughputPlan(PromptsPlan):
    """Many outputs at once, beside transformers' continuous batching and its assisted generation."""

    drafter: OneDrafter = DRAFTER
    way: Annotated[tuple[str, ...], Option("--configuration", "--way", help="Repeatable.")] = (
        *("crossdraft", "plain"),
        *("generate_batch", "assisted"),
    )
    concurrency: Concurrencies = "1,4,16,64"
    each: Annotated[int, Option(min=1, help="Consecutive outputs of each concurrent client.")] = 1
    repeat: Annotated[int, Option(min=1, help="Repetitions of each configuration, alternating.")] = 1
    tokens: Annotated[int, Option(min=2, help="Tokens of each output.")] = 64
    prompt_tokens: Annotated[int, Option(min=8, help="Max tokens of a prompt.")] = 64
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0
    method: Method = None
    cache_mib: CacheMib = 512
    threads: Annotated[tuple[int, ...], Option(min=1, help="Threads of transformers; repeatable.")] = (1,)
    dtype: Dtype = "float32"
    device: Device = "cpu"
    enforce_eager: EnforceEager = False


@command("prefill", SPEED, "prefill.Prefill")
@dataclass(frozen=True)
class PrefillPlan:
    """A long prompt that comes while others stream: what their tokens wait, beside what they usually do."""

    target: Target = TARGET
    streams: Annotated[int, Option(min=1, help="Running streams when the long prompt arrives.")] = 8
    prompt: Annotated[int, Option(min=64, help="Tokens of the long prompt.")] = 1500
    times: Annotated[int, Option(min=1, help="Number of long prompts.")] = 5
    cache_mib: CacheMib = 1024


# Robustness.


@dataclass(frozen=True)
class FaultsPlan(PairPlan):
    """Faults while seeded outputs stream."""

    pace_target: PaceTarget = "40,0.1"
    pace_drafter: PaceDrafter = "4,0"
    tokens: StreamTokens = 256
    times: Annotated[int, Option(min=1, help="How often each fault happens.")] = 10
    seed: Annotated[int, Option(help="Random seed.")] = 0


@command("kills", ROBUSTNESS, "faults.Kills")
@dataclass(frozen=True)
class KillsPlan(FaultsPlan):
    """Kill the drafter, and one of two targets, again and again while seeded streams run, one for each prompt."""

    limit: Limit = 20
    times: Annotated[int, Option(min=1, help="How often the drafter is killed, and a target.")] = 20
    quiet: Annotated[
        tuple[float, float], Option(metavar="SHORTEST LONGEST", help="Seconds from a return to the next kill.")
    ] = (1.0, 4.0)


@command("cuts", ROBUSTNESS, "faults.Cuts")
@dataclass(frozen=True)
class CutsPlan(FaultsPlan):
    """Let links drop every packet while seeded streams run: to the drafter, one of two targets, the only target."""

    limit: Limit = 4
    times: Annotated[int, Option(min=1, help="How often each link is cut.")] = 10
    delay_ms: Annotated[float, Option(help="One-way delay of each link.")] = 1.0
    seconds: Annotated[
        tuple[float, float], Option(metavar="CUT WHOLE", help="Seconds that a link stays cut, and up between two cuts.")
    ] = (5.0, 5.0)


# Parts.


@command("round", PARTS, "rounds.RoundBenchmark")
@dataclass(frozen=True)
class RoundPlan(SettingsPlan):
    """What a round costs outside the two models, on loopback, one generation at a time."""

    limit: Limit = 10
    drafter: Drafters = tuple(DRAFTERS[1:2])
    methods: Methods = ("standard", "tli", "slem", "seeded")
    temperatures: Temperatures = (1.0,)


@command("dataplane", PARTS, "dataplane.Dataplane")
@dataclass(frozen=True)
class DataplanePlan:
    """What the machinery around the models costs: services that compute next to nothing, paced like an accelerator."""

    method: Annotated[str, Option(help="The method; a seed is given to `seeded` only.")] = "slem"
    temperature: Annotated[float, Option(min=0.0, help="Sampling temperature.")] = 0.0
    over: Annotated[str, Option(help="pipeline: in this process; http or grpc: streamed from a server.")] = "pipeline"
    outputs: Annotated[tuple[int, ...], Option(help="Outputs at once; repeatable.")] = (1, 4, 16, 64)
    max_tokens: Annotated[int, Option(min=1, help="Tokens of each output.")] = 192
    target_pace: Annotated[str, Option(metavar="A,B", help="A pass of n tokens takes A + B n ms.")] = "8,0.02"
    drafter_pace: Annotated[str, Option(metavar="A,B", help="A draft step of n tokens takes A + B n ms.")] = "1,0.01"
    noise: Annotated[float, Option(min=0.0, help="Noise on the drafter's logits: 0.02 agrees in 0.97.")] = 0.02
    trip_ms: Annotated[
        float, Option(min=0.0, max=10_000, help="Round trip to the drafter on an emulated network; 0: on loopback.")
    ] = 0.0
    turns: Annotated[int, Option(min=1, help="How often each configuration runs.")] = 2
    against: Annotated[
        Path | None, Option(metavar="FILE", help="The --json of another run, to stand beside this one, with ratios.")
    ] = None


@app.command(rich_help_panel=PARTS)
def inflate(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or bundled:NAME, of the Llama architecture.")],
    layers: Annotated[int, Option(min=1, help="Of the larger model.")],
    hidden: Annotated[int, Option(min=1, help="Width of its residual stream.")],
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="An empty or new folder.")],
    intermediate: Annotated[
        int | None, Option(min=1, help="Width of its MLP; by default it grows as the residual stream does.")
    ] = None,
) -> None:
    """Make a costlier model with the same function, to measure speed with real acceptance.

    Of the bundled target: --layers 8 --hidden 1024 takes about 20 ms for one token, --layers 26 --hidden 1024 about
    60 ms, on one thread of an AMD EPYC core. Where the width is 4 or 16 times the model's, its file is half as large.
    """
    from crossdraft.bench import models
    from crossdraft.engine.names import Size as Shape

    models.make(model, Shape(layers, hidden, intermediate), output)
