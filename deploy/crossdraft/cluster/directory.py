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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

import ray
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError

from crossdraft.cluster.config import Process
from crossdraft.cluster.status import DIRECTORY, NAMESPACE, Deployed, Entry, Load, deployed_with, installed
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


def node_address() -> str:
    """Of the node of this process."""
    return str(ray.util.get_node_ip_address())


def entry_of(process: Process, address: str, metrics: str) -> Entry:
    """The entry of this process, which runs an actor."""
    id = ray.get_runtime_context().get_actor_id()
    assert id is not None  # only a driver has none
    of, version = (process.role, process.model, process.name), installed()
    return Entry(id, *of, address, metrics, node_address(), os.getpid(), version, time.time())


class Directory:
    """The processes of a cluster, as an actor. It needs nothing but a port that processes do not announce again."""

    def __init__(self, metrics_port: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._settled_at = self._loop.time() + SETTLING
        self._version = secrets.randbits(60)  # of changes; random, so that a restarted one has others
        self._heard: dict[str, tuple[Entry, Load, float]] = {}  # by id, with the time of the last announcement
        self._metrics_port = metrics_port
        self._changed = asyncio.Condition()
        self._forgetting = self._loop.create_task(self._forget())

    async def announce(self, entry: Entry, load: Load) -> Neighbours:
        """A process serves; it must announce itself again before the entry expires. Its load is no change."""
        known = self._heard.get(entry.id)
        self._heard[entry.id] = (entry, load, self._loop.time())
        if known is None or known[0] != entry:
            await self._change()
        near = (one for one, *_ in self._heard.values() if one.metrics and one.node == entry.node)
        return self._metrics_port, {one.metrics: one.labels for one in near}

    async def withdraw(self, id: str) -> None:
        """A process takes no new sessions any more."""
        if self._heard.pop(id, None) is not None:
            await self._change()

    async def deployed(self) -> Deployed:
        """What runs now. Serve is asked here, as who asks would take longer to import it than for all else."""
        _, entries = await self.entries()
        return await asyncio.to_thread(deployed_with, entries, {id: load for id, (_, load, _) in self._heard.items()})

    async def entries(self, known: int = -1, seconds: float = 0.0) -> tuple[int, tuple[Entry, ...]]:
        """Version and processes, sorted, once all are known; waits up to `seconds` for a version other than `known`."""
        await asyncio.sleep(max(0.0, self._settled_at - self._loop.time()))
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, LONGEST_POLL)), self._changed:
                await self._changed.wait_for(lambda: self._version != known)
        found = (entry for entry, *_ in self._heard.values())
        return self._version, tuple(
            sorted(found, key=lambda one: (one.model, one.role, one.name, one.node, one.process))
        )

    async def _change(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_INTERVAL)
            now = self._loop.time()
            for id in [id for id, (*_, at) in self._heard.items() if now - at > EXPIRY]:
                await self.withdraw(id)


class DirectoryOwner:
    """A replica of Serve's, whose actor the directory is: it ends with it, and so with the application.

    An actor, as what Serve's own calls wait for when a caller's node is lost would stop the directory for all others.
    """

    def __init__(self, process: Process) -> None:
        # All its calls may be repeated.
        options = {"num_cpus": 0, "max_restarts": ALWAYS, "max_task_retries": ALWAYS, "max_concurrency": MAX_CALLS}
        made: Any = ray.remote(Directory).options(name=DIRECTORY, namespace=NAMESPACE, **options)
        self._actor = made.remote(process.own)

    def reconfigure(self, deployed: dict[str, Any]) -> None:
        """Serve calls it with what is deployed, which it keeps for `crossdraft deploy`."""

    def __del__(self) -> None:
        """Serve calls it; the name may be given again then."""
        if hasattr(self, "_actor"):
            ray.kill(self._actor)


class DirectoryGoneError(Exception):
    """The directory does not answer; Ray restarts it."""


class FarDirectory:
    """The directory, for other processes."""

    def __init__(self) -> None:
        self._actor: Any = None  # its handle

    async def ask(self, method: str, *given: object, wait: float = 0.0) -> Any:
        """What a method of `Directory` returns; it may take `wait` seconds, and a busy actor some more.

        Raises:
            DirectoryGoneError: there is no answer.
        """
        try:
            if self._actor is None:  # in a thread: it blocks until the head node answers
                self._actor = await asyncio.to_thread(ray.get_actor, DIRECTORY, NAMESPACE)
            async with asyncio.timeout(wait + REPLY_SECONDS):
                return await getattr(self._actor, method).remote(*given)
        except (RayError, ValueError, TimeoutError) as error:
            self._actor = None
            why = str(error) or f"nothing came within {wait + REPLY_SECONDS:g} s"
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

    begun = asyncio.Event()

    async def announce() -> None:
        level = logging.WARNING
        while True:
            try:
                await exporter.update(entry.node, *await directory.ask("announce", entry, load()))
                level = logging.WARNING
            except DirectoryGoneError as error:
                log.log(level, "%s", error)
                level = logging.DEBUG  # until it is back
            begun.set()
            await asyncio.sleep(ANNOUNCE_INTERVAL)

    announcing = asyncio.create_task(announce())
    await begun.wait()
    try:
        yield
    finally:
        announcing.cancel()
        await asyncio.wait([announcing])
        await exporter.update(entry.node, 0, {})
        try:
            await directory.ask("withdraw", entry.id)
        except DirectoryGoneError as error:  # its entry will expire
            log.warning("%s", error)
