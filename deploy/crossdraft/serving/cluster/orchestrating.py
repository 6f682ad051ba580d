"""An orchestrator as a replica: outputs of one model over whatever services the directory names."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import NoReturn

from ray.exceptions import RayError

from crossdraft.rpc.errors import Unreachable
from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.cluster.directing import directory
from crossdraft.serving.cluster.directory import Entry
from crossdraft.serving.cluster.pieces import EXPECTED, Alive, Piece, Refusal
from crossdraft.serving.configuration import ServedService
from crossdraft.serving.local import LocalModel, LocalOptions, LocalOutputs, NamedDrafter
from crossdraft.serving.logs import LogFormat, logged
from crossdraft.serving.orders import Order, ServedModel

log = logging.getLogger(__name__)

PULSE = 0.5  # seconds: a stream is never silent for longer
ASKED_EVERY = 10.0  # seconds that one question to the directory lasts
PAUSE = 1.0  # seconds before it is asked again after a failure


class Orchestrator:
    """One replica.

    Args:
        served: the model.
        tls: what it shows to services.
        log_format: of its log.
    """

    def __init__(self, served: ServedService, tls: TlsFiles | None, log_format: LogFormat) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(log_format))
        self._served = served
        self._options = LocalOptions(served.outputs, tls=tls)
        self._outputs: LocalOutputs | None = None  # once the directory has named a target
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def models(self) -> tuple[ServedModel, ...]:
        """What it can make outputs of now: one model, or none yet."""
        return () if self._outputs is None else await self._outputs.models()

    async def stream(self, order: Order) -> AsyncGenerator[Piece, None]:
        """The pieces of one output, and something at least twice a second. Errors that can be expected are pieces."""
        if self._outputs is None:
            yield Refusal.of(Unreachable(f"no target of {self._served.name!r} is there yet"))
            return
        try:
            async with aclosing(_with_pulse(self._outputs.stream(order))) as pieces:
                async for piece in pieces:
                    yield piece
        except EXPECTED as error:
            yield Refusal.of(error)

    async def check_health(self) -> None:
        """For Serve; raises RuntimeError if the directory is not followed any more."""
        if self._following.done():
            raise RuntimeError("the directory is not followed any more") from self._following.exception()

    async def _follow(self) -> NoReturn:
        version = -1
        while True:
            try:
                version, entries = await directory().entries.remote(version, ASKED_EVERY)
            except (RayError, ValueError) as error:
                log.warning("the directory does not answer: %s", error)
                await asyncio.sleep(PAUSE)
                continue
            await self._use([entry for entry in entries if entry.model == self._served.name])

    async def _use(self, entries: Sequence[Entry]) -> None:
        """These are the services now."""
        targets = tuple(entry.address for entry in entries if not entry.drafter)
        if not targets:
            return  # those that are known may still be there: sessions find out by themselves
        model = LocalModel(self._served.name, targets, tuple(self._drafters(entries)))
        if self._outputs is None:
            outputs = LocalOutputs([model], self._options)
            self._outputs = await outputs.__aenter__()
        else:
            await self._outputs.follow(model)

    def _drafters(self, entries: Sequence[Entry]) -> list[NamedDrafter]:
        """In the order of the configuration; those that nobody serves now have no addresses."""
        return [
            NamedDrafter(one.name, tuple(entry.address for entry in entries if entry.drafter == one.name), one.trusted)
            for one in self._served.drafters
        ]


async def _with_pulse(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    """The same pieces, and `Alive` whenever none has come for a while."""
    async with aclosing(pieces):
        due = asyncio.ensure_future(anext(pieces))
        try:
            while True:
                await asyncio.wait([due], timeout=PULSE)
                if not due.done():
                    yield Alive()
                    continue
                try:
                    piece = due.result()
                except StopAsyncIteration:
                    return
                due = asyncio.ensure_future(anext(pieces))
                yield piece
        finally:
            due.cancel()
            await asyncio.wait([due])
