"""`crossdraft bench`: the commands that measure, and their options."""

from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli import bench_disturbances, bench_passes, bench_pipeline, bench_serving
from crossdraft.cli.method_names import METHODS as METHOD_NAMES

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
app.add_typer(bench_pipeline.app)
app.add_typer(bench_disturbances.app)
app.add_typer(bench_passes.app)
app.add_typer(bench_serving.app)

Prompts = Annotated[Path, typer.Option(help="JSON lines, each with a text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")]
Target = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]
Drafter = Annotated[list[str], typer.Option(help="The same; repeatable. `standard` takes the target's own model.")]
Methods = Annotated[list[str], typer.Option("--method", help="Repeatable.")]
Temperatures = Annotated[list[float], typer.Option("--temperature", help="Repeatable.")]
Proposals = Annotated[list[int], typer.Option("--k", "-k", help="Proposals in a round; repeatable.")]
MaxTokens = Annotated[int, typer.Option(help="Longest output.")]
Affinities = Annotated[
    list[str] | None,
    typer.Option("--affinity", metavar="NAME=FILE", help="A drafter's file of `crossdraft affinity`; repeatable."),
]
Shares = Annotated[list[float], typer.Option("--share", help="Of the vocabulary, to keep; repeatable.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")]


@app.command()
def acceptance(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS,
    methods: Methods = list(METHOD_NAMES),  # noqa: B006 - typer copies it
    temperatures: Temperatures = [0.0, 0.6, 1.0],  # noqa: B006
    proposals: Proposals = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    concurrency: Annotated[int, typer.Option(help="Generations at once.")] = 16,
    affinity: Affinities = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens per pass of each method with each drafter; those that a pair cannot do are skipped."""
    from crossdraft.cli import acceptance as command
    from crossdraft.cli.benching import Workload, affinities_of, prompts_of, settings_of

    settings = settings_of(target, drafter, methods, temperatures, proposals)
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
    proposals: Proposals = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    json_file: JsonFile = None,
) -> None:
    """What a round costs outside the two models, on loopback, one generation at a time."""
    from crossdraft.cli import rounds as command
    from crossdraft.cli.benching import Workload, prompts_of, settings_of

    settings = settings_of(target, drafter, methods, temperatures, proposals)
    command.measure(Workload(target, settings, prompts_of(prompts, limit), max_tokens), json_file)


@app.command()
def expected(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS,
    temperatures: Temperatures = [0.0, 0.6, 1.0],  # noqa: B006
    k: Annotated[int, typer.Option("--k", "-k", help="Proposals whose text counts.")] = 5,
    least: Annotated[
        float, typer.Option(help="Follow no draft that still agrees with a smaller probability; 0 is exact, and slow.")
    ] = 1e-4,
    after: Annotated[int, typer.Option(help="Tokens that the target goes on with, greedily, before.")] = 0,
    affinity: Affinities = None,
    json_file: JsonFile = None,
) -> None:
    """Expected acceptance of a round's first token, computed from whole rows after each prompt."""
    from crossdraft.cli import expected as command
    from crossdraft.cli.benching import affinities_of, prompts_of

    texts = prompts_of(prompts, limit)
    files = affinities_of(affinity or (), drafter)
    question = command.Question(target, tuple(drafter), texts, tuple(temperatures), k, least, files, after)
    command.measure(question, json_file)


@app.command()
def law(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "for i in range(",
    count: Annotated[int, typer.Option(help="Continuations of each setting.")] = 20_000,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS[1:2],
    methods: Methods = list(METHOD_NAMES),  # noqa: B006
    k: Annotated[int, typer.Option("--k", "-k", help="Proposals in a round.")] = 3,
    concurrency: Annotated[int, typer.Option(help="Generations at once.")] = 32,
    transformers: Annotated[int, typer.Option(help="As many by transformers' assisted generation, to compare.")] = 0,
    affinity: Affinities = None,
    json_file: JsonFile = None,
) -> None:
    """Whether sampled tokens have the target's distribution: chi-square tests over many continuations."""
    from crossdraft.cli import continuations as command
    from crossdraft.cli.benching import Workload, affinities_of, settings_of

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
    from crossdraft.cli import redistribution as command
    from crossdraft.cli.synthetic import Study

    command.measure(Study(tokens, exact_tokens, draws, noise, seed), json_file, plot)


@app.command()
def pruning(
    prompts: Prompts = PROMPTS,
    limit: Limit = None,
    target: Target = "bundled:target",
    drafter: Drafter = DRAFTERS[:2],
    methods: Methods = ["slem"],  # noqa: B006
    temperatures: Temperatures = [0.0],  # noqa: B006
    proposals: Proposals = [5],  # noqa: B006
    max_tokens: MaxTokens = 128,
    share: Shares = SHARES,
    corpus: Annotated[Path | None, typer.Option(help="What to rank by; by default Python's own sources.")] = None,
    concurrency: Annotated[int, typer.Option(help="Generations at once.")] = 16,
    json_file: JsonFile = None,
) -> None:
    """Tokens per pass with drafters that keep the most frequent ids of their head."""
    from crossdraft.cli import pruning as command
    from crossdraft.cli.benching import Workload, prompts_of, settings_of

    settings = settings_of(target, drafter, methods, temperatures, proposals)
    workload = Workload(target, settings, prompts_of(prompts, limit), max_tokens)
    command.measure(command.Plan(workload, tuple(share), corpus, concurrency), json_file)


@app.command()
def head(
    drafter: Annotated[list[str], typer.Option(help="A model, or random:SHAPE with random weights.")] = HEADS,
    share: Shares = SHARES,
    turns: Annotated[int, typer.Option(min=1, help="Drafts of five tokens with each head.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """How much of a drafting step is LM head and softmax, with the whole head and with cut ones."""
    from crossdraft.cli import head as command

    command.measure(drafter, share, turns, json_file)


@app.command()
def verification(
    methods: Methods = VERIFIED,
    k: Annotated[int, typer.Option("--k", "-k", min=1, max=64, help="Proposals in a round.")] = 5,
    width: Annotated[int, typer.Option(min=1, help="Ids of a row, on both sides.")] = 512,
    size: Annotated[int, typer.Option(min=1000, help="Ids of each vocabulary.")] = 128_000,
    rounds: Annotated[int, typer.Option(min=20, help="Of each method.")] = 500,
    json_file: JsonFile = None,
) -> None:
    """What a round costs without any service: state machine, planner and walk, over made-up vocabularies."""
    from crossdraft.cli import verification as command

    command.measure(methods, command.Shape(k, width, rounds, size), json_file)


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
    from crossdraft.cli import inflate as command
    from crossdraft.models.names import Size

    command.make(model, Size(layers, hidden, intermediate), output)


@app.command()
def governor(
    acceptance: Annotated[
        list[float], typer.Option(min=0, max=1, help="Of a proposal; this and the next three are repeatable.")
    ] = ACCEPTANCES,
    token: Annotated[list[float], typer.Option(min=0.001, help="Of the drafter, in plain passes.")] = TOKEN_COSTS,
    trip: Annotated[list[float], typer.Option(min=0, help="To the drafter and back, in plain passes.")] = TRIPS,
    node: Annotated[list[float], typer.Option(min=0, help="Of a pass's tree, in plain passes.")] = NODE_COSTS,
    tokens: Annotated[int, typer.Option(min=100, help="Of a long run.")] = 8000,
    branches: Annotated[bool, typer.Option(help="Prepared continuations, of which half match.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Simulated: the governor beside the best fixed way, over acceptance, speeds and distance; no model runs."""
    from crossdraft.cli import governor as command

    costs = command.Costs(tuple(acceptance), tuple(token), tuple(trip), tuple(node))
    command.measure(costs, tokens, branches, json_file)
