"""`crossdraft bench throughput`: the commands that look at many sessions at once."""

from typing import Annotated

import typer

from crossdraft.cli.bench_pipeline import PROMPTS, JsonFile, Limit, MarkdownFile, Method, Prompts, Target
from crossdraft.cli.bundled import DEFAULT_DRAFTER

WAYS = ["crossdraft", "plain", "generate_batch", "assisted"]

app = typer.Typer(rich_markup_mode=None)

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
    )
    command.measure(plan, json_file, markdown_file)
