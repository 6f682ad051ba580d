"""Pieces that are there at the same time travel together: a message through Ray costs more than what it carries."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from crossdraft.serving.cluster.pieces import Alive, Piece

PULSE = 0.5  # seconds: a stream is never silent for longer


async def gathered(
    pieces: AsyncGenerator[Piece, None], pulse: float = PULSE
) -> AsyncGenerator[tuple[Piece, ...], None]:
    """The same pieces in the same order, all that have come since the last ones at once; `Alive` after a pulse without.

    A piece waits for nothing but its reader. What `pieces` raises is raised after what came before it; leaving early
    closes them.
    """
    there: list[Piece] = []
    news = asyncio.Event()
    taking = asyncio.create_task(_taken(pieces, there, news))
    try:
        while there or not taking.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(pulse):
                    await news.wait()
            news.clear()
            together = tuple(there)
            there.clear()
            if together or not taking.done():
                yield together or (Alive(),)
        await taking
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def _taken(pieces: AsyncGenerator[Piece, None], there: list[Piece], news: asyncio.Event) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                there.append(piece)
                news.set()
    finally:
        news.set()
