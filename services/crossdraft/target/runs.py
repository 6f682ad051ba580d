"""Runs: tokens that a target draws one after another in the model thread, told as they are drawn."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from crossdraft.verification.exchange import PassDone


class Run:
    """What the model thread has drawn and nobody has been told yet. Make it in the event loop that tells.

    A reply takes along all that was drawn while the one before was being sent: none waits for another, and a loop that
    has much to do has fewer to send.
    """

    def __init__(self) -> None:
        self.over = False  # no token is wanted after the one that is being drawn
        self._loop = asyncio.get_running_loop()
        self._drawn: list[PassDone] = []
        self._news = asyncio.Event()

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
        task.add_done_callback(lambda _: self._news.set())
        try:
            more = True
            while more:
                while not (self._drawn or task.done()):
                    self._news.clear()
                    await self._news.wait()
                if not self._drawn:
                    await task  # it failed
                    return
                drawn, self._drawn = self._drawn, []
                more = drawn[-1].more
                yield together(drawn)
            await task
        finally:
            task.cancel()

    def _take(self, done: PassDone) -> None:
        self._drawn.append(done)
        self._news.set()


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
