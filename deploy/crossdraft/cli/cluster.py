"""Brings configurations onto a Ray cluster, and shows what runs there."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.serving.configuration import Configuration, ConfigurationError, load

MISSING = "a cluster needs Ray: install crossdraft with the extra `serve`"


def deploy(path: Path, address: str, check: bool) -> None:
    """Raises Misused if the file is wrong, CommandFailed if the cluster cannot do it."""
    try:
        configuration = load(path)
    except ConfigurationError as error:
        raise Misused(str(error)) from error
    if check:
        print(f"{path} can be used")
        return
    with _cluster(address):
        _deploy(configuration)


def _deploy(configuration: Configuration) -> None:
    from crossdraft.serving.cluster.deploying import deploy

    try:
        found = deploy(configuration)
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    for entry in found:
        print(f"{entry.model}: {entry.role} at {entry.address}")
    print(f"HTTP at http://{configuration.http.host}:{configuration.http.port}")


def status(address: str, as_json: bool) -> None:
    """Raises CommandFailed if nothing is deployed."""
    with _cluster(address):
        from crossdraft.serving.cluster.deploying import deployed

        try:
            found = deployed()
        except ValueError as error:
            raise CommandFailed("nothing is deployed there; use `crossdraft deploy`") from error
    if as_json:
        print(json.dumps(found.plain()))
        return
    table = Table("model", "what", "where", "node", box=None)
    for entry in found.services:
        table.add_row(entry.model, entry.role, entry.address, entry.node[:12])
    for name, state, replicas in found.deployments:
        table.add_row("", name, f"{replicas} replicas", state)
    Console().print(table)


def undeploy(address: str) -> None:
    """Raises CommandFailed if there is no cluster."""
    with _cluster(address):
        from crossdraft.serving.cluster.deploying import undeploy as end

        end()


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Within it this process is a client of the cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise CommandFailed(MISSING) from error
    try:
        ray.init(address, namespace="crossdraft", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError) as error:
        raise CommandFailed(f"no Ray cluster answers at {address}: {error}; start one with `ray up`") from error
    try:
        yield
    finally:
        ray.shutdown()
