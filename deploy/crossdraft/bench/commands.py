"""`crossdraft bench`: the commands that measure, and their options."""

from pathlib import Path
from typing import Annotated

import typer

from crossdraft.console.processes import DEFAULT_DRAFTER
from crossdraft.console.running import METHODS as METHOD_NAMES

# Of a checkout: the prompts belong to the tests, and are not part of the package.
PROMPTS = Path("tests/prompts.jsonl")
DRAFTERS = ["bundled:drafter-a", "bundled:drafter-b", "bundled:drafter-c"]
HEADS = [*DRAFTERS[:2], "random:qwen2.5-0.5b", "random:eagle-llama-3-8b"]
SHARES = [0.5, 0.25, 0.125, 0.0625]
METHODS = ["standard", "tli", "slem", "seeded"]  # what a round costs is measured with these
VERIFIED = ["standard", "union", "tli", "rdk", "coupled", "coupled-shared", "slem", "seeded"]
ACCEPTANCES = [0.0, 0.3, 0.6, 0.8, 0.95]
TOKEN_COSTS = [0.05, 0.2, 0.5, 1.0]  # in plain passes, like the next two
TRIPS = [0.0, 0.1, 0.5, 2.0]
NODE_COSTS = [0.01, 0.05, 0.2]
app = typer.Typer(name="bench", help="Measure on this machine.", rich_markup_mode=None, no_args_is_help=True)


# `crossdraft bench overlap` and `never-slower`: the commands that measure the speed of the whole pipeline.

KS = [1, 2, 3, 5, 8]
WINDOWS = ["8,1", "8,4", "16,1", "16,4", "32,1", "32,8"]
BRANCHES = ["2,1", "4,1", "4,2"]
bench_pipeline_app = typer.Typer(rich_markup_mode=None)
Method = Annotated[str | None, typer.Option(help="By default the best for the temperature.")]
PaceTarget = Annotated[
    str | None, typer.Option(metavar="A,B", help="A pass of the target over n tokens takes at least A + B n ms.")
]
PaceDrafter = Annotated[str | None, typer.Option(metavar="A,B", help="Likewise a step of the drafter.")]
LogitNoises = Annotated[
    list[float], typer.Option("--logit-noise", metavar="SIGMA", help="On the drafter's logits; repeatable.")
]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table there.")]
Prompts = Annotated[Path, typer.Option(help="JSON lines, each with a text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")]
Target = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]
Temperatures = Annotated[list[float], typer.Option("--temperature", help="Repeatable.")]
MaxTokens = Annotated[int, typer.Option(help="Longest output.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")]


@bench_pipeline_app.command()
def overlap(
    prompts: Prompts = PROMPTS,
    limit: Limit = 8,
    target: Target = "bundled:target",
    drafter: Annotated[str, typer.Option(help="The same.")] = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = None,
    pace_drafter: PaceDrafter = None,
    logit_noise: LogitNoises = [0.0],  # noqa: B006 - typer copies it
    delay_ms: Annotated[
        str, typer.Option(metavar="MS,MS", help="To the drafter, one way, on an emulated network; each in turn.")
    ] = "0",
    temperatures: Temperatures = [0.0, 1.0],  # noqa: B006
    method: Method = None,
    row_width: Annotated[int, typer.Option(help="Ids of a draft token's row; the drafter draws among them.")] = 64,
    max_tokens: MaxTokens = 128,
    repeat: Annotated[int, typer.Option(help="Of each prompt with each way.")] = 1,
    ks: Annotated[list[int], typer.Option("--k", "-k", help="Of lock-step, to choose from; repeatable.")] = KS,
    window: Annotated[list[str], typer.Option(metavar="WINDOW,WAIT", help="Of overlapped drafts, likewise.")] = WINDOWS,
    branches: Annotated[
        list[str], typer.Option(metavar="DEPTH,WIDTH", help="Of prepared continuations, likewise.")
    ] = BRANCHES,
    assisted: Annotated[
        list[int] | None,
        typer.Option(metavar="THREADS", help="transformers' assisted generation too; repeatable."),
    ] = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Speed of lock-step, overlapped and controlled decoding, beside plain decoding, in one run."""
    from crossdraft.bench import overlap as command
    from crossdraft.bench.overlap import Served
    from crossdraft.bench.workload import prompts_of

    plan = command.Plan(
        Served(target, pace_target),
        Served(drafter, pace_drafter),
        tuple(logit_noise),
        command.delays_of(delay_ms),
        tuple(temperatures),
        method,
        prompts_of(prompts, limit),
        row_width,
        max_tokens,
        repeat,
        tuple(assisted or ()),
        command.Search.of(ks, window, branches),
    )
    command.measure(plan, json_file, markdown_file)


@bench_pipeline_app.command("never-slower")
def never_slower(
    prompts: Prompts = PROMPTS,
    limit: Limit = 8,
    target: Target = "bundled:target",
    drafter: Annotated[str, typer.Option(help="What the bad ones are made of.")] = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = None,
    pace_drafter: PaceDrafter = None,
    temperatures: Temperatures = [0.0, 1.0],  # noqa: B006
    method: Method = None,
    tokens: Annotated[int, typer.Option(min=8, help="Length of each output.")] = 512,
    json_file: JsonFile = None,
) -> None:
    """Speed with drafters that are useless, slow, dead or dying, beside none."""
    from crossdraft.bench import faults as command
    from crossdraft.bench.overlap import Served
    from crossdraft.bench.workload import prompts_of

    served, drafting = Served(target, pace_target), Served(drafter, pace_drafter)
    plan = command.NeverSlowerPlan(served, drafting, tuple(temperatures), method, prompts_of(prompts, limit), tokens)
    command.never_slower_measure(plan, json_file)


app.add_typer(bench_pipeline_app)


# `crossdraft bench kills` and `cuts`: the commands that disturb services while streams run.

bench_disturbances_app = typer.Typer(rich_markup_mode=None)
FaultsDrafter = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]


@bench_disturbances_app.command()
def kills(
    prompts: Prompts = PROMPTS,
    limit: Limit = 20,
    target: Target = "bundled:target",
    drafter: FaultsDrafter = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = "40,0.1",
    pace_drafter: PaceDrafter = "4,0",
    tokens: Annotated[int, typer.Option(min=8, help="Of each stream.")] = 256,
    times: Annotated[int, typer.Option(min=1, help="That the drafter is killed, and that a target is.")] = 20,
    quiet: Annotated[
        tuple[float, float], typer.Option(metavar="SHORTEST LONGEST", help="Seconds from a return to the next kill.")
    ] = (1.0, 4.0),
    seed: Annotated[int, typer.Option(help="Of when and which.")] = 0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Kill the drafter, and one of two targets, again and again while seeded streams run, one for each prompt."""
    from crossdraft.bench import faults as command
    from crossdraft.bench.overlap import Served
    from crossdraft.bench.workload import prompts_of

    services = Served(target, pace_target), Served(drafter, pace_drafter)
    plan = command.Plan(*services, prompts_of(prompts, limit), tokens, times, quiet, seed)
    command.measure(plan, json_file, markdown_file)


@bench_disturbances_app.command()
def cuts(
    prompts: Prompts = PROMPTS,
    limit: Limit = 4,
    target: Target = "bundled:target",
    drafter: FaultsDrafter = f"bundled:{DEFAULT_DRAFTER}",
    pace_target: PaceTarget = "40,0.1",
    pace_drafter: PaceDrafter = "4,0",
    delay_ms: Annotated[float, typer.Option(help="Of each link, one way.")] = 1.0,
    tokens: Annotated[int, typer.Option(min=8, help="Of each stream.")] = 256,
    times: Annotated[int, typer.Option(min=1, help="That each link is cut.")] = 10,
    seconds: Annotated[
        tuple[float, float], typer.Option(metavar="CUT WHOLE", help="That it stays cut, and whole between two cuts.")
    ] = (5.0, 5.0),
    seed: Annotated[int, typer.Option(help="Of when.")] = 0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Cut links without a word while seeded streams run: to the drafter, to one of two targets, to the only one."""
    from crossdraft.bench import faults as command
    from crossdraft.bench.overlap import Served
    from crossdraft.bench.workload import prompts_of

    services = Served(target, pace_target), Served(drafter, pace_drafter)
    plan = command.CutsPlan(*services, delay_ms, prompts_of(prompts, limit), tokens, times, seconds, seed)
    command.cuts_measure(plan, json_file, markdown_file)


app.add_typer(bench_disturbances_app)


# `crossdraft bench speculation`, `trees` and `overhead`: the commands that look at passes.

bench_passes_app = typer.Typer(rich_markup_mode=None)
BenchPassesDrafter = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]


@bench_passes_app.command()
def speculation(
    prompts: Prompts = PROMPTS,
    limit: Limit = 8,
    target: Target = "bundled:target",
    drafter: BenchPassesDrafter = "bundled:target",
    pace_target: PaceTarget = "100,0",
    pace_drafter: PaceDrafter = None,
    logit_noise: LogitNoises = [0.3, 1.0],  # noqa: B006 - typer copies it
    delay_ms: Annotated[
        str, typer.Option(metavar="MS,MS", help="To the drafter, one way, on an emulated network; each in turn.")
    ] = "0,5,25",
    tokens: Annotated[int, typer.Option(min=8, help="Of each output.")] = 128,
    window: Annotated[int, typer.Option(help="Of epochs that are run in one way.")] = 32,
    wait: Annotated[int, typer.Option(help="Likewise.")] = 4,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Two targets with and without speculation parallelism, beside one target; outputs are seeded and compared."""
    from crossdraft.bench import speculation as command
    from crossdraft.bench.overlap import Served, delays_of
    from crossdraft.bench.workload import prompts_of

    services = Served(target, pace_target), Served(drafter, pace_drafter)
    conditions = tuple(logit_noise), delays_of(delay_ms)
    plan = command.Plan(*services, *conditions, prompts_of(prompts, limit), tokens, window, wait)
    command.measure(plan, json_file, markdown_file)


@bench_passes_app.command()
def trees(
    prompts: Prompts = PROMPTS,
    limit: Limit = 20,
    target: Target = "bundled:target",
    drafter: Annotated[list[str], typer.Option(help="The same; repeatable.")] = DRAFTERS,
    method: Annotated[list[str], typer.Option(help="Repeatable.")] = ["coupled", "tli"],  # noqa: B006
    temperatures: Temperatures = [1.0, 0.6],  # noqa: B006
    k: Annotated[int, typer.Option("--k", "-k", help="Draft tokens that a pass waits for.")] = 5,
    max_tokens: MaxTokens = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Generations at once.")] = 4,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Tokens per pass and row misses with chains, trees of paths, and trees that hold prepared continuations."""
    from crossdraft.bench import acceptance as command
    from crossdraft.bench.workload import Workload, prompts_of, settings_of

    settings = settings_of(target, drafter, method, temperatures, [k])
    workload = Workload(target, settings, prompts_of(prompts, limit), max_tokens)
    command.trees_measure(workload, concurrency, json_file, markdown_file)


@bench_passes_app.command()
def overhead(
    method: Annotated[list[str], typer.Option(help="Repeatable.")] = ["coupled", "tli", "slem", "seeded"],  # noqa: B006
    size: Annotated[int, typer.Option(min=1000, help="Ids of each vocabulary.")] = 128_000,
    tokens: Annotated[int, typer.Option(min=8, help="Of each output.")] = 256,
    outputs: Annotated[int, typer.Option(min=1, help="Of each method, in each way.")] = 4,
    pass_ms: Annotated[float, typer.Option(min=0, help="That a pass takes, slept.")] = 20.0,
    draft_token_ms: Annotated[float, typer.Option(min=0, help="That a draft token takes, slept.")] = 1.0,
    k: Annotated[int, typer.Option("--k", "-k", help="Draft tokens that a pass waits for.")] = 5,
    branches: Annotated[int, typer.Option(min=1, help="Draft tokens of each prepared continuation.")] = 4,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a profile of this process there.")] = None,
    json_file: JsonFile = None,
) -> None:
    """CPU time of the orchestrator for a pass, and bytes for a token, with large made-up vocabularies."""
    from crossdraft.bench import overhead as command

    plan = command.Plan(size, tokens, outputs, pass_ms, draft_token_ms, k, branches)
    command.measure(method, plan, json_file, profile)


app.add_typer(bench_passes_app)


# `crossdraft bench throughput`, `engine`, `memory`, `prefill` and `device`: many sessions at once.

WAYS = ["crossdraft", "plain", "generate_batch", "assisted"]
SIZES = ["1b", "7b", "14b"]
LOADS = ["1x1", "1x6", "16x1", "16x6"]
bench_serving_app = typer.Typer(rich_markup_mode=None)
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Of all models, as torch names it.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Capture no forwards of ours as CUDA graphs.")]
CacheMib = Annotated[int, typer.Option(min=1, help="MiB for keys and values of all sessions.")]


@bench_serving_app.command()
def throughput(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Annotated[str, typer.Option(help="The same.")] = f"bundled:{DEFAULT_DRAFTER}",
    way: Annotated[list[str], typer.Option(help="Repeatable.")] = WAYS,
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Outputs at once; each in turn.")] = "1,4,16,64",
    each: Annotated[int, typer.Option(min=1, help="Outputs after each other in each place.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Of each way, which take turns.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Of each output.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Of each prompt, at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    method: Method = None,
    cache_mib: CacheMib = 512,
    threads: Annotated[list[int], typer.Option(min=1, help="Of transformers; repeatable.")] = [1],  # noqa: B006
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


@bench_serving_app.command()
def engine(
    target: Target = "bundled:target",
    load: Annotated[list[str], typer.Option(metavar="SESSIONSxTOKENS", help="Of a pass; repeatable.")] = LOADS,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each session before the pass.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Of each load in both ways.")] = 50,
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


@bench_serving_app.command()
def memory(
    target: Target = "bundled:target",
    sessions: Annotated[int, typer.Option(min=10, help="In all.")] = 10_000,
    at_once: Annotated[int, typer.Option("--concurrency", min=1, help="Under way together.")] = 32,
    longest: Annotated[int, typer.Option(min=32, help="Tokens of a session, at most.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that a session draws, at most.")] = 8,
    cache_mib: CacheMib = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and ids.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Many sessions of all lengths through one engine: memory of the process, and KV slots held, over time."""
    from crossdraft.bench.memory import Memory

    Memory(target, cache_mib, sessions, at_once, longest, steps, seed).run(json_file)


@bench_serving_app.command()
def prefill(
    target: Target = "bundled:target",
    streams: Annotated[int, typer.Option(min=1, help="Under way when the prompt comes.")] = 8,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of the long prompt.")] = 1500,
    times: Annotated[int, typer.Option(min=1, help="That it comes.")] = 5,
    cache_mib: CacheMib = 1024,
    json_file: JsonFile = None,
) -> None:
    """A long prompt that comes while others stream: what their tokens wait, beside what they usually do."""
    from crossdraft.bench.prefill import Prefill

    Prefill(target, streams, prompt, times, cache_mib).run(json_file)


@bench_serving_app.command()
def device(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where device.md and device.json go.")],
    prompts: Prompts = PROMPTS,
    size: Annotated[
        list[str],
        typer.Option(help="1b, 7b, 14b, or a model's name, such as inflated:8x512:bundled:target; repeatable."),
    ] = SIZES,
    drafter: Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")] = f"bundled:{DEFAULT_DRAFTER}",
    device: Device = "cuda:0",
    dtype: Dtype = "bfloat16",
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Outputs at once; each in turn.")] = "1,16,64",
    tokens: Annotated[int, typer.Option(min=2, help="Of each output.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Of each pass.")] = 30,
    cache_mib: CacheMib = 16384,
    seconds: Annotated[float, typer.Option(min=1, help="For all of it.")] = 440.0,
    enforce_eager: EnforceEager = False,
) -> None:
    """Passes and throughput of models of real size on one accelerator, within a time limit."""
    from crossdraft.bench import device as command

    measured = (tuple(size), drafter, device, dtype, concurrency, tokens, turns)
    command.DeviceBenchmark(*measured, cache_mib, seconds, prompts, enforce_eager).run_in(output)


app.add_typer(bench_serving_app)
Drafter = Annotated[list[str], typer.Option(help="The same; repeatable. `standard` takes the target's own model.")]
Methods = Annotated[list[str], typer.Option("--method", help="Repeatable.")]
DraftTokens = Annotated[list[int], typer.Option("--k", "-k", help="Draft tokens in a round; repeatable.")]
Affinities = Annotated[
    list[str] | None,
    typer.Option("--affinity", metavar="NAME=FILE", help="A drafter's file of `crossdraft affinity`; repeatable."),
]
Shares = Annotated[list[float], typer.Option("--share", help="Of the vocabulary, to keep; repeatable.")]


@app.command()
def acceptance(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS,
    methods: Methods = list(METHOD_NAMES),  # noqa: B006 - typer copies it
    temperatures: Temperatures = [0.0, 0.6, 1.0],  # noqa: B006
    draft_tokens: DraftTokens = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    concurrency: Annotated[int, typer.Option(help="Generations at once.")] = 16,
    affinity: Affinities = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens per pass of each method with each drafter; those that a pair cannot do are skipped."""
    from crossdraft.bench import acceptance as command
    from crossdraft.bench.workload import Workload, affinities_of, prompts_of, settings_of

    settings = settings_of(target, drafter, methods, temperatures, draft_tokens)
    files = affinities_of(affinity or (), drafter)
    workload = Workload(target, settings, prompts_of(prompts, limit), max_tokens, files)
    command.measure(workload, concurrency, json_file)


@app.command("round")
def round_(
    prompts: Prompts = PROMPTS,
    limit: Limit = 10,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS[1:2],
    methods: Methods = METHODS,
    temperatures: Temperatures = [1.0],  # noqa: B006
    draft_tokens: DraftTokens = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    json_file: JsonFile = None,
) -> None:
    """What a round costs outside the two models, on loopback, one generation at a time."""
    from crossdraft.bench import overhead as command
    from crossdraft.bench.workload import Workload, prompts_of, settings_of

    settings = settings_of(target, drafter, methods, temperatures, draft_tokens)
    command.rounds_measure(Workload(target, settings, prompts_of(prompts, limit), max_tokens), json_file)


@app.command()
def expected(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS,
    temperatures: Temperatures = [0.0, 0.6, 1.0],  # noqa: B006
    k: Annotated[int, typer.Option("--k", "-k", help="Draft tokens whose text counts.")] = 5,
    least: Annotated[
        float, typer.Option(help="Follow no draft that still agrees with a smaller probability; 0 is exact, and slow.")
    ] = 1e-4,
    after: Annotated[int, typer.Option(help="Tokens that the target goes on with, greedily, before.")] = 0,
    affinity: Affinities = None,
    json_file: JsonFile = None,
) -> None:
    """Expected acceptance of a round's first token, computed from whole rows after each prompt."""
    from crossdraft.bench import expected as command
    from crossdraft.bench.workload import affinities_of, prompts_of

    texts = prompts_of(prompts, limit)
    files = affinities_of(affinity or (), drafter)
    question = command.Question(target, tuple(drafter), texts, tuple(temperatures), k, least, files, after)
    command.measure(question, json_file)


@app.command()
def distribution(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "for i in range(",
    count: Annotated[int, typer.Option(help="Continuations of each setting.")] = 20_000,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS[1:2],
    methods: Methods = list(METHOD_NAMES),  # noqa: B006
    k: Annotated[int, typer.Option("--k", "-k", help="Draft tokens in a round.")] = 3,
    concurrency: Annotated[int, typer.Option(help="Generations at once.")] = 32,
    transformers: Annotated[int, typer.Option(help="As many by transformers' assisted generation, to compare.")] = 0,
    affinity: Affinities = None,
    json_file: JsonFile = None,
) -> None:
    """Whether sampled tokens have the target's distribution: chi-square tests over many continuations."""
    from crossdraft.bench import exactness as command
    from crossdraft.bench.workload import Workload, affinities_of, settings_of

    settings = settings_of(target, drafter, methods, [1.0], [k])
    plan = command.Plan(prompt, count, concurrency, transformers)
    workload = Workload(target, settings, (prompt,), command.TOKENS, affinities_of(affinity or (), drafter))
    command.measure(workload, plan, json_file)


@app.command()
def rdk(
    tokens: Annotated[int, typer.Option(min=1000, help="Vocabulary of the first-order form.")] = 200_000,
    exact_tokens: Annotated[int, typer.Option(min=1000, help="Where the matrix itself is applied.")] = 2_000,
    draws: Annotated[int, typer.Option(min=1, help="Of target and drafter.")] = 20,
    noise: Annotated[float, typer.Option(min=0, help="On the drafter's logits, standard deviation.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture there.")] = None,
) -> None:
    """RDK's synthetic experiment: acceptance of a pruned drafter, with its mass redistributed and without."""
    from crossdraft.bench import rdk as command
    from crossdraft.bench.rdk import Study

    command.measure(Study(tokens, exact_tokens, draws, noise, seed), json_file, plot)


@app.command()
def pruning(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS[:2],
    methods: Methods = ["slem"],  # noqa: B006
    temperatures: Temperatures = [0.0],  # noqa: B006
    draft_tokens: DraftTokens = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    share: Shares = SHARES,
    corpus: Annotated[Path | None, typer.Option(help="What to rank by; by default Python's own sources.")] = None,
    concurrency: Annotated[int, typer.Option(help="Generations at once.")] = 16,
    json_file: JsonFile = None,
) -> None:
    """Tokens per pass with drafters that keep the most frequent ids of their head."""
    from crossdraft.bench import acceptance as command
    from crossdraft.bench.workload import Workload, prompts_of, settings_of

    settings = settings_of(target, drafter, methods, temperatures, draft_tokens)
    workload = Workload(target, settings, prompts_of(prompts, limit), max_tokens)
    command.pruning_measure(command.Plan(workload, tuple(share), corpus, concurrency), json_file)


@app.command()
def head(
    drafter: Annotated[list[str], typer.Option(help="A model, or random:SHAPE with random weights.")] = HEADS,
    share: Shares = SHARES,
    turns: Annotated[int, typer.Option(min=1, help="Drafts of five tokens with each head.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """How much of a drafting step is LM head and softmax, with the whole head and with cut ones."""
    from crossdraft.bench.engine import DraftingSteps

    DraftingSteps(tuple(drafter), tuple(share), turns).run(json_file)


@app.command()
def verification(
    methods: Methods = VERIFIED,
    k: Annotated[int, typer.Option("--k", "-k", min=1, max=64, help="Draft tokens in a round.")] = 5,
    width: Annotated[int, typer.Option(min=1, help="Ids of a row, on both sides.")] = 512,
    size: Annotated[int, typer.Option(min=1000, help="Ids of each vocabulary.")] = 128_000,
    rounds: Annotated[int, typer.Option(min=20, help="Of each method.")] = 500,
    json_file: JsonFile = None,
) -> None:
    """What a round costs without any service: state machine, planner and walk, over made-up vocabularies."""
    from crossdraft.bench import overhead as command

    command.verification_measure(methods, command.Shape(k, width, rounds, size), json_file)


@app.command()
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


@app.command()
def controller(
    acceptance: Annotated[
        list[float], typer.Option(min=0, max=1, help="Of a draft token; this and the next three are repeatable.")
    ] = ACCEPTANCES,
    token: Annotated[list[float], typer.Option(min=0.001, help="Of the drafter, in plain passes.")] = TOKEN_COSTS,
    trip: Annotated[list[float], typer.Option(min=0, help="To the drafter and back, in plain passes.")] = TRIPS,
    node: Annotated[list[float], typer.Option(min=0, help="Of a pass's tree, in plain passes.")] = NODE_COSTS,
    tokens: Annotated[int, typer.Option(min=100, help="Of a long run.")] = 8000,
    branches: Annotated[bool, typer.Option(help="Prepared continuations, of which half match.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Simulated: the controller beside the best fixed way, over acceptance, speeds and distance; no model runs."""
    from crossdraft.bench import controller as command

    costs = command.Costs(tuple(acceptance), tuple(token), tuple(trip), tuple(node))
    command.measure(costs, tokens, branches, json_file)
