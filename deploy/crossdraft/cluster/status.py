"""What runs on a cluster, the directory that knows it, and which crossdraft a machine has.

Imported by those that ask, who do not wait for what serves (Ray imports the module of an actor that is asked), and by
nodes with any version: nothing else of crossdraft is imported here.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGE = "crossdraft"
COMPILED = "__pycache__"
LABORATORY = "lab"
SHOWN = 12  # characters of the digest
NAMESPACE = "crossdraft"  # of all actors
DIRECTORY = "directory-2"  # an actor; where its methods change, another one, as processes of before an upgrade ask it
APPLICATION = "crossdraft"  # of Serve
RUNNING, STOPPING = "RUNNING", "STOPPING"  # states of replicas
EXPIRY = 8.0  # seconds since a process was announced last
ANSWER_SECONDS = 60.0  # for the directory, which may have to be started again, and asks Serve
SETTLING = 3.0  # seconds after which a new directory has heard of all processes


class Mark:
    """An actor that does nothing, while a deployment is under way."""


class Role(StrEnum):
    """What a process does."""

    TARGET = "target"
    DRAFTER = "drafter"
    ORCHESTRATOR = "orchestrator"
    HTTP = "http"  # the ingress behind Serve's proxies
    GRPC = "grpc"  # the front for gRPC clients
    DIRECTORY = "directory"  # knows all others


@dataclass(frozen=True)
class Entry:
    """A process that serves."""

    id: str  # of its actor; the same after a restart
    role: Role
    model: str  # name of the served model; empty for fronts
    name: str  # of a drafter, else empty
    address: str  # host:port of its gRPC server; empty where it has none
    metrics: str  # host:port of its Prometheus metrics; empty: none
    node: str  # the node's address
    process: int  # process id on the node
    version: str = ""  # of its crossdraft
    since: float = 0.0  # when it began to serve, seconds of the epoch
    sessions: int = field(default=0, compare=False)  # that are open at a service now; elsewhere outputs
    busy: float = field(default=0.0, compare=False)  # a model's share of the time; the share of outputs that are taken

    @property
    def what(self) -> str:
        """Role and name, to be shown."""
        return f"{self.role} {self.name}" if self.name else str(self.role)

    @property
    def labels(self) -> dict[str, str]:
        """For Prometheus, of all its metrics."""
        return {f"crossdraft_{name}": str(getattr(self, name)) for name in ("role", "node", "process")}


@dataclass(frozen=True, order=True)
class Hosted:
    """A deployment of Serve's."""

    name: str
    state: str
    replicas: int  # that serve
    configured: int
    message: str  # Serve's

    @property
    def progress(self) -> str:
        """How many replicas serve, in words."""
        return f"{self.replicas} of {self.configured} serve" if self.configured else "none is started yet"


@dataclass(frozen=True)
class Deployed:
    """What runs now."""

    processes: tuple[Entry, ...]  # in the directory
    state: str  # Serve's, of the application
    message: str  # Serve's, of the application
    deployments: tuple[Hosted, ...]
    pending: tuple[str, ...] = ()  # nodes that Ray sets up, where something is missing

    @property
    def missing(self) -> list[Hosted]:
        """Of which not all serve."""
        return [deployment for deployment in self.deployments if deployment.replicas < deployment.configured]

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"missing": [asdict(deployment) for deployment in self.missing]}


class Directory:
    """The processes of a cluster, as an actor. It needs nothing but a port that processes do not announce again."""

    def __init__(self, metrics_port: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._settled_at = self._loop.time() + SETTLING
        self._heard: dict[str, tuple[Entry, float]] = {}  # by id, with the time of the last announcement
        self._metrics_port = metrics_port
        self._imported = self._loop.run_in_executor(None, import_module, "ray.serve")  # for `deployed`

    async def announce(self, entry: Entry) -> tuple[int, tuple[Entry, ...]]:
        """A process serves; it must announce itself again before the entry expires. Returns the port on which one
        process of each node shows the metrics of all of it, and all entries."""
        self._heard[entry.id] = (entry, self._loop.time())
        return self._metrics_port, await self.entries()

    async def withdraw(self, id: str) -> None:
        """A process takes no new sessions any more."""
        self._heard.pop(id, None)

    async def entries(self) -> tuple[Entry, ...]:
        """Sorted, once all are known."""
        await asyncio.sleep(max(0.0, self._settled_at - self._loop.time()))
        lately = self._loop.time() - EXPIRY
        self._heard = {id: known for id, known in self._heard.items() if known[-1] > lately}
        found = (entry for entry, _ in self._heard.values())
        return tuple(sorted(found, key=lambda entry: (entry.model, entry.role, entry.name, entry.node, entry.process)))

    async def deployed(self) -> Deployed:
        """What runs now. Serve is asked here, as who asks would take longer to import it than for all else."""
        return await asyncio.to_thread(deployed_with, await self.entries())


def deployed() -> Deployed:
    """Raises ValueError if nothing is deployed."""
    import ray

    try:
        directory: Any = ray.get_actor(DIRECTORY, NAMESPACE)
    except ValueError:  # it is not started yet, or has ended
        return deployed_with(())
    found: Deployed = ray.get(directory.deployed.remote(), timeout=ANSWER_SECONDS)
    return found


def deployed_with(entries: tuple[Entry, ...]) -> Deployed:
    """These, and what Serve says; raises ValueError if it has no such application."""
    found = application_status()
    if found is None:
        raise ValueError("there is no application of this name")
    deployments = tuple(sorted(hosted(name, deployment) for name, deployment in found.deployments.items()))
    whole = Deployed(entries, found.status.value, in_short(found.message), deployments)
    return replace(whole, pending=pending_nodes()) if whole.missing else whole


def application_status() -> Any:
    """Serve's `ApplicationStatusOverview`; None: it has no such application."""
    from ray import serve

    return serve.status().applications.get(APPLICATION)


def pending_nodes() -> tuple[str, ...]:
    """Nodes that Ray's autoscaler has begun to set up, as `ray status` shows them; none without an autoscaler."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}").get("autoscaler_report") or {}
    launching = (f"{count} of type {kind}, launching" for kind, count in report.get("pending_launches", {}).items())
    return (*(f"{ip} {state}" for ip, _, state in report.get("pending_nodes", ())), *launching)


def hosted(name: str, deployment: Any) -> Hosted:
    """Of a status of Serve's: replicas that it ends neither serve nor are to."""
    states = deployment.replica_states.items()
    serving = sum(count for state, count in states if state == RUNNING)
    configured = sum(count for state, count in states if state != STOPPING)
    return Hosted(name, deployment.status.value, serving, configured, in_short(deployment.message))


def in_short(text: str) -> str:
    """What Ray says; if there is a traceback in it, the first and the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    dump = any(line.startswith("Traceback") for line in lines)
    return " … ".join(dict.fromkeys((*lines[:1], *lines[-1:]))) if dump else "\n".join(lines)


@cache
def installed() -> str:
    """`on_disk` at the first call in this process: what it runs."""
    return on_disk()


def on_disk() -> str:
    """Version and digest of the package's files now; takes about 0.1 s."""
    digest = sha256()
    for name, path in sorted(_files()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return f"{version(PACKAGE)}+{digest.hexdigest()[:SHOWN]}"


def _files() -> Iterator[tuple[str, Path]]:
    """Relative paths and files of the packages inside the namespace package, but the laboratory, which no wheel has.

    Only folders with an `__init__.py` count: any one named like it on Python's path belongs to it, also ~/crossdraft.
    """
    for folder in map(Path, import_module(PACKAGE).__path__):
        for init in folder.glob("*/__init__.py"):
            for path in init.parent.rglob("*"):
                if COMPILED not in path.parts and path.is_file() and init.parent.name != LABORATORY:
                    yield path.relative_to(folder).as_posix(), path
