"""Runs: tokens that a target draws one after another in the model thread, told as they are drawn."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from crossdraft.verification.exchange import PassDone

TOGETHER = 0.008  # seconds after a reply within which tokens wait for each other: a message costs more than a token


class Run:
    """What the model thread has drawn and nobody has been told yet. Make it in the event loop that tells.

    Args:
        most: tokens that are wanted; this may change.

    A reply takes along all that was drawn while the one before was being sent, and leaves no sooner than TOGETHER after
    it; the first and the last wait for nothing. So a model of some 10 ms a token or more tells each as it is drawn.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.over = False  # no token is wanted after the one that is being drawn
        self._loop = asyncio.get_running_loop()
        self._drawn: list[PassDone] = []
        self._news = asyncio.Event()  # a token was drawn, or drawing has ended
        self._due = asyncio.Event()  # no further token is waited for
        self._told = float("-inf")  # seconds of the loop's clock: when the latest reply left

    def end(self, cause: object = None) -> None:
        """The model thread is to stop after the token that it is drawing, whatever the cause."""
        self.over = True

    def drew(self, done: PassDone) -> None:
        """Called by the model thread with each token: one sample; the last one says that no more will come."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._take, done)

    async def replies(self, drawing: Coroutine[Any, Any, None]) -> AsyncGenerator[PassDone, None]:
        """What is to be told, while `drawing` runs; raises what it raises. Leaving early cancels it."""
        task = asyncio.create_task(drawing)
        task.add_done_callback(self._ended)
        try:
            more = True
            while more:
                while not (self._drawn or task.done()):
                    self._news.clear()
                    await self._news.wait()
                if not self._drawn:
                    await task  # it failed
                    return
                await self._wait_for_more()
                drawn, self._drawn = self._drawn, []
                more = drawn[-1].more
                self._told = self._loop.time()
                yield together(drawn)
            await task
        finally:
            task.cancel()

    async def _wait_for_more(self) -> None:
        early = self._told + TOGETHER - self._loop.time()
        if early > 0 and not self._due.is_set():
            timer = self._loop.call_later(early, self._due.set)
            await self._due.wait()
            timer.cancel()
            if self._drawn[-1].more:
                self._due.clear()

    def _take(self, done: PassDone) -> None:
        self._drawn.append(done)
        self._news.set()
        if not done.more:
            self._due.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._news.set()
        self._due.set()


def together(drawn: Sequence[PassDone]) -> PassDone:
    """One reply in place of several that follow each other."""
    if len(drawn) == 1:
        return drawn[0]
    return replace(
        drawn[-1],
        nodes=tuple(node for done in drawn for node in done.nodes),
        seconds=sum(done.seconds for done in drawn),
        queued=sum(done.queued for done in drawn),
        forwards=sum(done.forwards for done in drawn),
        first=drawn[0].first,
    )
