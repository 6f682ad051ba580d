"""A drafter session: a text that is rewound, and proposals that go on with it."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import numpy as np

from crossdraft.drafter.beginnings import Beginnings
from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.proposing import Equipment, proposing
from crossdraft.drafter.scoring import Scoring
from crossdraft.models.drawing import Draws, KeyedDraws, RandomDraws
from crossdraft.models.engine import Work
from crossdraft.models.worker import Job, ModelThreadClosedError
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.handlers import one_by_one
from crossdraft.text.tokenization import NotExpressible
from crossdraft.verification.exchange import Draft, Drafted, NoiseKey, OpenDrafter, Score, Scored
from crossdraft.verification.rows import Proposal, Row, Whose

LONG = 10_000  # letters whose tokenizing takes milliseconds


class DrafterSession:
    """One output that a drafter guesses ahead of."""

    def __init__(self, equipment: Equipment, opening: OpenDrafter) -> None:
        self._equipment = equipment
        self._running = equipment.running
        self._opening = opening
        self._proposing = proposing(equipment, opening)
        self._context = Context(self._running.tokenization, opening.prompt, self._running.description.context)
        self._beginnings: Beginnings[Scoring] = Beginnings()
        self._random = RandomDraws(np.random.default_rng())  # seeded by the operating system

    def converse(self, requests: AsyncIterator[Draft | Score]) -> AsyncGenerator[Drafted | Scored, None]:
        """One reply for each request, in order."""
        return one_by_one(self.answer, requests)

    async def answer(self, request: Draft | Score) -> Drafted | Scored:
        """Proposals that go on with the text, or scores of the latest ones.

        Raises:
            ProtocolBroken: the epoch is over, the output has fewer letters than it is to be rewound to, or there is no
                such draft to be scored.
        """
        return await (self._score(request) if isinstance(request, Score) else self._propose(request))

    async def close(self) -> None:
        """Frees the place in the cache."""
        with suppress(ModelThreadClosedError):  # the cache is gone with it
            await self._running.thread.close_session(self)

    async def _propose(self, request: Draft) -> Drafted:
        """Proposals; fewer or none, and a reason, where the drafter stands aside.

        An end of sequence is a proposal like any other: whether drafting goes on must not depend on what was drawn.
        """
        self._beginnings.enter(request)
        if self._proposing.obstacle:
            return Drafted(request.epoch, (), 0.0, self._proposing.obstacle)
        try:
            if len(request.letters) > LONG:  # the event loop is there for other sessions too
                await asyncio.to_thread(self._context.rewind, request.offset, request.letters)
            else:
                self._context.rewind(request.offset, request.letters)
            self._context.fit(request.count)
        except (NotExpressible, NoRoomError) as reason:
            return Drafted(request.epoch, (), 0.0, str(reason))
        scoring = Scoring(self._equipment, self._proposing, self, self._context.ids)
        self._beginnings.keep(self._context.offset, request.count, scoring)
        return await self._running.thread.run(self._draft(request, scoring))

    async def _score(self, request: Score) -> Scored:
        scoring = self._beginnings.scored(request)
        if self._proposing.whose is Whose.TARGET:
            raise ProtocolBroken("drafts of the target's tokens have no scores: open a session without redistribute")
        return Scored(request.epoch, *await scoring.probabilities(request.strings, request.tokens))

    def _draft(self, request: Draft, scoring: Scoring) -> Job[Drafted]:
        """Proposals, and the seconds that they took. Runs in the model thread."""
        began = time.perf_counter()
        draws = self._draws(request.epoch)
        proposals: list[Proposal] = []
        reason = ""
        try:
            while len(proposals) < request.count:
                self._context.fit(1)  # a token of the target's may have made several here
                logits = yield Work(self, self._context.ids)
                ((ids, weights),) = self._proposing.laws(logits)
                scoring.drawn(tuple(proposal.token for proposal in proposals), (ids, weights))
                token = draws.draw(ids, weights, self._context.offset)
                row = Row(ids, weights) if self._opening.row_width else None
                proposals.append(Proposal(token, row, self._proposing.whose))
                self._proposing.append(self._context, token)
        except (NotExpressible, NoRoomError) as error:
            # Decided by what is drawn, but all of it is sent: nobody misses the rest before it is revealed.
            reason = str(error) if len(proposals) < request.count else ""
        return Drafted(request.epoch, tuple(proposals), time.perf_counter() - began, reason)

    def _draws(self, epoch: int) -> Draws:
        """Where an epoch's draws come from."""
        noise = self._opening.noise
        if noise is None:
            return self._random
        return KeyedDraws(self._proposing.noise, NoiseKey(noise.seed, epoch) if self._opening.audited else noise)
