"""An orchestrator as a replica of Serve: outputs of one model over the services that the directory lists."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import NoReturn

from prometheus_client import CollectorRegistry, Counter, Gauge

from crossdraft.cluster.config import ANY_PORT, Process
from crossdraft.cluster.directory import announced, entry_of, node_address
from crossdraft.cluster.failover import EXPECTED, Began, Refusal, Replies
from crossdraft.cluster.serve_grpc import keep_alive
from crossdraft.cluster.status import Entry, Role
from crossdraft.config.cluster import ServedService
from crossdraft.rpc.errors import Unreachable
from crossdraft.rpc.event_loop import LoopLag
from crossdraft.rpc.links import Patience
from crossdraft.rpc.logs import about, logged
from crossdraft.rpc.metrics import PREFIX, Exporter
from crossdraft.rpc.server import freeze_heap
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter, OutputRequest
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked

log = logging.getLogger(__name__)
FIRST_TARGET = 15.0  # seconds that a request waits for the first target to be known
ABANDONED = "abandoned"  # outcome: the front has closed the stream
FINISHED = "finished"
SERVICES = (Role.TARGET, Role.DRAFTER)
keep_alive()  # now: Serve loads the class of a replica before it makes its server


class Orchestrator:
    """One replica. Must be made in a running event loop."""

    def __init__(self, process: Process) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(process.log_format))
        assert isinstance(process.own, ServedService)
        self._served = process.own
        waits = Patience(reply_seconds=process.reply_wait_seconds, target_seconds=process.target_wait_seconds)
        self._options = LocalOptions(self._served.max_outputs, waits, process.tls, updated=True)
        self._backend: LocalBackend | None = None
        self._ready = asyncio.Event()  # the directory has listed a target, and `_backend` is open
        self._model: LocalModel | None = None  # the services in use
        self._metrics = OrchestratorMetrics(process.model)
        LoopLag(self._metrics.registry, "orchestrator").start()
        self._exporter = Exporter(self._metrics.registry)
        metrics = self._exporter.start(node_address(), ANY_PORT) if process.metrics else ""
        self._entry = entry_of(process, "", metrics)
        self._began = Began(self._entry.id)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def models(self) -> tuple[ServedModel, ...]:
        """What it can serve now: its model, or nothing."""
        try:
            return await (await self._opened()).models()
        except Unreachable:
            return ()

    async def written(self, asked: Asked, special: bool) -> Written | Refusal:
        """How the target's tokenizer writes a prompt, or an error that fronts expect."""
        try:
            return await (await self._opened()).written(self._served.name, asked, special)
        except EXPECTED as error:
            return Refusal(error)

    async def stream(self, request: OutputRequest) -> AsyncGenerator[Replies, None]:
        """The replies of one output. Errors that fronts expect are replies, too."""
        yield (self._began,)
        with about(request=request.id):
            log.info("output requested: %d tokens are committed", len(request.generation.committed))
        self._metrics.resumed.inc(bool(request.generation.committed))
        self._metrics.running.inc()
        outcome = ABANDONED
        try:
            async with aclosing((await self._opened()).stream(request)) as replies:
                async for reply in replies:
                    yield (reply,)
            outcome = FINISHED
        except EXPECTED as error:
            outcome = type(error).__name__
            yield (Refusal(error),)
        finally:
            self._metrics.ended(outcome)

    async def check_health(self) -> None:
        """Serve calls it; raises RuntimeError if the directory is not followed any more."""
        if self._following.done():
            raise RuntimeError("the directory is not followed any more") from self._following.exception()

    async def _opened(self) -> LocalBackend:
        """Serve may send requests before the first target is known."""
        try:
            async with asyncio.timeout(FIRST_TARGET):
                await self._ready.wait()
        except TimeoutError:
            raise Unreachable(f"no target of {self._served.name!r} is there") from None
        assert self._backend is not None
        return self._backend

    async def _follow(self) -> NoReturn:
        heard: asyncio.Queue[Sequence[Entry]] = asyncio.Queue()
        async with announced(self._entry, self._load, heard.put_nowait):
            while True:
                await self._use([entry for entry in await heard.get() if entry.model == self._served.name])

    def _load(self) -> tuple[int, float]:
        outputs = 0 if self._backend is None else self._backend.running
        return outputs, outputs / self._served.max_outputs

    async def _use(self, entries: Sequence[Entry]) -> None:
        """Uses these services from now on."""
        targets = tuple(entry.address for entry in entries if entry.role is Role.TARGET)
        self._metrics.services(entries)
        if not targets:
            return  # those in use may still be there: sessions notice by themselves
        model = LocalModel(self._served.name, targets, tuple(self._drafters(entries)))
        if model == self._model:
            return
        self._model = model
        if self._backend is None:
            self._backend = await LocalBackend(model, self._options).__aenter__()
            freeze_heap()
            self._ready.set()
        else:
            await self._backend.follow(model)

    def _drafters(self, entries: Sequence[Entry]) -> list[NamedDrafter]:
        """In the order of the configuration; without addresses where no replica is there."""
        there = [entry for entry in entries if entry.role is Role.DRAFTER]
        return [
            NamedDrafter(one.name, tuple(entry.address for entry in there if entry.name == one.name), one.trusted)
            for one in self._served.drafters
        ]


class OrchestratorMetrics:
    """Of one orchestrator; the latencies that clients see are measured by the fronts."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        name, to, labels = f"{PREFIX}orchestrator_", self.registry, ("model_name",)
        running = Gauge(f"{name}running_outputs", "Outputs that are being made.", labels, registry=to)
        resumed = Counter(f"{name}resumed_outputs", "Outputs that others had begun.", labels, registry=to)
        self.running, self.resumed = running.labels(model), resumed.labels(model)
        self._ended = Counter(f"{name}outputs", "Outputs, by how they ended.", (*labels, "outcome"), registry=to)
        self._services = Gauge(f"{name}services", "Services that the directory lists.", (*labels, "role"), registry=to)

    def ended(self, outcome: str) -> None:
        """An output: FINISHED, ABANDONED, or the class of an error."""
        self.running.dec()
        self._ended.labels(self._model, outcome).inc()

    def services(self, entries: Sequence[Entry]) -> None:
        """Sets the numbers of services."""
        for role in SERVICES:
            self._services.labels(self._model, role.value).set(sum(entry.role is role for entry in entries))
