"""Outputs that orchestrators on other nodes make, each with a journal: one that is lost is replaced by another."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from crossdraft.pipeline import Token
from crossdraft.rpc.errors import Cancelled, TimedOut, Unreachable
from crossdraft.rpc.subject import about
from crossdraft.serving.cluster.hearing import Attention, Hearing, Lost, Together
from crossdraft.serving.cluster.journal import Journal, exact_after_loss, resumable
from crossdraft.serving.cluster.pieces import Alive, Began, Expected, Piece, Refusal
from crossdraft.serving.orders import Ended, Order, ServedModel, Traced, UnknownModelError

log = logging.getLogger(__name__)

ASKED_SECONDS = 3.0  # that a question for models may take
LONGEST_SEARCH = 30.0  # seconds since an orchestrator was given up after which an output without a new token fails
ELSEWHERE = (Unreachable, TimedOut, Cancelled)  # errors that another orchestrator need not meet
PAUSE = 0.25  # seconds before another orchestrator is asked
NOT_RESUMED = (
    "the orchestrator was lost, and an output of method {!r} cannot go on elsewhere with the same law; "
    "ask again, or use method seeded or slem"
)


class Orchestrators(Protocol):
    """The replicas that make one model's outputs."""

    async def models(self) -> tuple[ServedModel, ...]:
        """What one of them can make; raises Lost."""
        ...

    def stream(self, order: Order) -> AsyncGenerator[Together, None]:
        """The pieces that one of them sends, those together that come at once; raises Lost."""
        ...


class Losses(Protocol):
    """Who is told of orchestrators that were lost with an output."""

    def lost(self, model: str) -> None:
        """One was."""
        ...

    def resumed(self, model: str, seconds: float) -> None:
        """Another one has made the next token, so long after the last sign of the lost one."""
        ...


class ClusterOutputs:
    """`Outputs` of several models.

    Args:
        models: their orchestrators by name.
        losses: who is told of those that are lost.
        clock: seconds.
        attention: when one is taken for lost.
    """

    def __init__(
        self,
        models: Mapping[str, Orchestrators],
        losses: Losses | None = None,
        clock: Callable[[], float] = time.monotonic,
        attention: Attention | None = None,
    ) -> None:
        self._models = dict(models)
        self._hearing = {model: Hearing(attention or Attention()) for model in models}
        self._served: dict[str, Sequence[ServedModel]] = {}  # by model, what its orchestrators said last
        self._losses = losses
        self._clock = clock

    async def models(self) -> tuple[ServedModel, ...]:
        """Those whose orchestrators answer and have found a target; where they have no time to, what they said last."""
        asked = await asyncio.gather(*map(self._asked, self._models))
        return tuple(model for found in asked for model in found)

    async def _asked(self, name: str) -> Sequence[ServedModel]:
        try:
            async with asyncio.timeout(ASKED_SECONDS):
                self._served[name] = await self._models[name].models()
        except Lost:
            return ()
        except TimeoutError:
            return self._served.get(name, ()) if self._hearing[name].lively else ()
        return self._served[name]

    async def stream(self, order: Order) -> AsyncGenerator[Token | Traced | Ended, None]:
        """As `Outputs.stream`."""
        orchestrators = self._models.get(order.model)
        if orchestrators is None:
            raise UnknownModelError(f"there is no model {order.model!r}; there is {', '.join(self._models)}")
        journal, heard = Journal(resumable(order)), self._clock()
        hearing, lost = self._hearing[order.model], 0  # orchestrators, one after the other, since a piece came
        while True:
            try:
                async with aclosing(hearing.listen(orchestrators.stream(journal.rest), lost)) as coming:
                    async for together in coming:
                        heard, lost = self._clock(), 0
                        for piece in together:
                            shown = self._noted(piece, journal, heard)
                            if shown is not None:
                                yield shown
                return
            except Lost as error:
                self._gone(error, journal, heard)
                lost += 1
                await asyncio.sleep(PAUSE)

    def _noted(self, piece: Piece, journal: Journal, now: float) -> Token | Traced | Ended | None:
        """Keeps the journal; what the client is given of the piece."""
        match piece:
            case Refusal():
                raise _meant(piece.error(), journal)
            case Began():
                journal.took_up(piece.target)
                return None
            case Alive():
                return None
            case Token():
                self._delivered(piece, journal, now)
            case Ended():
                return journal.whole(piece)
        return piece

    def _delivered(self, token: Token, journal: Journal, now: float) -> None:
        journal.delivered.append(token.id)
        journal.kinds[token.kind] += 1
        if journal.lost_at is not None and self._losses is not None:
            self._losses.resumed(journal.order.model, now - journal.lost_at)
        journal.lost_at = None

    def _gone(self, error: Lost, journal: Journal, heard: float) -> None:
        """An orchestrator was lost; raises Unreachable if the output must not go on, or has waited for too long."""
        order = journal.order
        if not exact_after_loss(order):
            raise Unreachable(NOT_RESUMED.format(order.request.method)) from error
        journal.resumed, now = True, self._clock()
        if journal.lost_at is None:
            journal.lost_at, journal.given_up = heard, now
            if self._losses is not None:
                self._losses.lost(order.model)
        if now - journal.given_up > LONGEST_SEARCH:
            raise Unreachable(f"no orchestrator of {order.model!r} can go on: {error}") from error
        with about(request=order.id):
            log.warning("an orchestrator was lost after %d tokens: %s", len(journal.delivered), error)


def _meant(error: Expected, journal: Journal) -> Exception:
    """In the middle of an output, an orchestrator that finds no target is as good as lost: another one may."""
    return Lost(str(error)) if journal.delivered and isinstance(error, ELSEWHERE) else error
