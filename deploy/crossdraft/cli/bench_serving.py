"""`crossdraft bench throughput`, `engine`, `memory`, `prefill` and `device`: many sessions at once."""

from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli.bench_pipeline import PROMPTS, JsonFile, Limit, MarkdownFile, Method, Prompts, Target
from crossdraft.cli.bundled import DEFAULT_DRAFTER

WAYS = ["crossdraft", "plain", "generate_batch", "assisted"]
SIZES = ["1b", "7b", "14b"]
LOADS = ["1x1", "1x6", "16x1", "16x6"]

app = typer.Typer(rich_markup_mode=None)

Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Of all models, as torch names it.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Capture no forwards of ours as CUDA graphs.")]
CacheMib = Annotated[int, typer.Option(min=1, help="MiB for keys and values of all sessions.")]


@app.command()
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
    from crossdraft.cli import throughput as command
    from crossdraft.cli.benching import prompts_of

    texts = prompts_of(prompts, limit)
    plan = command.Plan(
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
    )
    command.measure(plan, json_file, markdown_file)


@app.command()
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
    from crossdraft.cli import engine_passes as command

    plan = command.Plan(target, dtype, device, cache_mib, command.loads_of(load), context, turns, enforce_eager)
    command.measure(plan, json_file, markdown_file)


@app.command()
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
    """Many sessions of all lengths through one engine: memory of the process, and places held, over time."""
    from crossdraft.cli import memory as command
    from crossdraft.models.soaking import Soaking

    command.measure(target, cache_mib, Soaking(sessions, at_once, longest, steps, seed), json_file)


@app.command()
def prefill(
    target: Target = "bundled:target",
    streams: Annotated[int, typer.Option(min=1, help="Under way when the prompt comes.")] = 8,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of the long prompt.")] = 1500,
    times: Annotated[int, typer.Option(min=1, help="That it comes.")] = 5,
    cache_mib: CacheMib = 1024,
    json_file: JsonFile = None,
) -> None:
    """A long prompt that comes while others stream: what their tokens wait, beside what they usually do."""
    from crossdraft.cli import prefill as command

    command.measure(command.Plan(target, streams, prompt, times, cache_mib), json_file)


@app.command()
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
    from crossdraft.cli import device as command

    measured = (tuple(size), drafter, device, dtype, concurrency, tokens, turns)
    plan = command.Plan(*measured, cache_mib, seconds, prompts, enforce_eager)
    command.measure(plan, output)
