"""`crossdraft deploy`, `status`, `undeploy`: the commands of a cluster, and their options."""

from pathlib import Path
from typing import Annotated

import typer

Address = Annotated[
    str, typer.Option(help="Of the Ray cluster: auto on one of its nodes, or ray://HOST:PORT from outside.")
]


def deploy(
    configuration: Annotated[Path, typer.Argument(help="A YAML file, such as deploy/crossdraft.yaml.")],
    address: Address = "auto",
    check: Annotated[bool, typer.Option("--check", help="Only read the file and say what is wrong with it.")] = False,
) -> None:
    """Serve what a configuration says on a running Ray cluster; what runs already and is the same goes on."""
    from crossdraft.cli import cluster as command

    command.deploy(configuration, address, check)


def status(
    address: Address = "auto", as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """Show which services answer on a cluster, and whether its orchestrators and fronts are healthy."""
    from crossdraft.cli import cluster as command

    command.status(address, as_json)


def undeploy(address: Address = "auto") -> None:
    """End all that `deploy` started; the Ray cluster itself goes on."""
    from crossdraft.cli import cluster as command

    command.undeploy(address)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (deploy, status, undeploy):
        app.command()(command)
