"""`crossdraft deploy`, `status`, `undeploy`: the commands of a cluster, and their options."""

from pathlib import Path
from typing import Annotated

import typer

Address = Annotated[
    str,
    typer.Option(help="Of the Ray cluster: auto on one of its nodes, or HOST:PORT as `ray start --address` has it."),
]


def deploy(
    configuration: Annotated[Path, typer.Argument(help="A YAML file, such as deploy/crossdraft.yaml.")],
    address: Address = "auto",
    check: Annotated[bool, typer.Option("--check", help="Only read the file and say what is wrong with it.")] = False,
    wait_seconds: Annotated[float, typer.Option(min=0, help="For nodes that are still being started.")] = 120.0,
) -> None:
    """Serve what a configuration says on a running Ray cluster.

    What runs already and is the same goes on; what differs is replaced, and open streams go on.
    """
    from crossdraft.cli import cluster as command

    command.deploy(configuration, address, check, wait_seconds)


def status(
    address: Address = "auto", as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """Show which processes answer on a cluster, where, and whether Serve's replicas are healthy."""
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
