"""Outputs that orchestrators on other nodes make, each with a journal: one that is lost is replaced by another."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from crossdraft.pipeline import Token
from crossdraft.rpc.errors import Unreachable
from crossdraft.serving.cluster.pieces import Alive, Piece, Refusal
from crossdraft.serving.orders import Ended, Order, ServedModel, Traced, UnknownModelError
from crossdraft.verification.methods import SEEDED, method_named

log = logging.getLogger(__name__)

SILENT_AFTER = 2.0  # seconds without a piece after which an orchestrator is given up
LONGEST_SEARCH = 30.0  # seconds without any piece of an output after which it fails
NOT_RESUMED = (
    "the orchestrator was lost, and an output of method {!r} cannot go on elsewhere with the same law; "
    "ask again, or use method seeded or slem"
)
PAUSE = 0.25  # seconds before another orchestrator is asked


class Lost(Exception):  # noqa: N818 - it says what happened
    """An orchestrator died, or cannot be reached."""


class Orchestrators(Protocol):
    """The replicas that make one model's outputs."""

    async def models(self) -> tuple[ServedModel, ...]:
        """What one of them can make; raises Lost."""
        ...

    def stream(self, order: Order) -> AsyncGenerator[Piece, None]:
        """The pieces that one of them sends; raises Lost."""
        ...


@dataclass
class Journal:
    """What a client has been given of one output: enough for another orchestrator to go on from there."""

    order: Order
    delivered: list[int] = field(default_factory=list)  # ids

    @property
    def rest(self) -> Order:
        """The order for what is missing."""
        request = self.order.request
        committed = (*request.committed, *self.delivered)
        return replace(self.order, request=replace(request, committed=committed))


class ClusterOutputs:
    """`Outputs` of several models.

    Args:
        models: their orchestrators by name.
    """

    def __init__(self, models: Mapping[str, Orchestrators]) -> None:
        self._models = dict(models)

    async def models(self) -> tuple[ServedModel, ...]:
        """Those whose orchestrators answer and have found a target."""
        asked = await asyncio.gather(*(_asked(one) for one in self._models.values()))
        return tuple(model for found in asked for model in found)

    async def stream(self, order: Order) -> AsyncGenerator[Token | Traced | Ended, None]:
        """As `Outputs.stream`."""
        orchestrators = self._models.get(order.model)
        if orchestrators is None:
            raise UnknownModelError(f"there is no model {order.model!r}; there is {', '.join(self._models)}")
        journal, heard = Journal(resumable(order)), time.monotonic()
        while True:
            try:
                async with aclosing(_attentive(orchestrators.stream(journal.rest))) as pieces:
                    async for piece in pieces:
                        heard = time.monotonic()
                        if isinstance(piece, Refusal):
                            raise piece.error()
                        if isinstance(piece, Token):
                            journal.delivered.append(piece.id)
                        if not isinstance(piece, Alive):
                            yield piece
                return
            except Lost as error:
                if not exact_after_loss(journal.order):
                    raise Unreachable(NOT_RESUMED.format(journal.order.request.method)) from error
                if time.monotonic() - heard > LONGEST_SEARCH:
                    raise Unreachable(f"no orchestrator of {order.model!r} answers: {error}") from error
                log.warning("an orchestrator was lost after %d tokens: %s", len(journal.delivered), error)
                await asyncio.sleep(PAUSE)


def resumable(order: Order) -> Order:
    """The same order with its chance resolved, so that whoever goes on with it makes the same text.

    Where no method is named and the output is not greedy, the method is `seeded`, with a seed of its own if need be:
    what began with `coupled` and is resumed has not the target's law, as the moment of a loss depends on what was
    being decided then.
    """
    request = order.request
    if request.greedy or not (request.method is None or method_named(request.method).seedable):
        return order
    seed = secrets.randbits(64) if request.seed is None else request.seed
    return replace(order, request=replace(request, method=request.method or SEEDED.name, seed=seed))


def exact_after_loss(order: Order) -> bool:
    """Whether the rest of an output may be made by another orchestrator without changing its law."""
    return order.request.greedy or order.request.seed is not None


async def _asked(orchestrators: Orchestrators) -> Sequence[ServedModel]:
    try:
        async with asyncio.timeout(SILENT_AFTER):
            return await orchestrators.models()
    except (Lost, TimeoutError):
        return ()


async def _attentive(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    """The same pieces; raises Lost if nothing comes for too long."""
    async with aclosing(pieces):
        while True:
            try:
                async with asyncio.timeout(SILENT_AFTER):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise Lost(f"it has been silent for {SILENT_AFTER:g} s") from error
            yield piece
