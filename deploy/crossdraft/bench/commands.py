"""`crossdraft bench`: the commands that measure, and their options.

What a command measures with is imported when it runs: `crossdraft --help` shall not wait for torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from crossdraft.console.processes import DEFAULT_DRAFTER
from crossdraft.console.running import METHODS as METHOD_NAMES

if TYPE_CHECKING:
    from crossdraft.bench.services import Served

# Of a checkout: the prompts belong to the tests, and are not part of the package.
PROMPTS = Path("tests/prompts.jsonl")
DRAFTERS = ["bundled:drafter-a", "bundled:drafter-b", "bundled:drafter-c"]
HEADS = [*DRAFTERS[:2], "random:qwen2.5-0.5b", "random:eagle-llama-3-8b"]
SHARES = [0.5, 0.25, 0.125, 0.0625]
METHODS = ["standard", "tli", "slem", "seeded"]  # what a round costs is measured with these
VERIFIED = ["standard", "union", "tli", "rdk", "coupled", "coupled-shared", "slem", "seeded"]
OUTPUTS = [1, 4, 16, 64]  # at once
ACCEPTANCES = [0.5, 0.8, 0.95]
PASSES_MS = [8.0, 25.0, 60.0]
TRIPS_MS = [0.0, 5.0, 20.0]
KS = [1, 2, 3, 5, 8]
WINDOWS = ["8,1", "8,4", "16,1", "16,4", "32,1", "32,8"]
BRANCHES = ["2,1", "4,1", "4,2"]
CONFIGURATIONS = ["crossdraft", "plain", "generate_batch", "assisted"]
SIZES = ["1b", "7b", "14b"]
LOADS = ["1x1", "1x6", "16x1", "16x6"]

EXACTNESS, SPEED = "Acceptance and exactness", "Speed"
ROBUSTNESS, PARTS = "Robustness", "Parts: what each costs by itself"
SECTIONS = (EXACTNESS, SPEED, ROBUSTNESS, PARTS)
ALIASES = {"law": "distribution", "governor": "controller"}  # earlier names


class Sections(TyperGroup):
    """Lists the commands in sections, and knows their earlier names."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """As click does."""
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One list for each section."""
        for section in SECTIONS:
            commands = [one for one in self.commands.items() if getattr(one[1], "rich_help_panel", None) == section]
            with formatter.section(section):
                formatter.write_dl([(name, command.get_short_help_str(400)) for name, command in commands])


app = typer.Typer(
    name="bench",
    help="Run benchmarks on this machine. Tables go to stdout (Markdown where that is a file), all figures to --json.",
    cls=Sections,
    rich_markup_mode=None,
    no_args_is_help=True,
)

Prompts = Annotated[Path, typer.Option(help="JSON lines, each with a text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")]
Target = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]
OneDrafter = Annotated[str, typer.Option("--drafter", help="A folder, a hub id, or bundled:NAME.")]
Drafters = Annotated[
    list[str],
    typer.Option(
        "--drafter", help="A folder, a hub id, or bundled:NAME; repeatable. `standard` takes the target's own model."
    ),
]
Method = Annotated[str | None, typer.Option(help="By default the best for the temperature.")]
Methods = Annotated[list[str], typer.Option("--method", help="Repeatable.")]
Temperatures = Annotated[list[float], typer.Option("--temperature", help="Repeatable.")]
NumberOfDraftTokens = Annotated[
    int, typer.Option("--num-speculative-tokens", "--k", "-k", help="Draft tokens in a round.")
]
NumbersOfDraftTokens = Annotated[
    list[int], typer.Option("--num-speculative-tokens", "--k", "-k", help="Draft tokens in a round; repeatable.")
]
MaxTokens = Annotated[int, typer.Option(help="Max tokens to generate.")]
Concurrency = Annotated[int, typer.Option(help="Generations at once.")]
Concurrencies = Annotated[str, typer.Option("--concurrency", metavar="N,N", help="Outputs at once; each in turn.")]
PaceTarget = Annotated[
    str | None, typer.Option(metavar="A,B", help="A pass of the target over n tokens takes at least A + B n ms.")
]
PaceDrafter = Annotated[
    str | None, typer.Option(metavar="A,B", help="A step of the drafter over n tokens takes at least A + B n ms.")
]
LogitNoises = Annotated[
    list[float], typer.Option("--logit-noise", metavar="SIGMA", help="Noise on the drafter's logits; repeatable.")
]
Delays = Annotated[
    str, typer.Option(metavar="MS,MS", help="One-way delays to the drafter on an emulated network; each in turn.")
]
Affinities = Annotated[
    list[str] | None,
    typer.Option("--affinity", metavar="NAME=FILE", help="A drafter's file of `crossdraft affinity`; repeatable."),
]
Shares = Annotated[list[float], typer.Option("--share", help="Share of the vocabulary to keep; repeatable.")]
StreamTokens = Annotated[int, typer.Option(min=8, help="Tokens of each output.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Torch device of all models.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Do not use CUDA graphs.")]
CacheMib = Annotated[int, typer.Option(min=1, help="Size of the KV cache in MiB.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file, as JSON.")
]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table to this file.")]


def _services(target: str, pace_target: str | None, drafter: str, pace_drafter: str | None) -> "tuple[Served, Served]":
    from crossdraft.bench.services import Served

    return Served(target, pace_target), Served(drafter, pace_drafter)


# Acceptance and exactness.


@app.command(rich_help_panel=EXACTNESS)
def acceptance(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafters = DRAFTERS,
    methods: Methods = list(METHOD_NAMES),  # noqa: B006 - typer copies it
    temperatures: Temperatures = [0.0, 0.6, 1.0],  # noqa: B006
    k: NumbersOfDraftTokens = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    concurrency: Concurrency = 16,
    affinity: Affinities = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Tokens per pass of each method with each drafter; those that a pair cannot do are skipped."""
    from crossdraft.bench.acceptance import Acceptance
    from crossdraft.bench.workload import affinities_of, prompts_of, settings_of

    Acceptance(
        target=target,
        settings=settings_of(target, drafter, methods, temperatures, k),
        prompts=prompts_of(prompts, limit),
        max_tokens=max_tokens,
        affinities=affinities_of(affinity or (), drafter),
        concurrency=concurrency,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=EXACTNESS)
def expected(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafters = DRAFTERS,
    temperatures: Temperatures = [0.0, 0.6, 1.0],  # noqa: B006
    k: NumberOfDraftTokens = 5,
    least: Annotated[
        float, typer.Option(help="Follow no draft that still agrees with a smaller probability; 0 is exact, and slow.")
    ] = 1e-4,
    after: Annotated[int, typer.Option(help="Tokens that the target first appends greedily.")] = 0,
    affinity: Affinities = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Expected acceptance of a round's first token, computed from whole rows after each prompt."""
    from crossdraft.bench.expected import ExpectedAcceptance
    from crossdraft.bench.workload import affinities_of, prompts_of

    texts, files = prompts_of(prompts, limit), affinities_of(affinity or (), drafter)
    ExpectedAcceptance(target, tuple(drafter), texts, tuple(temperatures), k, least, files, after).run(
        json_file, markdown_file
    )


@app.command(rich_help_panel=EXACTNESS)
def distribution(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "for i in range(",
    count: Annotated[int, typer.Option(help="Continuations of each setting.")] = 20_000,
    target: Target = "bundled:target",
    drafter: Drafters = DRAFTERS[1:2],
    methods: Methods = list(METHOD_NAMES),  # noqa: B006
    k: NumberOfDraftTokens = 3,
    concurrency: Concurrency = 32,
    transformers: Annotated[int, typer.Option(help="As many by transformers' assisted generation, to compare.")] = 0,
    affinity: Affinities = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Whether sampled tokens have the target's distribution: chi-square tests over many continuations."""
    from crossdraft.bench.exactness import TOKENS, Exactness
    from crossdraft.bench.workload import affinities_of, settings_of

    Exactness(
        target=target,
        settings=settings_of(target, drafter, methods, [1.0], [k]),
        prompts=(prompt,),
        max_tokens=TOKENS,
        affinities=affinities_of(affinity or (), drafter),
        count=count,
        concurrency=concurrency,
        assisted=transformers,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=EXACTNESS)
def trees(
    prompts: Prompts = PROMPTS,
    limit: Limit = 20,
    target: Target = "bundled:target",
    drafter: Drafters = DRAFTERS,
    methods: Methods = ["coupled", "tli"],  # noqa: B006
    temperatures: Temperatures = [1.0, 0.6],  # noqa: B006
    k: NumberOfDraftTokens = 5,
    max_tokens: MaxTokens = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Generations at once.")] = 4,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Tokens per pass and row misses with chains, trees of paths, and trees that hold prepared continuations."""
    from crossdraft.bench.acceptance import Trees
    from crossdraft.bench.workload import prompts_of, settings_of

    Trees(
        target=target,
        settings=settings_of(target, drafter, methods, temperatures, [k]),
        prompts=prompts_of(prompts, limit),
        max_tokens=max_tokens,
        concurrency=concurrency,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=EXACTNESS)
def pruning(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafters = DRAFTERS[:2],
    methods: Methods = ["slem"],  # noqa: B006
    temperatures: Temperatures = [0.0],  # noqa: B006
    k: NumbersOfDraftTokens = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    share: Shares = SHARES,
    corpus: Annotated[
        Path | None, typer.Option(help="Text whose tokens are counted; by default Python's own sources.")
    ] = None,
    concurrency: Concurrency = 16,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Tokens per pass with drafters that keep only the most frequent tokens of their LM head."""
    from crossdraft.bench.acceptance import Pruning
    from crossdraft.bench.workload import prompts_of, settings_of

    Pruning(
        target=target,
        settings=settings_of(target, drafter, methods, temperatures, k),
        prompts=prompts_of(prompts, limit),
        max_tokens=max_tokens,
        shares=tuple(share),
        corpus=corpus,
        concurrency=concurrency,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=EXACTNESS)
def rdk(
    tokens: Annotated[int, typer.Option(min=1000, help="Vocabulary of the first-order form.")] = 200_000,
    exact_tokens: Annotated[int, typer.Option(min=1000, help="Where the matrix itself is applied.")] = 2_000,
    draws: Annotated[int, typer.Option(min=1, help="Random draws of target and drafter.")] = 20,
    noise: Annotated[float, typer.Option(min=0, help="Standard deviation of the noise on the drafter's logits.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot to this file.")] = None,
) -> None:
    """RDK's synthetic experiment: acceptance of a pruned drafter, with its mass redistributed and without."""
    from crossdraft.bench.rdk import Study

    Study(tokens, exact_tokens, draws, noise, seed, plot).run(json_file, markdown_file)


# Speed.


@app.command(rich_help_panel=SPEED)
def overlap(
    prompts: Prompts = PROMPTS,
    limit: Limit = 8,
    target: Target = "bundled:target",
    drafter: OneDrafter = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = None,
    pace_drafter: PaceDrafter = None,
    logit_noise: LogitNoises = [0.0],  # noqa: B006
    delay_ms: Delays = "0",
    temperatures: Temperatures = [0.0, 1.0],  # noqa: B006
    method: Method = None,
    row_width: Annotated[int, typer.Option(help="Ids of a draft token's row; the drafter draws among them.")] = 64,
    max_tokens: MaxTokens = 128,
    repeat: Annotated[int, typer.Option(help="Repetitions of each prompt with each configuration.")] = 1,
    ks: Annotated[
        list[int],
        typer.Option("--num-speculative-tokens", "--k", "-k", help="Draft tokens in a lock-step round; repeatable."),
    ] = KS,
    window: Annotated[
        list[str],
        typer.Option(
            "--draft-tokens",
            "--window",
            metavar="MAX,MIN",
            help="Max and min draft tokens of overlapped drafts; repeatable.",
        ),
    ] = WINDOWS,
    branches: Annotated[
        list[str], typer.Option(metavar="DEPTH,WIDTH", help="Shape of prepared continuations; repeatable.")
    ] = BRANCHES,
    assisted: Annotated[
        list[int] | None,
        typer.Option(
            metavar="THREADS", help="Also run transformers' assisted generation with this many threads; repeatable."
        ),
    ] = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Speed of lock-step, overlapped and controlled decoding, beside plain decoding, in one run."""
    from crossdraft.bench.overlap import OverlapBenchmark, Search
    from crossdraft.bench.services import delays_of
    from crossdraft.bench.workload import prompts_of

    OverlapBenchmark(
        *_services(target, pace_target, drafter, pace_drafter),
        noises=tuple(logit_noise),
        delays=delays_of(delay_ms),
        temperatures=tuple(temperatures),
        method=method,
        prompts=prompts_of(prompts, limit),
        row_width=row_width,
        max_tokens=max_tokens,
        repeat=repeat,
        assisted=tuple(assisted or ()),
        search=Search.of(ks, window, branches),
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=SPEED)
def speculation(
    prompts: Prompts = PROMPTS,
    limit: Limit = 8,
    target: Target = "bundled:target",
    drafter: OneDrafter = "bundled:target",
    pace_target: PaceTarget = "100,0",
    pace_drafter: PaceDrafter = None,
    logit_noise: LogitNoises = [0.3, 1.0],  # noqa: B006
    delay_ms: Delays = "0,5,25",
    tokens: StreamTokens = 128,
    window: Annotated[
        int,
        typer.Option(
            "--max-draft-tokens", "--window", help="Max draft tokens ahead, in configurations without a controller."
        ),
    ] = 32,
    wait: Annotated[
        int, typer.Option("--min-draft-tokens", "--wait", help="Draft tokens that a pass waits for, likewise.")
    ] = 4,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Two targets with and without speculation parallelism, beside one target; outputs are seeded and compared."""
    from crossdraft.bench.services import delays_of
    from crossdraft.bench.speculation import SpeculationParallelism
    from crossdraft.bench.workload import prompts_of

    SpeculationParallelism(
        *_services(target, pace_target, drafter, pace_drafter),
        noises=tuple(logit_noise),
        delays=delays_of(delay_ms),
        prompts=prompts_of(prompts, limit),
        tokens=tokens,
        max_draft_tokens=window,
        min_draft_tokens=wait,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=SPEED)
def controller(
    outputs: Annotated[
        list[int], typer.Option(min=1, help="Outputs at once; repeatable, like the next three.")
    ] = OUTPUTS,
    acceptance: Annotated[list[float], typer.Option(min=0, max=1, help="Acceptance of a draft token.")] = ACCEPTANCES,
    pass_ms: Annotated[list[float], typer.Option(min=0.1, help="Time of a pass, in ms.")] = PASSES_MS,
    trip_ms: Annotated[list[float], typer.Option(min=0, help="Round trip to the drafter, in ms.")] = TRIPS_MS,
    passes: Annotated[int, typer.Option(min=10, help="Plain passes that a run takes.")] = 200,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Simulated: the controller beside the best fixed choice, over load, acceptance and distance; no model runs."""
    from crossdraft.bench.controller import SimulatedControl

    grid = tuple(outputs), tuple(acceptance), tuple(pass_ms), tuple(trip_ms)
    SimulatedControl(*grid, passes).run(json_file, markdown_file)


@app.command(rich_help_panel=SPEED)
def throughput(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: OneDrafter = f"bundled:{DEFAULT_DRAFTER}",
    way: Annotated[list[str], typer.Option("--configuration", "--way", help="Repeatable.")] = CONFIGURATIONS,
    concurrency: Concurrencies = "1,4,16,64",
    each: Annotated[int, typer.Option(min=1, help="Consecutive outputs of each concurrent client.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each configuration, alternating.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each output.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Max tokens of a prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    method: Method = None,
    cache_mib: CacheMib = 512,
    threads: Annotated[list[int], typer.Option(min=1, help="Threads of transformers; repeatable.")] = [1],  # noqa: B006
    dtype: Dtype = "float32",
    device: Device = "cpu",
    enforce_eager: EnforceEager = False,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Many outputs at once, beside transformers' continuous batching and its assisted generation."""
    from crossdraft.bench import throughput as command
    from crossdraft.bench.workload import prompts_of

    texts = prompts_of(prompts, limit)
    command.Throughput(
        target,
        drafter,
        tuple(way),
        command.concurrencies_of(concurrency),
        each,
        repeat,
        tokens,
        prompt_tokens,
        texts,
        temperature,
        method,
        cache_mib,
        tuple(threads),
        dtype,
        device,
        enforce_eager,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=SPEED)
def prefill(
    target: Target = "bundled:target",
    streams: Annotated[int, typer.Option(min=1, help="Running streams when the long prompt arrives.")] = 8,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of the long prompt.")] = 1500,
    times: Annotated[int, typer.Option(min=1, help="Number of long prompts.")] = 5,
    cache_mib: CacheMib = 1024,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """A long prompt that comes while others stream: what their tokens wait, beside what they usually do."""
    from crossdraft.bench.prefill import Prefill

    Prefill(target, streams, prompt, times, cache_mib).run(json_file, markdown_file)


@app.command(rich_help_panel=SPEED)
def device(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for device.md and device.json.")
    ],
    prompts: Prompts = PROMPTS,
    size: Annotated[
        list[str],
        typer.Option(help="1b, 7b, 14b, or a model's name, such as inflated:8x512:bundled:target; repeatable."),
    ] = SIZES,
    drafter: OneDrafter = f"bundled:{DEFAULT_DRAFTER}",
    device: Device = "cuda:0",
    dtype: Dtype = "bfloat16",
    concurrency: Concurrencies = "1,16,64",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each output.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Repetitions of each pass.")] = 30,
    cache_mib: CacheMib = 16384,
    seconds: Annotated[float, typer.Option(min=1, help="Time limit of the whole run, in seconds.")] = 440.0,
    enforce_eager: EnforceEager = False,
) -> None:
    """Passes and throughput of models of real size on one accelerator, within a time limit."""
    from crossdraft.bench import device as command

    measured = (tuple(size), drafter, device, dtype, concurrency, tokens, turns)
    command.DeviceBenchmark(*measured, cache_mib, seconds, prompts, enforce_eager).run_in(output)


# Robustness.


@app.command("never-slower", rich_help_panel=ROBUSTNESS)
def never_slower(
    prompts: Prompts = PROMPTS,
    limit: Limit = 8,
    target: Target = "bundled:target",
    drafter: Annotated[str, typer.Option(help="Model of the bad drafters.")] = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = None,
    pace_drafter: PaceDrafter = None,
    temperatures: Temperatures = [0.0, 1.0],  # noqa: B006
    method: Method = None,
    tokens: Annotated[int, typer.Option(min=8, help="Length of each output.")] = 512,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Speed with drafters that are useless, slow, dead or dying, beside none."""
    from crossdraft.bench.faults import NeverSlower
    from crossdraft.bench.workload import prompts_of

    NeverSlower(
        *_services(target, pace_target, drafter, pace_drafter),
        temperatures=tuple(temperatures),
        method=method,
        prompts=prompts_of(prompts, limit),
        tokens=tokens,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=ROBUSTNESS)
def kills(
    prompts: Prompts = PROMPTS,
    limit: Limit = 20,
    target: Target = "bundled:target",
    drafter: OneDrafter = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = "40,0.1",
    pace_drafter: PaceDrafter = "4,0",
    tokens: StreamTokens = 256,
    times: Annotated[int, typer.Option(min=1, help="How often the drafter is killed, and a target.")] = 20,
    quiet: Annotated[
        tuple[float, float], typer.Option(metavar="SHORTEST LONGEST", help="Seconds from a return to the next kill.")
    ] = (1.0, 4.0),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Kill the drafter, and one of two targets, again and again while seeded streams run, one for each prompt."""
    from crossdraft.bench.faults import Kills
    from crossdraft.bench.workload import prompts_of

    served, drafting = _services(target, pace_target, drafter, pace_drafter)
    Kills(
        target=served,
        drafter=drafting,
        prompts=prompts_of(prompts, limit),
        tokens=tokens,
        times=times,
        quiet=quiet,
        seed=seed,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=ROBUSTNESS)
def cuts(
    prompts: Prompts = PROMPTS,
    limit: Limit = 4,
    target: Target = "bundled:target",
    drafter: OneDrafter = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = "40,0.1",
    pace_drafter: PaceDrafter = "4,0",
    delay_ms: Annotated[float, typer.Option(help="One-way delay of each link.")] = 1.0,
    tokens: StreamTokens = 256,
    times: Annotated[int, typer.Option(min=1, help="How often each link is cut.")] = 10,
    seconds: Annotated[
        tuple[float, float],
        typer.Option(metavar="CUT WHOLE", help="Seconds that a link stays cut, and up between two cuts."),
    ] = (5.0, 5.0),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Let links drop every packet while seeded streams run: to the drafter, one of two targets, the only target."""
    from crossdraft.bench.faults import Cuts
    from crossdraft.bench.workload import prompts_of

    served, drafting = _services(target, pace_target, drafter, pace_drafter)
    Cuts(
        target=served,
        drafter=drafting,
        delay_ms=delay_ms,
        prompts=prompts_of(prompts, limit),
        tokens=tokens,
        times=times,
        seconds=seconds,
        seed=seed,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=ROBUSTNESS)
def memory(
    target: Target = "bundled:target",
    sessions: Annotated[int, typer.Option(min=10, help="Number of sessions.")] = 10_000,
    at_once: Annotated[int, typer.Option("--concurrency", min=1, help="Sessions at once.")] = 32,
    longest: Annotated[int, typer.Option(min=32, help="Max tokens of a session.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Max tokens that a session generates.")] = 8,
    cache_mib: CacheMib = 64,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Many sessions of all lengths through one engine: memory of the process, and KV slots held, over time."""
    from crossdraft.bench.memory import Memory

    Memory(target, cache_mib, sessions, at_once, longest, steps, seed).run(json_file, markdown_file)


# Parts.


@app.command("round", rich_help_panel=PARTS)
def round_(
    prompts: Prompts = PROMPTS,
    limit: Limit = 10,
    target: Target = "bundled:target",
    drafter: Drafters = DRAFTERS[1:2],
    methods: Methods = METHODS,
    temperatures: Temperatures = [1.0],  # noqa: B006
    k: NumbersOfDraftTokens = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """What a round costs outside the two models, on loopback, one generation at a time."""
    from crossdraft.bench.overhead import Rounds
    from crossdraft.bench.workload import prompts_of, settings_of

    Rounds(
        target=target,
        settings=settings_of(target, drafter, methods, temperatures, k),
        prompts=prompts_of(prompts, limit),
        max_tokens=max_tokens,
    ).run(json_file, markdown_file)


@app.command(rich_help_panel=PARTS)
def overhead(
    methods: Methods = ["coupled", "tli", "slem", "seeded"],  # noqa: B006
    size: Annotated[int, typer.Option(min=1000, help="Ids of each vocabulary.")] = 128_000,
    tokens: StreamTokens = 256,
    outputs: Annotated[int, typer.Option(min=1, help="Outputs of each method with each kind of drafting.")] = 4,
    pass_ms: Annotated[float, typer.Option(min=0, help="Emulated time of a pass, in ms.")] = 20.0,
    draft_token_ms: Annotated[
        float,
        typer.Option("--draft-token-ms", "--proposal-ms", min=0, help="Emulated time of a draft token, in ms."),
    ] = 1.0,
    k: NumberOfDraftTokens = 5,
    branches: Annotated[int, typer.Option(min=1, help="Draft tokens of each prepared continuation.")] = 4,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a profile of this process to this file.")
    ] = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """CPU time of the orchestrator for a pass, and bytes for a token, with large made-up vocabularies."""
    from crossdraft.bench.overhead import Overhead

    Overhead(tuple(methods), size, tokens, outputs, pass_ms, draft_token_ms, k, branches, profile).run(
        json_file, markdown_file
    )


@app.command(rich_help_panel=PARTS)
def verification(
    methods: Methods = VERIFIED,
    k: Annotated[
        int,
        typer.Option("--num-speculative-tokens", "--k", "-k", min=1, max=64, help="Draft tokens in a round."),
    ] = 5,
    width: Annotated[int, typer.Option(min=1, help="Ids of a row, on both sides.")] = 512,
    size: Annotated[int, typer.Option(min=1000, help="Ids of each vocabulary.")] = 128_000,
    rounds: Annotated[int, typer.Option(min=20, help="Rounds of each method.")] = 500,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """What a round costs without any service: state machine, planner and walk, over made-up vocabularies."""
    from crossdraft.bench.overhead import Verification

    Verification(tuple(methods), k, width, rounds, size).run(json_file, markdown_file)


@app.command(rich_help_panel=PARTS)
def engine(
    target: Target = "bundled:target",
    load: Annotated[
        list[str], typer.Option(metavar="SESSIONSxTOKENS", help="Sessions and tokens of a pass; repeatable.")
    ] = LOADS,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each session before the pass.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Repetitions of each load.")] = 50,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    enforce_eager: EnforceEager = False,
    cache_mib: CacheMib = 1024,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """The engine's pass beside a bare forward with a StaticCache, on the same tokens, with one thread."""
    from crossdraft.bench import engine as command

    loads = command.loads_of(load)
    command.EnginePasses(target, dtype, device, cache_mib, loads, context, turns, enforce_eager).run(
        json_file, markdown_file
    )


@app.command(rich_help_panel=PARTS)
def head(
    drafter: Annotated[list[str], typer.Option(help="A model, or random:SHAPE with random weights.")] = HEADS,
    share: Shares = SHARES,
    turns: Annotated[int, typer.Option(min=1, help="Drafts of five tokens with each head.")] = 20,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """How much of a drafting step is LM head and softmax, with the whole head and with cut ones."""
    from crossdraft.bench.engine import DraftingSteps

    DraftingSteps(tuple(drafter), tuple(share), turns).run(json_file, markdown_file)


@app.command(rich_help_panel=PARTS)
def inflate(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or bundled:NAME, of the Llama architecture.")],
    layers: Annotated[int, typer.Option(min=1, help="Of the larger model.")],
    hidden: Annotated[int, typer.Option(min=1, help="Width of its residual stream.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="An empty or new folder.")],
    intermediate: Annotated[
        int | None, typer.Option(min=1, help="Width of its MLP; by default it grows as the residual stream does.")
    ] = None,
) -> None:
    """Make a costlier model with the same function, to measure speed with real acceptance.

    Of the bundled target: --layers 8 --hidden 1024 takes about 20 ms for one token, --layers 26 --hidden 1024 about
    60 ms, on one thread of an AMD EPYC core. Where the width is 4 or 16 times the model's, its file is half as large.
    """
    from crossdraft.bench import inflate as command
    from crossdraft.engine.names import Size

    command.make(model, Size(layers, hidden, intermediate), output)
