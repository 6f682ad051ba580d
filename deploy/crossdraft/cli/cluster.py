"""`crossdraft deploy`, `status` and `undeploy`: models on a Ray cluster."""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.table import Table

from crossdraft.cli.processes import check_address
from crossdraft.cli.running import CommandFailed, UsageError, interruptible, needs_extra, print_whole

if TYPE_CHECKING:
    from crossdraft.cluster.status import Deployed
    from crossdraft.config.cluster import Configuration

MISSING = f"a cluster {needs_extra('cluster')}"

AUTO = "auto"
# Ports of Prometheus metrics, and process ids; with whole addresses all that fits a terminal of 80 columns.
COLUMNS = ("where", "metrics", "pid", "up h:m", "sessions", "load")
HEAD_SECONDS = 15.0  # for a head to answer; Ray itself would try for minutes
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # of a head
OTHER_VERSION = "Version mismatch"  # in an error of Ray's
NOT_DEPLOYED = "nothing is deployed on this cluster; use `crossdraft deploy`"
NO_CLUSTER = "no Ray cluster answers at {}: {}; start one with `ray up`, or `ray start --head` for this machine"
OWN_PYTHON = (
    "run crossdraft with the cluster's own Python: `ray exec CLUSTER.yaml 'crossdraft …'`, or on the head in the "
    "virtual environment that Ray was started from"
)
TOKEN_ADVICE = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on its nodes"


def deploy(configuration: Path, address: str, check: bool, wait_seconds: float, timeout: float) -> None:
    """Deploys what a file says. Raises UsageError if the file is wrong, CommandFailed if the cluster cannot do it."""
    wanted = _read(configuration)
    if check:
        print(f"{configuration} is valid")
        return
    with _cluster(address):
        from crossdraft.cluster import deploy as cluster
        from crossdraft.cluster.capacity import Waiting

        try:
            cluster.deploy(wanted, Waiting(wait_seconds, timeout, partial(print, flush=True)))
        except ValueError as error:
            raise CommandFailed(*str(error).splitlines()) from error
    http, grpc = wanted.http, wanted.grpc
    print(f"HTTP at {http.host}:{http.port} of every node with an http front; `crossdraft status` shows which")
    if grpc is not None:
        print(f"gRPC at port {grpc.port}; `crossdraft status` shows on which node")
    if open_fronts := "; ".join(exposed(wanted)):
        print(f"{open_fronts}: whoever reaches that can use it and read what passes (docs/security.md)")


def exposed(wanted: "Configuration") -> Iterator[str]:
    """Of each front that other machines can reach, where it listens, and what protects nobody there."""
    from crossdraft.rpc.server import Listening

    keys = bool(wanted.security.api_keys)
    for name, front in (("HTTP", wanted.http), ("gRPC", wanted.grpc)):
        lacks = [*["API keys"][keys:], *["TLS"][bool(getattr(front, "ssl_certfile", None)) :]]
        if front is not None and lacks and not Listening(front.host).local:
            yield f"{name} listens on {front.host} without {' and '.join(lacks)}"


def status(address: str, as_json: bool) -> None:
    """Prints what runs. Raises CommandFailed if nothing is deployed."""
    with _cluster(address):
        from crossdraft.cluster.status import deployed

        try:
            found = deployed()
        except ValueError as error:
            raise CommandFailed(NOT_DEPLOYED) from error
    if as_json:
        print(json.dumps(found.plain()))
        return
    if found.processes:
        print_whole(table_of(found, time.time()))
    for version in sorted({process.version for process in found.processes}):
        of = [str(one.process) for one in found.processes if one.version == version]
        others = len(of) < len(found.processes)
        print(f"crossdraft {version}" + (f": processes {', '.join(of)}" if others else ""))
    if found.state != "RUNNING":
        print(f"Ray Serve says of the application: {found.state.lower().replace('_', ' ')} {found.message}".rstrip())
    for one in found.deployments:
        replicas = "1 replica" if one.replicas == 1 else f"{one.replicas} replicas"
        print(f"{one.name}: {one.state.lower()}, {replicas} {one.message}".rstrip())
    for one in found.missing:
        print(f"{one.name}: {one.progress}; the rest is being started, or waits for a node with room")
    for node in found.pending:
        print(f"Ray sets up a node: {node}")


def table_of(found: "Deployed", now: float) -> Table:
    """The processes at a moment, seconds of the epoch."""
    table = Table("what", box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name == "where" else "right")
    for entry in found.processes:
        hours, minutes = divmod(max(0, int(now - entry.since)) // 60, 60)  # another node's clock may be ahead
        where = (entry.address or entry.node, entry.metrics.rpartition(":")[2], str(entry.process))
        figures = (f"{hours}:{minutes:02}", str(entry.sessions), f"{entry.busy:.0%}")
        table.add_row(f"{entry.model} {entry.what}".lstrip(), *where, *figures)
    return table


def undeploy(address: str) -> None:
    """Ends what `deploy` started. Raises CommandFailed if there is no cluster."""
    with _cluster(address):
        from crossdraft.cluster import deploy as cluster

        cluster.undeploy()


def _read(path: Path) -> "Configuration":
    try:
        from crossdraft.cluster.config import ConfigurationError, load
    except ModuleNotFoundError as absent:
        raise CommandFailed(MISSING) from absent
    try:
        return load(path)
    except ConfigurationError as error:
        raise UsageError(*str(error).splitlines()) from error


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    interruptible()
    try:
        import ray
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.services import canonicalize_bootstrap_address
        from ray.exceptions import AuthenticationError, RayError
    except ImportError as error:
        raise CommandFailed(MISSING) from error
    if address != AUTO:
        check_address("--address", address)
    try:
        head = address if address != AUTO else canonicalize_bootstrap_address(AUTO) or address
        _check_answers(head, init_grpc_channel(head, [("grpc.enable_http_proxy", 0)]))
        ray.init(address, namespace="crossdraft", log_to_driver=False, logging_level=logging.WARNING)
    except AuthenticationError as error:
        raise CommandFailed(f"the cluster at {address} asks for a token: {TOKEN_ADVICE}") from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        if OTHER_VERSION in str(error):
            raise CommandFailed(f"{' '.join(str(error).split())}; {OWN_PYTHON}") from error
        raise CommandFailed(f"{NO_CLUSTER.format(address, str(error).rstrip('.'))}; or {TOKEN_ADVICE}") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        yield
    except RayError as error:
        raise CommandFailed(f"the cluster does not answer as it should: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()


def _check_answers(head: str, channel: grpc.Channel) -> None:
    """Raises ConnectionError if nothing listens there, CommandFailed if it says nothing."""
    with channel:
        try:  # any answer will do
            channel.unary_unary(CHECK, None, None)(b"", timeout=HEAD_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ConnectionError(error.details()) from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise CommandFailed(
                    f"the head of the Ray cluster does not answer at {head} after {HEAD_SECONDS:.0f} s: look at that "
                    "machine, or start Ray there again"
                ) from error
