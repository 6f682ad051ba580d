"""A drafter session's stream: requests change what is drafted, and replies leave as they are made."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from crossdraft.drafter.epochs import Epoch, Epochs
from crossdraft.verification.exchange import Advance, Draft, Drafted, Score, Scored

Request = Draft | Advance | Score
Reply = Drafted | Scored
UNREAD_SCORES = 16  # scores are computed once fewer replies than this wait to be read

Send = Callable[[Drafted], None]  # may be called from any thread; returns at once


class Drafter(Protocol):
    """What drafts in one session."""

    def begin(self, epoch: Epoch) -> None:
        """A new epoch says what the text is; called once for each, in order, also for one that is soon over.

        Raises:
            ServiceError: this epoch cannot be.
        """
        ...

    async def draft(self, epoch: Epoch, send: Send) -> None:
        """Sends proposals until no more are wanted; called again when more are.

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

        # What was asked for while the last proposals were made is still wanted.
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
