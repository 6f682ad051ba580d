"""`crossdraft bench kills` and `cuts`: the commands that disturb services while streams run."""

from typing import Annotated

import typer

from crossdraft.cli.bench_pipeline import (
    PROMPTS,
    JsonFile,
    Limit,
    MarkdownFile,
    PaceDrafter,
    PaceTarget,
    Prompts,
    Target,
)
from crossdraft.cli.bundled import DEFAULT_DRAFTER

app = typer.Typer(rich_markup_mode=None)

Drafter = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]


@app.command()
def kills(
    prompts: Prompts = PROMPTS,
    limit: Limit = 20,
    target: Target = "bundled:target",
    drafter: Drafter = f"bundled:{DEFAULT_DRAFTER}",
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
    from crossdraft.cli import kills as command
    from crossdraft.cli.benching import prompts_of
    from crossdraft.cli.overlap_stage import Served

    services = Served(target, pace_target), Served(drafter, pace_drafter)
    plan = command.Plan(*services, prompts_of(prompts, limit), tokens, times, quiet, seed)
    command.measure(plan, json_file, markdown_file)


@app.command()
def cuts(
    prompts: Prompts = PROMPTS,
    limit: Limit = 4,
    target: Target = "bundled:target",
    drafter: Drafter = f"bundled:{DEFAULT_DRAFTER}",
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
    from crossdraft.cli import cuts as command
    from crossdraft.cli.benching import prompts_of
    from crossdraft.cli.overlap_stage import Served

    services = Served(target, pace_target), Served(drafter, pace_drafter)
    plan = command.Plan(*services, delay_ms, prompts_of(prompts, limit), tokens, times, seconds, seed)
    command.measure(plan, json_file, markdown_file)
