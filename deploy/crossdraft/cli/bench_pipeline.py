"""`crossdraft bench overlap` and `never-slower`: the commands that measure the speed of the whole pipeline."""

from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli.bundled import DEFAULT_DRAFTER

# Of a checkout: the prompts belong to the tests, and are not part of the package.
PROMPTS = Path("tests/prompts.jsonl")

KS = [1, 2, 3, 5, 8]
WINDOWS = ["8,1", "8,4", "16,1", "16,4", "32,1", "32,8"]
BRANCHES = ["2,1", "4,1", "4,2"]

app = typer.Typer(rich_markup_mode=None)

Prompts = Annotated[Path, typer.Option(help="JSON lines, each with a text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")]
Target = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]
Method = Annotated[str | None, typer.Option(help="By default the best for the temperature.")]
MaxTokens = Annotated[int, typer.Option(help="Longest output.")]
Temperatures = Annotated[list[float], typer.Option("--temperature", help="Repeatable.")]
PaceTarget = Annotated[
    str | None, typer.Option(metavar="A,B", help="A pass of the target over n tokens takes at least A + B n ms.")
]
PaceDrafter = Annotated[str | None, typer.Option(metavar="A,B", help="Likewise a step of the drafter.")]
LogitNoises = Annotated[
    list[float], typer.Option("--logit-noise", metavar="SIGMA", help="On the drafter's logits; repeatable.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table there.")]


@app.command()
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
    row_width: Annotated[int, typer.Option(help="Ids of a proposal's row; the drafter draws among them.")] = 64,
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
    """Speed of lock-step, overlapped and governed decoding, beside plain decoding, in one run."""
    from crossdraft.cli import overlap as command
    from crossdraft.cli.benching import prompts_of
    from crossdraft.cli.overlap_stage import Served

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


@app.command("never-slower")
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
    from crossdraft.cli import never_slower as command
    from crossdraft.cli.benching import prompts_of
    from crossdraft.cli.overlap_stage import Served

    served, drafting = Served(target, pace_target), Served(drafter, pace_drafter)
    plan = command.Plan(served, drafting, tuple(temperatures), method, prompts_of(prompts, limit), tokens)
    command.measure(plan, json_file)
