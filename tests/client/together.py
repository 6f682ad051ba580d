"""Outputs to their end, and outputs whose sessions begin in one moment, however slow the machine is."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from crossdraft.client import Generation
from tests.rpc.sessions import DrafterClient, TargetClient

Opens = Callable[..., Awaitable[object]]
HANGS = 120.0  # seconds after which the others never come


async def ended(generation: Generation) -> Generation:
    """The output, once all its tokens have come."""
    async for _ in generation:
        pass
    return generation


def open_together(sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no session is open to those who asked for it before so many are."""
    missing, ready = sessions, asyncio.Event()

    def late(usual: Opens) -> Opens:
        async def opened(*given: object) -> object:
            nonlocal missing
            session = await usual(*given)
            missing -= 1
            if not missing:
                ready.set()
            async with asyncio.timeout(HANGS):
                await ready.wait()
            return session

        return opened

    for client in (TargetClient, DrafterClient):
        monkeypatch.setattr(client, "open", late(client.open))
