"""The directory: which processes a cluster has, and where; an actor, and the client of it in each process.

Processes announce themselves every second, so that a restarted directory soon knows them all, and those of a lost node
expire. A session notices the loss of its service by itself, and sooner. Ray's own lists of actors have no addresses.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

import ray
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError

from crossdraft.cluster.config import Process
from crossdraft.cluster.status import DIRECTORY, NAMESPACE, Directory, Entry, installed
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.metrics import Exporter

log = logging.getLogger(__name__)
ANNOUNCE_INTERVAL = 1.0  # seconds
REPLY_SECONDS = 5.0  # after which a reply of the directory is given up
PATIENCE = 1.0  # seconds that a process of the same node may take to answer
DIRECTLY = build_opener(ProxyHandler({})).open  # no proxy
ALWAYS = -1  # restarts
MAX_CALLS = 1000  # at once
Load = Callable[[], tuple[int, float]]  # `sessions` and `busy` of an entry now


def node_address() -> str:
    """Of the node of this process."""
    return str(ray.util.get_node_ip_address())


def entry_of(process: Process, address: str, metrics: str) -> Entry:
    """The entry of this process, which runs an actor."""
    id = ray.get_runtime_context().get_actor_id()
    assert id is not None  # only a driver has none
    of, version = (process.role, process.model, process.name), installed()
    return Entry(id, *of, address, metrics, node_address(), os.getpid(), version, time.time())


class DirectoryOwner:
    """A replica of Serve's, whose actor the directory is: it ends with it, and so with the application.

    An actor, as what Serve's own calls wait for when a caller's node is lost would stop the directory for all others.
    """

    def __init__(self, process: Process) -> None:
        # All its calls may be repeated.
        options = {"num_cpus": 0, "max_restarts": ALWAYS, "max_task_retries": ALWAYS, "max_concurrency": MAX_CALLS}
        made: Any = ray.remote(Directory).options(name=DIRECTORY, namespace=NAMESPACE, **options)
        self._actor = made.remote(process.own)

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

    async def ask(self, method: str, *given: object) -> Any:
        """What a method of `Directory` returns. Raises DirectoryGoneError if there is no answer."""
        try:
            if self._actor is None:  # in a thread: it blocks until the head node answers
                self._actor = await asyncio.to_thread(ray.get_actor, DIRECTORY, NAMESPACE)
            async with asyncio.timeout(REPLY_SECONDS):
                return await getattr(self._actor, method).remote(*given)
        except (RayError, ValueError, TimeoutError) as error:
            self._actor = None
            why = str(error) or f"nothing came within {REPLY_SECONDS:g} s"
            raise DirectoryGoneError(f"the directory does not answer: {why}") from error


class NodeExporter:
    """Answers with the metrics of all processes of a node, on a port that one of these has: a Prometheus collector.

    Each process updates one. The first gets the port, and another one when that has ended.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        registry.register(self)
        self._exporter, self._port = Exporter(registry), 0
        self._sources: Mapping[str, Mapping[str, str]] = {}  # host:port of processes, and labels to add

    async def update(self, host: str, port: int, entries: Sequence[Entry]) -> None:
        """Tries to listen, unless it does or `port` is 0; `entries`: all processes of the cluster."""
        self._sources = {entry.metrics: entry.labels for entry in entries if entry.metrics and entry.node == host}
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
async def announced(
    entry: Entry, load: Load = lambda: (0, 0.0), heard: Callable[[Sequence[Entry]], None] | None = None
) -> AsyncIterator[None]:
    """Keeps the process in the directory, each time with what `load` says, and gives `heard` all entries."""
    directory, exporter, begun = FarDirectory(), NodeExporter(), asyncio.Event()

    async def announce() -> None:
        level = logging.WARNING
        while True:
            try:
                sessions, busy = load()
                port, entries = await directory.ask("announce", replace(entry, sessions=sessions, busy=busy))
                await exporter.update(entry.node, port, entries)
                if heard is not None:
                    heard(entries)
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
        await exporter.update(entry.node, 0, ())
        try:
            await directory.ask("withdraw", entry.id)
        except DirectoryGoneError as error:  # its entry will expire
            log.warning("%s", error)
