"""A drafter session: a text that is rewound, and proposals that go on with it."""

import asyncio
import time
from contextlib import suppress

import numpy as np

from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.models.drawing import Draws, KeyedDraws, RandomDraws
from crossdraft.models.engine import Work
from crossdraft.models.running import RunningModel
from crossdraft.models.sampling import drafting_laws
from crossdraft.models.worker import Job, ModelThreadClosedError
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.tokenization import NotExpressible
from crossdraft.verification.exchange import Draft, Drafted, OpenDrafter
from crossdraft.verification.rows import Proposal, Row

LONG = 10_000  # letters whose tokenizing takes milliseconds


class DrafterSession:
    """One output that a drafter guesses ahead of."""

    def __init__(self, running: RunningModel, opening: OpenDrafter) -> None:
        self._running = running
        self._opening = opening
        self._context = Context(running.tokenization, opening.prompt, running.description.context)
        self._columns = running.columns(opening.allowed)  # of the logits, that may be drawn; None: all
        self._epoch = 0
        self._draws: Draws = (
            RandomDraws(np.random.default_rng())  # seeded by the operating system
            if opening.noise is None
            else KeyedDraws(running.noise, opening.noise)
        )

    async def answer(self, request: Draft) -> Drafted:
        """Proposals that go on with the text; none, and a reason, where the drafter stands aside.

        An end of sequence is a proposal like any other: whether drafting goes on must not depend on what was drawn.

        Raises:
            ProtocolBroken: the epoch is over, or the output has fewer letters than it is to be rewound to.
        """
        if request.epoch < self._epoch:
            raise ProtocolBroken(f"epoch {request.epoch} is over; the latest is {self._epoch}")
        self._epoch = request.epoch
        if self._columns is not None and not len(self._columns):
            return Drafted(request.epoch, (), 0.0, self._nothing())
        try:
            if len(request.letters) > LONG:  # the event loop is there for other sessions too
                await asyncio.to_thread(self._context.rewind, request.offset, request.letters)
            else:
                self._context.rewind(request.offset, request.letters)
            self._context.fit(request.count)
        except (NotExpressible, NoRoomError) as reason:
            return Drafted(request.epoch, (), 0.0, str(reason))
        proposals, seconds = await self._running.thread.run(self._draft(request.count))
        return Drafted(request.epoch, proposals, seconds)

    async def close(self) -> None:
        """Frees the place in the cache."""
        with suppress(ModelThreadClosedError):  # the cache is gone with it
            await self._running.thread.close_session(self)

    def _nothing(self) -> str:
        """Why nothing may be drawn."""
        shared = self._opening.allowed is not None and len(self._opening.allowed)
        return "none of the shared tokens is kept" if shared else "the two vocabularies share no token"

    def _draft(self, count: int) -> Job[tuple[tuple[Proposal, ...], float]]:
        """Proposals, and the seconds that they took. Runs in the model thread."""
        began = time.perf_counter()
        proposals = []
        for _ in range(count):
            logits = yield Work(self, self._context.ids)
            columns = self._columns
            # On the model's device, of an integer type.
            places = None if columns is None else logits[0, :0].long().new_tensor(columns)
            ((drawn, weights),) = drafting_laws(logits, self._opening.options, self._opening.row_width, places)
            ids = self._running.ids(drawn)
            token = self._draws.draw(ids, weights, self._context.offset)
            self._context.append(token)
            proposals.append(Proposal(token, Row(ids, weights) if self._opening.row_width else None))
        return tuple(proposals), time.perf_counter() - began
