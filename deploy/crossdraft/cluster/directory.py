"""The directory: which processes a cluster has, and where; an actor, and the client of it in each process.

Processes announce themselves every second, so that a restarted directory soon knows them all, and those of a lost node
expire. The directory decides only where sessions are opened: a session notices the loss of its service by itself, and
sooner. Not Serve's or Ray's own lists of actors: these have no addresses of servers inside the actors.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

import ray
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError

from crossdraft.cluster.config import DIRECTORY, NAMESPACE
from crossdraft.cluster.installed import installed
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.metrics import Exporter, Registry

log = logging.getLogger(__name__)
ANNOUNCE_INTERVAL = 1.0  # seconds
EXPIRY = 8.0  # seconds since a process was announced last
SETTLING = 3.0  # seconds after which a new directory has heard of all processes
LONGEST_POLL = 30.0  # seconds that one call of `entries` may wait for a change
REPLY_SECONDS = 5.0  # after which a reply of the directory is given up
PATIENCE = 1.0  # seconds that a process of the same node may take to answer
DIRECTLY = build_opener(ProxyHandler({})).open  # no proxy
ALWAYS = -1  # restarts
MAX_CALLS = 1000  # at once
Neighbours = tuple[int, dict[str, dict[str, str]]]  # port and sources of a node's metrics, for a NodeExporter


class Role(StrEnum):
    """What a process does."""

    TARGET = "target"
    DRAFTER = "drafter"
    ORCHESTRATOR = "orchestrator"
    HTTP = "http"  # the ingress behind Serve's proxies
    GRPC = "grpc"  # the front for gRPC clients


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

    @property
    def what(self) -> str:
        """Role and name, to be shown."""
        return f"{self.role} {self.name}" if self.name else str(self.role)

    @property
    def labels(self) -> dict[str, str]:
        """For Prometheus, of all its metrics."""
        return {f"crossdraft_{name}": str(getattr(self, name)) for name in ("role", "node", "process")}


@dataclass(frozen=True)
class Load:
    """Of a process now."""

    sessions: int = 0  # that are open at a service; elsewhere outputs
    busy: float = 0.0  # a model's share of the time; of an orchestrator's outputs, those that are taken


class Directory:
    """The processes of a cluster. Pure: the caller tells the time, in seconds of a monotonic clock.

    Args:
        began: when the directory was started.
        version: first value of the counter of changes; random, so that a restarted directory has other versions.
    """

    def __init__(self, began: float = 0.0, version: int = 0) -> None:
        self.version = version
        self._settled_at = began + SETTLING
        self._heard: dict[str, tuple[Entry, float]] = {}  # by id, with the time of the last announcement
        self.loads: dict[str, Load] = {}  # by id

    def unsettled(self, now: float) -> float:
        """Seconds until it has heard of all processes."""
        return max(0.0, self._settled_at - now)

    def announce(self, entry: Entry, now: float, load: Load | None = None) -> None:
        """A process serves. Its load is no change."""
        known = self._heard.get(entry.id)
        self.loads[entry.id] = load or Load()
        self._heard[entry.id] = (entry, now)
        self.version += known is None or known[0] != entry

    def withdraw(self, id: str) -> None:
        """A process takes no new sessions any more."""
        self.version += self._heard.pop(id, None) is not None
        self.loads.pop(id, None)

    def forget(self, now: float) -> None:
        """Removes processes whose announcement has expired."""
        silent = [id for id, (_, at) in self._heard.items() if now - at > EXPIRY]
        for id in silent:
            self.withdraw(id)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, sorted."""
        found = [entry for entry, _ in self._heard.values()]
        return tuple(sorted(found, key=lambda one: (one.model, one.role, one.name, one.node, one.process)))


def node_address() -> str:
    """Of the node of this process."""
    return str(ray.util.get_node_ip_address())


def entry_of(role: Role, model: str, name: str, address: str, metrics: str, node: str) -> Entry:
    """The entry of this process, which runs an actor."""
    id = ray.get_runtime_context().get_actor_id()
    assert id is not None  # only a driver has none
    return Entry(id, role, model, name, address, metrics, node, os.getpid(), installed(), time.time())


class DirectoryGoneError(Exception):
    """The directory does not answer; Ray restarts it."""


class DirectoryActor:
    """The directory of a cluster, as an actor. It needs nothing but a port that processes do not announce again."""

    def __init__(self, metrics_port: int = 0) -> None:
        self._directory = Directory(time.monotonic(), secrets.randbits(60))
        self._metrics_port = metrics_port
        self._changed = asyncio.Condition()
        self._forgetting = asyncio.get_running_loop().create_task(self._forget())

    async def announce(self, entry: Entry, load: Load, *_: object) -> Neighbours:
        """A process serves; it must announce itself again before the entry expires. Earlier versions say more."""
        async with self._notifying():
            self._directory.announce(entry, time.monotonic(), load)
        near = (one for one in self._directory.entries if one.metrics and one.node == entry.node)
        return self._metrics_port, {one.metrics: one.labels for one in near}

    async def loads(self) -> dict[str, Load]:
        """Of all processes, by the ids of their entries."""
        return self._directory.loads

    async def withdraw(self, id: str) -> None:
        """A process takes no new sessions."""
        async with self._notifying():
            self._directory.withdraw(id)

    async def entries(self, known: int = -1, seconds: float = 0.0) -> tuple[int, tuple[Entry, ...]]:
        """Version and processes, once all are known; waits up to `seconds` for a version other than `known`."""
        await asyncio.sleep(self._directory.unsettled(time.monotonic()))
        try:
            async with asyncio.timeout(min(seconds, LONGEST_POLL)), self._changed:
                await self._changed.wait_for(lambda: self._directory.version != known)
        except TimeoutError:
            pass
        return self._directory.version, self._directory.entries

    @asynccontextmanager
    async def _notifying(self) -> AsyncIterator[None]:
        """Wakes waiting calls of `entries` if the version changes in the block."""
        async with self._changed:
            before = self._directory.version
            yield
            if self._directory.version != before:
                self._changed.notify_all()

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_INTERVAL)
            async with self._notifying():
                self._directory.forget(time.monotonic())


class DirectoryOwner:
    """A replica of Serve's, whose actor the directory is: it ends with it, and so with the application.

    An actor, as what Serve's own calls wait for when a caller's node is lost would stop the directory for all others.
    """

    def __init__(self, metrics_port: int) -> None:
        self._actor: Any = (
            ray.remote(DirectoryActor)
            .options(
                name=DIRECTORY,
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=ALWAYS,
                max_task_retries=ALWAYS,  # all its calls may be repeated
                max_concurrency=MAX_CALLS,
            )
            .remote(metrics_port)
        )

    def reconfigure(self, deployed: dict[str, Any]) -> None:
        """Serve calls it with what is deployed, which it keeps for `crossdraft deploy`."""

    def __del__(self) -> None:
        """Serve calls it; the name may be given again then."""
        if hasattr(self, "_actor"):
            ray.kill(self._actor)


class FarDirectory:
    """The directory, for other processes. All methods raise DirectoryGoneError."""

    def __init__(self) -> None:
        self._actor: Any = None  # its handle

    async def announce(self, entry: Entry, load: Load) -> Neighbours:
        """As DirectoryActor.announce."""
        asked = (await self._found()).announce.remote(entry, load)
        found: Neighbours = await self._answer(asked, REPLY_SECONDS)
        return found

    async def withdraw(self, id: str) -> None:
        """As DirectoryActor.withdraw."""
        await self._answer((await self._found()).withdraw.remote(id), REPLY_SECONDS)

    async def entries(self, known: int = -1, seconds: float = 0.0) -> tuple[int, tuple[Entry, ...]]:
        """As DirectoryActor.entries."""
        found: tuple[int, tuple[Entry, ...]]
        found = await self._answer((await self._found()).entries.remote(known, seconds), seconds + REPLY_SECONDS)
        return found

    async def _found(self) -> Any:
        if self._actor is None:
            try:  # in a thread: it blocks until the head node answers
                self._actor = await asyncio.to_thread(ray.get_actor, DIRECTORY, NAMESPACE)
            except (RayError, ValueError) as error:
                raise DirectoryGoneError(f"there is no directory: {error}") from error
        return self._actor

    async def _answer(self, asked: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await asked
        except (RayError, TimeoutError) as error:
            self._actor = None
            why = str(error) or f"nothing came within {seconds:g} s"
            raise DirectoryGoneError(f"the directory does not answer: {why}") from error


class NodeExporter:
    """Answers with the metrics of all processes of a node, on a port that one of these has: a Prometheus collector.

    Each process updates one. The first gets the port, and another one when that has ended.
    """

    def __init__(self) -> None:
        registry = Registry()
        registry.register(self)
        self._exporter, self._port = Exporter(registry), 0
        self._sources: Mapping[str, Mapping[str, str]] = {}

    async def update(self, host: str, port: int, sources: Mapping[str, Mapping[str, str]]) -> None:
        """Tries to listen, unless it does or `port` is 0; `sources`: host:port of processes, and labels to add."""
        self._sources = sources
        if port != self._port:
            await self._exporter.stop()
            self._port = 0
            with suppress(CannotListen):
                self._port = port and int(self._exporter.start(host, port).rpartition(":")[2])

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for address, labels in self._sources.items():
            with suppress(OSError, HTTPException), DIRECTLY(f"http://{address}/metrics", timeout=PATIENCE) as page:
                for one in text_string_to_metric_families(page.read().decode()):
                    family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                    family.samples += [sample._replace(labels={**sample.labels, **labels}) for sample in one.samples]
        return families.values()


@asynccontextmanager
async def announced(entry: Entry, load: Callable[[], Load] = Load) -> AsyncIterator[None]:
    """Keeps the process in the directory during the block, with what `load` says each time."""
    directory, exporter = FarDirectory(), NodeExporter()

    async def announce(level: int = logging.WARNING) -> bool:
        """Whether the directory has taken it."""
        try:
            await exporter.update(entry.node, *await directory.announce(entry, load()))
        except DirectoryGoneError as error:
            log.log(level, "%s", error)
            return False
        return True

    announcing = asyncio.create_task(_repeated(announce, await announce()))
    try:
        yield
    finally:
        announcing.cancel()
        await asyncio.wait([announcing])
        await exporter.update(entry.node, 0, {})
        try:
            await directory.withdraw(entry.id)
        except DirectoryGoneError as error:  # its entry will expire
            log.warning("%s", error)


async def _repeated(announce: Callable[[int], Awaitable[bool]], known: bool) -> None:
    while True:
        await asyncio.sleep(ANNOUNCE_INTERVAL)
        known = await announce(logging.WARNING if known else logging.DEBUG)
