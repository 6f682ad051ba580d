"""An orchestrator as a replica: outputs of one model over whatever services the directory names."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, suppress
from typing import NoReturn

from crossdraft.cluster.actors import entry_of, node_address
from crossdraft.cluster.config import Orchestrated
from crossdraft.cluster.directory import DirectoryGoneError, Entry, FarDirectory, Role, announced
from crossdraft.cluster.failover import EXPECTED, Alive, Began, Piece, Refusal
from crossdraft.cluster.metrics import OrchestratorMetrics
from crossdraft.rpc.errors import Unreachable
from crossdraft.rpc.log_context import about
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.server import settle
from crossdraft.serving.logs import logged
from crossdraft.serving.backend import LocalModel, LocalOptions, LocalBackend, NamedDrafter, OutputRequest, ServedModel

log = logging.getLogger(__name__)
ASKED_EVERY = 10.0  # seconds that one question to the directory lasts
FIRST_TARGET = 15.0  # seconds that an order waits for the first target to be known
PAUSE = 0.5  # seconds before it is asked again after a failure


class Orchestrator:
    """One replica. It is made in a running event loop."""

    def __init__(self, told: Orchestrated) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(told.log_format))
        self._told = told
        self._options = LocalOptions(told.max_outputs, tls=told.tls)
        self._outputs: LocalBackend | None = None
        self._known = asyncio.Event()  # the directory has named a target, and `_outputs` are there
        self._model: LocalModel | None = None  # as it was last followed
        self._metrics = OrchestratorMetrics(told.model)
        self._exporter = Exporter(self._metrics.registry)
        node = node_address()
        metrics = self._exporter.start(node, 0) if told.metrics else ""
        self._entry = entry = entry_of(Role.ORCHESTRATOR, told.model, "", "", metrics, node)
        self._began = Began(told.target, f"{entry.node} {entry.process} {entry.id}")  # a machine may give a pid again
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def models(self) -> tuple[ServedModel, ...]:
        """What it can make outputs of now: one model, or none."""
        try:
            return await (await self._opened()).models()
        except Unreachable:
            return ()

    async def stream(self, order: OutputRequest) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The pieces of one output, and something at least twice a second. Errors that can be expected are pieces."""
        yield (self._began,)
        with about(request=order.id):
            log.info("output ordered: %d tokens are there already", len(order.request.committed))
        with self._metrics.output(resumed=bool(order.request.committed)) as course:
            try:
                async with aclosing(gathered(self._made(order))) as pieces:
                    async for together in pieces:
                        yield together
                course.finished()
            except EXPECTED as error:
                course.refused(error)
                yield (Refusal.of(error),)

    async def _made(self, order: OutputRequest) -> AsyncGenerator[Piece, None]:
        outputs = await self._opened()
        async with aclosing(outputs.stream(order)) as made:
            async for piece in made:
                yield piece

    async def _opened(self) -> LocalBackend:
        """Serve sends orders as soon as a replica is there, which may be before it knows a target."""
        try:
            async with asyncio.timeout(FIRST_TARGET):
                await self._known.wait()
        except TimeoutError:
            raise Unreachable(f"no target of {self._told.model!r} is there") from None
        assert self._outputs is not None  # it is, once a target is known
        return self._outputs

    async def check_health(self) -> None:
        """For Serve; raises RuntimeError if the directory is not followed any more."""
        if self._following.done():
            raise RuntimeError("the directory is not followed any more") from self._following.exception()

    async def _follow(self) -> NoReturn:
        directory, version = FarDirectory(), -1
        async with announced(self._entry):
            while True:
                try:
                    version, entries = await directory.entries(version, ASKED_EVERY)
                except DirectoryGoneError as error:
                    log.warning("%s", error)
                    await asyncio.sleep(PAUSE)
                    continue
                await self._use([entry for entry in entries if entry.model == self._told.model])

    async def _use(self, entries: Sequence[Entry]) -> None:
        """These are the services now."""
        targets = tuple(entry.address for entry in entries if entry.role is Role.TARGET)
        self._metrics.services(entries)
        if not targets:
            return  # those that are known may still be there: sessions find out by themselves
        model = LocalModel(self._told.model, targets, tuple(self._drafters(entries)))
        if model == self._model:
            return
        self._model = model
        if self._outputs is None:
            self._outputs = await LocalBackend([model], self._options).__aenter__()
            settle()
            self._known.set()
        else:
            await self._outputs.follow(model)

    def _drafters(self, entries: Sequence[Entry]) -> list[NamedDrafter]:
        """In the order of the configuration; those that nobody serves now have no addresses."""
        there = [entry for entry in entries if entry.role is Role.DRAFTER]
        return [
            NamedDrafter(one.name, tuple(entry.address for entry in there if entry.name == one.name), one.trusted)
            for one in self._told.drafters
        ]


# Pieces that are there at the same time travel together: a message through Ray costs more than what it carries.

PULSE = 0.5  # seconds: a stream is never silent for longer


async def gathered(
    pieces: AsyncGenerator[Piece, None], pulse: float = PULSE
) -> AsyncGenerator[tuple[Piece, ...], None]:
    """The same pieces in the same order, all that have come since the last ones at once; `Alive` after a pulse without.

    A piece waits for nothing but its reader. What `pieces` raises is raised after what came before it; leaving early
    closes them.
    """
    there: list[Piece] = []
    news = asyncio.Event()
    taking = asyncio.create_task(_taken(pieces, there, news))
    try:
        while there or not taking.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(pulse):
                    await news.wait()
            news.clear()
            together = tuple(there)
            there.clear()
            if together or not taking.done():
                yield together or (Alive(),)
        await taking
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def _taken(pieces: AsyncGenerator[Piece, None], there: list[Piece], news: asyncio.Event) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                there.append(piece)
                news.set()
    finally:
        news.set()
