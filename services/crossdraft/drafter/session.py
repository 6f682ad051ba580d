"""A drafter session: a text that is rewound, and proposals that go on with it, streamed while they are made."""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import numpy as np

from crossdraft.drafter.branching import Prepared, Shape
from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.conversation import Conversation, Reply, Request, Send
from crossdraft.drafter.drafting import Drafting, Means
from crossdraft.drafter.epochs import Epoch
from crossdraft.drafter.proposing import Equipment, proposing
from crossdraft.drafter.scoring import Scoring
from crossdraft.models.drawing import Draws, KeyedDraws, RandomDraws
from crossdraft.models.worker import Job, ModelThreadClosedError
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import NOTHING
from crossdraft.text.tokenization import NotExpressible
from crossdraft.verification.exchange import Draft, Drafted, NoiseKey, OpenDrafter, Score, Scored
from crossdraft.verification.rows import Whose


class DrafterSession:
    """One output that a drafter guesses ahead of.

    The text and what is drafted after it belong to the jobs in the model thread. A job that was dropped is never
    stepped again once a later one has begun, so that they need no lock.
    """

    def __init__(self, equipment: Equipment, opening: OpenDrafter) -> None:
        running = equipment.running
        self._equipment = equipment
        self._thread = running.thread
        self._opening = opening
        self._means = Means(
            session=self,
            context=Context(running.tokenization, opening.prompt, running.description.context, opening.templated),
            proposing=proposing(equipment, opening),
            vocabulary=running.tokenization.vocabulary,
            rows=opening.row_width > 0,
            prepared=Prepared(),
        )
        self._random = RandomDraws(np.random.default_rng())  # seeded by the operating system
        self._told: deque[Epoch] = deque()  # whose text is not the context's yet
        self._latest: tuple[Epoch, Drafting, Scoring] | None = None

    def converse(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Reply, None]:
        """Proposals that go on with the text as it is said to be, and scores of them.

        Raises:
            ProtocolBroken: an epoch is over or has not begun, the output has fewer letters than it is to be rewound to,
                or there is no such branch, or no such draft to be scored.
        """
        return Conversation(self).replies(requests)

    async def close(self) -> None:
        """Frees the place in the cache."""
        with suppress(ModelThreadClosedError):  # the cache is gone with it
            await self._thread.close_session(self)

    def begin(self, epoch: Epoch) -> None:
        """As in `conversation.Drafter`."""
        self._told.append(epoch)

    async def draft(self, epoch: Epoch, send: Send) -> None:
        """As in `conversation.Drafter`.

        An end of sequence is a proposal like any other: whether drafting goes on must not depend on what was drawn.
        """
        await self._thread.run(self._job(epoch, send))

    async def score(self, epoch: Epoch, request: Score) -> Scored:
        """As in `conversation.Drafter`."""
        if self._means.proposing.whose is Whose.TARGET:
            raise ProtocolBroken("drafts of the target's tokens have no scores: open a session without redistribute")
        if self._latest is None or self._latest[0] is not epoch:
            raise ProtocolBroken(f"epoch {epoch.number} has no draft to be scored: the drafter stood aside")
        scoring = self._latest[2]
        return Scored(request.epoch, *await scoring.probabilities(request.strings, request.tokens))

    def _job(self, epoch: Epoch, send: Send) -> Job[None]:
        """Runs in the model thread."""
        # Each epoch's text is said as a change of the one before, also of one that was over before its job came.
        while self._told and self._told[0].number <= epoch.number:
            told = self._told.popleft()
            self._latest = None
            try:
                self._latest = told, *self._begun(told)
            except (NotExpressible, NoRoomError) as reason:
                told.aside = True
                send(Drafted(told.number, (), 0.0, str(reason)))
        if self._latest is not None and self._latest[0] is epoch:
            yield from self._latest[1].run(send)

    def _begun(self, epoch: Epoch) -> tuple[Drafting, Scoring]:
        """What is drafted in a new epoch. Raises NoRoomError, NotExpressible and ProtocolBroken."""
        request, context, shape = epoch.request, self._means.context, self._shape(epoch.request)
        adopted = self._means.prepared.begin(request, context)
        if self._means.proposing.obstacle:
            raise NoRoomError(self._means.proposing.obstacle)
        if adopted is None:
            context.rewind(request.offset, request.letters)
        else:  # its tokens as they were drafted, not as the tokenizer would write them
            context.rewind(adopted.offset, NOTHING)
            context.append(adopted.key)
        context.fit(request.count + shape.room)
        scoring = Scoring(self._equipment, self._means.proposing, self, context.ids)
        drafting = Drafting(self._means, epoch, shape, self._draws(epoch.number), scoring)
        if adopted is not None:
            drafting.adopt(adopted)
        return drafting, scoring

    def _shape(self, request: Draft) -> Shape:
        """No branches where each draw is audited, where they would leave too little text, nor of the target's tokens,
        whose text the drafter re-tokenizes."""
        asked = Shape(request.branch_depth, request.branch_width)
        foreign = self._means.proposing.whose is Whose.TARGET
        if self._opening.audited or foreign or not asked.fits(self._means.context.capacity):
            return Shape(0, 0)
        return asked

    def _draws(self, epoch: int) -> Draws:
        """Where an epoch's draws come from."""
        noise = self._opening.noise
        if noise is None:
            return self._random
        proposing = self._means.proposing
        return KeyedDraws(proposing.noise, NoiseKey(noise.seed, epoch) if self._opening.audited else noise)
