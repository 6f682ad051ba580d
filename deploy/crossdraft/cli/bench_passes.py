"""`crossdraft bench speculation`, `trees` and `overhead`: the commands that look at passes."""

from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli.bench_pipeline import (
    PROMPTS,
    JsonFile,
    Limit,
    LogitNoises,
    MarkdownFile,
    MaxTokens,
    PaceDrafter,
    PaceTarget,
    Prompts,
    Target,
    Temperatures,
)

DRAFTERS = ["bundled:drafter-a", "bundled:drafter-b", "bundled:drafter-c"]

app = typer.Typer(rich_markup_mode=None)

Drafter = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]


@app.command()
def speculation(
    prompts: Prompts = PROMPTS,
    limit: Limit = 8,
    target: Target = "bundled:target",
    drafter: Drafter = "bundled:target",
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
    from crossdraft.cli import speculation as command
    from crossdraft.cli.benching import prompts_of
    from crossdraft.cli.overlap import delays_of
    from crossdraft.cli.overlap_stage import Served

    services = Served(target, pace_target), Served(drafter, pace_drafter)
    conditions = tuple(logit_noise), delays_of(delay_ms)
    plan = command.Plan(*services, *conditions, prompts_of(prompts, limit), tokens, window, wait)
    command.measure(plan, json_file, markdown_file)


@app.command()
def trees(
    prompts: Prompts = PROMPTS,
    limit: Limit = 20,
    target: Target = "bundled:target",
    drafter: Annotated[list[str], typer.Option(help="The same; repeatable.")] = DRAFTERS,
    method: Annotated[list[str], typer.Option(help="Repeatable.")] = ["coupled", "tli"],  # noqa: B006
    temperatures: Temperatures = [1.0, 0.6],  # noqa: B006
    k: Annotated[int, typer.Option("--k", "-k", help="Proposals that a pass waits for.")] = 5,
    max_tokens: MaxTokens = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Generations at once.")] = 4,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Tokens per pass and row misses with chains, trees of paths, and trees that hold prepared continuations."""
    from crossdraft.cli import trees as command
    from crossdraft.cli.benching import Workload, prompts_of, settings_of

    settings = settings_of(target, drafter, method, temperatures, [k])
    workload = Workload(target, settings, prompts_of(prompts, limit), max_tokens)
    command.measure(workload, concurrency, json_file, markdown_file)


@app.command()
def overhead(
    method: Annotated[list[str], typer.Option(help="Repeatable.")] = ["coupled", "tli", "slem", "seeded"],  # noqa: B006
    size: Annotated[int, typer.Option(min=1000, help="Ids of each vocabulary.")] = 128_000,
    tokens: Annotated[int, typer.Option(min=8, help="Of each output.")] = 256,
    outputs: Annotated[int, typer.Option(min=1, help="Of each method, in each way.")] = 4,
    pass_ms: Annotated[float, typer.Option(min=0, help="That a pass takes, slept.")] = 20.0,
    proposal_ms: Annotated[float, typer.Option(min=0, help="That a proposal takes, slept.")] = 1.0,
    k: Annotated[int, typer.Option("--k", "-k", help="Proposals that a pass waits for.")] = 5,
    branches: Annotated[int, typer.Option(min=1, help="Proposals of each prepared continuation.")] = 4,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a profile of this process there.")] = None,
    json_file: JsonFile = None,
) -> None:
    """CPU time of the orchestrator for a pass, and bytes for a token, with large made-up vocabularies."""
    from crossdraft.cli import overhead as command

    plan = command.Plan(size, tokens, outputs, pass_ms, proposal_ms, k, branches)
    command.measure(method, plan, json_file, profile)
