"""A drafter session: a text that is rewound, and draft tokens that go on with it, streamed while they are made."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

import numpy as np

from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.drafting import Drafting, Epoch, Epochs, Means, Prepared, Shape
from crossdraft.drafter.sampling import Equipment, proposing
from crossdraft.drafter.scoring import Scoring
from crossdraft.engine.model_thread import Job, ModelThreadClosedError
from crossdraft.engine.sampler import Draws, KeyedDraws, RandomDraws
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import NOTHING
from crossdraft.text.tokenization import NotExpressible
from crossdraft.types.messages import Advance, Draft, Drafted, NoiseKey, OpenDrafter, Score, Scored
from crossdraft.types.rows import Whose

# A drafter session's stream: requests change what is drafted, and replies leave as they are made.

Request = Draft | Advance | Score
Reply = Drafted | Scored
Send = Callable[[Drafted], None]  # may be called from any thread; returns at once


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
        """Draft tokens that go on with the text as it is said to be, and scores of them.

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

        An end of sequence is a draft token like any other: whether drafting goes on must not depend on what was drawn.
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


UNREAD_SCORES = 16  # scores are computed once fewer replies than this wait to be read


class Drafter(Protocol):
    """What drafts in one session."""

    def begin(self, epoch: Epoch) -> None:
        """A new epoch says what the text is; called once for each, in order, also for one that is soon over.

        Raises:
            ServiceError: this epoch cannot be.
        """
        ...

    async def draft(self, epoch: Epoch, send: Send) -> None:
        """Sends draft tokens until no more are wanted; called again when more are.

        Cancelled when a newer epoch begins, perhaps before it has done anything; that one may be drafted at once: what
        is under way ends before the text is touched for it.

        Raises:
            ServiceError: this epoch cannot be.
        """
        ...

    async def score(self, epoch: Epoch, request: Score) -> Scored:
        """Scores of the epoch's draft; raises ServiceError."""
        ...


class Conversation:
    """One session's requests and replies."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._epochs = Epochs()
        self._drafting: asyncio.Task[None] | None = None
        # Bounded by what epochs allow ahead of the client, and by UNREAD_SCORES.
        self._replies: asyncio.Queue[Reply | BaseException | None] = asyncio.Queue()
        self._taken = asyncio.Event()  # a reply was taken from the queue

    async def replies(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Reply, None]:
        """The replies, until the requests end and what they asked for is done. Raises ServiceError.

        No reply of an epoch comes after the request that begins the next one was read.
        """
        listening = asyncio.create_task(self._listen(requests))
        listening.add_done_callback(self._listened)
        try:
            while (reply := await self._replies.get()) is not None:
                self._taken.set()
                if isinstance(reply, BaseException):
                    raise reply
                if reply.epoch == self._epochs.number:
                    yield reply
                    if isinstance(reply, Drafted):
                        self._go_on(self._epochs.read(reply))
        finally:
            self._epochs.close()
            tasks = [task for task in (listening, self._drafting) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, requests: AsyncIterator[Request]) -> None:
        async for request in requests:
            match request:
                case Draft():
                    epoch = self._epochs.begin(request)
                    self._forget()
                    self._drafter.begin(epoch)
                    if self._drafting is not None:
                        self._drafting.cancel()
                    self._draft(epoch)
                case Advance():
                    self._go_on(self._epochs.advance(request))
                case Score():
                    scored = self._epochs.scored(request)
                    await self._drafted()
                    await self._room()
                    self._replies.put_nowait(await self._drafter.score(scored, request))
        while self._epochs.held:
            await self._next_taken()
        await self._drafted()

    def _forget(self) -> None:
        """What waits is of epochs that are over; only their failures still count."""
        waiting = [self._replies.get_nowait() for _ in range(self._replies.qsize())]
        for reply in waiting:
            if isinstance(reply, BaseException):
                self._replies.put_nowait(reply)

    async def _room(self) -> None:
        while self._replies.qsize() >= UNREAD_SCORES:
            await self._next_taken()

    async def _next_taken(self) -> None:
        self._taken.clear()
        await self._taken.wait()

    def _go_on(self, epoch: Epoch | None) -> None:
        """Drafts on, if more is wanted and nobody does."""
        if epoch is not None and (self._drafting is None or self._drafting.done()):
            self._draft(epoch)

    def _draft(self, epoch: Epoch) -> None:
        self._drafting = asyncio.create_task(self._run(epoch))
        self._drafting.add_done_callback(self._failed)

    async def _run(self, epoch: Epoch) -> None:
        loop, replies = asyncio.get_running_loop(), self._replies

        def send(reply: Drafted) -> None:
            if not epoch.over:  # a loop that has ended takes no more calls
                loop.call_soon_threadsafe(replies.put_nowait, reply)

        # What was asked for while the last draft tokens were made is still wanted.
        while epoch.wanted:
            await self._drafter.draft(epoch, send)

    async def _drafted(self) -> None:
        """Waits until what is wanted is drafted; errors of it come with the replies."""
        if self._drafting is not None:
            await asyncio.wait((self._drafting,))

    def _failed(self, drafting: asyncio.Task[None]) -> None:
        if not drafting.cancelled() and (error := drafting.exception()) is not None:
            self._replies.put_nowait(error)

    def _listened(self, listening: asyncio.Task[None]) -> None:
        self._replies.put_nowait(None if listening.cancelled() else listening.exception())
